"""Gated delta rules of transformers: the operator is the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from oracles.delta_formula import formula

from captum_ssm.errors import CachedStateError, InputError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.registry import adapter_for

pytest.importorskip("transformers")

from zoo.delta import FAMILIES, Family

pytestmark = pytest.mark.slow

# for any draw; typical is 1e-6, most of it the rounding of the models' own chunked form
FLOAT32 = 1e-5


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    return Family(request.param, monkeypatch)


@pytest.mark.parametrize("where", ["middle", "everything"])
def test_padding(family: Family, where: str) -> None:
    mixer = family.mixer().double()
    hidden = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    hidden_tokens = {"middle": slice(3, 5)}
    mask[1, hidden_tokens.get(where, slice(0, 9))] = 0
    layer = hybrid.record_one(mixer, hidden, attention_mask=mask)
    hybrid.check(layer, FLOAT32)
    hybrid.check_formula(layer, formula(mixer, hidden, {"attention_mask": mask}), 1e-10)
    found = layer.linear.mask
    assert found is not None and torch.equal(found, mask.bool())
    assert not layer.operator.dense(None)[1][:, :, mask[1] == 0].any()
    assert not layer.linear.bias.any()


def test_caches_and_packed_sequences_are_refused(family: Family) -> None:
    hidden, mixer = torch.randn(1, 4, 12), family.mixer()
    (_, adapter) = adapter_for(mixer) or pytest.fail("no adapter")
    for args, kwargs in (((hidden, object()), {}), ((hidden,), {"cache_params": object()})):
        with pytest.raises(CachedStateError):
            adapter(mixer, Call(args, kwargs, hidden))
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(InputError, match=name):
            adapter(mixer, Call((hidden,), {name: torch.tensor([0, 2, 4])}, hidden))


#: Options of some families beside those of all.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES),
    *((name, {"linear_conv_kernel_dim": 1}) for name in FAMILIES),
    *((name, {"linear_conv_kernel_dim": 5, "hidden_act": "gelu"}) for name in FAMILIES),
    *(
        (name, {"linear_num_key_heads": keys, "linear_num_value_heads": values})
        for name in ("qwen3_next", "qwen3_5", "olmo_hybrid")
        for keys, values in ((1, 3), (2, 6))
    ),
    *(("olmo_hybrid", {"linear_allow_neg_eigval": negative}) for negative in (False, True)),
    ("bailing_hybrid", {"kda_safe_gate": False}),
    ("bailing_hybrid", {"kda_lower_bound": -0.4}),
    ("glm5_next", {"linear_lower_bound": None}),
    ("glm5_next", {"linear_lower_bound": -0.4}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_contract(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid.holds(Family(name, monkeypatch).mixer(**options), 12, formula)
