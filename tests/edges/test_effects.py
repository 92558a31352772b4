"""First-order effects of edges against gradients by hand, sums of the linear network, and truth."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles import relative_error as close
from oracles.messages import whole_matrix
from torch import Tensor
from zoo.architectures import QUICK, ZOO, Case, every, language
from zoo.attention import attention_model
from zoo.networks import NETWORKS
from zoo.small import mamba_lm

from captum_ssm import EdgeEffects, Edges, LatimFlow, knock_out, trace
from captum_ssm.attr.call.targets import logits_of
from captum_ssm.edges.truth import Interventions
from captum_ssm.errors import OptionError, QueryError, TargetError
from captum_ssm.models import load_bundled
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

#: The largest accepted error of a logit; the blocks of the last two compute in float32.
LIMITS = {"mamba": 1e-10, "zamba": 1e-10, "rwkv": 1e-10, "mamba2": 3e-6, "bamba": 3e-6}


def by_hand(case: Case, number: int) -> Tensor:
    """Effects of one layer (B, L, L): the model's gradient times messages of its whole matrix."""
    with trace(case.model, graph="outputs") as record:
        output = logits_of(case.model(case.inputs))
    layer = record.layers[number]
    index = case.target["target"]
    chosen = output[:, index] if isinstance(index, int) else output[:, index[0], index[1]]
    (gradient,) = torch.autograd.grad(chosen.sum(), layer.output)
    linear, gradient = layer.linear, layer.in_order(gradient)
    before = torch.zeros_like(linear.values, requires_grad=True)
    (before,) = torch.autograd.grad(linear.project(before), before, gradient)
    found = torch.einsum(
        "bic,bicjd,bjd->bij",
        before.flatten(2),
        whole_matrix(linear.operator),
        linear.values.flatten(2),
    )
    return found.detach()


@every(QUICK)
def test_every_edge(case: Case) -> None:
    effects = EdgeEffects(case.model, exact_norms=False).attribute(case.inputs, **case.target)
    for number in {0, len(effects.layers) - 1}:
        expected = by_hand(case, number)
        found = effects.matrix(number)
        assert close(found, expected) <= 1e-5
        assert close(effects.by_source(number), expected.sum(1)) <= 1e-5
        assert close(effects.by_target(number), expected.sum(2)) <= 1e-5
        assert close(effects.rows([-1, 1], number), expected[:, [-1, 1]]) <= 1e-5
        cut = effects.of(Edges(effects.names[number], [0, 2], slice(3, None)))
        assert close(cut, expected[:, 3:, [0, 2]].sum((1, 2))) <= 1e-4
    assert (
        close(effects.matrix(), sum(effects.matrix(i) for i in range(len(effects.layers)))) < 1e-5
    )


@pytest.mark.parametrize("name", ["rwkv7", "fla RWKV6"])
def test_every_edge_where_norms_mix_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_every_edge(NETWORKS[name](monkeypatch))


@every(("mamba2", "recurrent_gemma", "gpt_neox"))
@pytest.mark.parametrize("rule", ["frozen", "centered"])
def test_in_the_linear_network_they_add_up_to_what_the_mixer_adds(case: Case, rule: str) -> None:
    effects = EdgeEffects(case.model, rule=rule).attribute(case.inputs, **case.target)
    parts = LatimFlow(case.model).decompose(case.inputs, rule=rule, **case.target)
    for number, layer in enumerate(effects.layers):
        rest = layer.linear.project(layer.linear.bias)
        whole = effects.by_target(number) + (layer.gradient * rest).sum(-1)
        assert close(whole, parts.mixers[number]) <= 2e-5
    assert torch.allclose(effects.output, parts.output)


