"""Estimated effects of edges against knock-outs, and the parts that are to blame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm import EdgeEffects, Edges, knock_out
from captum_ssm.tracing import repaired_scans
from captum_ssm_bench import EXPERIMENTS, Cell, Key, lines, load_bundled
from captum_ssm_bench.experiments.knockout.experiment import (
    AS_IT_IS,
    HELD,
    Drawn,
)
from captum_ssm_bench.experiments.knockout.held import scale_of
from captum_ssm_bench.experiments.knockout.single import LARGEST, MESSAGES, asked, evenly, of_text

KNOCKOUT = EXPERIMENTS["knockout"]
ALL_HELD = Cell("all held")


def drawn(name: str, index: int, seed: int) -> Drawn:
    (subject,) = (each for each in KNOCKOUT.subjects() if each.name == name)
    return Drawn(load_bundled(name)[0], KNOCKOUT.example(subject, index, seed))


def of_edges(numbers: Mapping[str, float], name: str) -> list[float]:
    """What is recorded of each edge."""
    return [numbers[f"{name} {i}"] for i in range(int(numbers["n"]))]


# --- estimates as they are -------------------------------------------------------------------


def test_edges_are_those_of_a_direct_call_and_columns_their_correlations(seed: int) -> None:
    """Over two texts together, of which each has sums of its own."""
    (subject,) = (each for each in KNOCKOUT.subjects() if each.name == "pairs-mamba2")
    model, results, direct = subject.load(torch.device("cpu")), [], []
    for index in (0, 1):
        example = KNOCKOUT.example(subject, index, seed)
        rows = KNOCKOUT.measure(model, example, AS_IT_IS)
        results.append((Key("knockout", subject.name, *AS_IT_IS, seed, index), rows))
        truth = EdgeEffects(model, exact_norms=False).validate(
            example.inputs, example.target, samples=10, seed=example.seed("edges")
        )
        direct.append(truth)
        for name, number in (("layer", 0), ("target", 2), ("source", 3)):
            assert of_edges(rows["all"], name) == [edge[number] for edge in truth.edges]
        assert of_edges(rows["all"], "estimated") == truth.estimated.tolist()
        assert of_edges(rows["all"], "true") == truth.true.tolist()
    estimated = [truth.estimated for truth in direct]
    true = [truth.true for truth in direct]
    found = {line.row: line.entries for line in lines(KNOCKOUT, results)}
    for row, part in (("all", slice(10)), ("large", slice(5)), ("even", slice(5, 10))):
        x, y = (torch.cat([each[part] for each in values]).numpy() for values in (estimated, true))
        assert found[row]["r"].value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
        assert found[row]["error"].value == pytest.approx(abs(x - y).sum() / abs(y).sum())
        counted = torch.cat([t.true[part].abs() > t.rounding for t in direct]).numpy()
        same = (np.sign(x) == np.sign(y))[counted].mean()
        assert found[row]["signs"].value == pytest.approx(same)
    layers = {edge[0] for truth in direct for edge in truth.edges}
    of_layers = {row for row in found if row.startswith("layer")}
    assert of_layers == {f"layer {layer}, Mamba-2" for layer in layers}


@pytest.mark.parametrize("options", [{"rule": "centered"}, {"exact_norms": True}])
def test_other_options_estimate_the_same_edges(options: dict[str, Any], seed: int) -> None:
    one = drawn("pairs-mamba", 0, seed)
    model, question = load_bundled("pairs-mamba")[0], one.question
    effects = EdgeEffects(model, **options).attribute(question.inputs, question.target)
    expected = [effects.matrix(e.layer)[0, e.target, e.source] for e in one.edges]
    torch.testing.assert_close(
        one.estimated_by(**options), torch.stack(expected).double(), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(one.estimated_by(**options), one.estimated, rtol=0.01)


# --- what is held ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pairs-mamba", "copying-bamba", "scenes-vim"])
def test_nothing_held_is_the_model_as_it_is(name: str, seed: int) -> None:
    one = drawn(name, 1, seed)
    matched, true = one.plain.effects(one.edges, one.effects, ())
    torch.testing.assert_close(matched, one.estimated, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(true, one.true, rtol=1e-3, atol=4 * one.rounding)


@pytest.mark.parametrize(
    "name", ["pairs-mamba2", "pairs-gated-deltanet", "copying-bamba", "scenes-vim"]
)
def test_nothing_bends_where_all_is_held(name: str, seed: int) -> None:
    """What is left of these models is linear, and a gradient tells all of it."""
    one = drawn(name, 0, seed)
    matched, true = one.plain.effects(one.edges, one.effects, HELD[ALL_HELD])
    torch.testing.assert_close(matched, true, rtol=1e-3, atol=8 * one.rounding)
    _, free = one.plain.effects(one.edges, one.effects, ())
    assert float((true - free).abs().max()) > 1e-3, "something was held"


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6), nn.RMSNorm(6, eps=0.5)])
def test_scales_are_those_of_norms(norm: nn.Module) -> None:
    x = torch.randn(2, 3, 6)
    centered = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    torch.testing.assert_close(scale_of(norm, x) * centered, norm(x))


# --- messages drawn evenly -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pairs-bamba", "pairs-rwkv-101", "two hops, delta rule"])
def test_messages_are_cut_one_by_one(name: str) -> None:
    edges = EXPERIMENTS["edges"]
    (subject,) = (each for each in edges.subjects() if each.name == name)
    model = subject.load(torch.device("cpu"))
    inputs, target = asked(edges.example(subject, 0, 0)[2])
    effects = EdgeEffects(model).attribute(inputs, target)
    drawn = evenly(effects, torch.Generator().manual_seed(7))
    assert len(set(drawn)) == MESSAGES and all(e.source <= e.target for e in drawn)
    estimated, true, rounding = of_text(model, inputs, target, torch.Generator().manual_seed(7))

    def number(*cut: Edges) -> float:
        with torch.no_grad(), repaired_scans(), knock_out(model, *cut):
            return float(model(input_ids=inputs).logits[(0, *target)])

    for edge, x, y in zip(drawn, estimated, true, strict=True):
        expected = float(effects.matrix(edge.layer)[0, edge.target, edge.source])
        assert float(x) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        cut = Edges(edge.layer, edge.source, edge.target)
        assert float(y) == pytest.approx(number() - number(cut), abs=float(rounding[0]) + 1e-4)


def test_the_largest_are_those_of_all_texts() -> None:
    """A circuit whose answer follows from few messages."""
    edges = EXPERIMENTS["edges"]
    (subject,) = (each for each in edges.subjects() if each.name == "recall, delta rule")
    model, example = subject.load(torch.device("cpu")), edges.example(subject, 0, 0)
    generator = torch.Generator().manual_seed(0)
    x, y, _ = (
        torch.cat(each).abs().numpy()
        for each in zip(*(of_text(model, *asked(t), generator) for t in example), strict=True)
    )
    rows = edges.measure(model, example, edges.cells()[0])
    assert (rows["all"]["n"], rows["largest"]["n"]) == (20 * MESSAGES, LARGEST)
    assert rows["largest"]["xx"] == pytest.approx((np.sort(x)[-LARGEST:] ** 2).sum())
    effective = set(np.flatnonzero(y > 0.1)), set(np.flatnonzero(x > 0.1))
    assert effective[0] == effective[1] and len(effective[0]) < LARGEST
    assert rows["largest"]["found"] >= len(effective[0]) / LARGEST
