"""What a backward pass asks of a device: nothing, for it runs on a thread of autograd's."""

from __future__ import annotations

from contextvars import Context

import pytest
import torch
from helpers.counts import Counts
from helpers.stand_in import StandIn
from zoo.attention import attention_model
from zoo.mamba import transformers_model

from captum_ssm import LatimFlow


@pytest.mark.parametrize("family", ["mamba", "gpt_neox"])
@pytest.mark.parametrize("rule", ["frozen", "centered"])
def test_what_a_backward_pass_asks_is_read_later(
    monkeypatch: pytest.MonkeyPatch, rule: str, family: str
) -> None:
    """CUDA runs hooks and backward functions on a thread of its own, whose context is empty."""
    make = transformers_model if family == "mamba" else attention_model
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kwargs: Context().run(grad, *args, **kwargs)
    )
    with StandIn() as device:
        model, ids = make(family).to("cuda"), torch.randint(8, (1, 7)).to("cuda")
        device.counts = Counts()
        with torch.no_grad():
            model(ids)
        own = device.counts.synchronisations
        device.counts = Counts()
        LatimFlow(model).attribute(ids, (-1, 3), rule=rule)
    # the target is brought to the device, and all that was noted is read at the end
    assert device.counts.synchronisations <= own + 2, device.counts.waits
