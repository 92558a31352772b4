"""Options of all calls beside ``attribute``, with values of wrong types and with good ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.every_method import METHODS
from torch import nn
from zoo.small import mamba_lm, mixers_of, token_ids

from captum_ssm import CaptumSSMError, ImplicitAttention, LatimALTI, LatimNorm, compare
from captum_ssm.models import load_bundled
from captum_ssm.testing.options import OPTIONS, ByKind

pytestmark = pytest.mark.slow

#: TOKENS and LAYERS are those that the values of the contract are for.
BATCH, TOKENS, LAYERS, HEADS = 2, 7, 2, 20

_NO_LISTS = ["a", 1, 1.5, True, ["a"], [1.5], [True], [None], [[0]], torch.tensor([0.5])]
_LISTS = [[0], [1, 0], (1,), range(2), np.array([0, 1]), torch.tensor([1]), [np.int64(1)], [-1]]
_NO_NAMES = ["x", "", 3, 1.5, True, ["mean"], {"a": 1}, None]
_FLAG = OPTIONS["zero_bias"]

#: By option: values that are refused, the others accepted; the contract has those of ``attribute``.
MORE: dict[str, tuple[list[Any], list[Any]]] = {
    **dict.fromkeys(
        ("residual", "roles", "features", "simplified"), ([*_FLAG.refused], [True, *_FLAG.same])
    ),
    "recompute": ([x for x in _FLAG.refused if x is not None], [None, True, *_FLAG.same]),
    "chunk_tokens": (["a", 0, 2, 1.5, True, [8]], [None, 8, np.int64(8)]),
    "heads": ([*_NO_LISTS, [], [HEADS], [0, 0, 1], [0, -HEADS]], [None, *_LISTS]),
    "channels": ([*_NO_LISTS, None, [], [HEADS]], _LISTS),
    "layers": ([*_NO_LISTS, [LAYERS]], [None, *_LISTS]),
    "positions": ([*_NO_LISTS, [], [TOKENS], torch.ones(1, 1, 1).long()], [None, *_LISTS]),
    "form": (_NO_NAMES, ["lrp", "gradient"]),
    "activation": (_NO_NAMES, ["linearized", "silu", "taylor1", "taylor2", "relu", "identity"]),
    "p": (["2", 0, 3, 1.5, True, None, [1]], [1, 2, np.int64(1), torch.tensor(2)]),
    "targets": (["a", 3, 1.5, None, [], {"a": 1}], [[(-1, 3)], [(-1, 3), (0, 1)], ((-1, 3),)]),
    "attributions": ([None, "a", [1, 2], torch.ones(3)], [torch.ones(BATCH, TOKENS)]),
    # which keep several matrices of a layer
    "reduce": (["x", "", 3, True, lambda x: x.sum()], ["mean", "max", None, "heads"]),
    "components": (["x", 3, [], {"gates"}, None], ["s6", "unified", "unified-conv"]),
}


def values_of(option: str) -> tuple[list[Any], list[Any]]:
    if option in MORE:
        return MORE[option]
    values = OPTIONS[option]  # of which the contract tries every one
    differ = [value.ids if isinstance(value, ByKind) else value for value in values.differ]
    return [*values.refused][:2], [*differ, *values.same][:2]


PLAIN = ("self", "options")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in PLAIN]


#: The methods' calls with options, by name; those with a property's name are none.
CALLS = [
    (method, name)
    for method in METHODS
    for name in (
        "attribute_each", "matrices", "states", "factors", "maps", "decomposition_error",
        "decompose", "decompose_each", "compute_convergence_delta",
    )
    if hasattr(method, name) and "args" not in _parameters(getattr(method, name))
]  # fmt: skip


def _model() -> Any:
    return mamba_lm(num_hidden_layers=LAYERS)


def _called(model: nn.Module, method: Any, call: str, **given: Any) -> Any:
    """The method's call with what it needs, and with an option."""
    needed = {
        "inputs": token_ids(BATCH, TOKENS), "target": (-1, 3), "targets": [(-1, 3)],
        "channels": [0], "attributions": torch.ones(BATCH, TOKENS),
    }  # fmt: skip
    names = _parameters(getattr(method, call))
    arguments = {name: value for name, value in needed.items() if name in names} | given
    return getattr(method(model), call)(**arguments)


