"""Every method holds operators to their modules: where asked to, and LatimFlow by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import every_method
from helpers.adapters import forgetting_the_skip
from torch import Tensor, nn
from zoo.language import word_tokenizer
from zoo.small import mamba_lm, token_ids

from captum_ssm import (
    ImplicitAttention,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaLRP,
    SSMLLMAttribution,
    compare,
)
from captum_ssm.errors import ReconstructionError
from captum_ssm.tracing import verification

pytestmark = pytest.mark.slow

FLOWS = [LatimFlow, MambaLRP]
TARGET = (-1, 3)
LAYERS = r"Layer 'backbone\.layers\.[0-2]\.mixer' \(\w+\).* with an error of \d\.\de[-+]\d\d, more "


def with_wrong_adapter(model: Any) -> Any:
    forgetting_the_skip(model.backbone.layers[0].mixer)
    return model


Ask = Callable[[nn.Module, Tensor, Any], Any]
TWO = [TARGET, (0, 1)]
#: What else than ``attribute`` takes the argument.
OTHERS: dict[str, Ask] = {
    "matrices": lambda m, ids, check: ImplicitAttention(m).matrices(ids, verify=check),
    "states": lambda m, ids, check: ImplicitAttention(m).states(ids, [1], verify=check),
    "factors": lambda m, ids, check: ImplicitAttention(m).factors(ids, [1], verify=check),
    "norms": lambda m, ids, check: LatimNorm(m).maps(ids, verify=check),
    "alti": lambda m, ids, check: LatimALTI(m).maps(ids, verify=check),
    "logit": lambda m, ids, check: LatimLogit(m).decompose(ids, TARGET, verify=check),
    "flow": lambda m, ids, check: LatimFlow(m).decompose(ids, TARGET, verify=check),
    "targets": lambda m, ids, check: LatimFlow(m).decompose_each(ids, TWO, verify=check),
    "delta": lambda m, ids, check: MambaLRP(m).compute_convergence_delta(
        torch.zeros(ids.shape), ids, TARGET, verify=check
    ),
    "each": lambda m, ids, check: MambaLRP(m).attribute_each(ids, TWO, verify=check),
    "compare": lambda m, ids, check: compare(
        m, ids, [LatimFlow], TARGET, options={"LatimFlow": {"verify": check}}
    ),
    "texts": lambda m, ids, check: SSMLLMAttribution(LatimFlow(m), word_tokenizer()).attribute(
        "anna owns the lamp", target="bob", verify=check
    ),
}


def asked(name: str) -> Ask:
    if name in OTHERS:
        return OTHERS[name]
    (method,) = (m for m in every_method.METHODS if m.__name__ == name)
    return lambda model, ids, check: method(model).attribute(ids, target=TARGET, verify=check)


NAMES = [*(m.__name__ for m in every_method.METHODS), *OTHERS]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_adapter_is_found_where_asked_for(name: str) -> None:
    model, ids, ask = mamba_lm(), token_ids(), asked(name)
    ask(model, ids, True)
    with_wrong_adapter(model)
    with pytest.raises(ReconstructionError, match=f"{LAYERS}than 1e-05") as caught:
        ask(model, ids, True)
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(ReconstructionError, match=f"{LAYERS}than 1e-03"):
        ask(model, ids, 1e-3)
    ask(model, ids, False)


@pytest.mark.parametrize("method", FLOWS)
def test_the_delta_does_not_tell_and_the_check_is_on_by_default(method: Any) -> None:
    model, ids = with_wrong_adapter(mamba_lm()), token_ids()
    for call in (
        lambda **options: method(model).attribute(ids, TARGET, **options),
        lambda **options: method(model).decompose(ids, TARGET, **options),
        lambda **options: method(model).attribute_each(ids, [TARGET], **options),
    ):
        with pytest.raises(ReconstructionError, match=LAYERS):
            call()
        call(verify=False)
    relevance, delta = method(model).attribute(
        ids, TARGET, verify=False, return_convergence_delta=True
    )
    assert delta.abs().max() <= 1e-5 * relevance.abs().sum()  # and yet the relevance is wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    """Modules then compute in less than what they return has bits for."""
    model, ids = mamba_lm(use_bias=True), token_ids()
    with torch.autocast("cpu", dtype):
        LatimFlow(model).attribute(ids, TARGET, verify=True)
        ImplicitAttention(model).attribute(ids, TARGET, verify=True)
    with_wrong_adapter(model)
    with torch.autocast("cpu", dtype), pytest.raises(ReconstructionError, match=LAYERS):
        LatimFlow(model).attribute(ids, TARGET)


@pytest.mark.parametrize("method", [ImplicitAttention, LatimFlow, LatimLogit])
def test_rounding_is_nobodys_fault(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a bound is less than the module's own rounding, float64 tells whose error it is."""
    monkeypatch.setitem(verification.TOLERANCES, torch.float32, 1e-9)
    model, ids = mamba_lm(), token_ids()
    method(model).attribute(ids, TARGET)
    with_wrong_adapter(model)
    with pytest.raises(ReconstructionError, match=LAYERS):
        method(model).attribute(ids, TARGET)
