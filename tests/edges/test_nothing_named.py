"""Edges that name nothing are refused, and the mean in place of messages is that of real tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo.small import mamba_lm, token_ids

from captum_ssm import Edges, knock_out
from captum_ssm.errors import OptionError
from tests.oracles import relative_error


@pytest.mark.parametrize("edges", [Edges(), Edges(selection=True)])
def test_edges_that_name_nothing_are_refused(edges: Edges) -> None:
    with pytest.raises(OptionError, match="names nothing"), knock_out(mamba_lm(), edges):
        pytest.fail("entered")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_mean_is_that_of_real_tokens(side: str) -> None:
    """A padded example loses the same messages as the example alone."""
    model: Any = mamba_lm().double()
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    pad = slice(0, 3) if side == "left" else slice(6, 9)
    mask[1, pad] = 0
    ids[1, pad] = 0
    real = mask[1].bool()
    padded, alone = (3, 0) if side == "left" else (0, 0)
    edges = Edges(1, padded + 1, "later")
    with torch.no_grad():
        with knock_out(model, edges, replace="mean"):
            batch = model(ids, attention_mask=mask).logits[1, real]
        plain = model(ids[1:, real]).logits[0]
        with knock_out(model, Edges(1, alone + 1, "later"), replace="mean"):
            one = model(ids[1:, real]).logits[0]
    assert relative_error(batch, one) <= 1e-9
    assert relative_error(one, plain) > 1e-6  # it was no empty cut
