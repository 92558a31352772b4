"""Published experiments against cuts made one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.architectures import Case
from zoo.small import mamba_lm

from captum_ssm import Edges, knock_out
from captum_ssm.edges import knockout_windows, parts_off
from captum_ssm.errors import InputError, NoMixerError, OptionError, QueryError, TargetError

HYBRID = pytest.mark.parametrize("case", ["bamba"], indirect=True)


def chance(model: Any, ids: Tensor, token: int, *cut: Edges) -> Tensor:
    with torch.no_grad(), knock_out(model, *cut):
        return model(ids).logits[:, -1].double().softmax(-1)[:, token]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "spans"),
    [(3, [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4]]), (99, [[0, 1, 2, 3, 4]] * 5)],
)
def test_windows_are_centered_and_clipped(window: int, spans: list[list[int]]) -> None:
    model, ids = mamba_lm(num_hidden_layers=5), torch.randint(15, (3, 8))
    kinds = {"two": [1, 2], "of each": torch.tensor([[0], [3], [5]])}
    found = knockout_windows(model, ids, (-1, 4), kinds, window=window)
    assert found.kinds == ("two", "of each")
    assert found.layers == tuple(f"backbone.layers.{i}.mixer" for i in range(5))
    assert torch.allclose(found.plain, chance(model, ids, 4), atol=1e-7)
    for k, sources in enumerate(kinds.values()):
        for i, span in enumerate(spans):
            assert found.layers_of(i) == tuple(found.layers[j] for j in span)
            expected = chance(model, ids, 4, Edges(span, sources, -1))
            assert torch.allclose(found.probabilities[k, i], expected, atol=1e-7)


def test_change_in_percent_and_by_difference() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 6))
    found = knockout_windows(model, ids, [(-1, 4), (-1, 7)], {"first": 0}, window=2)
    before = [float(chance(model, ids, token)[b]) for b, token in enumerate((4, 7))]
    for i, span in enumerate([[0], [0, 1], [1, 2]]):
        for b, token in enumerate((4, 7)):
            after = float(chance(model, ids, token, Edges(span, 0, -1))[b])
            assert abs(float(found.difference[0, i, b]) - (after - before[b])) < 1e-7
            percent = (after - before[b]) / before[b] * 100
            assert abs(float(found.change[0, i, b]) - percent) < 1e-4


@pytest.mark.slow
def test_what_is_cut_and_what_takes_its_place() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 6))
    other = torch.randint(15, (2, 6))
    for options, replace in (
        ({"selection": True}, None),
        ({"component": "conv"}, None),
        ({}, "mean"),
        ({}, other),
    ):
        found = knockout_windows(
            model,
            ids,
            (-1, 4),
            {"last": -1},
            targets=[-2, -1],
            window=1,
            replace=replace,
            **options,
        )
        with torch.no_grad(), knock_out(model, Edges(1, -1, [-2, -1], **options), replace=replace):
            expected = model(ids).logits[:, -1].double().softmax(-1)[:, 4]
        assert torch.allclose(found.probabilities[0, 1], expected, atol=1e-7)


@pytest.mark.slow
@HYBRID
def test_windows_of_one_kind_of_layers(case: Case) -> None:
    names = ["model.layers.1.self_attn"], ["model.layers.0.mamba", "model.layers.2.mamba"]
    for layers, of_kind in zip(("attention", "ssm"), names, strict=True):
        found = knockout_windows(
            case.model, case.inputs, (-1, 3), {"first": 0}, window=3, layers=layers
        )
        assert list(found.layers) == of_kind
        expected = chance(case.model, case.inputs, 3, Edges(of_kind, 0, -1))
        assert torch.allclose(found.probabilities[0, 0], expected, atol=1e-7)
    named = knockout_windows(
        case.model, case.inputs, (-1, 3), {"first": 0}, window=1, layers=range(1, 3)
    )
    assert named.layers == ("model.layers.1.self_attn", "model.layers.2.mamba")


def test_padded_batches() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 7))

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        return model(ids, attention_mask=mask).logits

    def windows_of(mask: Tensor) -> Tensor:
        kinds = {"two before": -3}
        found = knockout_windows(
            run, ids, (-1, 4), kinds, window=2, model=model, additional_forward_args=mask
        )
        return found.probabilities

    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    alone = knockout_windows(model, ids[1:, 3:], (-1, 4), {"two before": -3}, window=2)
    assert torch.allclose(windows_of(mask)[..., 1:], alone.probabilities, atol=1e-6)
    with pytest.raises(TargetError, match="padd"):
        windows_of(mask.flip(1))


@pytest.mark.slow
@HYBRID
def test_parts_off_switches_off_one_part_at_a_time(case: Case) -> None:
    ids = case.inputs

    def score() -> Tensor:
        return case.model(ids).logits[:, -1, 3]

    def cut(*edges: Edges) -> Tensor:
        with torch.no_grad(), knock_out(case.model, *edges):
            return score().double()

    found = parts_off(case.model, score, heads=True)
    names = ["model.layers.0.mamba", "model.layers.1.self_attn", "model.layers.2.mamba"]
    assert torch.allclose(found.plain, cut(), atol=1e-6)
    assert list(found.kinds) == ["attention", "ssm"]
    assert list(found.layers) == list(found.heads) == names
    for kind, scores in found.kinds.items():
        assert torch.allclose(scores, cut(Edges(kind)), atol=1e-6)
    for number, name in enumerate(names):
        assert torch.allclose(found.layers[name], cut(Edges(number)), atol=1e-6)
        for head, scores in enumerate(found.heads[name]):
            assert torch.allclose(scores, cut(Edges(number, heads=head)), atol=1e-6)
        with pytest.raises(OptionError, match="heads"):  # there are no more of them
            cut(Edges(number, heads=len(found.heads[name])))
    found = parts_off(case.model, lambda: float(score().mean()), layers="ssm")  # numbers
    assert list(found.layers) == names[::2] and not found.heads
    assert float(found.layers[names[2]]) == pytest.approx(float(cut(Edges(2)).mean()), abs=1e-6)


def test_wrong_arguments() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 6))

    def windows(**changed: Any) -> Any:
        given = {"forward_func": model, "inputs": ids, "target": (-1, 4), "kinds": {"first": 0}}
        return knockout_windows(**(given | changed))

    def scored(**changed: Any) -> Any:
        given = {"model": model, "score": lambda: float(model(ids).logits.sum())}
        return parts_off(**(given | changed))

    for call, changed, error, said in (
        (windows, {"kinds": {}}, OptionError, "kinds"),
        (windows, {"kinds": {"first": 1.5}}, OptionError, "sources"),
        (windows, {"kinds": {"outside": 6}}, QueryError, "position 6"),
        (windows, {"window": 0}, OptionError, "window"),
        (windows, {"layers": 7}, OptionError, "layers contains 7"),
        (windows, {"layers": "attention"}, NoMixerError, "attention"),
        (windows, {"target": None}, TargetError, "target=None"),
        (windows, {"inputs": [1, 2]}, InputError, "inputs"),
        (scored, {"score": 0.5}, OptionError, "score"),
        (scored, {"score": lambda: 0.5}, NoMixerError, "none of them"),
        (scored, {"score": lambda: model(ids).logits}, OptionError, "score returned"),
        (scored, {"heads": 1}, OptionError, "heads"),
    ):
        with pytest.raises(error, match=said):
            call(**changed)
    with pytest.raises(TargetError, match="no probability"):  # of a model of one number
        knockout_windows(lambda x: model(x).logits[:, -1, :1], ids, 0, {"first": 0}, model=model)
