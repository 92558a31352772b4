"""Adapters that fail, or return what cannot stand for their mixer: named, whoever asks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, register_mixer, trace
from captum_ssm.errors import AdapterError, CachedStateError, GradientModeError
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.operators import Chain, Diagonal, ElementwiseRecurrence, Operator, Shape
from captum_ssm.tracing import find_mixers
from captum_ssm.tracing.adapter import linear_form

WIDTH, BATCH, TOKENS = 4, 2, 5


class Smoothing(nn.Module):
    """out(h), h[t] = a[t] h[t-1] + value(x[t])."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.decay, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        v, a = self.value(x), torch.sigmoid(self.decay(x))
        state, states = torch.zeros_like(v[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + v[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Smoothing()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x)


def right(module: Any, call: Call) -> LinearMixer:
    x = call.hidden_states
    values = module.value(x)[..., None]
    operator = ElementwiseRecurrence(torch.sigmoid(module.decay(x)))
    return LinearMixer(values, operator, lambda y: module.out(y.flatten(2)))


class Other(ElementwiseRecurrence):
    change: Callable[[Tensor], Tensor]

    def apply(self, v: Tensor) -> Tensor:
        return type(self).change(super().apply(v))


def with_apply(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Call], LinearMixer]:
    class Changed(Other):
        pass

    Changed.change = staticmethod(change)

    def adapter(module: Any, call: Call) -> LinearMixer:
        decay = torch.sigmoid(module.decay(call.hidden_states))
        return replace(right(module, call), operator=Changed(decay))

    return adapter


def changed(**changes: Callable[[LinearMixer], Any]) -> Callable[[Any, Call], LinearMixer]:
    def adapter(module: Any, call: Call) -> LinearMixer:
        linear = right(module, call)
        return replace(linear, **{name: change(linear) for name, change in changes.items()})

    return adapter


def identity(shape: tuple[int, ...]) -> Diagonal:
    return Diagonal(torch.ones(1, 1, 1, 1), Shape(*shape))


def resized(*shape: int) -> Callable[[Any, Call], LinearMixer]:
    def adapter(module: Any, call: Call) -> LinearMixer:
        values = call.hidden_states.sum() * torch.ones(shape)
        return replace(right(module, call), values=values, operator=identity(shape))

    return adapter


def named(component: str | None) -> Callable[[Any, Call], LinearMixer]:
    def adapter(module: Any, call: Call) -> LinearMixer:
        linear = right(module, call)
        shape = linear.operator.shape
        after = Diagonal(torch.ones(1, 1, 1, 1), shape, component)
        return replace(linear, operator=Chain(after, linear.operator))

    return adapter


def raising(error: Exception) -> Callable[[Any, Call], LinearMixer]:
    def adapter(module: Any, call: Call) -> LinearMixer:
        raise error

    return adapter


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (lambda module, call: None, r"returned None in place of a .*\.LinearMixer"),
    "a tensor": (
        lambda module, call: call.hidden_states,
        r"returned a tensor of shape \(2, 5, 4\)",
    ),
    "values of three dimensions": (
        changed(values=lambda m: m.values.squeeze(-1)),
        r"values=a tensor of shape \(2, 5, 4\) .*in place of a floating tensor \(B, L, H, P\)",
    ),
    "integer values": (changed(values=lambda m: m.values.long()), r"torch\.int64 in place of a fl"),
    "a matrix as operator": (
        changed(operator=lambda m: m.operator.dense()),
        r"operator=a tensor of shape \(2, 5, 5\) .*captum_ssm\.operators\.Operator",
    ),
    "an operator on other heads": (
        changed(operator=lambda m: identity((2, 5, 2, 2))),
        r"values of shape \(2, 5, 4, 1\) but an operator of shape \(2, 5, 2, 2\)",
    ),
    "fewer tokens": (resized(2, 3, 4, 1), r"\(2, 3, 4, 1\) .* returned \(2, 5, 4\).*with \(2, 5\)"),
    "another batch": (resized(1, 5, 4, 1), r"\(1, 5, 4, 1\) .* must begin with \(2, 5\)"),
    "no projection": (changed(project=lambda m: None), r"project=None in place of a function"),
    "a floating mask": (changed(mask=lambda m: torch.ones(2, 5)), r"mask=.*booleans .*= \(2, 5\)"),
    "a component of another name": (
        named("forget gate"),
        r"a Diagonal of component='forget gate'.*\['activation', 'conv', 'gate', 'norm', 'scan', 's"
        r"kip'\], or None",
    ),
    "an exception": (raising(KeyError("gate")), r"<locals>\.adapter raised KeyError: 'gate'"),
}
#: Wrong only once they are used.
WRONG_LATER: dict[str, tuple[Any, str]] = {
    "a projection to another width": (
        changed(project=lambda m: lambda y: torch.cat([m.project(y)] * 2, -1)),
        r"project that returns a tensor of shape \(2, 5, 8\) .*not a tensor of \(2, 5, 4\)",
    ),
    "a projection that fails": (
        changed(project=lambda m: lambda y: m.project(y.transpose(1, 2)) @ torch.ones(3)),
        r"project that raised RuntimeError: ",
    ),
    "a projection to nothing": (
        changed(project=lambda m: lambda y: None),
        r"project that returns None, not a tensor of \(2, 5, 4\)",
    ),
    "an operator that loses a token": (
        with_apply(lambda y: y[:, 1:]),
        r"operator that turns values of shape \(2, 5, 4, 1\) into \(2, 4, 4, 1\)",
    ),
}
#: Wrong only where a gradient is wanted.
CUT: dict[str, tuple[Any, str]] = {
    "values": (
        changed(values=lambda m: m.values.detach()),
        "cut values off from call.hidden_states",
    ),
    "the operator": (
        with_apply(lambda y: y.detach()),
        "cut the operator's output off from its values",
    ),
    "the projection": (
        changed(project=lambda m: lambda y: m.project(y.detach()).detach()),
        "cut project's output off from its argument",
    ),
}


