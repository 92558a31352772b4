"""What hooks are made of: one thread's calls, the tensors in a call, calls without a cache."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from zoo.mamba import padded_batch

from captum_ssm import trace
from captum_ssm.tracing import repaired_scans
from captum_ssm.tracing.hooks import detached, in_this_thread, swap_first

pytest.importorskip("transformers")


def test_a_hook_is_silent_in_other_threads() -> None:
    hook = in_this_thread(lambda *args: sum(args))
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(hook(1, 2)))
    thread.start()
    thread.join()
    assert elsewhere == [None]
    assert hook(1, 2) == 3


def test_only_the_first_floating_tensor_is_swapped() -> None:
    tokens, x, y = torch.arange(3), torch.randn(3), torch.randn(3)
    call = ((tokens, None), {"nested": [x, y], "last": y})
    swapped, new = swap_first(call, torch.neg)
    assert new is not None and torch.equal(new, -x)
    (same, nothing), kwargs = swapped
    assert same is tokens and nothing is None
    assert kwargs["nested"][0] is new and kwargs["nested"][1] is y and kwargs["last"] is y
    assert call[1]["nested"][0] is x, "the call itself stays"


def test_without_a_floating_tensor_nothing_is_swapped() -> None:
    call = ((torch.arange(3), "text"), {})
    assert swap_first(call, torch.neg) == (call, None)


def test_detached_keeps_all_but_the_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    found = detached({"a": (2 * x, "text"), "b": [x, None]})
    assert found["a"][1] == "text" and found["b"][1] is None
    assert type(found["a"]) is tuple and type(found["b"]) is list
    assert torch.equal(found["a"][0], 2 * x) and torch.equal(found["b"][0], x)
    assert not found["a"][0].requires_grad and not found["b"][0].requires_grad


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
