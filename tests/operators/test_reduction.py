"""How the matrices of many channels become one."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.errors import OptionError
from captum_ssm.operators import discard_smallest


def test_discard_smallest_by_hand() -> None:
    values = torch.tensor([[5.0, 1.0, 3.0, 2.0, 4.0], [-1.0, -5.0, 0.0, 0.0, -2.0]])
    assert discard_smallest(0.4)(values).tolist() == [4.0, pytest.approx(-1 / 3)]
    assert discard_smallest(0.0)(values).tolist() == [3.0, pytest.approx(-1.6)]
    assert discard_smallest(0.99)(values).tolist() == [5.0, 0.0]
    # half of five channels is two and a half: two are dropped
    assert discard_smallest(0.5)(values).tolist() == [4.0, pytest.approx(-1 / 3)]


@pytest.mark.parametrize("percent", [0, 1, 29, 50, 58, 99])
def test_discard_smallest_drops_the_asked_number(percent: int) -> None:
    values = torch.arange(100.0)[torch.randperm(100)]
    wanted = (percent + 99) / 2  # the mean of percent, ..., 99
    assert float(discard_smallest(percent / 100)(values)) == pytest.approx(wanted)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_discard_smallest_refuses(ratio: float) -> None:
    with pytest.raises(OptionError, match="ratio"):
        discard_smallest(ratio)
