"""Every method of the catalogue, held to the contract of a method; and the contract itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import METHODS, each_method, named
from torch import Tensor
from zoo.small import falcon_lm

from captum_ssm import ImplicitAttention, LatimALTI, LatimFlow, LatimNorm, MambaAttribution
from captum_ssm.testing.methods import CLAUSES, KINDS, check_method
from captum_ssm.testing.options import BASELINES, OPTIONS, Values

#: What is checked whatever else is, and what takes longer: options, by kinds of inputs.
QUICK = ("signature", "results", "delta", "traces", "modes", "captum")
BY_OPTION = ("padding", "parts", "precision")
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "residual_in_fp32": False}


class FrozenFlow(LatimFlow):
    """LatimFlow by the rule that can drop its constants."""

    name = "LatimFlow, frozen"
    default_rule = "frozen"


#: By its default rule, whose baseline is the mean, LatimFlow refuses to drop constants.
_DEFAULTS = {
    "zero_bias": Values(),
    "baselines": OPTIONS["baselines"]._replace(differ=(0.5, BASELINES), same=("mean", None)),
}


def check(method: Any, **given: Any) -> None:
    check_method(method, options=_DEFAULTS if method is LatimFlow else None, **given)


@named(METHODS, quick=(LatimFlow,))
def test_promises_of_captum(method: Any) -> None:
    check(method, clauses=QUICK)


@named([LatimFlow, ImplicitAttention, LatimNorm], quick=(LatimFlow,))
def test_options_on_padded_batches(method: Any) -> None:
    check(method, clauses=["padding"], kinds=["ids"])


@pytest.mark.slow
@each_method
@pytest.mark.parametrize("kind", KINDS)
def test_options_on_all_inputs(kind: str, method: Any) -> None:
    check(method, clauses=BY_OPTION, kinds=[kind])


@pytest.mark.slow
@each_method
@pytest.mark.parametrize("clause", ["options", "refusals"])
def test_values_of_options(clause: str, method: Any) -> None:
    check(method, clauses=[clause])


def test_every_clause_is_checked() -> None:
    assert {*QUICK, *BY_OPTION, "options", "refusals"} == {*CLAUSES}


@pytest.mark.slow
def test_a_rule_that_drops_constants() -> None:
    check_method(FrozenFlow, clauses=["results", "options", *BY_OPTION])


@pytest.mark.slow
@named([LatimFlow, MambaAttribution, LatimALTI])
def test_on_another_model(method: Any) -> None:
    chosen = ["results", "padding", "parts"]
    check(method, clauses=chosen, kinds=["ids"], language=lambda: falcon_lm(**SIZES))


def test_methods_differ_in_name() -> None:
    assert len({method.get_name() for method in METHODS}) == len(METHODS)


class OfNorms(LatimNorm):
    """A method of one's own, to be broken in one way at a time."""

    name = "Of Norms"

    def attribute(  # type: ignore[override]
        self,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        power: float = 1.0,
        per_token: bool = False,
        internal_batch_size: int | None = None,
    ) -> Any:
        options = {"per_token": per_token, "internal_batch_size": internal_batch_size}
        found = super().attribute.__wrapped__(
            self, inputs, target, additional_forward_args, **options
        )
        one, in_tuple = (found[0], True) if isinstance(found, tuple) else (found, False)
        one = self.changed(one, additional_forward_args, power)
        return (one,) if in_tuple else one

    def changed(self, found: Tensor, mask: Any, power: float) -> Tensor:
        return found * power


POWER = {"power": Values(differ=(2.0, 3.0), same=(1.0,))}


def broken(change: Callable[[OfNorms, Tensor, float], Tensor]) -> Any:
    """A method of one's own, whose result is changed by a function."""

    class Broken(OfNorms):
        name = "Broken"

        def changed(self, found: Tensor, mask: Any, power: float) -> Tensor:
            return change(self, found, power)

    return Broken


def leaves_a_hook(method: OfNorms, found: Tensor, power: float) -> Tensor:
    method.forward_func.register_forward_hook(lambda *_: None)
    return found * power


@torch.no_grad()
def writes_to_the_model(method: OfNorms, found: Tensor, power: float) -> Tensor:
    next(iter(find(method.forward_func))).mul_(1.0)
    return found * power


def find(function: Any) -> Any:
    return function.parameters() if hasattr(function, "parameters") else [torch.ones(1)]


def test_a_method_of_ones_own() -> None:
    chosen = ["signature", "results", "options", "padding", "parts", "traces"]
    check_method(OfNorms, options=POWER, clauses=chosen, kinds=["ids"])


@pytest.mark.parametrize(
    ("change", "clause", "said"),
    [
        (lambda _, found, power: found * power / found.shape[1], "padding",
         r"padding, ids, power=2\.0: example 1 differs by itself"),
        (lambda _, found, power: power * found / found.abs().max(), "padding",
         "example . differs by itself"),
        (leaves_a_hook, "traces", r"traces, ids: a call has changed : module"),
        (writes_to_the_model, "traces", "a call has changed backbone"),
        (lambda _, found, power: found.clone(), "options",
         r"power=2\.0: gives the same relevance as its default 1\.0"),
    ],
)  # fmt: skip
def test_a_broken_one_is_told_so(change: Any, clause: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_method(broken(change), options=POWER, clauses=[clause], kinds=["ids"])


def test_an_option_without_values_is_named() -> None:
    with pytest.raises(AssertionError, match=r"no values to try of \['power'\]"):
        check_method(OfNorms, clauses=["signature"])


def test_an_unknown_clause() -> None:
    with pytest.raises(ValueError, match="clauses names 'pading'"):
        check_method(OfNorms, clauses=["pading"])
