"""The options of explanation methods, with the values that :func:`.check_method` tries."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from ..operators import discard_smallest
from .small import CHANNELS, TOKENS, WIDTH


class ByKind(NamedTuple):
    """One value of an option per kind of inputs; a list or tensor has one entry per example."""

    ids: Any
    embeddings: Any
    images: Any


class Values(NamedTuple):
    """The values to try for an option.

    Attributes:
        differ: accepted values whose results differ from each other and from the default's result;
            a :class:`ByKind` for a value that depends on the kind of inputs.
        same: accepted values that give the same result as the default.
        refused: values that must raise an error that names the option.
    """

    differ: Collection[Any] = ()
    same: Collection[Any] = ()
    refused: Collection[Any] = ()


_NAN = float("nan")
_NAMES = ("x", "", 3, 1.5, True, ["mean"], {"a": 1})
_FLAG = ("yes", "", 1, 0, 1.0, None, [True], torch.tensor([True, False]))
_NUMBER = ("a", 1.5, 1.0, _NAN, True, [1], torch.tensor(1.5), np.float64(1))
_NO = (False, np.False_)
#: Targets of both examples, and other targets to contrast with them.
TARGET = ByKind((-1, 3), [(-1, 3), (-2, 4)], [1, 3])
OTHER = ByKind((-2, 5), [(-1, 5), (-3, 6)], torch.tensor([4, 0]))
#: One baseline scalar for each example, for all its embeddings or pixels.
_EACH = torch.tensor([1.0, -0.5])
BASELINES = ByKind(_EACH.view(2, 1, 1), _EACH.view(2, 1, 1), _EACH.view(2, 1, 1, 1))
#: The values to try, by the name of the argument of ``attribute``.
OPTIONS: dict[str, Values] = {
    "inputs": Values((), (), (
        None, "a", 3, 1.5, [], [1, 2], np.ones((2, 5)), {}, (), torch.ones(2, 5).bool(),
        torch.tensor(3), torch.ones(7).long(), torch.ones(2, 0).long(), torch.ones(0, 5).long(),
        torch.ones(2, 0, WIDTH), (torch.ones(2, 5).long(), torch.ones(2, 5).long()),
    )),
    "target": Values((), (), (
        "a", 1.5, 3, True, {"a": 1}, [], ["a"], [(-1, 3)] * 3, (0, 99), (0, True), [None], (-99, 0),
    )),
    "additional_forward_args": Values((), (), (torch.ones(3, TOKENS),)),
    "per_token": Values((), _NO, _FLAG),
    "return_convergence_delta": Values((), _NO, _FLAG),
    "show_progress": Values((), (*_NO, True), _FLAG),
    "internal_batch_size": Values((), (None, 100, np.int64(100), torch.tensor(100)),
                                  (*_NUMBER, 0, -2)),
    "memory_budget": Values((), (None, 10**9, "512MiB", "1 GB"),
                            ("a", "", 1.5, True, 0, -1, [1], _NAN)),
    "verify": Values((), (True, False, 1e-2, np.False_, np.float32(1e-2), torch.tensor(1e-2)), (
        "x", [True], {}, _NAN, float("inf"), 0, 1, -1e-3, torch.ones(2),
    )),
    "query": Values(("mean", -2, [-2, -2, -1], torch.tensor([-2, -3])), (
        None, "last", -1, np.int64(-1), torch.tensor(-1), (-1,), [np.int32(-1)],
    ), (
        "first", "", 1.5, True, [], ["a"], [1.5], [True], [[0], [1, 2]], {"a": 1}, TOKENS,
        -TOKENS - 1, torch.tensor([0.5, 1]), torch.tensor([0, 1, 2]), torch.ones(2, 0).long(),
    )),
    "components": Values(("s6", "exact", "unified-conv", {"scan", "gate"}), ("unified",), (
        *_NAMES, None, [["scan"]], [], {"gates"}, "s6-scan", torch.tensor(1), ["scan", 1],
    )),
    "reduce": Values(("max", "min", "product", discard_smallest(0.4)),
                     ("mean", lambda x: x.mean(-1)),
                     ("x", "", 3, True, ["mean"], None, "heads", lambda x: x, lambda x: x.sum())),
    "heads": Values(([0, -1], torch.tensor([2])), (None, range(CHANNELS)), (
        "a", 1, 1.5, True, [1.5], [True], [None], [[0]], [], [99], [0, 0], [0, -CHANNELS],
    )),
    "start_layer": Values((1,), (0, np.int32(0), torch.tensor(0)), (*_NUMBER, None, -1, 2)),
    "recipe": Values(("published_code",), ("paper",), (*_NAMES, None)),
    "normalize_rows": Values((True,), _NO, _FLAG),
    "absolute": Values((True,), _NO, _FLAG),
    "discard_ratio": Values((np.float32(0.3),), (0, 0.0), ("a", None, True, _NAN, 1, -0.1)),
    "clamp": Values(("abs", "none"), ("relu",), (*_NAMES, None)),
    "aggregate": Values(("mean",), ("rollout",), (*_NAMES, None)),
    "mixing": Values(("projection",), ("alti",), (*_NAMES, None)),
    "contrast": Values(("mean", "others", "all", "runner-up", OTHER), (None,), (
        "nonsense", "", 1.5, 99, True, {"a": 1}, [], ["a"], [(0, 1)] * 3, (0, 99),
    )),
    "rule": Values(("frozen", "half", "centered", "balanced"), (None,), _NAMES),
    "baselines": Values(("mean", 0.5, BASELINES), (None,), (
        "a", "", True, _NAN, float("inf"), [[1], [2, 3]], {"a": 1}, torch.ones(7, 3),
    )),
    "zero_bias": Values((True,), _NO, _FLAG),
}  # fmt: skip