def test_the_largest_ones() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 9))
    effects = EdgeEffects(model, exact_norms=False).attribute(ids, (-1, 3))
    every_one = torch.stack([effects.matrix(i) for i in range(3)], 1)  # (B, N, L, L)
    for example, edges in enumerate(effects.top(7)):
        size = every_one[example].flatten().abs().sort(descending=True).values[:7]
        assert close(torch.tensor([abs(e.effect) for e in edges]), size) < 1e-6
        for edge in edges:
            entry = every_one[example, edge.layer, edge.target, edge.source]
            assert abs(float(entry) - edge.effect) < 1e-6
            assert edge.name == f"backbone.layers.{edge.layer}.mixer"
    (only,) = (
        EdgeEffects(model, exact_norms=False)
        .attribute(ids[:1], (-1, 3))
        .top(1000, "backbone.layers.2.mixer")
    )
    assert {edge.layer for edge in only} == {2}
    assert len(only) == 9  # in the last layer others have no effect at all


def test_layers_by_number_name_and_range() -> None:
    model, ids = mamba_lm().double(), torch.randint(15, (1, 6))
    effects = EdgeEffects(model, exact_norms=False).attribute(ids, (-1, 3))
    last = effects.matrix(2)
    for layers in (-1, "backbone.layers.2.mixer", slice(2, 3), range(2, 3), [2]):
        assert torch.equal(effects.matrix(layers), last)
    sums = torch.stack([effects.matrix(layer).sum((1, 2)) for layer in range(3)])
    assert close(effects.by_layer(), sums) < 1e-5
    for wrong in (3, "layer", 1.5):
        with pytest.raises(OptionError, match="layers contains"):
            effects.matrix(wrong)


def test_truth_is_what_knocking_out_does() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 8))
    method = EdgeEffects(model, exact_norms=False)
    truth = method.validate(ids, (-1, 3), samples=30, at_a_time=7)
    assert len(truth.edges) == len(truth.examples) == len(truth.true) == 30
    each = list(zip(truth.examples, truth.edges, truth.true.tolist(), strict=True))
    assert len({(b, edge.layer, edge.target, edge.source) for b, edge, _ in each}) == 30
    with torch.no_grad():
        before = model(ids).logits[:, -1, 3]
        for b, edge, true in each:
            with knock_out(model, Edges(edge.name, edge.source, edge.target)):
                after = model(ids).logits[:, -1, 3]
            assert abs(float((before - after)[b]) - true) < 1e-5
    assert 0 <= truth.sign_agreement <= 1
    again = method.validate(ids, (-1, 3), samples=30)
    assert [e[:4] for e in again.edges] == [e[:4] for e in truth.edges]


def test_the_default_is_near_the_truth() -> None:
    model, vocabulary = load_bundled()
    text = "anna owns the lamp . bob owns the kite . ? anna owns the"
    ids, lamp = torch.tensor([vocabulary.encode(text)]), vocabulary.id_of("lamp")
    effects = EdgeEffects(model).attribute(ids, (-1, lamp))
    with torch.no_grad():
        before = model(ids).logits[0, -1, lamp]
        for edge in effects.top(2)[0]:
            with knock_out(model, Edges(edge.layer, edge.source, edge.target)):
                true = float(before - model(ids).logits[0, -1, lamp])
            assert edge.effect == pytest.approx(true, rel=0.02)
    first = EdgeEffects(model, exact_norms=False).attribute(ids, (-1, lamp))
    assert abs(first.matrix(1)[0, 13, 3]) < 0.3 * abs(effects.matrix(1)[0, 13, 3])


def test_truth_of_chosen_edges_and_probabilities() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 8))
    edges = [Edges(1), Edges(sources=slice(0, 3), targets=slice(3, None))]
    truth = EdgeEffects(model, exact_norms=False).validate(
        ids, (-1, 3), edges=edges, contrast="all"
    )
    with torch.no_grad():
        before = model(ids).logits[:, -1].log_softmax(-1)[:, 3]
        for i, one in enumerate(edges):
            with knock_out(model, one):
                after = model(ids).logits[:, -1].log_softmax(-1)[:, 3]
            assert close(truth.true[2 * i : 2 * i + 2], before - after) < 1e-4
    effects = EdgeEffects(model, exact_norms=False).attribute(ids, (-1, 3), contrast="all")
    assert close(truth.estimated, torch.cat([effects.of(one) for one in edges])) < 1e-5


