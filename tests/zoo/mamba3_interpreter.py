"""A program: mamba_ssm's Mamba3 with its real Triton kernels, run by Triton's interpreter.

Takes a folder with ``cases.pt``, a list of dicts (``options`` of Mamba3, ``state`` dict, ``eps`` of
its norms by name, input ``hidden``), and writes ``outputs.pt``, two for each case: the second as a
user gets it, the first without the conversion of the operands to bfloat16, which is all that
``mamba3_siso_combined`` does, besides checks, before it calls the kernels.  This is a process of
its own because Triton settles at import, by TRITON_INTERPRET, whether it interprets.

What differs from a GPU:

- the kernels' cos, sin and tanh are instructions of NVIDIA's that the interpreter does not know;
  Triton's own functions stand in for them;
- each kernel has one configuration instead of the fastest of several;
- products of bfloat16 matrices, which the interpreter would form from the numbers' bit patterns,
  are formed from the numbers; its conversion to bfloat16 rounds towards zero;
- the reference that mamba_ssm ships stands in for the RMSNorm kernel.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

KERNELS = "mamba_ssm.ops.triton.mamba3."


@triton.jit
def cos(x):  # type: ignore[no-untyped-def]
    return tl.cos(x)


@triton.jit
def sin(x):  # type: ignore[no-untyped-def]
    return tl.sin(x)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


STAND_INS = {"cos_approx": cos, "sin_approx": sin, "tanh_approx": tanh}


def load() -> Any:
    """mamba_ssm's mamba3 module, its kernels fit for the interpreter."""
    try:
        importlib.import_module("selective_scan_cuda")
    except ImportError:  # mamba_ssm's package imports it, Mamba3 does not use it
        sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    mamba3 = importlib.import_module("mamba_ssm.modules.mamba3")
    norm: Any = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")
    norm.rmsnorm_fn = norm.rms_norm_ref
    forward: Any = importlib.import_module(KERNELS + "mamba3_siso_fwd")
    angles: Any = importlib.import_module(KERNELS + "angle_dt")
    for kernel in (forward.mamba3_siso_fwd_kernel, angles.angle_dt_fwd_kernel):
        kernel.configs = kernel.configs[:1]
    for module in (forward, angles):
        for name in STAND_INS.keys() & vars(module).keys():
            setattr(module, name, STAND_INS[name])
    return mamba3


def repair_products() -> None:
    """Make the interpreter's matrix product take bfloat16 for the numbers it stands for."""
    product = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        def widened(x: Any) -> Any:
            if x.dtype.scalar != tl.bfloat16:
                return x
            return builder.create_fp_ext(x, tl.block_type(tl.float32, list(x.data.shape)))

        return product(builder, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def unrounded(**operands: Any) -> Any:
    """mamba3_siso_combined without its conversions to bfloat16."""
    function = importlib.import_module(KERNELS + "mamba3_siso_combined")._Mamba3Function
    names = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
    no_states, no_cu_seqlens = [None] * 4, None
    return function.apply(
        *(operands[name] for name in names),
        *no_states,
        no_cu_seqlens,
        operands["chunk_size"],
        False,
    )


@torch.no_grad()
def main(folder: Path) -> None:
    mamba3 = load()
    repair_products()
    kernels = (unrounded, mamba3.mamba3_siso_combined)
    outputs = []
    for case in torch.load(folder / "cases.pt"):
        mixer = mamba3.Mamba3(**case["options"])
        mixer.load_state_dict(case["state"])
        for name, eps in case["eps"].items():
            mixer.get_submodule(name).eps = eps
        outputs.append([])
        for mamba3.mamba3_siso_combined in kernels:
            outputs[-1].append(mixer(case["hidden"]))
    torch.save(outputs, folder / "outputs.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
