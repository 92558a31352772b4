"""Captum's tools around an attribution method: noise, metrics, pictures, summaries, attacks."""

from __future__ import annotations

import inspect

import pytest
import torch
from captum.attr import (
    CommonStats,
    LLMAttributionResult,
    Max,
    Mean,
    NoiseTunnel,
    StdDev,
    Summarizer,
    Var,
    visualization,
)
from captum.metrics import infidelity, sensitivity_max
from captum.robust import FGSM, MinParamPerturbation
from torch import nn
from zoo.small import WIDTH, classifier, images, mamba_lm, token_ids, vision

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients"),
]


def embedded():
    model = mamba_lm()
    return model, model.get_input_embeddings()(token_ids(2, 6)).detach(), {"target": (4, 3)}


def text_classes():
    model = classifier("mean")
    embeddings = model.backbone.embeddings(token_ids(2, 6)).detach()
    return model, embeddings, {"target": torch.tensor([4, 1])}


def pictures():
    return vision("middle"), images(2), {"target": [4, 1]}


KINDS = {"embeddings": embedded, "text classifier": text_classes, "images": pictures}
kinds = pytest.mark.parametrize("kind", KINDS)


# --- NoiseTunnel ---------------------------------------------------------------------------------

SMOOTHING = {
    "smoothgrad": lambda found: found.mean(1),
    "smoothgrad_sq": lambda found: (found**2).mean(1),
    "vargrad": lambda found: (found**2).mean(1) - found.mean(1) ** 2,
}


def each_of(targets, example):
    one_each = isinstance(targets, list) or (torch.is_tensor(targets) and targets.dim() > 0)
    return int(targets[example]) if one_each else targets