def test_wrong_arguments() -> None:
    model, ids = mamba_lm(), torch.randint(15, (1, 6))
    method, asked = EdgeEffects(model), (ids, (-1, 3))
    effects = method.attribute(*asked)
    for call, error, said in (
        (lambda: EdgeEffects(model, rule="half-way"), OptionError, "rule"),
        (lambda: method.attribute(ids, 3), TargetError, "target"),
        (lambda: effects.top(0), OptionError, "count"),
        (lambda: effects.rows([9]), QueryError, "positions"),
        (lambda: effects.of(Edges(1, 1, 2, selection=True)), OptionError, "selection"),
        (lambda: method.validate(*asked, samples=None), OptionError, "samples"),
        (lambda: method.validate(*asked, edges=[Edges(9)]), OptionError, "layers contains 9"),
    ):
        with pytest.raises(error, match=said):
            call()


def calls_in_cuts(model: Any, *given: Tensor, limit: float = 1e-10) -> list[int]:
    """Compare cuts, alone and in pairs, with knock-outs; return how many times each mixer ran."""

    def run(ids: Tensor, mask: Tensor | None = None) -> Any:
        return model(ids, attention_mask=mask).logits

    forward, ids, more = model if len(given) == 1 else run, given[0], given[1:]
    effects = EdgeEffects(forward, model).attribute(ids, (-1, 3), more)
    top = effects.top(400)[0]
    edges = [x for n in range(len(effects.layers)) for x in [y for y in top if y.layer == n][:3]]
    cuts: list[Any] = [*((x,) for x in edges), *pairwise(edges), (2,), (edges[-1], 3)]
    runs = Interventions(forward, model, ids, more, (-1, 3), at_a_time=3, tokens=ids.shape[1])
    calls, found = Counter[Any](), torch.zeros(len(cuts), dtype=torch.float64)
    mixers = [mixer.module for mixer in find_mixers(model)]
    hooks = [m.register_forward_hook(lambda m, *_: calls.update([m])) for m in mixers]
    for some, output in runs.outputs(cuts):
        found[some] = runs.explained(output)
    for hook in hooks:
        hook.remove()
    for cut, number in zip(cuts, found, strict=True):
        named = [
            (None, x, "other") if isinstance(x, int) else (x.name, x.source, x.target) for x in cut
        ]
        with torch.no_grad(), knock_out(model, *(Edges(*each) for each in named)):
            assert abs(run(*given)[0, -1, 3] - number) <= limit
    return [calls[m] for m in mixers]


@pytest.mark.parametrize("name", LIMITS)
def test_states_below_a_cut_are_reused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"zamba": lambda _: language(attention_model("zamba"))}
    case = (ZOO | more)[name](monkeypatch)
    ids, mask = case.inputs[:1], (torch.arange(9) > 1)[None].long()
    for given in ((ids,), (ids, mask)):
        calls = calls_in_cuts(case.model.double(), *given, limit=LIMITS[name])
        assert calls[0] < max(calls) - 1, "more than one run goes without the first mixer"


def test_blocks_with_a_connection_besides_tensors_run_again() -> None:
    model, seen = mamba_lm().double(), list[Tensor]()
    first, last = model.backbone.layers[0].norm, model.backbone.layers[2].norm
    first.register_forward_hook(lambda _, args, out: seen.append(out))
    last.register_forward_hook(lambda _, args, out: out + seen.pop() if seen else out)
    calls = calls_in_cuts(model, torch.randint(15, (1, 9)))
    assert calls[1] == calls[0] + 1, "one run without the first block shows it"
