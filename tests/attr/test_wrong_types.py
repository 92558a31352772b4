"""Every option of every method, with values of wrong types and with each that is documented.

The tables are by option; which method has which is read from the signatures, so that an option
without a row fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.sessions import sampled
from torch import nn
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo.language import word_tokenizer
from zoo.small import WIDTH, mamba_lm, mixers_of, token_ids

import captum_ssm
from captum_ssm import (
    CaptumSSMError,
    ImplicitAttention,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    SSMLLMAttribution,
    compare,
    discard_smallest,
)
from captum_ssm.attr.engine.method import SSMAttribution

BATCH, TOKENS, LAYERS, HEADS = 2, 5, 2, 20
NAN, INF = float("nan"), float("inf")

METHODS = [
    found
    for name in captum_ssm.attr.__all__
    if isinstance(found := getattr(captum_ssm.attr, name), type)
    and issubclass(found, SSMAttribution)
]

# --- the tables ----------------------------------------------------------------------------------

NO_FLAGS = ["yes", "", 1, 0, 1.0, None, [True], torch.tensor([True, False])]
FLAGS = [True, False, np.True_, np.False_]
NO_INTEGERS = ["a", 1.5, 1.0, NAN, True, None, [1], torch.tensor(1.5), np.float64(1)]
NO_LISTS = ["a", 1, 1.5, True, ["a"], [1.5], [True], [None], [[0]], torch.tensor([0.5])]
LISTS = [[0], [1, 0], (1,), range(2), np.array([0, 1]), torch.tensor([1]), [np.int64(1)], [-1]]
NO_NAMES = ["x", "", 3, 1.5, True, ["mean"], {"a": 1}]

#: By option: values that are refused, the others accepted.
OPTIONS: dict[str, tuple[list[Any], list[Any]]] = {
    **dict.fromkeys(
        (
            "per_token",
            "show_progress",
            "normalize_rows",
            "absolute",
            "residual",
            "roles",
            "features",
            "zero_bias",
            "return_convergence_delta",
            "simplified",
        ),
        (NO_FLAGS, FLAGS),
    ),
    "internal_batch_size": (
        [*(x for x in NO_INTEGERS if x is not None), 0, -2],
        [None, 1, 2, 100, np.int64(1), torch.tensor(1)],
    ),
    "start_layer": ([*NO_INTEGERS, -1, LAYERS], [0, 1, np.int32(1), torch.tensor(1)]),
    "verify": (
        ["x", [True], {}, NAN, INF, 0, 1, -1e-3, torch.tensor([1e-2, 1e-2]), np.nan],
        [True, False, 1e-2, np.False_, np.True_, np.float32(1e-2), torch.tensor(1e-2)],
    ),
    "heads": ([*NO_LISTS, [], [HEADS], [0, 0, 1], [0, -HEADS]], [None, *LISTS]),
    "channels": ([*NO_LISTS, None, [], [HEADS]], LISTS),
    "layers": ([*NO_LISTS, [LAYERS]], [None, *LISTS]),
    "positions": ([*NO_LISTS, [], [TOKENS], torch.ones(1, 1, 1).long()], [None, *LISTS]),
    "discard_ratio": (
        ["a", None, True, NAN, INF, 1, -0.1, [0.5]],
        [0, 0.0, 0.5, np.float32(0.5), torch.tensor(0.5)],
    ),
    "reduce": (
        [
            *(x for x in NO_NAMES if x != "mean"),
            lambda x: x,
            lambda x: x.sum(),
            lambda x: 3,
            lambda x: x.argmax(-1),
            lambda x: x @ torch.ones(3),
            lambda: 0,
        ],
        ["mean", "max", "min", "product", discard_smallest(0.4), lambda x: x.mean(-1)],
    ),
    "components": (
        [*NO_NAMES, None, [["scan"]], [], {"gates"}, "s6-scan", torch.tensor(1), ["scan", 1]],
        ["s6", "unified", "exact", "unified-conv", {"scan"}, ["scan", "gate"], ("scan", "scan")],
    ),
    "recipe": ([*NO_NAMES, None], ["paper", "published_code"]),
    "clamp": ([*NO_NAMES, None], ["relu", "abs", "none"]),
    "aggregate": ([*(x for x in NO_NAMES), None], ["rollout", "mean"]),
    "mixing": ([*NO_NAMES, None], ["alti", "projection"]),
    "baselines": (
        [
            "a",
            "",
            True,
            NAN,
            INF,
            [[1], [2, 3]],
            {"a": 1},
            torch.ones(7, 3),
            torch.ones(3, 2).long(),
        ],
        [None, "mean", 0, 0.5, np.float32(0.1), torch.zeros(1), torch.tensor(2)],
    ),
    "rule": (NO_NAMES, [None, "frozen", "half", "equal", "centred"]),
    "form": ([*NO_NAMES, None], ["lrp", "gradient"]),
    "activation": (
        [*NO_NAMES, None],
        ["linearized", "silu", "taylor1", "taylor2", "relu", "identity"],
    ),
    "p": (["2", 0, 3, 1.5, True, None, [1]], [1, 2, np.int64(1), torch.tensor(2)]),
    "query": (
        [
            "first",
            "",
            1.5,
            True,
            [],
            ["a"],
            [1.5],
            [True],
            [[0], [1, 2]],
            [[0], [1], [2]],
            {"a": 1},
            TOKENS,
            torch.tensor([0.5, 1]),
            torch.tensor([0, 1, 2]),
            torch.ones(2, 1, 1).long(),
            torch.ones(2, 0).long(),
            np.ones(2),
        ],
        [
            None,
            "last",
            "mean",
            0,
            -1,
            np.int64(2),
            torch.tensor(3),
            torch.tensor([1, 2]),
            torch.tensor([1, 2], dtype=torch.int32),
            torch.tensor([[0, 1], [1, 2]]),
            [1, 2],
            (0,),
            range(3),
            [np.int32(1), 2],
        ],
    ),
    "contrast": (
        ["nonsense", "", 1.5, 99, True, {"a": 1}, [], ["a"], [(0, 1)] * 3, (0, 99)],
        [None, "mean", "others", "all", 3, (-1, 5), [(0, 1), (1, 2)]],
    ),
    "memory_budget": (
        ["a", "", 1.5, True, 0, -1, [1], NAN],
        [None, 10**9, "512MiB", "1 GB"],
    ),
    "target": (
        ["a", 1.5, 3, True, {"a": 1}, [], ["a"], [(-1, 3)] * 3, (0, 99), (0, True), [None]],
        [(-1, 3), [(0, 1), (1, 2)], torch.tensor([[0, 1], [1, 2]]), (np.int64(1), 2)],
    ),
    "targets": (
        ["a", 3, 1.5, None, [], {"a": 1}],
        [[(-1, 3)], [(-1, 3), (0, 1)], ((-1, 3),)],
    ),
    "additional_forward_args": ([torch.ones(3, TOKENS)], [None, torch.ones(BATCH, TOKENS)]),
    "inputs": (
        [None, "a", 3, 1.5, [], [1, 2], np.ones((2, 5)), {}, (), torch.ones(2, 5).bool()],
        [torch.ones(BATCH, TOKENS).long(), torch.ones(BATCH, TOKENS).int()],
    ),
    "attributions": ([None, "a", [1, 2], torch.ones(3)], [torch.ones(BATCH, TOKENS)]),
}

#: Values that some calls alone take, or refuse.
ALSO_REFUSED = {
    **{(call, "reduce"): [None, "heads"] for call in ("attribute", "attribute_each")},
    ("states", "components"): ["exact", "unified-scan"],
}
ALSO_ACCEPTED = {
    ("matrices", "reduce"): [None, "heads"],
    ("states", "components"): ["s6", "unified"],
    ("LatimFlow", "verify"): [None],
    ("MambaLRP", "verify"): [None],
}
#: What only some calls can take of a row, as it does not fit what else is passed.
NOT_TAKEN = {("states", "components"): ["exact"]}

PLAIN = ("self", "options")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in PLAIN]


#: The methods' calls with options, by name; those with a property's name are none.
CALLS = [
    (method, name)
    for method in METHODS
    for name in (
        "attribute",
        "attribute_each",
        "matrices",
        "states",
        "factors",
        "maps",
        "decomposition_error",
        "decompose",
        "decompose_each",
        "compute_convergence_delta",
    )
    if hasattr(method, name) and "args" not in _parameters(getattr(method, name))
]
CASES = [
    pytest.param(method, call, option, id=f"{method.__name__}.{call}-{option}")
    for method, call in CALLS
    for option in _parameters(getattr(method, call))
]


def _model() -> Any:
    return mamba_lm(num_hidden_layers=LAYERS)


def _called(model: nn.Module, method: Any, call: str, **given: Any) -> Any:
    """The method's call with what it needs, and with an option."""
    needed = {
        "inputs": token_ids(BATCH, TOKENS),
        "target": (-1, 3),
        "targets": [(-1, 3)],
        "channels": [0],
        "attributions": torch.ones(BATCH, TOKENS),
    }
    names = _parameters(getattr(method, call))
    arguments = {name: value for name, value in needed.items() if name in names} | given
    return getattr(method(model), call)(**arguments)


