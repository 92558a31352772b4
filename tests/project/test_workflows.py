"""Forty things that users of Captum, transformers and inseq do, each as they would type it.

They were written down before any was tried. Each works as it stands, or is refused with what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from captum.attr import (
    IntegratedGradients,
    LLMGradientAttribution,
    NoiseTunnel,
    Saliency,
    TextTemplateInput,
    TextTokenInput,
)
from captum.attr import visualization as viz
from captum.metrics import infidelity, sensitivity_max
from helpers.user_models import TEXT, Made
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, pipeline
from zoo.folders import SHAPES

from captum_ssm import (
    LatimFlow,
    LayerLatimFlow,
    NeuronLatimFlow,
    SSMLLMAttribution,
    compare,
    report,
)
from captum_ssm.cli import main
from captum_ssm.errors import InputError, OptionError, TargetError
from captum_ssm.insights import AttributionVisualizer, Batch, ImageFeature


class Workflow(NamedTuple):
    """What a user types, which returns relevance and its shape; how it is refused, if it is."""

    type: Callable[[Any], Any]
    error: tuple[type[Exception], str] | None
    quick: bool


WORKFLOWS: dict[str, Workflow] = {}


def workflow(
    error: type[Exception] | None = None, says: str = "", quick: bool = False
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add what a user types to the list."""

    def add(type_: Callable[[Any], Any]) -> Callable[[Any], Any]:
        WORKFLOWS[type_.__name__] = Workflow(type_, error and (error, says), quick)
        return type_

    return add


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("workflows"))


