"""Functions that several adapters share."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InputError, UnsupportedMixerError
from ...operators import Diagonal, Operator, Shape, ShortConv
from ...operators.kernels import wide_products
from ...operators.kernels.arithmetic import full_precision, unseen
from ...operators.kernels.truths import read_once
from ..base import Call, in_batch

#: Index of the mask among the positional arguments of mixers in transformers 5.
_MASK = 2


def working_dtype(module: nn.Module, x: Tensor) -> torch.dtype:
    """Return float64 if the module or its input is in float64, otherwise float32.

    Args:
        module: the mixer.
        x: the mixer's input.

    Returns:
        The dtype in which an adapter computes, also for models in half precision.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import working_dtype
        >>> working_dtype(torch.nn.Linear(2, 2).bfloat16(), torch.ones(1, 2).bfloat16())
        torch.float32
    """
    dtypes = {p.dtype for p in module.parameters()} | {x.dtype}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def run(submodule: nn.Module, x: Tensor) -> Tensor:
    """Return ``submodule(x)``, computed in the dtype of ``x``.

    A submodule without half-precision weights is called itself, so LoRA adapters, hooks that move
    weights and steering hooks have the same effect as in the model.

    Args:
        submodule: a projection or a norm of the mixer.
        x: input of the submodule, in the dtype of :func:`working_dtype`.

    Returns:
        The submodule's output.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import run
        >>> run(torch.nn.Linear(2, 3).bfloat16(), torch.ones(1, 4, 2)).dtype
        torch.float32
    """
    with full_precision(x.device):
        out = widened(submodule, x)(x)
    return out if isinstance(out, Tensor) else torch.as_tensor(out)


def widened(module: nn.Module, like: Tensor) -> nn.Module:
    """Return a copy of a half-precision module that computes in the dtype of ``like``.

    The weights of torch's own linear modules are shared, not copied.

    Args:
        module: the module; a module without half-precision weights is returned unchanged.
        like: a tensor with the wanted dtype, on the device of the module.
    """
    half_dtypes = (torch.float16, torch.bfloat16)
    if not any(p.dtype in half_dtypes for p in module.parameters()):
        return module
    # a module of another package, such as PEFT, may convert its input to the dtype of a weight
    submodules = list(module.modules())
    is_torch_code = all(type(layer).__module__.startswith("torch.nn.") for layer in submodules)
    shared_layers = [
        layer
        for layer in submodules
        if is_torch_code and type(layer) is nn.Linear and wide_products.serves(like, layer.weight)
    ]
    # deepcopy treats objects in ``copies`` as copied, and adds those that it copies
    copies: dict[int, Any] = {id(layer.weight): None for layer in shared_layers}
    wide_module = copy.deepcopy(module, copies).to(like.dtype)
    for layer in shared_layers:
        copies[id(layer)].weight = layer.weight
        copies[id(layer)].forward = _linear_map(layer.weight, copies[id(layer)].bias)
    return wide_module


def _linear_map(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, weight, bias)  # a function, so that a loop does not change `weight`


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply an affine map in the dtype of ``x``, for mixers that use a submodule's raw weight.

    Args:
        x: the input (..., E).
        weight: the matrix (D, E).
        bias: the constant (D,). Default: None, no constant.

    Returns:
        The output (..., D).

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import linear
        >>> linear(torch.ones(1, 2), torch.eye(2).half(), torch.ones(2).half()).tolist()
        [[2.0, 2.0]]
    """
    bias = None if bias is None else bias.to(x)
    with full_precision(x.device):
        if wide_products.serves(x, weight):
            return wide_products.linear(x, weight, bias)
        return F.linear(x, weight.to(x), bias)


def projection(module: Any, called: bool = True) -> Callable[[Tensor], Tensor]:
    """Return a function that calls ``module``, or uses its raw weight if ``called`` is False."""
    if called:
        return lambda x: run(module, x)
    return lambda x: linear(x, module.weight, module.bias)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return weight * x / sqrt(mean of x^2 + eps), with the mean over the last dimension."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.to(x)