def _refused(call: Callable[[], Any], option: str) -> None:
    with pytest.raises(CaptumSSMError) as caught:
        call()
    assert option.rstrip("s") in str(caught.value), str(caught.value)
    assert str(caught.value).rstrip().endswith((".", "?", ")"))


@pytest.mark.parametrize(("method", "call", "option"), sampled(CASES, 12))
def test_options(method, call, option):
    """Each wrong value is refused by an error that names the option, each other one accepted."""
    model = _model()
    refused, accepted = OPTIONS[option]
    keys = {(call, option), (method.__name__, option)}
    also_refused, also_accepted, not_taken = (
        [x for key in keys for x in table.get(key, [])]
        for table in (ALSO_REFUSED, ALSO_ACCEPTED, NOT_TAKEN)
    )
    for value in [*refused, *also_refused]:
        _refused(lambda value=value: _called(model, method, call, **{option: value}), option)
    for value in [*accepted, *also_accepted]:
        if not any(value is x for x in not_taken):
            _called(model, method, call, **{option: value})


@pytest.mark.parametrize("method", METHODS)
def test_constructors(method):
    model = _model()
    mixers = mixers_of(model)
    names = ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    wrong = {
        "model": ["mamba", 3, type(model), [model], True],
        "layers": [
            "x",
            3,
            1.5,
            True,
            [],
            [3],
            ["x"],
            [None],
            names[:1] * 2,
            [names[1], mixers[1]],
            mixers_of(_model()),
        ],
    }
    right = {"model": [None, model], "layers": [None, names, mixers, tuple(names), set(names)]}
    for option in _parameters(method.__init__)[1:]:
        refused = wrong[option] if option in wrong else OPTIONS[option][0]
        accepted = right[option] if option in right else OPTIONS[option][1]
        for value in refused:
            _refused(lambda value=value, option=option: method(model, **{option: value}), option)
        for value in accepted:
            made = method(model, **{option: value})
            mean = {"aggregate": "mean"} if option == "residual" else {}
            made.attribute(token_ids(BATCH, TOKENS), target=(-1, 3), **mean)


