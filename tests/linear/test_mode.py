"""How relevance is shared, where constants come from, and what the rules refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.function_arguments import draw
from oracles.euler import apply, check, rules
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm.errors import NotLinearError

GATES = pytest.mark.parametrize("gate", ["frozen", "half"])


def shares(function, inputs, gate="frozen"):
    """Relevance of each input, per unit of what all of them have together."""
    found = check(function, inputs, gate)
    parts = [(g * x).sum() for g, x in zip(found.gradients, inputs, strict=True)]
    return torch.stack(parts) / sum(parts)


@GATES
def test_two_straight_factors_share(gate):
    for product in (
        lambda a, b: a * b,
        lambda a, b: torch.mul(input=a, other=b),
        lambda a, b: a.clone().mul_(b),
        lambda a, b: torch.einsum("blc,blc->bl", a, b),
        lambda a, b: torch.einsum("blc,bkc->blk", [a, b]),
        lambda a, b: a @ b.mT,
        lambda a, b: torch.bmm(a, mat2=b.transpose(1, 2)),
        lambda a, b: F.linear(a[0], b[0]),
        lambda a, b: F.linear(a[0], b[0], torch.ones(4).double()),
        lambda a, b: torch.addmm(torch.ones(4, 4).double(), a[0], b[0].mT, alpha=2),
        lambda a, b: torch.addcmul(torch.ones(6).double(), a, b),
    ):
        assert torch.allclose(shares(product, [draw(), draw()], gate), torch.tensor(0.5).double())


@GATES
def test_an_activation_as_one_factor(gate):
    wanted = [0.0, 1.0] if gate == "frozen" else [0.5, 0.5]
    for product in (
        lambda a, b: F.silu(a) * b,
        lambda a, b: b * F.gelu(a, approximate="tanh"),
        lambda a, b: F.silu(a).view(2, 24) * b.reshape(2, 24),
        lambda a, b: F.silu(a, inplace=False).mul(other=b),
        lambda a, b: nn.SiLU(inplace=True)(a.clone()) * b,
        lambda a, b: a.clone().relu_() * b,
        lambda a, b: torch.einsum("blc,blc->bl", [b, F.silu(a)]),
        lambda a, b: F.silu(a).mT @ b,
        lambda a, b: torch.stack([x * y for x, y in zip(torch.tanh(a), b, strict=True)]),
    ):
        found = shares(product, [draw(), draw()], gate)
        assert torch.allclose(found, torch.tensor(wanted).double())
    for gate_of in (torch.sigmoid, F.softplus, lambda x: x.softmax(-1)):  # a coefficient
        found = shares(lambda a, b, gate_of=gate_of: gate_of(a) * b, [draw(), draw()], gate)
        assert torch.equal(found, torch.tensor([0.0, 1.0]).double())


@GATES
def test_powers_of_one_tensor(gate):
    for function in (
        lambda x: x * x,
        lambda x: x**2,
        lambda x: x.square(),
        lambda x: x.relu() ** 2,
        lambda x: torch.einsum("blc,blc,blc->b", x, x, x),
        lambda x: x * x.mean(-1, keepdim=True),
        lambda x: F.silu(x) * F.gelu(x),
        lambda x: torch.pow(x, exponent=3),
        lambda x: x.abs() ** 0.5,
        lambda x: torch.exp(x) * x,
    ):
        assert check(function, [draw()], gate).is_live
    for function in (lambda x: x**-1, lambda x: x ** x.detach(), lambda x: 2**x):
        assert not check(function, [draw(True)], gate).is_live


def test_activations_where_their_input_is_zero():
    for function in (F.silu, F.gelu, torch.tanh, F.relu, torch.sin, torch.square, F.leaky_relu):
        x = draw() * (torch.rand(2, 4, 6) < 0.5)
        found = check(lambda x, function=function: function(x) + 0 * x, [x])
        assert torch.isfinite(found.gradients[0]).all() and not function(x)[x == 0].any()
    for function, slope in ((F.silu, 0.5), (F.gelu, 0.5), (torch.tanh, 1.0), (F.elu, 1.0)):
        with rules() as mode:
            x = mode.leaf(torch.zeros(3, dtype=torch.float64))
            (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert (gradient - slope).abs().max() <= 1e-6


def test_without_constants_nothing_is_left_of_them():
    model = randomise(nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.LayerNorm(6))).double()
    c = draw()

    def function(x: Tensor) -> Tensor:
        y = model(x + c)
        y = torch.cat([c, y], 1)
        y[:, 1] = c[:, 0]
        y[:, 2].copy_(c[:, 1])
        return F.pad(y, (1, 1), value=2.0)

    found = apply(function, [draw()], constants=False)
    assert found.delta <= 1e-12 and not found.constants
    assert not found.outputs[0][:, :4].any()  # all that was constant alone


def test_masks_are_kept_where_constants_are_not():
    mask = torch.zeros(6).double()
    mask[3:] = torch.finfo(torch.float32).min
    scores = apply(lambda x: (x + mask).softmax(-1), [draw()], constants=False).outputs[0]
    assert not scores[..., 3:].any() and (scores[..., :3] > 0).all()
    hidden = torch.arange(6) > 2
    scores = apply(
        lambda x: x.masked_fill(hidden, float("-inf")).softmax(-1), [draw()], constants=False
    ).outputs[0]
    assert not scores[..., 3:].any() and (scores[..., :3] > 0).all()


def test_what_runs_under_no_grad_is_a_coefficient():
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = F.linear(x + 1, torch.eye(6).double(), torch.ones(6).double())
            frozen = frozen * x
        return frozen * x + x.detach()

    assert check(function, [draw()]).is_live


def test_the_input_itself_may_be_changed_in_place():
    with rules() as mode:
        x = mode.begin(draw())
        root = mode.root.detach().clone()
        x *= 2
        x += 1
        assert torch.equal(mode.root.detach(), root)
        (gradient,) = torch.autograd.grad(x.sum(), mode.root)
    assert torch.equal(gradient, torch.full_like(root, 2))


def test_a_product_with_a_bias_may_be_changed_in_place_row_by_row():
    """As PEFT does for adapters of each example; the product of three dimensions is a view."""
    weight, bias = torch.randn(6, 6).double(), torch.randn(6).double()

    def function(x: Tensor) -> Tensor:
        out = F.linear(x, weight, bias)
        for row in range(len(x)):
            out[[row]] += 2 * x[[row]]
        return out

    assert check(function, [draw()]).is_live


def test_unknown_functions_are_named():
    for function, name in (
        (lambda x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
        (lambda x: torch.lgamma(x), "lgamma"),
        (lambda x: x.clone().digamma_(), "digamma_"),
        (lambda x: torch.linalg.svdvals(x), "svdvals"),
    ):
        with pytest.raises(NotLinearError, match=rf"'here'.*{name}") as caught:
            apply(function, [draw()])
        assert isinstance(caught.value, NotImplementedError)
    with pytest.raises(NotLinearError, match="without labels, return the logits"):
        apply(lambda x: F.cross_entropy(x[0], torch.zeros_like(x[0])), [draw()])
    # of coefficients any function may be taken
    assert check(lambda x: torch.lgamma(x.exp()) * x, [draw()]).is_live
