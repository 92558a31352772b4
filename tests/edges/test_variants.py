"""Effects of single-base variants, by one backward pass and by trying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import vim as vim_oracle
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm import LatimFlow, variant_effects
from captum_ssm.edges import mutagenesis
from captum_ssm.errors import GradientModeError, InputError, OptionError
from captum_ssm.models import Caduceus, HyenaDNA, OneHot

RULES = ("frozen", "half", "centered", "balanced")


def caduceus() -> Any:
    model = Caduceus(d_model=6, n_layer=2, num_classes=3, d_state=3)
    return OneHot(vim_oracle.randomise(model).double())


def hyenadna() -> Any:
    return OneHot(randomise(HyenaDNA(d_model=6, l_max=9, num_classes=3, filter_order=5)).double())


def sequences(batch: int = 2, length: int = 7) -> Tensor:
    x = torch.nn.functional.one_hot(torch.randint(4, (batch, length)), 4).mT.double()
    x[0, :, 3] = 0
    return x


def one_by_one(model: Any, x: Tensor, target: int) -> Tensor:
    out = torch.zeros_like(x)
    for example, base, position in (x == 0).nonzero().tolist():
        if x[example, :, position].any():
            changed = x[example : example + 1].clone()
            changed[0, :, position] = 0
            changed[0, base, position] = 1
            difference = model(changed) - model(x[example : example + 1])
            out[example, base, position] = difference[0, target].item()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("make", [hyenadna, caduceus])
def test_mutagenesis_is_a_run_for_each(make: Any) -> None:
    model, x = make(), sequences()
    wanted = one_by_one(model, x, 1)
    assert relative_error(mutagenesis(model, x, 1), wanted) <= 1e-12
    assert relative_error(mutagenesis(model, x, 1, at_a_time=5), wanted) <= 1e-12
    last = OneHot(model.model, bases_first=False)
    assert relative_error(mutagenesis(last, x.mT, 1), wanted.mT) <= 1e-12
    each = torch.cat([one_by_one(model, x, 0)[:1], one_by_one(model, x, 2)[1:]])
    assert relative_error(mutagenesis(model, x, [0, 2]), each) <= 1e-12


def test_mutagenesis_of_log_odds() -> None:
    model, x = hyenadna(), sequences()

    def odds(x: Tensor) -> Tensor:
        logits = model(x)
        return logits[:, :1] - logits[:, 1:].logsumexp(1, keepdim=True)

    wanted = one_by_one(odds, x, 0)
    assert relative_error(mutagenesis(model, x, 0, contrast="others"), wanted) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, *RULES])
@pytest.mark.parametrize("make", [caduceus, hyenadna])
def test_effects_are_differences_of_a_gradient(make: Any, rule: Any) -> None:
    model, x = make(), sequences()
    found = variant_effects(model, x, 1, rule=rule)
    if rule is None:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    else:  # relevance is the gradient times the input, whatever that is held against
        against = torch.randn_like(x)
        relevance = LatimFlow(model).attribute(x, 1, rule=rule, baselines=against)
        gradient = relevance / (x - against)
    for example, base, position in (x == 0).nonzero().tolist():
        column = x[example, :, position]
        wanted = torch.zeros(())
        if column.any():
            wanted = (
                gradient[example, base, position] - gradient[example, column.argmax(), position]
            )
        assert abs(found[example, base, position] - wanted) <= 1e-9
    assert not found[x == 1].any()
    last = OneHot(model.model, bases_first=False)
    assert relative_error(variant_effects(last, x.mT, 1, rule=rule).mT, found) <= 1e-9


def test_what_is_no_sequence_is_refused() -> None:
    model, x = caduceus(), sequences()
    for wrong in (x / 2, x.unsqueeze(0), x[:, :3], torch.ones_like(x)):
        for function in (variant_effects, mutagenesis):
            with pytest.raises(InputError, match=r"is not \(B, 4, L\) or \(B, L, 4\)"):
                function(model, wrong, 1)
    with pytest.raises(OptionError, match="rule='lrp'"):
        variant_effects(model, x, 1, rule="lrp")
    with (
        torch.inference_mode(),
        pytest.raises(GradientModeError, match=r"torch\.inference_mode\(\) forbids"),
    ):
        variant_effects(model, x, 1, rule=None)