def unit_vectors(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum of x^2 + eps), vectors of length one, for vectors ``x`` (..., N)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``x`` (B, L, ...) with zeros at padded tokens."""
    return x if mask is None else x * mask.view(*mask.shape, *[1] * (x.dim() - 2))


def activation_of(module: Any) -> Callable[[Tensor], Tensor]:
    """Return a mixer's activation function; SiLU is torch's, not a kernel's."""
    return F.silu if getattr(module, "activation", None) in ("silu", "swish") else module.act


def activation_ratio(act: Callable[[Tensor], Tensor], name: str, u: Tensor) -> Tensor:
    """Return act(u) / u, the factor that replaces a frozen activation; act'(0) at u = 0.

    Args:
        act: the activation function.
        name: name of the activation, such as ``"silu"``, for the closed form of SiLU.
        u: input of the activation.

    Returns:
        The factor, in the shape of ``u``, without a graph.

    Raises:
        UnsupportedMixerError: if act(0) is not 0.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import activation_ratio
        >>> activation_ratio(torch.relu, "relu", torch.tensor([2.0, 3.0])).tolist()
        [1.0, 1.0]
    """
    u = u.detach()
    if name in ("silu", "swish"):
        return torch.sigmoid(u)
    with torch.inference_mode(False), torch.enable_grad(), unseen():
        zero = torch.zeros((), dtype=u.dtype, device=u.device, requires_grad=True)
        at_zero = act(zero)
        (slope,) = torch.autograd.grad(at_zero, zero)
    if at_zero != 0:
        raise UnsupportedMixerError(
            f"The activation {name!r} is {float(at_zero.detach()):.3g} at 0, so act(u) / u "
            "does not exist there. Use a model whose activation is 0 at 0, such as SiLU or GELU."
        )
    # the inner where avoids 0 / 0; at 0 the ratio's limit is the slope
    return torch.where(u == 0, slope, act(u) / torch.where(u == 0, torch.ones_like(u), u))