@pytest.fixture
def s(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    made.tmp = tmp_path
    return made


# --- a user of Captum ----------------------------------------------------------------------------


@workflow()
def classifier_of_my_own(s):
    ids = s.tok(["anna owns the lamp .", "bob owns the kite ."], return_tensors="pt").input_ids
    pred = s.classifier(ids).argmax(-1)
    attr, _ = LatimFlow(s.classifier).attribute(ids, target=pred, return_convergence_delta=True)
    return attr, ids.shape


@workflow(quick=True)
def lambda_as_forward_func(s):
    model = s.lm
    attr = LatimFlow(lambda x: model(x).logits[:, -1]).attribute(s.ids, target=5)
    return attr, s.ids.shape


@workflow(quick=True)
def log_probability_as_forward_func(s):
    def forward(x):
        return s.lm(x).logits[:, -1].log_softmax(-1)

    return LatimFlow(forward).attribute(s.ids, target=5), s.ids.shape


@workflow()
def additional_forward_args_mask(s):
    enc = s.tok(["anna owns the lamp . ?", "bob owns the"], padding=True, return_tensors="pt")

    def forward(ids, mask):
        return s.lm(ids, attention_mask=mask).logits[:, -1]

    args = (enc.attention_mask,)
    attr = LatimFlow(forward).attribute(enc.input_ids, target=[3, 4], additional_forward_args=args)
    return attr, enc.input_ids.shape


@workflow()
def list_of_tuples_as_targets(s):
    ids = s.tok(["anna owns the lamp .", "bob owns the kite ."], return_tensors="pt").input_ids
    return LatimFlow(s.lm).attribute(ids, target=[(4, 7), (2, 3)]), ids.shape


@workflow(TargetError, r"Pass a tuple \(position, token\), for example target=\(-1, 5\)")
def int_target_of_a_language_model(s):
    return LatimFlow(s.lm).attribute(s.ids, target=5)


@workflow()
def no_target_for_one_number(s):
    return LatimFlow(lambda x: s.lm(x).logits[:, -1, 5]).attribute(s.ids), s.ids.shape


@workflow(OptionError, "n_steps is not an argument of .*Leave it out")
def arguments_of_integrated_gradients(s):
    return LatimFlow(lambda e: s.lm(inputs_embeds=e).logits[:, -1]).attribute(
        s.emb, baselines=torch.zeros_like(s.emb), target=5, n_steps=50
    )


@workflow()
def noise_tunnel(s):
    tunnel = NoiseTunnel(LatimFlow(s.lm))
    attr = tunnel.attribute(
        s.emb, nt_type="smoothgrad_sq", nt_samples=4, stdevs=0.1, target=(-1, 5)
    )
    return attr, s.emb.shape


@workflow()
def infidelity_as_a_metric(s):
    def forward(e):
        return s.lm(inputs_embeds=e).logits[:, -1]

    def perturb(x):
        noise = torch.randn_like(x) * 0.01
        return noise, x - noise

    attr = LatimFlow(forward).attribute(s.emb, target=5, per_token=False)
    return infidelity(forward, perturb, s.emb, attr, target=5)


@workflow()
def sensitivity_as_a_metric(s):
    method = LatimFlow(s.lm)
    return sensitivity_max(method.attribute, s.emb, target=(-1, 5), n_perturb_samples=3)


@workflow()
def layer_method(s):
    method = LayerLatimFlow(lambda x: s.lm(x).logits[:, -1], s.lm.backbone.layers[1])
    return method.attribute(s.ids, target=5).sum(-1), s.ids.shape


@workflow()
def neuron_method(s):
    method = NeuronLatimFlow(s.lm, s.lm.backbone.layers[1])
    return method.attribute(s.ids, neuron_selector=(3, 7)), s.ids.shape


@workflow(OptionError, "feature_mask is not an argument of .*add up the relevance")
def feature_mask(s):
    mask = torch.zeros_like(s.ids)
    mask[:, 5:] = 1
    return LatimFlow(s.lm).attribute(s.ids, target=(-1, 5), feature_mask=mask)


@workflow()
def text_drawn_by_captum(s):
    attr = LatimFlow(s.classifier).attribute(s.ids, target=1)[0]
    attr = attr / attr.norm()
    words = s.tok.convert_ids_to_tokens(s.ids[0])
    record = viz.VisualizationDataRecord(attr, 0.9, "1", "1", "1", attr.sum(), words, 0.0)
    assert "lamp" in viz.visualize_text([record]).data
    return attr


@workflow()
def image_drawn_by_captum(s):
    attr = LatimFlow(s.vim).attribute(s.image, target=s.vim(s.image).argmax(1))
    shown, image = (np.transpose(x[0].numpy(), (1, 2, 0)) for x in (attr, s.image))
    viz.visualize_image_attr(
        shown, image, method="blended_heat_map", sign="all", show_colorbar=True, use_pyplot=False
    )
    return attr, s.image.shape


@workflow(quick=True)
def llm_attribution_of_captum(s):
    llm = LLMGradientAttribution(LatimFlow(s.lm), s.tok)
    return llm.attribute(TextTokenInput(TEXT, s.tok), target="lamp").token_attr, s.ids.shape


@workflow()
def text_token_input(s):
    prompt = TextTokenInput(TEXT, s.tok, skip_tokens=[1])
    res = SSMLLMAttribution(LatimFlow(s.lm), s.tok).attribute(prompt, target="lamp . bob")
    res.plot_token_attr(show=False)
    res.plot_seq_attr(show=False)
    return res.seq_attr


@workflow(quick=True)
def text_template_input(s):
    prompt = TextTemplateInput("{} owns the {} . ? anna owns the", values=["anna", "lamp"])
    res = SSMLLMAttribution(LatimFlow(s.lm), s.tok).attribute(prompt, target="lamp")
    return res.seq_attr, (2,)


@workflow()
def captums_methods_beside_ours(s):
    out = compare(s.vim, [LatimFlow, Saliency, IntegratedGradients], s.image, target=1)
    assert len(out) == 3
    return next(iter(out.values()))


@workflow()
def insights(s):
    visualizer = AttributionVisualizer(
        models=[s.vim],
        score_func=lambda o: torch.softmax(o, 1),
        classes=list(SHAPES),
        features=[ImageFeature("Photo", [lambda x: x * 0], [])],
        dataset=iter([Batch(inputs=s.image, labels=torch.tensor([1]))]),
    )
    assert visualizer.visualize()


# --- a user of transformers ----------------------------------------------------------------------


@workflow(quick=True)
def what_a_tokenizer_returns(s):
    inputs = s.tok(TEXT, return_tensors="pt")
    return LatimFlow(s.lm).attribute(inputs, target=(-1, 5)), inputs.input_ids.shape


@workflow(InputError, r"a batch dimension is needed.*Pass inputs\[None\]", quick=True)
def ids_without_a_batch(s):
    ids = torch.tensor(s.tok.encode(TEXT))
    return LatimFlow(s.lm).attribute(ids, target=(-1, 5))


@workflow()
def report_of_a_pipeline(s):
    pipe = pipeline("text-generation", model=str(s.folder))
    assert report(pipe, TEXT, path=s.tmp / "pipe.html").exists()


@workflow()
def parts_of_a_pipeline(s):
    pipe = pipeline("text-generation", model=str(s.folder))
    text = pipe(TEXT, max_new_tokens=3, return_full_text=False)[0]["generated_text"]
    res = SSMLLMAttribution(LatimFlow(pipe.model), pipe.tokenizer).attribute(TEXT, target=text)
    return res.seq_attr


@workflow()
def generate_then_explain(s):
    out = s.lm.generate(s.ids, max_new_tokens=4, do_sample=False)
    read = out[:, :-1]
    return LatimFlow(s.lm).attribute(read, target=(-1, out[0, -1])), read.shape


@workflow()
def sampled_generation(s):
    llm = SSMLLMAttribution(LatimFlow(s.lm), s.tok)
    res = llm.attribute(TEXT, gen_args={"max_new_tokens": 4, "do_sample": True, "top_k": 5})
    return res.token_attr


@workflow()
def left_padded_batch(s):
    texts = ["anna owns the lamp . ? anna owns the", "bob owns the"]
    enc = s.tok(texts, padding=True, padding_side="left", return_tensors="pt")
    attr = LatimFlow(s.lm).attribute(
        enc["input_ids"], target=(-1, 5), additional_forward_args=enc["attention_mask"]
    )
    assert attr[1, 0] == 0
    return attr, enc["input_ids"].shape


@workflow()
def half_precision_under_no_grad(s):
    model = AutoModelForCausalLM.from_pretrained(s.folder, dtype=torch.bfloat16)
    with torch.no_grad():
        answer = model(s.ids).logits[0, -1].argmax()
        return LatimFlow(model).attribute(s.ids, target=(-1, answer)), s.ids.shape


@workflow()
def a_model_left_in_training_mode(s):
    model = AutoModelForCausalLM.from_config(s.lm.config).train()
    return LatimFlow(model).attribute(s.ids, target=(-1, 5)), s.ids.shape


@workflow()
def peft_adapter(s):
    config = LoraConfig(target_modules=["in_proj", "x_proj"], r=2)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(s.folder), config).eval()
    return LatimFlow(model).attribute(s.ids, target=(-1, 5)), s.ids.shape


