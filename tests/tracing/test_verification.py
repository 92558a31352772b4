"""What counts as reproducing a module's output."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles.vim import randomise

from captum_ssm import trace
from captum_ssm.errors import ReconstructionError
from captum_ssm.mixers import Architecture
from captum_ssm.models.vim import VimMixer
from captum_ssm.operators import SelectiveScan
from captum_ssm.tracing.verification import (
    TOLERANCES,
    Errors,
    combined_errors,
    output_errors,
    relative_error,
    require_same,
    tolerance_for,
)


def on_a_gpu(dtype: torch.dtype) -> Any:
    """What is asked of an output there."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=torch.Size((2, 9, 3)))


def test_float32_on_a_gpu_may_be_multiplied_in_ten_bits() -> None:
    """A product of numbers rounded to ten bits is off by up to 2^-10 of itself."""
    wide = tolerance_for(on_a_gpu(torch.float32))
    assert 2**-10 < wide < TOLERANCES[torch.float16]
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert tolerance_for(on_a_gpu(dtype)) == TOLERANCES[dtype]


def test_sums_over_many_tokens_may_round_more() -> None:
    def tolerance(tokens: int, dtype: torch.dtype) -> float:
        return tolerance_for(torch.ones(1, 1, 1, dtype=dtype).expand(1, tokens, 1))

    for dtype in (torch.float64, torch.float32):
        assert tolerance(1024, dtype) == TOLERANCES[dtype]
        assert tolerance(16_384, dtype) == pytest.approx(16 * TOLERANCES[dtype])
        assert tolerance(10**7, dtype) == 1e-3
    assert tolerance(10**7, torch.bfloat16) == TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_error_is_the_largest_difference_per_largest_entry(dtype: torch.dtype) -> None:
    real = (30 * torch.randn(2, 7, 5)).to(dtype)
    rebuilt = real.double() + torch.randn(2, 7, 5, dtype=torch.float64)
    a, b = rebuilt.numpy(), real.double().numpy()
    wanted = np.abs(a - b).max() / np.abs(b).max()
    assert relative_error(rebuilt, real) == pytest.approx(wanted, rel=1e-12)
    assert relative_error(real.clone(), real) == 0


def test_sums_with_random_signs_are_held_to_less() -> None:
    real = torch.randn(1, 100, 7)
    real[0, 0, 0] = 10
    off = real.clone()
    off[0, 50, 3] += 1
    assert output_errors(off, real).strict == pytest.approx(0.1)
    off = real + 0.001 * torch.randn(1, 100, 7)
    single, both = relative_error(off, real), output_errors(off, real).strict
    assert single < both < 10 * single
    assert output_errors(real.clone(), real) == (0, 0)


def test_no_operator_is_applied_for_sums_of_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = randomise(VimMixer(bimamba_type="v2", d_model=5, d_state=3)).double()
    with torch.no_grad(), trace(mixer) as record:
        real = mixer(torch.randn(2, 7, 5).double())
    linear = record.layers[0].linear
    monkeypatch.setattr(SelectiveScan, "apply", None)
    assert combined_errors(linear, real).sums <= 1e-9
    assert combined_errors(linear, 1.01 * real).sums > 1e-4


def test_what_is_no_number_is_no_small_error() -> None:
    assert not Errors(numbers=0.0, sums=float("nan")).strict <= 1


def test_what_is_said_of_another_output() -> None:
    mamba = Architecture("Mamba", "some", "some.Mixer")
    require_same("layers.3.mixer", mamba, error=1e-5, limit=1e-5)
    for error in (2e-5, float("nan"), float("inf")):
        with pytest.raises(ReconstructionError) as caught:
            require_same("layers.3.mixer", mamba, error, limit=1e-5)
        text = str(caught.value)
        assert "'layers.3.mixer' (Mamba)" in text and f"an error of {error:.1e}, more than" in text
        assert "verify=1e-2" in text and "like=" not in text
    with pytest.raises(ReconstructionError, match=r"some\.Mixer is served with like='its\.Model'"):
        require_same("layers.3.mixer", replace(mamba, like="its.Model"), 2e-5, limit=1e-5)