@pytest.mark.parametrize("value", [None, "a", 3, lambda x: x, nn.Linear, [1], torch.ones(2)])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_forward_func(method, value):
    with pytest.raises(CaptumSSMError, match="forward_func"):
        method(value)


COMPARED: dict[str, tuple[list[Any], list[Any]]] = {
    "methods": (
        [None, 3, "latim", nn.Linear, [], {}, ["latim"], [3], [None], [nn.Linear], [mamba_lm]],
        [["LatimNorm", LatimALTI], (LatimNorm,), {"mine": "LatimNorm"}, "LatimNorm", LatimNorm],
    ),
    "options": (
        ["x", 3, [], {"LatimNorm": 3}, {"LATIM": {}}, {"LatimNorm": "x"}],
        [None, {}, {"LatimNorm": {"start_layer": 1}}],
    ),
    "layers": (["x", 3, [], [3]], [None, ["backbone.layers.0.mixer"]]),
    "model": (["mamba", 3], [None]),
    **{
        name: OPTIONS[name]
        for name in ("inputs", "target", "additional_forward_args", "internal_batch_size")
    },
    "per_token": OPTIONS["per_token"],
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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gen_args": 3}, "gen_args"),
        ({"gen_args": "x"}, "gen_args"),
        ({"skip_tokens": "x"}, "skip_tokens"),
        ({"skip_tokens": [[1]]}, "skip_tokens"),
        ({"skip_tokens": 3}, "skip_tokens"),
        ({"target": 1.5}, "target"),
        ({"target": {"a": 1}}, "target"),
        ({"target": []}, "target"),
        ({"target": "lamp", "zero_bias": "x"}, "zero_bias"),
        ({"target": "lamp", "internal_batch_size": 1.5}, "internal_batch_size"),
        ({"target": "lamp", "per_token": True}, "per_token"),
    ],
)
def test_texts(options, named):
    explain = SSMLLMAttribution(LatimFlow(_model()), word_tokenizer())
    with pytest.raises(CaptumSSMError, match=f"(?i){named}"):
        explain.attribute("anna owns the", **options)


