"""Which of torch's operators Apple's MPS has, by the table that torch ships with itself.

The table names the devices that have a kernel of an operator.  What is made of other operators runs
on all, if those do: each is looked up in turn.  Which numbers a kernel takes the table does not
say; that there are neither float64 nor complex128 is known.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.counts import kind_of, place

#: Numbers of which there are no tensors there.
WITHOUT = (torch.float64, torch.complex128)
#: Kernels made of operators, the one before the other.
_COMPOSED = (
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)
#: What calls a kernel of its own on each device, and MPS's there.
_BY_DEVICE = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


class LackingOperatorError(NotImplementedError):
    """MPS has no kernel of an operator."""


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an operator returns on a processor, if MPS has it.

    Raises:
        LackingOperatorError: when MPS has no kernel of it, or of one that it is made of.
    """
    kernel = kernel_of(func)
    if kernel is None:
        raise LackingOperatorError(
            f"The operator '{func.name()}' is not implemented for the MPS device: {place()}"
        )
    if kernel == "MPS" or kind_of(func).is_view:
        return func(*args, **kwargs)
    with _Within():
        return func._op_dk(getattr(torch._C.DispatchKey, kernel), *args, **kwargs)


class _Within(TorchDispatchMode):
    """Looks up what an operator is made of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to keep compilers out takes time at each operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # torch hands on a tensor made of a number as that number, which this overload refuses
        if kernel_of(func) == "MPS" and any(map(_is_number, args, func._schema.arguments)):
            func = func._overloadpacket
            return func(*args, **kwargs or {})
        return run(func, args, kwargs or {})


def _is_number(given: Any, wanted: Any) -> bool:
    return isinstance(given, int | float) and isinstance(wanted.type, torch.TensorType)


@functools.cache
def kernel_of(func: Any) -> str | None:
    """What runs an operator on MPS: ``"MPS"``, or by its name a kernel made of operators.

    None if nothing does.
    """
    name = func.name()
    if name.removeprefix("aten::") in _own() or func._overloadpacket in _BY_DEVICE:
        return "MPS"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((key for key in _COMPOSED if has(name, key)), None)


@functools.cache
def _own() -> frozenset[str]:
    """The operators that have a kernel of MPS's own."""
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    tables = (str(folder / name) for name in ("native_functions.yaml", "tags.yaml"))
    parsed = parse_native_yaml(*tables)
    functions = {str(function.func.name): function for function in parsed.native_functions}
    kernels = parsed.backend_indices[DispatchKey.MPS]

    def is_own(function: Any) -> bool:
        # one of several variants has the kernel of them all
        chief = function.structured_delegate
        return kernels.has_kernel(function if chief is None else functions[str(chief)])

    return frozenset(name for name, function in functions.items() if is_own(function))
