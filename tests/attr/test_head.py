"""The head of a language model runs where it is asked, and the number explained stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import without_replays
from helpers.versions import transformers5
from torch import Tensor, nn
from zoo.mamba import padded_batch, transformers_model

from captum_ssm import LatimFlow, LatimLogit, MambaLRP
from captum_ssm.errors import NonFiniteError, OptionError, TargetError

# before, most heads run at all positions whatever they are asked
pytestmark = [transformers5, pytest.mark.slow]

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
TOKENS = IDS.shape[1]


@pytest.fixture
def model() -> Any:
    return transformers_model("mamba").double()


@pytest.fixture
def positions(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    plain = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() == model.lm_head.weight.data_ptr():
            found.append(x.shape[1])
        return plain(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)
    return found


def whole(model: Any) -> Callable[..., Tensor]:
    return lambda x, *more: model(x, *more).logits


LAST = (-1, 2)
APART = [(0, 1), (4, 2)]
ASKED = [
    (LAST, None, 1),
    (APART, None, 2),
    ([(5, 3), (4, 3)], None, 2),
    (LAST, (1, 3), 2),
    (LAST, [(-1, 3), (2, 0)], 2),
    (APART, "mean", 2),
    (LAST, "others", 1),
    (LAST, "all", 1),
]


@pytest.mark.parametrize(("target", "contrast", "count"), ASKED)
@pytest.mark.parametrize("method", [LatimFlow, MambaLRP])
def test_decompositions_are_those_of_all_logits(
    method: Any, target: Any, contrast: Any, count: int, model: Any, positions: list[int]
) -> None:
    # without the run that a function's number is compared with
    expected = method(whole(model), model).decompose(IDS, target, contrast=contrast, verify=False)
    assert positions == [TOKENS]
    found = method(model).decompose(IDS, target, contrast=contrast)
    assert positions == [TOKENS, count]
    assert torch.allclose(found.inputs, expected.inputs, rtol=1e-9, atol=1e-12)
    assert torch.allclose(found.output, expected.output)  # the model rounds it to float32
    assert found.delta.abs().max() < 1e-5


@pytest.mark.parametrize(("target", "contrast", "count"), ASKED)
def test_so_are_contributions_to_logits(
    target: Any, contrast: Any, count: int, model: Any, positions: list[int]
) -> None:
    with without_replays(positions):
        expected, found = (
            LatimLogit(function, model).attribute(
                IDS, target, contrast=contrast, mixing="projection", verify=verify
            )
            for function, verify in ((whole(model), False), (model, True))
        )
    assert positions == [TOKENS, count]
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_several_targets_share_their_positions(model: Any, positions: list[int]) -> None:
    targets = [LAST, (3, 1), (-1, 4)]
    found = LatimFlow(model).attribute_each(IDS, targets)
    assert positions == [2]
    expected = LatimFlow(whole(model), model).attribute_each(IDS, targets)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_embeddings_masks_and_bound_forwards(model: Any, positions: list[int]) -> None:
    ids, mask = padded_batch([3, TOKENS])
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = LatimFlow(lambda x: model(x, mask).logits).attribute(ids, LAST)
    for function in (model.forward, torch.compile(model, backend="eager")):
        positions.clear()
        found = LatimFlow(function).attribute(ids, LAST, mask, internal_batch_size=1)
        assert positions == [1, 1]
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    positions.clear()
    found = LatimFlow(model).attribute(embeddings, LAST, mask)
    assert positions == [1]
    assert torch.allclose(found.sum(-1), expected, rtol=1e-9, atol=1e-12)


def by_position(module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that changes logits at the second position, wherever it stands among them."""
    logits = output if isinstance(output, Tensor) else output.logits
    logits = logits * torch.arange(1, logits.shape[1] + 1).to(logits)[:, None]
    return logits if isinstance(output, Tensor) else type(output)(logits=logits)


class OfTwo(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def with_own_forward(model: Any) -> None:
    inner = model.forward
    model.forward = lambda *args, **kwargs: by_position(model, args, inner(*args, **kwargs))


def with_subclass(model: Any) -> None:
    class Own(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, logits_to_keep: Any = 0) -> Any:
            out = super().forward(input_ids, logits_to_keep=logits_to_keep)
            return by_position(self, (), out)

    model.__class__ = Own


def with_other_head(model: Any) -> None:
    head = OfTwo(model.lm_head.in_features, model.lm_head.out_features, bias=False).double()
    head.weight = model.lm_head.weight
    model.lm_head = head


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on the head": lambda model: model.lm_head.register_forward_hook(by_position),
    "a hook on the model": lambda model: model.register_forward_hook(by_position),
    "its own forward": with_own_forward,
    "a subclass": with_subclass,
    "another head": with_other_head,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_read_other_positions_gets_all(
    change: str, model: Any, positions: list[int]
) -> None:
    CHANGES[change](model)
    expected = model(IDS)
    positions.clear()
    found = LatimFlow(model).decompose(IDS, (2, 1))
    assert positions == [TOKENS]
    logits = expected if isinstance(expected, Tensor) else expected.logits
    assert torch.allclose(found.output, logits[:, 2, 1])


WRONG: list[tuple[Any, Any, type[Exception]]] = [
    ((6, 2), None, TargetError), (None, None, TargetError), (LAST, (7, 1), TargetError),
    (LAST, "least", OptionError),
]  # fmt: skip


@pytest.mark.parametrize(("target", "contrast", "error"), WRONG)
def test_errors_are_those_of_all_logits(
    target: Any, contrast: Any, error: type[Exception], model: Any
) -> None:
    said = []
    for function in (model, whole(model)):
        with pytest.raises(error) as found:
            LatimFlow(function, model).attribute(IDS, target, contrast=contrast)
        said.append(str(found.value))
    assert said[0] == said[1]


def test_an_infinite_logit_is_told_of_by_the_users_target(model: Any) -> None:
    weight = model.lm_head.weight.detach().clone()  # that of the embeddings, too
    weight[2] = torch.inf
    model.lm_head.weight = nn.Parameter(weight)
    with pytest.raises(NonFiniteError, match=r"target=\(-1, 2\)"):
        LatimFlow(model).attribute(IDS, LAST)
