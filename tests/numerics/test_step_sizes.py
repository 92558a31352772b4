"""Step sizes from 1e-8 to 20, beside decays that underflow in one step or never fade."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from zoo.extreme import FAMILIES, METHODS, in_double, language_model, token_ids
from zoo.extreme import with_extreme_steps as extreme

from captum_ssm import trace

#: Of a single draw in float32.
LIMIT = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_float32_is_float64(method: str, family: str) -> None:
    model, ids = extreme(language_model(family)), token_ids()
    found, wanted = METHODS[method](model, ids), METHODS[method](in_double(model), ids)
    assert found.dtype == torch.float32 and wanted.dtype == torch.float64
    assert torch.isfinite(wanted).all()
    assert bool(wanted.any())
    assert relative_error(found, wanted) <= LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_are_their_modules(family: str) -> None:
    model = extreme(language_model(family))
    with trace(model) as record:
        model(token_ids())
    assert len(record.layers) == 2
    assert max(layer.reconstruction_error() for layer in record.layers) <= LIMIT
