"""The gated delta rule of transformers' models, by the function that a module calls for it.

What the function makes of unit values are the rule's matrices; nothing here calls the package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import causal_taps, diagonal_matrices, keep_of

RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


@torch.no_grad()
def formula(module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The matrices of every channel (B, C, L, L), of a module in float64."""
    modeling, calls, entering = sys.modules[type(module).__module__], [], []
    last = getattr(module, "out_proj", None) or module.o_proj
    (rule,) = (name for name in RULES if hasattr(modeling, name))

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            out = function(*args, **options)
            calls.append((function, args, options, out))
            return out

        return called

    handle = last.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch)
        for name in ("causal_conv1d_fn", rule):
            patch.setattr(modeling, name, noted(getattr(modeling, name)))
        module(hidden.double(), **kwargs)
        handle.remove()
        (_, (mixed, *_), *_), (function, (query, key, v, *rest), options, (out, _)) = calls
        columns = []
        for t in range(v.shape[1]):
            unit = torch.zeros_like(v)
            unit[:, t] = 1
            columns.append(function(query, key, unit, *rest, **options)[0][..., 0])
    core = torch.stack(columns, -1).transpose(1, 2).repeat_interleave(v.shape[-1], 1)
    width = v.shape[2] * v.shape[3]
    conv = causal_taps(module.conv1d, v.shape[1])[:, -width:]
    before = torch.einsum("xcij,bcj->bic", conv, mixed[:, -width:]).view(v.shape)
    ratio = torch.where(before == 0, 0.5, v / before)
    keep = keep_of(kwargs.get("attention_mask"), hidden)[..., None, None]
    outer = (entering[0].view(out.shape) / out).nan_to_num()  # of the norm and the gate
    inner = diagonal_matrices(ratio, v.shape) @ conv @ diagonal_matrices(keep, v.shape)
    return diagonal_matrices(outer, v.shape) @ core @ inner


def in_float64(patch: pytest.MonkeyPatch) -> None:
    """Have functions that ask for float32 compute in float64."""
    to, zeros = Tensor.to, torch.zeros

    def widened(x: Any) -> Any:
        return torch.float64 if x is torch.float32 else x

    def wide_to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        return to(self, *map(widened, args), **options)

    def wide_zeros(*size: Any, dtype: Any = torch.float64, **options: Any) -> Tensor:
        return zeros(*size, dtype=widened(dtype), **options)

    patch.setattr(Tensor, "float", Tensor.double)
    patch.setattr(Tensor, "to", wide_to)
    patch.setattr(torch, "zeros", wide_zeros)
