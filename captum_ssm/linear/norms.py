"""Norms whose scale is frozen: what is left of them is affine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import NotLinearError

if TYPE_CHECKING:
    from .mode import Linearising


def layer_norm(
    mode: Linearising, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Centred and scaled by a frozen deviation."""
    x, size, weight, bias, eps = filled(
        args, kwargs, ("input", "normalized_shape", "weight", "bias", "eps"), (None, None, 1e-5)
    )
    out = _standardised(x, tuple(range(-len(size), 0)), eps)
    return _scaled_and_shifted(mode, out, weight, bias).to(x.dtype)


def group_norm(
    mode: Linearising, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Each group of channels centred and scaled by a frozen deviation."""
    x, groups, weight, bias, eps = filled(
        args, kwargs, ("input", "num_groups", "weight", "bias", "eps"), (None, None, 1e-5)
    )
    out = _standardised(x.reshape(len(x), groups, -1), (-1,), eps).reshape(x.shape)
    spread = (-1, *(1,) * (x.dim() - 2))
    weight, bias = (None if p is None else p.view(spread) for p in (weight, bias))
    return _scaled_and_shifted(mode, out, weight, bias).to(x.dtype)


def instance_norm(
    mode: Linearising, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Each channel of an example centred and scaled by a frozen deviation over its places."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")
    x, mean, variance, weight, bias, own, _, eps, *_ = filled(
        args,
        kwargs,
        (*names, "momentum", "eps", "cudnn_enabled"),
        (None, None, None, None, True, 0.1, 1e-5, True),
    )
    if not own:
        return batch_norm(mode, func, (x, mean, variance, weight, bias, False, 0.1, eps), {})
    out = _standardised(x, tuple(range(2, x.dim())), eps)
    spread = (-1, *(1,) * (x.dim() - 2))
    weight, bias = (None if p is None else p.view(spread) for p in (weight, bias))
    return _scaled_and_shifted(mode, out, weight, bias).to(x.dtype)


def rms_norm(mode: Linearising, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Scaled by a frozen root mean square."""
    x, size, weight, eps = filled(
        args, kwargs, ("input", "normalized_shape", "weight", "eps"), (None, None)
    )
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = _wide(x.detach()).square().mean(tuple(range(-len(size), 0)), keepdim=True)
    out = _wide(x) * torch.rsqrt(square + eps)
    return _scaled_and_shifted(mode, out, weight, None).to(x.dtype)


def batch_norm(
    mode: Linearising, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """With the running statistics an affine map of each channel."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum")
    x, mean, variance, weight, bias, training, _, eps = filled(
        args, kwargs, (*names, "eps"), (None, None, False, 0.1, 1e-5)
    )
    if training or mean is None:
        raise NotLinearError(
            f"Module {mode.where()!r} runs a batch_norm in training mode, which mixes examples. "
            "Explain the model in eval mode, with running statistics."
        )
    spread = (-1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(_wide(variance) + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    out = _wide(x) * scale.view(spread) + shift.view(spread)
    return mode.ledger.included(out, shift.view(spread)).to(x.dtype)


def normalize(
    mode: Linearising, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A vector divided by its frozen length."""
    x, p, dim, eps = filled(args, kwargs, ("input", "p", "dim", "eps"), (2.0, 1, 1e-12))
    length = torch.linalg.vector_norm(x.detach(), p, dim, keepdim=True)
    out: Tensor = x / length.clamp_min(eps)
    return out


def filled(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]
) -> list[Any]:
    """All arguments in order; ``defaults`` are those of the last names."""
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | kwargs
    given.update(zip(names, args, strict=False))
    return [given[name] for name in names]


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    wide = _wide(x)
    centred = wide - wide.mean(dims, keepdim=True)
    variance = centred.detach().square().mean(dims, keepdim=True)
    return centred * torch.rsqrt(variance + eps)


def _scaled_and_shifted(
    mode: Linearising, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else mode.ledger.included(out + bias, bias)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least, as torch's own norms compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
