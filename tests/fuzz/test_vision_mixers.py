"""Random configurations of vision mixers, which read the tokens in more than one direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fuzz.mixer_checks import BOOL, FEW, KERNEL, Drawn, fuzzed
from hypothesis import strategies as st
from oracles import vim as oracle
from torch import nn
from zoo import timm_cpu
from zoo.mamba import randomise

from captum_ssm.models.vim import VimMixer

Made = tuple[Any, int, dict[str, Any]]
_VIM: Drawn = {
    "d_model": st.integers(1, 8),
    "d_state": FEW,
    "d_conv": KERNEL,
    "d_inner": st.integers(1, 12),
    "dt_rank": FEW,
    "bias": BOOL,
    "conv_bias": BOOL,
    "bimamba_type": st.sampled_from(["none", "v1", "v2"]),
    "if_divide_out": BOOL,
    "init_layer_scale": st.sampled_from([None, 0.3]),
}


def vim(options: dict[str, Any]) -> Made:
    return oracle.randomise(VimMixer(**options)), options["d_model"], {}


test_vim = fuzzed({"vim": (_VIM, vim)})

_ATTENTION: Drawn = {
    "num_heads": FEW,
    "per_head": st.integers(1, 5),
    "qkv_bias": BOOL,
    "qk_norm": BOOL,
    "fused": BOOL,
}
_TIMM: Drawn = {
    **_ATTENTION,
    "dim": st.integers(1, 9),
    "proj_bias": BOOL,
    "gated": BOOL,
    "dim_out": st.integers(1, 7),
    "is_causal": BOOL,
}
_MIXER: Drawn = {
    "d_model": st.sampled_from([2, 4, 6, 10]),
    "d_state": FEW,
    "d_conv": KERNEL,
    "expand": st.integers(1, 2),
    "dt_rank": FEW,
    "bias": BOOL,
    "conv_bias": st.sampled_from([0, 2]),
}
#: mambavision's models, as long as the module's tests run.
PACKAGE: dict[str, Any] = {}


def timm_attention(options: dict[str, Any]) -> Made:
    from timm.layers import Attention

    options = dict(options)
    fused, causal, width = (options.pop(name) for name in ("fused", "is_causal", "dim"))
    size = options.pop("per_head")
    module = Attention(width, attn_head_dim=size, norm_layer=nn.LayerNorm, **options)
    return _well_conditioned(module, fused), width, {"is_causal": causal}


def mambavision_attention(options: dict[str, Any]) -> Made:
    options = dict(options)
    fused, width = options.pop("fused"), options["num_heads"] * options.pop("per_head")
    return _well_conditioned(PACKAGE["mambavision"].Attention(width, **options), fused), width, {}


def mambavision_mixer(options: dict[str, Any]) -> Made:
    module = PACKAGE["mambavision"].MambaVisionMixer(**options)
    return randomise(module), options["d_model"], {}


def _well_conditioned(module: Any, fused: bool) -> Any:
    """Norms of few features that do not blow rounding errors up."""
    module.fused_attn = fused
    for part in randomise(module).modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 0.05
    return module


@pytest.fixture(scope="module")
def mambavision() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        timm_cpu.timm()
        PACKAGE["mambavision"] = timm_cpu.mambavision(patch)
        yield


@pytest.mark.timm
@pytest.mark.usefixtures("mambavision")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
class TestOfTimm:
    test = staticmethod(
        fuzzed(
            {
                "timm's attention": (_TIMM, timm_attention),
                "attention": (_ATTENTION, mambavision_attention),
                "mixer": (_MIXER, mambavision_mixer),
            }
        )
    )