def frozen(parameter: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a parameter with the dtype and device of ``like``, without a graph."""
    return parameter.detach().to(like, copy=True)


def refuse_packed(call: Call, **positions: int) -> None:
    """Raise InputError if the call packs several sequences into one.

    Args:
        call: the recorded call.
        positions: index of each argument that may be passed by position.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if call.argument(name, positions.get(name)) is not None:
            raise InputError(
                f"The mixer was called with {name}, which packs several sequences into one; the "
                "adapter does not separate them. Pass each sequence as a separate example."
            )


def padding_mask(
    mask: Tensor | None, x: Tensor, kind: type | None = None, original: Tensor | None = None
) -> Tensor | None:
    """Convert a 0/1 mask to a boolean (B, L), or to None if all tokens are real.

    Args:
        mask: the mask, broadcastable to (B, L).
        x: the sequence (B, L, E).
        kind: class of the module that computed the mask from ``original``. Default: None.
        original: the call's mask; all mixers share it, so the result is read from a GPU only once.
            Default: None, ``mask``.
    """
    if mask is None:
        return None
    is_real = mask.to(x.device).bool().expand(x.shape[:2])
    passed = mask if original is None else original
    return None if read_once(("padding", kind), lambda: bool(is_real.all()), passed) else is_real


def mixer_input(module: nn.Module, call: Call, name: str | None = None) -> Tensor:
    """Return a mixer's input (B, L, E) in the dtype of :func:`working_dtype`.

    Args:
        module: the mixer.
        call: the mixer's recorded call.
        name: name of the first argument. Default: None, :attr:`Call.hidden_states`.
    """
    hidden = call.hidden_states if name is None else in_batch(call.argument(name, 0))
    return hidden.to(working_dtype(module, hidden))


def hf_input_and_mask(
    module: nn.Module, call: Call, cache: str = "cache_params", zero_padded: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the input (B, L, E) of a mixer of transformers, and the mask of real tokens.

    Args:
        module: the mixer.
        call: the mixer's recorded call; a cache is refused.
        cache: name of the cache argument. Default: ``"cache_params"``.
        zero_padded: whether to set padded tokens to zero. Default: True.
    """
    call.refuse_cache(cache, position=1)
    hidden = mixer_input(module, call)
    passed, applied = applied_mask(module, call)
    mask = padding_mask(applied, hidden, type(module), passed)
    return zeroed(hidden, mask if zero_padded else None), mask


def applied_mask(module: nn.Module, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask passed in the call, and the mask that the module's code applies.

    For example, transformers 4 ignores the mask of a single example, and a mask of token pairs.

    Args:
        module: the mixer.
        call: the mixer's recorded call.
    """
    names = list(inspect.signature(type(module).forward).parameters)
    # a subclass may pass its arguments on without naming them; 1 is subtracted for `self`
    position = names.index("attention_mask") - 1 if "attention_mask" in names else _MASK
    mask: Tensor | None = call.argument("attention_mask", position)
    code = sys.modules[type(module).__module__]
    mask_padding = getattr(code, "apply_mask_to_padding_states", None)
    if mask is None or mask_padding is None:
        return mask, mask
    # applied to ones, the module's function returns the mask that it applies
    ones = torch.ones(*call.hidden_states.shape[:2], 1, device=mask.device)
    return mask, mask_padding(ones, mask)[..., 0]


def as_heads(x: Tensor, heads: int | None = None) -> Tensor:
    """View a tensor (B, L, C) as heads (B, L, H, P).

    Args:
        x: the tensor.
        heads: number of heads, H. Default: None, one head per channel.

    Returns:
        The view.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import as_heads
        >>> x = torch.ones(2, 5, 6)
        >>> tuple(as_heads(x).shape), tuple(as_heads(x, heads=2).shape)
        ((2, 5, 6, 1), (2, 5, 2, 3))
    """
    heads = x.shape[-1] if heads is None else heads
    return x.view(*x.shape[:-1], heads, -1)


def mask_operators(mask: Tensor | None, shape: Shape, like: Tensor) -> list[Operator]:
    """Return a list of one operator that sets padded tokens to zero; an empty list without mask."""
    if mask is None:
        return []
    return [Diagonal(mask[:, :, None, None].to(like), shape, data_dependent=False)]


def causal_conv(
    conv: nn.Conv1d, values: Tensor, mask: Tensor | None, shape: Shape
) -> tuple[ShortConv, Tensor]:
    """Return a depthwise causal ``nn.Conv1d`` as an operator, and its output (B, L, H, P).

    If the input projection has a bias, padded tokens are not zero, and the convolution mixes them
    into real tokens.  This contribution does not depend on the input, so it is part of the constant
    term, and padded tokens get exactly zero relevance.

    Args:
        conv: the convolution; its outputs after the last token are ignored. If it has fewer
            channels than the values, neighboring heads share a filter.
        values: input of the convolution (B, L, H, P).
        mask: True for real tokens (B, L); None if all are real.
        shape: sizes of ``values``.

    Returns:
        The operator, with the module's bias, and the module's output.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import as_heads, causal_conv
        >>> from captum_ssm.operators import Shape
        >>> conv = torch.nn.Conv1d(2, 2, 3, groups=2, padding=2)
        >>> x = torch.randn(1, 5, 2)
        >>> operator, u = causal_conv(conv, as_heads(x), None, Shape(1, 5, 2, 1))
        >>> torch.allclose(u[..., 0], conv(x.mT)[..., :5].mT, atol=1e-6)
        True
    """
    taps = conv.weight.flip(-1).to(values)[:, 0]  # by lag
    shared = shape.heads * shape.per_head // len(taps)  # heads that share a filter
    weight = taps.view(-1, shape.per_head, taps.shape[1]).repeat_interleave(shared, 0)
    bias: Tensor | None = None
    if conv.bias is not None:
        bias = frozen(conv.bias, values).view(1, 1, -1, shape.per_head)
        bias = bias.repeat_interleave(shared, 2)
    lags = [lag * conv.dilation[0] for lag in range(taps.shape[1])]
    operator = ShortConv(weight, shape, bias, lags)
    if mask is None:
        return operator, operator.affine(values)
    output = operator.affine(values)
    # apply() leaves out the bias that `operator` adds
    leaked = operator.apply(values * ~mask[:, :, None, None])
    constant = leaked if bias is None else leaked + bias
    return ShortConv(weight, shape, constant, lags), output