def _refused(call: Callable[[], Any], option: str) -> None:
    with pytest.raises(CaptumSSMError) as caught:
        call()
    assert option.rstrip("s") in str(caught.value), str(caught.value)
    assert str(caught.value).rstrip().endswith((".", "?", ")"))


@pytest.mark.parametrize(("method", "call"), CALLS)
def test_options(method, call):
    model = _model()
    for option in _parameters(getattr(method, call)):
        refused, accepted = values_of(option)
        for value in refused:
            _refused(
                lambda value=value, option=option: _called(model, method, call, **{option: value}),
                option,
            )
        drops = option == "zero_bias" and method.__name__ == "LatimFlow"  # by its rule refused
        rule = {"rule": "frozen"} if drops else {}
        for value in accepted:
            _called(model, method, call, **{option: value}, **rule)


@pytest.mark.parametrize("method", METHODS)
def test_constructors(method):
    model = _model()
    mixers = mixers_of(model)
    names = ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    no_layers = ["x", 3, 1.5, True, [], [3], ["x"], [None], names[:1] * 2, [names[1], mixers[1]]]
    wrong = {
        "model": ["mamba", 3, type(model), [model], True],
        "layers": [*no_layers, mixers_of(_model())],
    }
    right = {"model": [None, model], "layers": [None, names, mixers, tuple(names), set(names)]}
    for option in _parameters(method.__init__)[1:]:
        refused = wrong[option] if option in wrong else values_of(option)[0]
        accepted = right[option] if option in right else values_of(option)[1]
        for value in refused:
            _refused(lambda value=value, option=option: method(model, **{option: value}), option)
        for value in accepted:
            made = method(model, **{option: value})
            mean = {"aggregate": "mean"} if option == "residual" else {}
            made.attribute(token_ids(BATCH, TOKENS), target=(-1, 3), **mean)


WORDS = load_bundled()[1]
COMPARED: dict[str, tuple[list[Any], list[Any]]] = {
    "methods": (
        [3, "latim", WORDS, nn.Linear, [], {}, ["latim"], [3], [None], [nn.Linear], [mamba_lm]],
        [
            None,
            ["LatimNorm", LatimALTI],
            (LatimNorm,),
            {"mine": "LatimNorm"},
            "LatimNorm",
            LatimNorm,
        ],
    ),
    "options": (
        ["x", 3, [], {"LatimNorm": 3}, {"LATIM": {}}, {"LatimNorm": "x"}],
        [None, {}, {"LatimNorm": {"start_layer": 1}}],
    ),
    "layers": (["x", 3, [], [3]], [None, ["backbone.layers.0.mixer"]]),
    "model": (["mamba", 3], [None]),
    "tokenizer": (["mamba", 3], [None, WORDS]),
    "show_progress": values_of("show_progress"),
    **{
        name: values_of(name)
        for name in ("inputs", "target", "additional_forward_args", "internal_batch_size")
    },
    "per_token": values_of("per_token"),
}


@pytest.mark.parametrize("option", _parameters(compare)[1:])
def test_compare(option):
    model = _model()
    needed = {"methods": [LatimNorm], "inputs": token_ids(BATCH, TOKENS), "target": (-1, 3)}
    refused, accepted = COMPARED[option]
    for value in refused:
        _refused(lambda value=value: compare(model, **(needed | {option: value})), option)
    for value in accepted:
        compare(model, **(needed | {option: value}))


def test_a_function_runs_out_of_memory_by_itself():
    """Such an error is no fault of the function: parts of the work are then made smaller."""
    model, ids = _model(), token_ids(BATCH, TOKENS)

    def hungry(x):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 B")

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        ImplicitAttention(model).matrices(ids, reduce=hungry)
