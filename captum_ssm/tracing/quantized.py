"""Replace quantized layers by their affine maps while a model is explained.

The kernel of a quantized layer may have no derivative, or a wrong one if it rounds its input, and
its rounding may depend on other tokens. During a call each such layer therefore computes W x + b
from its weight W in floating point: the weight's ``dequantize()`` if its class has one, else the
kernel's results for unit vectors. The format of the weight need not be known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from ..errors import NotLinearError
from .changes import replaced_in_thread, value_in_thread
from .record import free_memory

#: Largest difference, relative to the largest output, between a kernel and its affine map, and the
#: difference from which users are told. Rounding to bfloat16 is below.
_REFUSED, _TOLD = 0.1, 8e-3
#: Largest such difference of a kernel in float32 that rounds only its output.
_EQUAL = 1e-5
#: Share of a device's free memory for weights in floating point, and unit vectors per kernel call.
_SHARE, _ROWS = 4, 1024
#: Length of the unit vectors if a bias is added, whose rounding is small in comparison.
_LONG = 2.0**10


@contextmanager
def exact_products(model: nn.Module, run: Callable[[], Tensor]) -> Iterator[None]:
    """Let quantized layers compute W x + b in floating point, in the calling thread.

    A layer is quantized if it has weights of 8 bits or less, packed integers or a tensor class of
    its own, and maps each vector of one sequence to a vector. Weights in floating point are kept
    as long as they need at most a quarter of the free memory, and else computed for each product.

    Args:
        model: the model that runs inside the ``with``.
        run: a function that runs the model and returns its output. It is called twice at the end
            if a layer rounds its inputs, to compute the share of the output that is left out.

    Warns:
        UserWarning: with this share.

    Raises:
        NotLinearError: on the first run of a layer that differs from W x + b by more than 10 %.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing import exact_products
        >>> model = torch.nn.Linear(2, 2)
        >>> with exact_products(model, lambda: model(torch.ones(1, 2))):  # nothing is quantized
        ...     pass
    """
    free_bytes: dict[torch.device, int] = {}
    layers = [
        Affine(name, module, free_bytes)
        for name, module in model.named_modules()
        if is_quantized(module) and not isinstance(value_in_thread(module, "forward"), Affine)
    ]
    exact = None
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced_in_thread(layer.module, "forward", layer))
        yield
        worst = max(layers, key=lambda layer: layer.error, default=None)
        if worst is not None and worst.error > _TOLD:
            exact = run()  # and once more below, with the kernels
    if worst is not None and exact is not None:
        missing = (run() - exact).nan_to_num().norm() / exact.nan_to_num(0, 0, 0).norm()
        warnings.warn(
            f"Quantized layers round their inputs, layer {worst.name!r} by {worst.error:.1%} of "
            "its largest output. The model is explained without this rounding, which changes its "
            f"output by {float(missing):.1%}. Dequantize the model to explain all of its output.",
            stacklevel=6,
        )


class Affine:
    """The affine map of a quantized layer, called in place of the layer's ``forward``.

    Attributes:
        name: the layer's name.
        module: the layer.
        bias: the vector b (N,), once known; None for 0.
        error: the largest difference from the kernel in the first run, relative to the largest
            output of the kernel.

    Args:
        free_bytes: the bytes left for weights, by device; shared by all layers.
    """

    def __init__(self, name: str, module: nn.Module, free_bytes: dict[torch.device, int]) -> None:
        self.name, self.module = name, module
        self.bias: Tensor | None = None
        self.error = -1.0
        self._kernel, self._free_bytes = value_in_thread(module, "forward"), free_bytes
        self._weight: Tensor | None = None
        #: An input (1, ..., K) of the form that the kernel accepts.
        self._like = torch.empty(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return W x + b for a floating tensor ``x``; call the kernel for any other arguments."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel() or x.dim() < 2:
            return self._kernel(*args, **kwargs)
        out: Tensor = mv(x, self)
        return out if self.bias is None else out + self.bias.to(out)

    def product(self, x: Tensor) -> Tensor:
        """Return W x: by the kernel if it rounds nothing but its output, for ``x`` (..., K)."""
        output_rounding = min(_TOLD, max(_EQUAL, torch.finfo(x.dtype).eps))
        if x.dtype != self._like.dtype or self.error > output_rounding:
            return F.linear(x, self.weight().to(x))
        y: Tensor = self._kernel(x)
        return y if self.bias is None else y - self.bias.to(y)

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Return the weight W (N, K) in the precision of the kernel's output."""
        if self._weight is not None:
            return self._weight
        weight = self._plain_weight()
        weight = self._measure_weight() if weight is None else weight
        free_bytes, needed = self._free_bytes, weight.numel() * weight.itemsize
        free_bytes.setdefault(weight.device, free_memory(weight.device) // _SHARE)
        if needed <= free_bytes[weight.device]:
            free_bytes[weight.device] -= needed
            self._weight = weight
        return weight

    def _plain_weight(self) -> Tensor | None:
        """Return the layer's weight as a plain tensor in floating point; None if it has none."""
        weight: Tensor | None = self.module._parameters.get("weight")
        if weight is not None and type(weight).dequantize is not Tensor.dequantize:
            weight = weight.dequantize()
        plain = type(weight) in (Tensor, nn.Parameter)
        if weight is None or not plain or weight.is_meta or _is_coded(weight):
            return None
        self.bias = self.module._parameters.get("bias")
        return weight

    def _measure_weight(self) -> Tensor:
        """Return the weight W (N, K) that the kernel uses for unit vectors, and find the bias."""
        at_zero, size = self._kernel(self._like), self._like.shape[-1]
        self.bias = at_zero.flatten() if bool(at_zero.any()) else None
        length = 1.0 if self.bias is None else _LONG
        rows = []
        for start in range(0, size, _ROWS):
            count = min(_ROWS, size - start)
            units = self._like.new_zeros(*self._like.shape[:-2], count, size)
            units[..., range(count), range(start, start + count)] = length  # one in each row
            outputs = self._kernel(units) - at_zero
            rows.append(outputs.view(count, -1) / length)
        return torch.cat(rows).T

    @torch.no_grad()
    def check(self, x: Tensor) -> None:
        """Compare the map with the kernel on the first input (..., K) of a run."""
        if self.error >= 0:  # checked before
            return
        self._like = torch.zeros_like(x.detach()[(slice(0, 1),) * (x.dim() - 1)])
        y = self._kernel(x.detach())
        affine = F.linear(x.detach(), self.weight().to(x))
        affine = affine if self.bias is None else affine + self.bias.to(x)
        self.error = float((y - affine).abs().max() / y.abs().max().clamp_min(1e-30))
        if not self.error <= _REFUSED:
            raise NotLinearError(
                f"Layer {self.name!r}, a quantized {type(self.module).__name__}, differs from its "
                f"weights times its inputs by {self.error:.0%} of its largest output, because it "
                "rounds its inputs too much or is not linear. Dequantize this layer, or load the "
                "model without quantization."
            )


@wrap_torch_function(lambda x, layer: (x,))
def mv(x: Tensor, layer: Affine) -> Tensor:
    """Return W x (..., N) for ``x`` (..., K); function modes see torch's mv, which has a rule."""
    layer.check(x)
    out: Tensor = _KernelProduct.apply(x, layer)  # type: ignore[no-untyped-call]
    return out


class _KernelProduct(torch.autograd.Function):
    """Autograd function: values (..., K) times a layer's weight, which the graph does not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Affine) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight().to(grads[0]), None  # None: for ``layer``


def is_quantized(module: nn.Module) -> bool:
    """Return True if a module without parts has weights of few bits or of a custom class."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    has_coded = any(x is not None and x.dim() > 1 and _is_coded(x) for x in tensors)
    # compressed-tensors rounds weights in floating point in each call
    return not module._modules and (
        has_coded or getattr(module, "quantization_scheme", None) is not None
    )


def _is_coded(x: Tensor) -> bool:
    """Return True for integers that code weights, and for tensor classes except DTensor."""
    if type(x) not in (Tensor, nn.Parameter):
        is_ordinary = hasattr(x, "placements") or isinstance(x, torch._subclasses.FakeTensor)
        return not is_ordinary
    return x.dtype == torch.int32 or (x.dtype.itemsize == 1 and x.dtype != torch.bool)
