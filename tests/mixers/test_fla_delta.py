"""Delta rules of flash-linear-attention, their kin and MesaNet: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fla_checks import EPS, holds
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 24
OF_DELTA = {"num_heads": 4, "norm_eps": EPS}
OF_GATED = {"num_heads": 3, "head_dim": 6, "norm_eps": EPS}
OF_PRODUCT = {"num_heads": 2, "head_dim": 5, "expand_v": 2, "norm_eps": EPS}
OF_MESA = {"num_heads": 3, "head_dim": 5, "norm_eps": EPS}
OF_RWKV7 = {
    "norm_eps": EPS, "num_hidden_layers": 2, "decay_low_rank_dim": 4, "gate_low_rank_dim": 5,
    "a_low_rank_dim": 3, "v_low_rank_dim": 2,
}  # fmt: skip
#: Layers, with the options of one case each.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("DeltaNet", OF_DELTA | {"conv_bias": True, "use_gate": True, "conv_size": 3, "expand_v": 2.0}),
    ("DeltaNet", OF_DELTA | {"qk_activation": "elu", "qk_norm": "sum", "expand_k": 2.0}),
    ("DeltaNet", OF_DELTA | {"qk_activation": "relu", "use_beta": False, "num_heads": 2}),
    ("DeltaNet", OF_DELTA | {"use_short_conv": False, "allow_neg_eigval": True}),
    ("DeltaNet", OF_DELTA | {"use_short_conv": False, "qk_activation": "identity"}),
    ("GatedDeltaNet",
     OF_GATED | {"num_v_heads": 6, "conv_bias": True, "output_gate_activation": "sigmoid"}),
    ("GatedDeltaNet", OF_GATED | {"use_gate": False, "conv_size": 3, "num_heads": 1}),
    ("GatedDeltaNet", OF_GATED | {"use_short_conv": False, "allow_neg_eigval": True}),
    ("KimiDeltaAttention", OF_GATED | {"safe_gate": True, "lower_bound": -3.0, "conv_bias": True}),
    ("KimiDeltaAttention", OF_GATED | {"num_v_heads": 6, "expand_v": 0.5}),
    ("KimiDeltaAttention", OF_GATED | {"use_short_conv": False, "allow_neg_eigval": True}),
    ("GatedDeltaProduct", OF_PRODUCT),
    ("GatedDeltaProduct",
     OF_PRODUCT | {"num_householder": 3, "num_v_heads": 4, "conv_bias": True, "head_dim": 4}),
    ("GatedDeltaProduct",
     OF_PRODUCT | {"num_householder": 1, "use_output_gate": False, "use_forget_gate": False}),
    ("GatedDeltaProduct", OF_PRODUCT | {"use_short_conv": False, "allow_neg_eigval": False}),
    ("Comba", OF_PRODUCT | {"num_v_heads": 4, "conv_bias": True, "use_output_gate": False}),
    ("Comba", OF_PRODUCT | {"use_output_correction": False, "use_inner_decay": False}),
    ("Comba", OF_PRODUCT | {"use_short_conv": False}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": 8, "fuse_norm": False}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": None, "num_heads": 2, "value_dim": 48}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": WIDTH}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": 8, "layer_idx": 1}),
    ("MesaNet", OF_MESA | {"use_output_gate": True, "conv_bias": True, "conv_size": 3}),
    ("MesaNet", OF_MESA | {"max_cg_step_training": 2, "lambda_lower_bound": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_contract(fla: FLA, kind: str, options: dict[str, Any]) -> None:
    layer, later = fla.layer(kind, hidden_size=WIDTH, **options), options.get("layer_idx")
    # a later layer takes from the first one's values, here the input itself
    taken = {"v_first": lambda hidden: hidden} if later else {}
    holds(layer, WIDTH, compacted=not kind.startswith("RWKV"), **taken)
