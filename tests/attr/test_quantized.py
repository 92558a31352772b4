"""Models whose linear layers are custom kernels: explained as models with dequantized weights."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.every_method import CALLS, METHODS, named
from helpers.marks import slow_but
from oracles import relative_error
from torch import Tensor, nn
from zoo import mamba2
from zoo.extreme import token_ids

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.errors import NotLinearError
from captum_ssm.tracing import quantized


@torch.library.custom_op("captum_ssm_tests::of_codes", mutates_args=())
def of_codes(x: Tensor, codes: Tensor, scale: Tensor, steps: float) -> Tensor:
    """x W^T for 8 bits, or pairs of 4, without a derivative; x is rounded if there are steps."""
    if codes.dtype == torch.int32:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1) - 8
    size = x.abs().amax().clamp_min(1e-9) / steps if steps else 1.0  # one for all tokens
    return (x / size).round() * size @ (codes * scale).T if steps else x @ (codes * scale).T


class Kernel(nn.Module):
    """A linear layer with a weight that only its kernel can read."""

    def __init__(self, layer: nn.Linear, bits: int, steps: float) -> None:
        super().__init__()
        weight, self.bias, self.steps = layer.weight.detach(), layer.bias, steps
        scale = weight.abs().amax(1, keepdim=True) / (448 if bits == 8 else 7)
        codes = (weight / scale).round().int() + 8
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        few = (weight / scale).to(torch.float8_e4m3fn) if bits == 8 else packed
        self.register_buffer("codes", few)
        self.register_buffer("scale", scale)
        self.exact = (few.float() if bits == 8 else codes - 8.0) * scale

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes.to(x) if self.codes.dtype != torch.int32 else self.codes
        y = of_codes(x, codes, self.scale, self.steps)
        return y if self.bias is None else y + self.bias


class Coded(Tensor):
    """A weight of a class of its own, whose one operation is a product that rounds its input."""

    @staticmethod
    def __new__(cls, exact: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, exact.shape, dtype=exact.dtype)

    def __init__(self, exact: Tensor) -> None:
        self.exact = exact

    def dequantize(self) -> Tensor:
        return self.exact

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear((255.3 * x).round() / 255.3, weight.exact, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].exact)
        raise NotImplementedError(func)


def twins(bits: int, steps: float = 0.0) -> tuple[Any, Any]:
    """A model of kernels, or of coded weights for 16 bits, and one with dequantized weights."""
    plain = mamba2.make_model("bamba", mamba_proj_bias=True)
    model = deepcopy(plain)
    for name, layer in plain.named_modules():
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        if bits == 16:
            weight = Coded(layer.weight.detach())
            model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
            continue
        kernel = Kernel(layer, bits, steps)
        model.set_submodule(name, kernel)
        layer.weight.data = kernel.exact
    return model, plain


QUICK = [LatimFlow, MambaAttribution]


@pytest.mark.parametrize("bits", [4, 8])
@named(METHODS, quick=QUICK)
def test_kernels_without_a_derivative(method: Any, bits: int) -> None:
    (model, plain), ids = twins(bits), token_ids()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is rounded
        found = method(model).attribute(ids, target=(-1, 3))
    assert relative_error(found, method(plain).attribute(ids, target=(-1, 3))) < 1e-5


@pytest.mark.parametrize("name", slow_but([], sorted(CALLS.keys() - {"report"})))
def test_every_other_call(name: str) -> None:
    (model, plain), ids = twins(8), token_ids()
    calls = (CALLS[name](net, ids, (-1, 3)) for net in (model, plain))
    for found, expected in zip(*calls, strict=True):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("rule", slow_but(["balanced"], ["half", "centered", "balanced"]))
@pytest.mark.parametrize("bits", slow_but([16], [8, 16]))
def test_rounded_inputs(bits: int, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, plain), ids = twins(bits, steps=127.0), token_ids()
    monkeypatch.setattr(quantized, "free_memory", lambda device: 0)  # no weight is kept
    monkeypatch.setattr(quantized, "_TOLD", 1e-5)
    with pytest.warns(UserWarning, match="round their inputs") as told:
        found = LatimFlow(model, rule=rule).attribute(ids, target=(-1, 3))
    expected = LatimFlow(plain, rule=rule).attribute(ids, target=(-1, 3))
    assert relative_error(found, expected) < 1e-5
    with torch.no_grad():
        real, exact = (net(ids).logits for net in (model, plain))
    share = float((real - exact).norm() / exact.norm())
    assert f"output by {share:.1%}" in str(told[0].message)


def test_inputs_rounded_too_much() -> None:
    model, _ = twins(8, steps=2.0)
    with pytest.raises(NotLinearError, match=r"^Layer 'model\.layers\.0\.\S+', a quantized Kernel"):
        MambaAttribution(model).attribute(token_ids(), target=(-1, 3))
    model(token_ids())  # runs its kernels again
    assert all("forward" not in vars(module) for module in model.modules())
