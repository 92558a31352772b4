"""Images and their relevance as pages hold them."""

from __future__ import annotations

import base64
import math

import numpy as np
import torch

from captum_ssm.viz.html.pictures import Raster, raster


def steps(made: Raster) -> np.ndarray:
    return np.frombuffer(base64.b64decode(made.steps), "i1").reshape(made.rows, made.columns)


def test_a_few_extremes_leave_the_others_their_steps():
    values = torch.ones(10, 10)
    values[3, 4] = -50.0
    made = raster(values, extremes=False)
    assert made.largest == 1.0
    assert steps(made)[3, 4] == -127 and steps(made)[0, 0] == 127
    assert raster(values, extremes=True).largest == 50.0


def test_what_is_no_number_has_no_step():
    for extremes in (True, False):
        made = raster(torch.tensor([[math.nan, 1.0, math.inf]]), extremes=extremes)
        np.testing.assert_array_equal(steps(made), [[-128, 127, -128]])
        nothing = raster(torch.zeros(2, 2), extremes=extremes)
        assert nothing.largest == 0.0 and not steps(nothing).any()
