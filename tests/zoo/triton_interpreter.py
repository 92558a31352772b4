"""Triton's kernels on the CPU, by Triton's own interpreter.

Triton settles at import, by ``TRITON_INTERPRET=1``, whether it interprets, so a process does so
from its start or never.  What differs from a GPU:

- each kernel has the configuration with the smallest blocks instead of the fastest;
- functions that torch would compile run as they stand;
- functions of NVIDIA's library, which the interpreter passes over, are computed by NumPy;
- the interpreter keeps bfloat16 as patterns of bits and computes with these.  Here sums, products
  and matrix products of such numbers are formed in float32 and rounded to the nearest.

Kernels written in CUDA do not run.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

SKIP_REASON = "needs TRITON_INTERPRET=1 in the environment, see CONTRIBUTING.md"
#: What kernels call of NVIDIA's library.
LIBRARY: dict[str, Callable[..., Any]] = {"exp": np.exp, "log1p": np.log1p, "tanh": np.tanh}


def is_on() -> bool:
    """Whether this process interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def install(patch: pytest.MonkeyPatch) -> None:
    """Make kernels fit for the interpreter until ``patch`` is undone."""
    from triton.language.extra import libdevice
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def block(config: Any) -> int:
        return math.prod(size for size in config.kwargs.values() if type(size) is int)

    def run_smallest(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = [min(self.configs, key=block)]
        return run(self, *args, **kwargs)

    patch.setattr(autotuner.Autotuner, "run", run_smallest)
    for name, function in LIBRARY.items():
        patch.setattr(libdevice, name, by_numpy(function))
    patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    # backward kernels of mamba_ssm share their work among so many
    few = SimpleNamespace(multi_processor_count=1)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: few)
    torch.compiler.set_stance("force_eager")
    _count_in_tensors(patch)
    _compute_with_bfloat16(patch)


def by_numpy(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function of kernels that NumPy computes, entry by entry."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def computed(x: Any) -> Any:
        return tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

    return computed


def _count_in_tensors(patch: pytest.MonkeyPatch) -> None:
    """The numbers of a loop are tensors where it is compiled; some kernels convert them."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    rewrite = InterpretedFunction.rewrite

    class Index(int):
        def __mul__(self, other: Any) -> Any:
            return Index(int(self) * int(other))

        def __sub__(self, other: Any) -> Any:
            return Index(int(self) - int(other))

        def to(self, dtype: Any) -> Any:
            return tl.full([], int(self), dtype)

    def indices(*bounds: Any) -> Iterator[Index]:
        return map(Index, range(*bounds))

    def with_indices(self: Any) -> Any:
        patch.setitem(self.fn.__globals__, "range", indices)
        return rewrite(self)

    patch.setattr(InterpretedFunction, "rewrite", with_indices)


def _compute_with_bfloat16(patch: pytest.MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    names = ("cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "create_fma", "create_dot")
    own = {name: getattr(builder, name) for name in names}

    def is_half(x: Any) -> bool:
        return bool(x.dtype.scalar == tl.bfloat16)

    def widened(x: Any) -> Any:
        if not is_half(x):
            return x
        bits = np.ascontiguousarray(x.data).astype(np.uint32) << 16
        return handle(bits.view(np.float32), tl.float32)

    def rounded(x: Any) -> Any:
        if x.data.dtype != np.float32:  # the truth of a comparison
            return x
        half = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16)
        return handle(half.numpy().view(np.uint16), tl.bfloat16)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar:
            return source
        if target.scalar == tl.bfloat16:
            return rounded(own["cast_impl"](self, source, tl.float32))
        return own["cast_impl"](self, widened(source), target)

    def in_float32(name: str) -> Any:
        def computed(self: Any, *operands: Any) -> Any:
            wide = [widened(x) if isinstance(x, handle) else x for x in operands]
            out = own[name](self, *wide)
            return rounded(out) if is_half(operands[0]) else out

        return computed

    def convert(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return own["create_fp_to_fp"](self, source, target, mode)

    def dot(self: Any, a: Any, b: Any, sum_so_far: Any, *rest: Any) -> Any:
        return own["create_dot"](self, widened(a), widened(b), sum_so_far, *rest)

    patch.setattr(builder, "cast_impl", cast)
    patch.setattr(builder, "create_fp_to_fp", convert)
    patch.setattr(builder, "create_dot", dot)
    for name in ("binary_op", "unary_op", "create_fma"):
        patch.setattr(builder, name, in_float32(name))
