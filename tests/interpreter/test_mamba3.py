"""mamba_ssm's Mamba3 with its own kernel.

The kernel's cos, sin and tanh are instructions of NVIDIA's; NumPy's functions stand in for them.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from oracles import relative_error
from zoo.mamba3_cpu import Mamba3
from zoo.mamba_ssm_cpu import MambaSSM
from zoo.triton_interpreter import by_numpy

from captum_ssm.mixers.base import Call
from captum_ssm.mixers.mamba3 import mamba_ssm_mamba3

KERNELS = "mamba_ssm.ops.triton.mamba3."
INSTRUCTIONS = {"cos_approx": np.cos, "sin_approx": np.sin, "tanh_approx": np.tanh}
WIDTH = 16
#: Batch, tokens and options: sizes that the kernel accepts, powers of two, with up to three chunks.
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {}),
    (1, 2, {"ngroups": 2, "is_outproj_norm": True}),
    (2, 3, {"rope_fraction": 1.0}),
    (1, 37, {"ngroups": 2, "d_state": 16}),
    (1, 20, {"is_outproj_norm": True, "d_state": 16, "rope_fraction": 1.0}),
]


@pytest.fixture
def mamba3(mamba_ssm: MambaSSM, monkeypatch: pytest.MonkeyPatch) -> Mamba3:
    for name in ("mamba3_siso_fwd", "angle_dt"):
        module = importlib.import_module(KERNELS + name)
        for instruction in INSTRUCTIONS.keys() & vars(module).keys():
            monkeypatch.setattr(module, instruction, by_numpy(INSTRUCTIONS[instruction]))
    return Mamba3(mamba_ssm, monkeypatch)


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


@pytest.mark.parametrize(("batch", "tokens", "case"), CASES)
@torch.no_grad()
def test_the_kernel(
    mamba3: Mamba3, monkeypatch: pytest.MonkeyPatch, batch: int, tokens: int, case: dict[str, Any]
) -> None:
    """The operator, and the loop that stands in elsewhere, are the real kernel.

    As it is, the kernel converts to bfloat16, and that is the error then.
    """
    mixer = mamba3.make(WIDTH, **{"d_state": 8, "headdim": 8, "chunk_size": 16, **case})
    hidden = torch.randn(batch, tokens, WIDTH)
    looped = mixer(hidden)
    monkeypatch.setattr(mamba3.module, "mamba3_siso_combined", unrounded)
    precise = mixer(hidden)
    found = mamba_ssm_mamba3(mixer, Call((hidden,), {}, precise)).output()
    assert relative_error(found, precise) <= 1e-5 and relative_error(looped, precise) <= 1e-5
    as_it_is = importlib.import_module(KERNELS + "mamba3_siso_combined").mamba3_siso_combined
    monkeypatch.setattr(mamba3.module, "mamba3_siso_combined", as_it_is)
    assert 1e-4 < relative_error(found, mixer(hidden)) <= 1e-1
