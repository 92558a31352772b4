"""Random configurations of vision mixers, which read the tokens in more than one direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz.fuzzing import fuzz
from fuzz.mixer_checks import Inputs, Made, check, inputs
from hypothesis import given
from hypothesis import strategies as st
from oracles import vim
from torch import nn
from zoo import timm_cpu
from zoo.mamba import randomise

from captum_ssm.models.vim import VimMixer

BOOL, FEW = st.booleans(), st.integers(1, 4)
_VIM = {
    "d_model": st.integers(1, 8),
    "d_state": FEW,
    "d_conv": st.integers(1, 5),
    "d_inner": st.integers(1, 12),
    "dt_rank": FEW,
    "bias": BOOL,
    "conv_bias": BOOL,
    "bimamba_type": st.sampled_from(["none", "v1", "v2"]),
    "if_divide_out": BOOL,
    "init_layer_scale": st.sampled_from([None, 0.3]),
}


@fuzz(quick=2, long=80)
@given(st.fixed_dictionaries(_VIM), inputs())
def test_vim(options: dict[str, Any], drawn: Inputs) -> None:
    torch.manual_seed(drawn.seed)
    module = vim.randomise(VimMixer(**options))
    check(Made(module, options["d_model"]), drawn)


_ATTENTION = {
    "num_heads": FEW,
    "per_head": st.integers(1, 5),
    "qkv_bias": BOOL,
    "qk_norm": BOOL,
    "fused": BOOL,
}


@pytest.mark.timm
@fuzz(quick=2, long=80)
@given(
    st.fixed_dictionaries(
        {
            **_ATTENTION,
            "dim": st.integers(1, 9),
            "proj_bias": BOOL,
            "gated": BOOL,
            "dim_out": st.integers(1, 7),
            "is_causal": BOOL,
        }
    ),
    inputs(),
)
def test_timm_attention(timm: Any, options: dict[str, Any], drawn: Inputs) -> None:
    from timm.layers import Attention

    options = dict(options)
    torch.manual_seed(drawn.seed)
    fused, causal = options.pop("fused"), options.pop("is_causal")
    width = options.pop("dim")
    module = randomise(
        Attention(width, attn_head_dim=options.pop("per_head"), norm_layer=nn.LayerNorm, **options)
    )
    module.fused_attn = fused
    _well_conditioned(module)
    check(Made(module, width, lambda *_: {"is_causal": causal}), drawn)


@pytest.mark.timm
@fuzz(quick=2, long=80)
@given(st.fixed_dictionaries(_ATTENTION), inputs())
def test_mambavision_attention(mambavision: Any, options: dict[str, Any], drawn: Inputs) -> None:
    options = dict(options)
    torch.manual_seed(drawn.seed)
    fused = options.pop("fused")
    width = options["num_heads"] * options.pop("per_head")
    module = randomise(mambavision.Attention(width, **options))
    module.fused_attn = fused
    _well_conditioned(module)
    check(Made(module, width), drawn)


@pytest.mark.timm
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@fuzz(quick=2, long=80)
@given(
    st.fixed_dictionaries(
        {
            "d_model": st.sampled_from([2, 4, 6, 10]),
            "d_state": FEW,
            "d_conv": st.integers(1, 5),
            "expand": st.integers(1, 2),
            "dt_rank": FEW,
            "bias": BOOL,
            "conv_bias": st.sampled_from([0, 2]),
        }
    ),
    inputs(),
)
def test_mambavision_mixer(mambavision: Any, options: dict[str, Any], drawn: Inputs) -> None:
    torch.manual_seed(drawn.seed)
    module = randomise(mambavision.MambaVisionMixer(**options))
    # the reference scan computes in float32
    check(Made(module, options["d_model"]), drawn)


@pytest.fixture(scope="module")
def timm() -> Any:
    """timm beside a CPU build of torch."""
    return timm_cpu.timm()


@pytest.fixture(scope="module")
def mambavision(timm: Any) -> Any:
    """mambavision's models on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        yield timm_cpu.mambavision(patch)


def _well_conditioned(module: nn.Module) -> None:
    """Norms of few features that do not blow rounding errors up."""
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 0.05