@pytest.mark.parametrize("ratio", ["a", None, True, NAN, [0.5]])
def test_discard_smallest(ratio):
    with pytest.raises(CaptumSSMError, match="ratio"):
        discard_smallest(ratio)


def test_numbers_of_numpy_and_torch_say_the_same():
    """What is accepted in another form is not merely let through."""
    model, ids = _model(), token_ids(BATCH, TOKENS)
    found = MambaAttribution(model).attribute
    expected = found(ids, (-1, 3), heads=[1, 4], start_layer=1, query=2)
    for kind in (np.int64, torch.tensor):
        heads = [kind(1), kind(4)]
        again = found(ids, (-1, 3), heads=heads, start_layer=kind(1), query=kind(2))
        assert torch.equal(again, expected)
    assert torch.equal(
        found(ids, (-1, 3), heads=torch.tensor([1, 4]), start_layer=1, query=2), expected
    )
    for flag in (np.False_, np.True_):
        assert torch.equal(
            found(ids, (-1, 3), normalize_rows=flag), found(ids, (-1, 3), normalize_rows=bool(flag))
        )


class Louder(MambaMixer):
    """What its operator is not."""

    def forward(self, *args, **kwargs):
        return 1.01 * super().forward(*args, **kwargs)


def test_a_tolerance_of_numpy_is_a_tolerance():
    """np.False_ asks for no check, and a tolerance in any form holds."""
    model, ids = _model(), token_ids(BATCH, TOKENS)
    for mixer in mixers_of(model):
        mixer.__class__ = Louder
    found = ImplicitAttention(model).matrices
    for value in (False, np.False_, 0.02, np.float64(0.02), torch.tensor(0.02)):
        found(ids, verify=value)
    for value in (True, np.True_, 0.005, np.float32(0.005), torch.tensor(0.005)):
        with pytest.raises(CaptumSSMError, match="error of"):
            found(ids, verify=value)


def test_a_function_runs_out_of_memory_by_itself():
    """Such an error is no fault of the function: parts of the work are then made smaller."""
    model, ids = _model(), token_ids(BATCH, TOKENS)

    def hungry(x):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 B")

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        ImplicitAttention(model).matrices(ids, reduce=hungry)


def test_embeddings_are_inputs_as_ids_are():
    model, embeddings = _model(), torch.randn(BATCH, TOKENS, WIDTH)
    for method in (LatimLogit, LatimFlow):
        for value in FLAGS:
            found = method(model).attribute(embeddings, (-1, 3), per_token=value)
            assert found.dim() == (2 if value else 3)
