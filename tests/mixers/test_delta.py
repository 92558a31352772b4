"""Gated delta rules of transformers: the operator is the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import contract
from oracles import relative_error
from oracles.delta_formula import formula
from zoo.delta import FAMILIES, Family

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_between_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = Family(name, monkeypatch).mixer().double()
    hidden, mask = torch.randn(3, 9, 12).double(), torch.ones(3, 9, dtype=torch.long)
    mask[1, 3:5], mask[2] = 0, 0
    layer = contract.record_one(mixer, hidden, attention_mask=mask)
    contract.check(layer)
    wanted = formula(mixer, hidden, {"attention_mask": mask})
    assert relative_error(layer.operator.dense(None), wanted) <= 1e-10
    assert layer.linear.mask is not None and torch.equal(layer.linear.mask, mask.bool())


GROUPED = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
#: Options of all families, and of some.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"linear_conv_kernel_dim": 1}) for name in FAMILIES),
    *((name, {"linear_conv_kernel_dim": 5, "hidden_act": "gelu"}) for name in FAMILIES),
    ("qwen3_next", GROUPED),
    ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    ("olmo_hybrid", GROUPED | {"linear_allow_neg_eigval": True}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    ("bailing_hybrid", {"kda_safe_gate": False}),
    ("bailing_hybrid", {"kda_lower_bound": -0.4}),
    ("glm5_next", {"linear_lower_bound": None}),
    ("glm5_next", {"linear_lower_bound": -0.4}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_contract(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    contract.holds(Family(name, monkeypatch).mixer(**options), 12, formula)
