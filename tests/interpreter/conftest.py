"""Triton kernels, ours and those of packages, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zoo import fla_cpu, mamba_ssm_cpu, triton_interpreter


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> Iterator[None]:
    """Kernels are made fit for the interpreter once."""
    with pytest.MonkeyPatch.context() as patch:
        triton_interpreter.install(patch)
        yield


@pytest.fixture
def fla() -> fla_cpu.FLA:
    """flash-linear-attention as it is."""
    return fla_cpu.as_it_is()


@pytest.fixture
def mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> mamba_ssm_cpu.MambaSSM:
    """mamba_ssm with its Triton kernels, mixers fused; what it has in CUDA is replaced."""
    return mamba_ssm_cpu.install(monkeypatch, causal_conv1d=True, interpreted=True)
