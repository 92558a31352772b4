"""What hooks are made of: one thread's calls, the tensors in a call, calls without a cache."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from zoo.mamba import padded_batch

from captum_ssm import trace
from captum_ssm.tracing import repaired_scans
from captum_ssm.tracing.hooks import in_this_thread


def test_a_hook_is_silent_in_other_threads() -> None:
    hook = in_this_thread(lambda *args: sum(args))
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(hook(1, 2)))
    thread.start()
    thread.join()
    assert elsewhere == [None]
    assert hook(1, 2) == 3


@pytest.mark.parametrize("given", [{}, {"use_cache": True}, {"use_cache": None}])
def test_the_cache_is_off(model: Any, given: dict[str, Any]) -> None:
    model.config.use_cache = True
    tokens = torch.randint(19, (2, 5))
    assert model(tokens, **given).cache_params is not None
    with torch.no_grad(), trace(model) as t:
        assert model(tokens, **given).cache_params is None
        assert model(tokens, None, None, None, None, None, None, True).cache_params is None
        assert model.backbone(tokens, None, None, True).cache_params is None
    assert len(t.layers) == 9
    for layer in t.layers:
        assert layer.call.argument("cache_params") is None
        assert layer.reconstruction_error() <= 2e-5
    assert model.config.use_cache is True
    assert model(tokens).cache_params is not None


def test_the_other_arguments_are_kept_beside_use_cache(model: Any) -> None:
    tokens, mask = padded_batch([6, 2])
    with torch.no_grad():
        with repaired_scans():  # a trace's own loops, to the last digit
            wanted = model(tokens, mask, use_cache=False, output_hidden_states=True)
        with trace(model):
            found = model(tokens, mask, None, None, None, True, None, True)
    assert torch.equal(found.logits, wanted.logits)
    assert len(found.hidden_states) == 4


@pytest.mark.parametrize(("graph", "error"), [("none", ValueError), ("all", KeyboardInterrupt)])
@pytest.mark.parametrize("place", ["backbone.layers.1.mixer.x_proj", "lm_head"])
def test_hooks_go_when_the_model_fails(
    model: Any, snapshot: Any, graph: Any, error: type[BaseException], place: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    model.get_submodule(place).register_forward_pre_hook(fail)
    tokens = torch.randint(19, (2, 5))
    before = snapshot(model)
    with pytest.raises(error), trace(model, graph=graph):
        model(tokens)
    before.check()
