"""Errors name what is wrong, and no adapter for what forward_func does."""

from __future__ import annotations

import pytest
import torch
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, LatimFlow
from captum_ssm.errors import InputError


@pytest.mark.parametrize("method", [LatimFlow, ImplicitAttentionRollout])
def test_a_mask_of_the_whole_batch_in_a_closure(method: type[LatimFlow]) -> None:
    model, ids = mamba_lm(), token_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    explain = method(lambda x: model(x, attention_mask=mask).logits, model=model)
    with pytest.raises(InputError, match="internal_batch_size"):
        explain.attribute(ids, (-1, 3), internal_batch_size=1)
