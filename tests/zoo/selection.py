"""Small real mixers whose steps lie on both sides of softplus's bend, and their oracles."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from oracles import selection as loops
from oracles import vim
from oracles.mamba2_formula import form_of
from torch import Tensor, nn

from captum_ssm import ImplicitAttention
from captum_ssm.models.vim import VimMixer
from zoo import mamba2
from zoo.attention import attention_model
from zoo.mamba import transformers_model

#: An epsilon that keeps norms of two features well conditioned.
NORMS = {"rms_norm_eps": 0.05}


def spread_steps(mixer: Any) -> Any:
    """The mixer with biases of dt that put S_Delta on both sides of zero."""
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.endswith(("dt_proj.bias", "dt_proj_b.bias", "dt_proj_bias", "dt_bias")):
                parameter.copy_(1.5 * torch.randn_like(parameter))
    return mixer


def mixer_named(model: nn.Module, kind: str) -> Any:
    return next(m for m in model.modules() if type(m).__name__ == kind)


def make_mixer(kind: str, **options: Any) -> tuple[Any, int, loops.Select]:
    """A real mixer, the width of its input, and the oracle of what it selects."""
    if kind in ("mamba", "falcon_mamba"):
        model = transformers_model(kind, **options)
        return spread_steps(model.backbone.layers[0].mixer), 5, loops.mamba
    if kind in ("jamba", "zamba"):
        model = attention_model(kind, "sdpa", **NORMS | options)
        mixer = mixer_named(model, f"{kind.title()}MambaMixer")
        return spread_steps(mixer), 16, loops.mamba if kind == "jamba" else loops.zamba
    if kind.startswith("vim"):
        _, direction, *halved = kind.split()
        mixer = VimMixer(5, d_state=3, bimamba_type=direction, if_divide_out=bool(halved))
        return spread_steps(vim.randomise(mixer)), 5, loops.vim
    model = mamba2.make_model(kind, **options)
    mixer = spread_steps(mamba2.first_mixer(model))
    return mixer, 12, loops.mamba2(form_of(mixer, model.config))


MASKED = ["mamba", "falcon_mamba", "jamba", "zamba", "mamba2", "bamba"]
KINDS = [*MASKED, "vim none", "vim v1", "vim v2", "vim v2 halved"]
#: Mamba-2's channel 7 lies inside head 1.
CHANNELS = [7, 0, -1]


def explain(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> tuple[Any, Any]:
    """The method on the bare mixer, and the arguments with which to call it."""
    call = {"inputs": hidden}
    if mask is not None:  # it comes behind a cache
        names = list(inspect.signature(type(mixer).forward).parameters)
        call["additional_forward_args"] = (*(None,) * (names.index("attention_mask") - 2), mask)
    return ImplicitAttention(mixer), call