@workflow()
def a_result_saved_and_loaded(s):
    res = SSMLLMAttribution(LatimFlow(s.lm), s.tok).attribute(TEXT, target="lamp")
    torch.save(res, s.tmp / "result.pt")
    again = torch.load(s.tmp / "result.pt", weights_only=False)
    assert torch.equal(again.seq_attr, res.seq_attr)
    json.dumps(res.seq_attr_dict)
    return again.seq_attr


@workflow()
def a_report_in_a_notebook(s):
    from IPython.display import HTML

    path = report(s.lm, TEXT, LatimFlow, tokenizer=s.tok, path=s.tmp / "one.html")
    assert "lamp" in HTML(path.read_text()).data


# --- a user of inseq -----------------------------------------------------------------------------


@workflow(quick=True)
def methods_by_name(s):
    out = compare(s.lm, ["latim_flow", "mamba_attribution"], s.ids, target=(-1, 5))
    assert len(out) == 2
    return next(iter(out.values())), s.ids.shape


@workflow()
def contrast_between_two_tokens(s):
    lamp, kite = s.tok.convert_tokens_to_ids(["lamp", "kite"])
    return LatimFlow(s.lm).attribute(s.ids, target=(-1, lamp), contrast=kite), s.ids.shape


@workflow()
def a_result_shown(s):
    out = SSMLLMAttribution(LatimFlow(s.lm), s.tok).attribute(TEXT)
    out.show()
    return out.seq_attr


# --- on the command line -------------------------------------------------------------------------


def command(*arguments: object) -> None:
    assert main(["explain", *map(str, arguments)]) == 0


@workflow()
def explain_a_local_folder(s):
    command(s.folder, "--text", TEXT, "--out", "folder.html")


@workflow()
def explain_by_integrated_gradients(s):
    methods = ["latim-flow", "integrated_gradients"]
    command(s.folder, "--text", TEXT, "--method", *methods, "--out", "ig.json")


@workflow()
def explain_a_contrast(s):
    target = ["--target", "lamp", "--contrast", "kite"]
    command("recall-mamba", "--text", TEXT, *target, "--out", "contrast.png")


@workflow()
def explain_an_image(s):
    assert s.image.dim() == 4
    command(str(s.shapes), "--image", s.picture, "--target", "ring", "--out", "image.png")


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if each.quick else pytest.mark.full)
        for name, each in WORKFLOWS.items()
    ],
)
def test_a_workflow(name: str, s: Made) -> None:
    typed = WORKFLOWS[name]
    error = typed.error
    with nullcontext() if error is None else pytest.raises(error[0], match=error[1]):
        found = typed.type(s)
        attr, shape = found if isinstance(found, tuple) else (found, None)
        assert attr is None or bool(attr.isfinite().all())
        assert shape is None or tuple(attr.shape) == tuple(shape)


def test_there_are_forty() -> None:
    refused = [name for name, each in WORKFLOWS.items() if each.error is not None]
    assert len(WORKFLOWS) == 40
    assert len(refused) <= 4
