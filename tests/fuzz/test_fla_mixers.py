"""Random configurations of flash-linear-attention's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuzz.fuzzing import fuzz
from fuzz.mixer_checks import Inputs, Made, check, inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zoo import fla_cpu

#: Added to mean squares, so that norms of few features do not blow rounding errors up.
EPS = 0.05
BOOL = st.booleans()
_SIZES = {"heads": st.sampled_from([1, 2, 4]), "per_head": st.sampled_from([4, 8])}
_CONV = {
    "use_short_conv": BOOL,
    "conv_size": st.integers(1, 4),
    "conv_bias": BOOL,
}
_EXPANDED = {
    "expand_k": st.sampled_from([0.5, 1.0, 2.0]),
    "expand_v": st.sampled_from([1.0, 2.0]),
}
_GATED = {
    "use_output_gate": BOOL,
    "gate_fn": st.sampled_from(["swish", "sigmoid", "gelu"]),
    "elementwise_affine": BOOL,
    "fuse_norm": BOOL,
    "feature_map": st.sampled_from([None, "relu"]),
}

_LAYERS: dict[str, dict[str, Any]] = {
    "MultiScaleRetention": {**_SIZES, **_CONV, **_EXPANDED, **_GATED, "shared": BOOL},
    "GatedLinearAttention": {
        **_SIZES,
        **_CONV,
        **_EXPANDED,
        **_GATED,
        "shared": BOOL,
        "gate_low_rank_dim": st.integers(1, 4),
        "gate_logit_normalizer": st.sampled_from([1, 4, 16]),
        "clamp_min": st.sampled_from([None, -0.05, -2.0]),
    },
    "HGRNAttention": {
        **_SIZES,
        **_CONV,
        "expand_ratio": st.integers(1, 2),
        "elementwise_affine": BOOL,
        "bounded": BOOL,
    },
    "HGRN2Attention": {**_SIZES, **_CONV, "elementwise_affine": BOOL, "bounded": BOOL},
    "RWKV6Attention": {
        **_SIZES,
        **_EXPANDED,
        "proj_low_rank_dim": st.integers(1, 4),
        "gate_low_rank_dim": st.integers(1, 4),
        "gate_fn": st.sampled_from(["swish", "sigmoid"]),
        "elementwise_affine": BOOL,
    },
    "DeltaNet": {
        **_SIZES,
        **_CONV,
        **_EXPANDED,
        "use_beta": BOOL,
        "use_gate": BOOL,
        "allow_neg_eigval": BOOL,
        "qk_activation": st.sampled_from(["silu", "relu", "elu", "identity"]),
        "qk_norm": st.sampled_from(["l2", "sum"]),
    },
    "GatedDeltaNet": {
        "heads": st.integers(1, 3),
        "per_head": st.sampled_from([4, 8]),
        "each": st.integers(1, 2),
        **_CONV,
        "expand_v": st.sampled_from([1, 2]),
        "use_gate": BOOL,
        "allow_neg_eigval": BOOL,
        "output_gate_activation": st.sampled_from(["swish", "sigmoid"]),
    },
}


def make(fla: fla_cpu.FLA, name: str, options: dict[str, Any]) -> Made:
    """A layer with random parameters."""
    options = dict(options)
    heads, per_head = options.pop("heads"), options.pop("per_head")
    width = heads * per_head
    options |= {"hidden_size": width, "norm_eps": EPS}
    bounded = options.pop("bounded", False)
    if name == "GatedDeltaNet":
        each = options.pop("each")
        options |= {"num_heads": heads, "head_dim": per_head, "num_v_heads": heads * each}
    elif name == "HGRN2Attention":
        # the layer's norm is not told this eps
        options |= {"num_heads": heads, "expand_ratio": None, "norm_eps": 10.0}
    elif name != "HGRNAttention":
        options |= {"num_heads": heads}
    if options.pop("shared", False) and heads > 1:
        options["num_kv_heads"] = heads // 2
    layer = fla.layer(name, **options)
    layer.layer_idx = 1  # the first layer has no lower bound

    def call(_: Tensor, mask: Tensor | None) -> dict[str, Any]:
        given: dict[str, Any] = {"attention_mask": mask}
        if bounded:
            size = layer.forget_dim if name == "HGRN2Attention" else layer.input_dim
            given["lower_bound"] = torch.linspace(0.01, 0.9, size)
        return given

    return Made(
        layer,
        width,
        call,
        sides=("left", "right"),
        mixes_channels=name == "RWKV6Attention",
        double=False,
    )


@pytest.fixture(scope="module")
def layers() -> Iterator[fla_cpu.FLA]:
    """fla's layers on the CPU, for all cases."""
    with pytest.MonkeyPatch.context() as patch:
        yield fla_cpu.install(patch)


@pytest.mark.parametrize("name", _LAYERS)
@fuzz(quick=3, long=50)
@given(data=st.data(), drawn=inputs())
def test_layers(layers: Any, name: str, data: st.DataObject, drawn: Inputs) -> None:
    options = data.draw(st.fixed_dictionaries(_LAYERS[name]), label="options")
    torch.manual_seed(drawn.seed)
    check(make(layers, name, options), drawn)