@kinds
@pytest.mark.parametrize(("smoothing", "at_a_time"), zip(SMOOTHING, (None, 1, 2), strict=True))
def test_noise_tunnel(method, watched, kind, smoothing, at_a_time):
    model, inputs, options = KINDS[kind]()
    attribution, samples, stdev = method(watched(model)), 4, 0.1
    torch.manual_seed(7)
    found = NoiseTunnel(attribution).attribute(
        inputs,
        nt_type=smoothing,
        nt_samples=samples,
        nt_samples_batch_size=at_a_time,
        stdevs=stdev,
        **options,
    )
    assert found.shape == inputs.shape and not found.requires_grad
    torch.manual_seed(7)
    noise = []  # (B, samples of a draw, ...), as Captum draws it
    for _ in range(samples // (at_a_time or samples)):
        size = (len(inputs), at_a_time or samples, *inputs.shape[1:])
        noise.append(torch.normal(0, torch.full((size[0] * size[1], *size[2:]), stdev)).view(size))
    noisy = inputs[:, None] + torch.cat(noise, dim=1)
    by_hand = torch.stack(
        [
            attribution.attribute(noisy[example], target=each_of(options["target"], example))
            for example in range(len(inputs))
        ]
    )
    torch.testing.assert_close(found, SMOOTHING[smoothing](by_hand), rtol=1e-3, atol=1e-5)


def test_noise_tunnel_hands_options_on(method, watched):
    model, inputs, _ = embedded()
    tunnel = NoiseTunnel(method(watched(model)))
    parameters = inspect.signature(method.attribute).parameters
    of_some = {"query": 3, "components": "s6", "start_layer": 1, "contrast": "mean"}
    own = {name: value for name, value in of_some.items() if name in parameters}
    assert own
    options = {"target": (3, 3), "nt_samples": 3, "stdevs": 0.1} | own
    torch.manual_seed(1)
    whole = tunnel.attribute(inputs, **options)
    torch.manual_seed(1)
    parts = tunnel.attribute(inputs, internal_batch_size=2, **options)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    torch.manual_seed(1)
    (in_tuple,) = tunnel.attribute((inputs,), **options)
    assert torch.equal(in_tuple, whole)
    torch.manual_seed(1)
    per_token = tunnel.attribute(inputs, per_token=True, **options)
    torch.testing.assert_close(per_token, whole.sum(-1), rtol=1e-4, atol=1e-6)
    assert not whole[:, 4:].any()  # query and target were at the fourth token


def test_noise_tunnel_repeats_masks_and_targets(method, watched):
    model, inputs, _ = embedded()
    mask = torch.ones(2, 6).long()
    mask[0, 3:] = 0
    attribution = method(watched(model))
    targets = [(2, 3), (5, 1)]
    found = NoiseTunnel(attribution).attribute(
        inputs, nt_samples=3, stdevs=1e-9, target=targets, additional_forward_args=mask
    )
    expected = attribution.attribute(inputs, targets, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not found[0, 3:].any()


# --- metrics -------------------------------------------------------------------------------------


def scores(kind, model):
    """A function that returns the logits: Captum's metrics take no other output."""
    if kind == "embeddings":
        return lambda x: model(inputs_embeds=x).logits
    return model if kind == "images" else lambda x: model(inputs_embeds=x)


def selected(output, target):
    """One number per example."""
    if isinstance(target, tuple):
        return output[:, target[0], target[1]]
    return output[range(len(output)), [int(t) for t in target]]


@kinds
def test_infidelity(method, watched, kind):
    model, inputs, options = KINDS[kind]()
    attributions = method(watched(model)).attribute(inputs, **options)
    function = scores(kind, model)
    noise = 0.1 * torch.randn_like(inputs)
    found = infidelity(
        function,
        lambda x: (noise, x - noise),
        inputs,
        attributions,
        n_perturb_samples=1,
        **options,
    )
    with torch.no_grad():
        change = selected(function(inputs) - function(inputs - noise), options["target"])
    expected = ((noise * attributions).flatten(1).sum(1) - change) ** 2
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@kinds
def test_infidelity_with_several_samples(method, watched, kind):
    model, inputs, options = KINDS[kind]()
    attributions = method(watched(model)).attribute(inputs, **options)

    def perturb(x):
        noise = 0.1 * torch.randn_like(x)
        return noise, x - noise

    found = infidelity(
        scores(kind, model),
        perturb,
        inputs,
        attributions,
        n_perturb_samples=5,
        max_examples_per_batch=4,
        normalize=True,
        **options,
    )
    assert found.shape == (2,) and torch.isfinite(found).all() and (found > 0).all()


@kinds
def test_sensitivity(method, watched, kind):
    model, inputs, options = KINDS[kind]()
    attribution = method(watched(model))
    found = sensitivity_max(attribution.attribute, inputs, n_perturb_samples=3, **options)
    assert found.shape == (2,) and torch.isfinite(found).all() and (found > 0).all()
    still = sensitivity_max(attribution.attribute, inputs, lambda x, _: x, **options)
    # the same examples in another batch, so not the same to the last bit
    torch.testing.assert_close(still, torch.zeros(2), rtol=0, atol=1e-3)
    shift = 0.05 * torch.randn_like(inputs)
    found = sensitivity_max(
        attribution.attribute, inputs, lambda x, _: x + shift, n_perturb_samples=1, **options
    )
    before = attribution.attribute(inputs, **options)
    change = attribution.attribute(inputs + shift, **options) - before
    expected = change.flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@kinds
def test_sensitivity_of_a_tuple(method, watched, kind):
    model, inputs, options = KINDS[kind]()
    attribution = method(watched(model))
    found = sensitivity_max(attribution.attribute, (inputs,), n_perturb_samples=2, **options)
    assert found.shape == (2,) and (found > 0).all()


# --- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["heat_map", "blended_heat_map", "masked_image", "alpha_scaling"])
def test_image_attributions_can_be_shown(method, watched, style):
    model, inputs, options = pictures()
    if "query" in inspect.signature(method.attribute).parameters:
        options["query"] = "last"
    attributions = method(watched(model)).attribute(inputs, **options)
    for attribution, image in zip(attributions, inputs, strict=True):
        for_numpy = attribution.permute(1, 2, 0).numpy()
        assert for_numpy.shape == (12, 12, 3)
        pixels = image.sigmoid().permute(1, 2, 0).numpy()
        figure, axis = visualization.visualize_image_attr(
            for_numpy, pixels, style, "absolute_value", show_colorbar=True, use_pyplot=False
        )
        assert figure.axes and axis.images
        shown = axis.images[-1].get_array()
        assert shown.shape[:2] == (12, 12) and shown.max() > shown.min()


def test_text_attributions_can_be_shown(method, watched):
    model = watched(mamba_lm())
    words = [f"word{i}" for i in range(6)]
    relevance = method(model).attribute(token_ids(1, 6), target=(4, 3))[0]
    record = visualization.VisualizationDataRecord(
        relevance / relevance.abs().max(), 0.7, "yes", "no", "yes", relevance.sum(), words, 0.0
    )
    html = visualization.visualize_text([record]).data
    assert all(word in html for word in words)
    assert f"{float(relevance.sum()):.2f}" in html


def test_llm_attribution_results(method, watched):
    """The relevance of a prompt to each of three generated tokens."""
    model, prompt, generated = watched(mamba_lm()), token_ids(1, 5), [7, 0, 18]
    attribution, rows, ids = method(model), [], prompt
    for token in generated:
        rows.append(attribution.attribute(ids, target=(-1, token))[0, :5])
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    token_attr = torch.stack(rows)
    result = LLMAttributionResult(
        seq_attr=token_attr.sum(0),
        token_attr=token_attr,
        input_tokens=[f"in{i}" for i in range(5)],
        output_tokens=[f"out{i}" for i in range(3)],
    )
    assert result.seq_attr_dict["in2"] == pytest.approx(float(token_attr[:, 2].sum()))
    _, axis = result.plot_token_attr(show=False)
    texts = [text.get_text() for text in axis.texts]
    assert texts == [f"{value:.4f}" for value in token_attr.flatten().tolist()]
    _, axis = result.plot_seq_attr(show=False)
    assert len(axis.patches) == 2 * 5


# --- summaries -----------------------------------------------------------------------------------


@kinds
def test_summaries(method, watched, kind):
    model, inputs, options = KINDS[kind]()
    attribution = method(watched(model))
    runs = [attribution.attribute(inputs + 0.1 * k, **options) for k in range(4)]
    summary = Summarizer([Mean(), Var(order=1), StdDev(), Max()])
    common = Summarizer(CommonStats())
    for run in runs:
        summary.update(run)
        common.update((run,))
    stacked = torch.stack(runs)
    found = summary.summary
    for name, expected in [
        ("mean", stacked.mean(0)),
        ("sample_variance", stacked.var(0)),
        ("std_dev", stacked.std(0, unbiased=False)),
        ("max", stacked.amax(0)),
    ]:
        torch.testing.assert_close(found[name].float(), expected, rtol=1e-3, atol=1e-6)
    (shared,) = common.summary
    torch.testing.assert_close(shared["mean"], stacked.mean(0), rtol=1e-4, atol=1e-6)
    assert torch.equal(shared["min"], stacked.amin(0))


# --- attacks -------------------------------------------------------------------------------------


def test_fgsm(method, watched):
    model, inputs = vision("middle"), images(2)
    attribution = method(watched(model))
    attack = FGSM(nn.Sequential(model, nn.Softmax(-1)), lower_bound=-3, upper_bound=3)
    labels = model(inputs).argmax(-1)
    before = attribution.attribute(inputs, target=labels)
    for epsilon in (0.01, 0.1, 0.5):
        perturbed = attack.perturb(inputs, epsilon=epsilon, target=labels)
        assert perturbed.requires_grad is False or perturbed.grad_fn is None
        found = attribution.attribute(perturbed, target=labels)
        assert found.shape == inputs.shape and torch.isfinite(found).all()
        assert not torch.equal(found, before)
    assert torch.equal(attribution.attribute(inputs, target=labels), before)
    for parameter in model.parameters():  # FGSM's own backward pass is no business of ours
        assert parameter.grad is None


@pytest.mark.parametrize("mode", ["linear", "binary"])
def test_the_smallest_attack_that_succeeds(method, watched, mode):
    """Towards an image with a lower score; relevance is recomputed at each step and at the end."""
    model = watched(vision("middle"))
    attribution = method(model)
    image, other = images(1), images(1)
    scores = [model(x)[0, 3].item() for x in (image, other)]
    if scores[0] < scores[1]:
        image, other = other, image
    middle = sum(scores) / 2
    steps = []

    def attack(x, share):
        mixed = (1 - share) * x + share * other
        steps.append((mixed, attribution.attribute(mixed, target=3)))
        return mixed

    search = MinParamPerturbation(
        forward_func=model,
        attack=attack,
        arg_name="share",
        arg_min=0.0,
        arg_max=1.0,
        arg_step=0.25,
        mode=mode,
        correct_fn=lambda out: bool(out[0, 3] > middle),
    )
    perturbed, share = search.evaluate(image)
    if mode == "linear" and perturbed is None:
        perturbed, share = attack(image, 1.0), 1.0  # the end of the range is not tried
    if perturbed is not None:
        assert 0 < share <= 1 and model(perturbed)[0, 3].item() <= middle
        expected = attribution.attribute(perturbed, target=3)
        assert any(torch.equal(expected, found) for _, found in steps)
    for mixed, found in steps:
        assert found.shape == image.shape
        assert torch.equal(found, attribution.attribute(mixed, target=3))


def test_attack_on_embeddings(method, watched):
    model = watched(classifier("mean"))
    embeddings = model.backbone.embeddings(token_ids(2, 6)).detach()
    attribution = method(model)

    def probabilities(x):
        return model(inputs_embeds=x).softmax(-1)

    labels = probabilities(embeddings).argmax(-1)
    perturbed = FGSM(probabilities).perturb(embeddings, epsilon=0.2, target=labels)
    found = attribution.attribute(perturbed, target=labels)
    assert found.shape == (2, 6, WIDTH) and torch.isfinite(found).all()