def model_with(adapter: Any) -> nn.Module:
    register_mixer(Smoothing, adapter)
    return nn.Sequential(Block(), Block()).eval()


def assert_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message) as caught:
        call()
    text = str(caught.value)
    assert f"a {__name__}.Smoothing: its adapter {__name__}." in text and "Layer '" in text
    assert "docs/howto/adding_an_architecture.md" in text
    assert isinstance(caught.value, RuntimeError)


def inputs() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


def traced(model: Any, x: Any, **options: Any) -> Any:
    with torch.no_grad(), trace(model, **options) as t:
        model(x)
    return t.layers


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_a_mixer_is_named_by_whoever_asks(case: str) -> None:
    adapter, message = WRONG[case]
    model, x = model_with(adapter), inputs()
    assert_named(lambda: traced(model, x), rf"Layer '0\.mixer'.*{message}")
    later = traced(model, x, operators=False)
    assert_named(lambda: later[1].linear, rf"Layer '1\.mixer'.*{message}")
    for method in (ImplicitAttentionRollout, LatimFlow, LatimLogit):
        assert_named(lambda m=method: m(model).attribute(x, target=(-1, 2)), message)  # type: ignore[misc]


@pytest.mark.parametrize("case", WRONG_LATER)
def test_what_shows_when_it_is_used(case: str) -> None:
    adapter, message = WRONG_LATER[case]
    model, x = model_with(adapter), inputs()
    assert_named(lambda: traced(model, x)[0].verify(), rf"Layer '0\.mixer'.*{message}")
    assert_named(lambda: LatimFlow(model).attribute(x, target=(-1, 2)), message)


@pytest.mark.parametrize("case", CUT)
def test_what_no_gradient_gets_through(case: str) -> None:
    adapter, message = CUT[case]
    model, x = model_with(adapter), inputs()
    ImplicitAttentionRollout(model).attribute(x, query="last", verify=True)  # needs no gradient
    flow = LatimFlow(model)
    assert_named(lambda: flow.attribute(x, target=(-1, 2), rule="frozen"), message)
    if case != "the operator":  # by the rules that divide it is asked for its adjoint itself
        assert_named(lambda: flow.attribute(x, target=(-1, 2)), message)


class Scaled(Operator):
    def __init__(self, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        self.shape = Shape(*weight.shape)
        self.weight, self.change = weight, change

    def apply(self, v: Tensor) -> Tensor:
        return self.change(v * self.weight)


def test_an_adjoint_by_torch_needs_the_gradient() -> None:
    weight, u = torch.randn(2, 2, 3, 4, 1).unbind()
    torch.testing.assert_close(Scaled(weight, lambda y: y).transpose(u), weight * u)
    with pytest.raises(GradientModeError, match=r"Scaled\.apply detaches its result"):
        Scaled(weight, Tensor.detach).transpose(u)
    nothing = Scaled(torch.zeros_like(weight), Tensor.detach)
    assert not nothing.transpose(u).any()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_right_adapter_serves_with_and_without_gradients(recorded: bool, asked: bool) -> None:
    model, x = model_with(right), inputs().requires_grad_()
    mixer = find_mixers(model)[0]
    with torch.set_grad_enabled(recorded):
        linear = linear_form(mixer, Call((x,), {}, mixer.module(x)))
    with torch.set_grad_enabled(asked):
        out = linear.project(linear.operator.affine(linear.values))
        torch.testing.assert_close(out, mixer.module(x))
    assert out.requires_grad == asked


class EndOfARepeatedRun(Exception):
    """As torch's checkpoints raise it inside of a forward that they run again."""

    __module__ = "torch.utils.checkpoint"


@pytest.mark.parametrize(
    "error",
    [
        CachedStateError("a cache"),
        MemoryError(),
        ImportError("kernels"),
        torch.OutOfMemoryError(),
        EndOfARepeatedRun(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_say_something_else_stay_what_they_are(error: Exception) -> None:
    model = model_with(raising(error))
    with pytest.raises(type(error)) as caught:
        LatimFlow(model, recompute=False).attribute(inputs(), target=(-1, 2))
    assert caught.value is error
