"""StripedHyena 2 (Evo 2): gated convolutions of three lengths, and attention.

    x2, x1, v = conv(u)        y = x2 (h * + D) x1 v

with u the projected stream, conv a short convolution, and h short and explicit (se), of medium
length (mr) or a sum of exponentials as long as the sequence (li); D is a weight for each channel,
which se has not.  Values are v before conv; frozen are the gates x2 and x1 behind it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..operators import Chain, Diagonal, LongConv, Operator, Shape, ShortConv, Sum
from .base import Call, LinearMixer
from .parts.common import as_heads, frozen, run, working_dtype
from .parts.softmax import seen_pairs, softmax_attention

#: Taps of a filter that is applied one by one; longer ones take fewer operations by transforms.
_FEW = 16


def cascade(module: Any, call: Call) -> LinearMixer:
    """captum_ssm.models.dna's HyenaCascade."""
    projected = call.hidden_states
    projected = projected.to(working_dtype(module, projected))
    projected = projected.view(*projected.shape[:2], -1, 3)
    taps = module.short_filter_weight.to(projected).flip(-1)[:, 0]  # (3 E, K)
    taps = taps.view(-1, 3, taps.shape[-1])
    x2, x1, v = (as_heads(each) for each in projected.unbind(-1))  # (B, L, E, 1)
    shape = Shape(*v.shape)
    *convolutions, conv = (ShortConv(weight[:, None], shape) for weight in taps.unbind(1))
    gates = [
        Diagonal(convolution.affine(each), shape, "gate")
        for each, convolution in zip((x2, x1), convolutions, strict=True)
    ]
    kernel = module.kernel(shape.tokens).detach().to(v)[:, None]  # (E, 1, K)
    few = kernel.shape[-1] <= _FEW
    core: Operator = ShortConv(kernel, shape, component="scan") if few else LongConv(kernel, shape)
    if module.D is not None:
        skip = Diagonal(frozen(module.D, v).view(1, 1, -1, 1), shape, "skip")
        core = Sum(core, skip)
    operator = Chain(gates[0], core, gates[1], conv)
    return LinearMixer(v, operator, lambda y: y.flatten(2))


def attention(module: Any, call: Call) -> LinearMixer:
    """captum_ssm.models.dna's StripedAttention."""
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    query, key, values = module.parts(run(module.Wqkv, hidden))
    query, key, width = query.transpose(1, 2), key.transpose(1, 2), values.shape[-1]
    mask = seen_pairs(hidden.shape[1], hidden.device)
    operator, _ = softmax_attention(query, key, values, width**-0.5, mask)

    def project(y: Tensor) -> Tensor:
        return run(module.out_proj, y.flatten(2))

    return LinearMixer(values, operator, project)
