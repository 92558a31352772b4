"""Fused functions of packages, in whose place torch's stand while a run is observed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from oracles import relative_error
from torch import Tensor
from zoo import fla_cpu, fla_torch
from zoo.mamba_ssm_cpu import MambaSSM

from captum_ssm import LatimFlow
from captum_ssm.errors import NotLinearError, ReconstructionError
from captum_ssm.tracing.repair.fused import unfused

ORIGINALS: dict[str, tuple[str, ...]] = {
    "fla.modules.norm.layernorm": ("layer_norm", "rms_norm", "group_norm"),
    "fla.modules.mlp": ("swiglu", "swiglu_linear"),
    "fla.models.rwkv6.modeling_rwkv6": ("token_shift",),
    "fla.models.rwkv7.modeling_rwkv7": ("token_shift",),
}
SHIFT = "fla.modules.token_shift"


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> fla_cpu.FLA:
    """fla with its own autograd functions outside of mixers, forward in torch, no backward."""
    pytest.importorskip("fla", reason=fla_cpu.SKIP_REASON)
    modules = {name: importlib.import_module(name) for name in ORIGINALS}
    kept = [
        (modules[place], name, getattr(modules[place], name))
        for place, names in ORIGINALS.items()
        for name in names
    ]
    package = fla_cpu.install(monkeypatch)
    for module, name, original in kept:
        monkeypatch.setattr(module, name, original)

    def norm_kernel(
        x: Tensor, weight: Any, bias: Any, eps: float, residual: Any, is_rms_norm: bool,
        num_groups: int, **_: Any,
    ) -> tuple[Tensor, None, Tensor, Tensor]:  # fmt: skip
        total = x if residual is None else x + residual
        whole = total.view(-1, x.shape[-1] * num_groups)
        out = fla_torch.norm(
            whole, weight, bias, eps=eps, is_rms_norm=is_rms_norm, num_groups=num_groups
        )
        return out.view_as(x), None, torch.ones(1), total

    monkeypatch.setattr("fla.modules.norm.layernorm.layer_norm_fwd", norm_kernel)

    def shift_kernel(x: Tensor, cu_seqlens: None, *_: Any) -> tuple[Tensor, int, int, bool, Tensor]:
        difference = importlib.import_module(SHIFT).token_shift_ref(x, cu_seqlens)
        return difference, len(x), x.shape[1], True, x[:, -1]

    monkeypatch.setattr("fla.modules.activations.ops.swiglu_fwd", lambda x, y: F.silu(x) * y)
    monkeypatch.setattr("fla.modules.activations.ops.sqrelu_fwd", fla_torch.square_relu)
    monkeypatch.setattr(f"{SHIFT}.token_shift_fwd", shift_kernel)
    return package


@pytest.mark.parametrize(
    ("family", "fuse_swiglu"),
    [
        ("KDA", True),
        *(pytest.param(x, x != "GLA", marks=pytest.mark.slow) for x in ("GLA", "Mamba2", "Samba")),
    ],
)
def test_flow_through_fused_models(fla: fla_cpu.FLA, family: str, fuse_swiglu: bool) -> None:
    model = fla.model(family, norm_eps=fla_checks.EPS, fuse_swiglu=fuse_swiglu)
    ids, mask = torch.randint(19, (2, 9)), fla_checks.side_mask([9, 5], 9)
    found, delta = LatimFlow(model).attribute(ids, (-1, 3), mask, return_convergence_delta=True)
    assert delta.abs().max() <= 1e-5 and found[mask == 1].any()


def test_the_number_is_compared_where_no_kernel_runs(
    fla: fla_cpu.FLA, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = fla.model("KDA", norm_eps=fla_checks.EPS), torch.randint(19, (1, 9))

    def no_driver(*_: Any, **__: Any) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr("fla.modules.norm.layernorm.layer_norm_fwd", no_driver)
    with pytest.raises(RuntimeError, match="drivers"):
        model(ids)
    method = LatimFlow(lambda x: model(x).logits, model=model)
    assert method.attribute(ids, target=(-1, 3)).any()
    other = LatimFlow(lambda x: model(x).logits * (1 + torch.is_grad_enabled()), model=model)
    with pytest.raises(ReconstructionError, match="in a plain run"):
        other.attribute(ids, target=(-1, 3))


@pytest.mark.parametrize("family", ["RWKV6", "RWKV7"])
def test_flow_through_fused_channel_mixing(fla: fla_cpu.FLA, family: str) -> None:
    model = fla.model(family, norm_eps=fla_checks.EPS)
    ids, mask = torch.randint(19, (2, 9)), fla_checks.side_mask([9, 5], 9)
    wanted = LatimFlow(model).attribute(ids, (-1, 3), mask)
    own = importlib.import_module("fla.modules.activations.ops").sqrelu
    for layer in model.model.layers:
        layer.ffn.act_fn = own
    found, delta = LatimFlow(model).attribute(ids, (-1, 3), mask, return_convergence_delta=True)
    assert delta.abs().max() <= 1e-5 and relative_error(found, wanted) <= 1e-5
    assert all(layer.ffn.act_fn == own for layer in model.model.layers)


def test_token_shifts_compute_the_same(fla: fla_cpu.FLA) -> None:
    module = importlib.import_module(SHIFT)
    for bounds in (None, [0, 1, 4, 9]):
        x = torch.randn(2 if bounds is None else 1, 9, 6)
        packed = None if bounds is None else torch.tensor(bounds)
        wanted = module.token_shift_ref(x, packed)
        with unfused():
            found, last = module.token_shift(x, packed, output_cache=True)
        assert torch.equal(found, wanted)
        assert torch.equal(last, x[:, -1] if bounds is None else x[0, [0, 3, 8]])
    x = torch.randn(1, 9, 6, requires_grad=True)
    with unfused():
        found = module.token_shift(x[:, 4:], cache=x[:, 3])
        kernel = module.token_shift(x, packed, cache=torch.randn(3, 6))
    assert torch.equal(found, module.token_shift_ref(x)[:, 4:])
    assert type(kernel.grad_fn).__name__ == "TokenShiftBackward"


class Opaque(torch.autograd.Function):
    """ReLU squared, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 * ctx.saved_tensors[0].relu()


def test_what_stays_fused_is_named_of_a_batch_too(fla: fla_cpu.FLA) -> None:
    model = fla.model("RWKV6", norm_eps=fla_checks.EPS)
    for layer in model.model.layers:
        layer.ffn.act_fn = Opaque.apply
    ids, mask = torch.randint(19, (2, 9)), fla_checks.side_mask([9, 5], 9)
    for given in ((ids, (-1, 3), mask), (ids[:1], (-1, 3))):
        with pytest.raises(NotLinearError, match=r"custom autograd functions \(Opaque\)"):
            LatimFlow(model).attribute(*given)


@pytest.mark.parametrize(("rms", "groups"), [(True, 1), (False, 3)])
def test_norms_compute_the_same(fla: fla_cpu.FLA, rms: bool, groups: int) -> None:
    apply = importlib.import_module("fla.modules.norm.layernorm").LayerNormFunction
    x, residual, weight, bias = (torch.randn(2, 5, 12), torch.randn(2, 5, 12), *torch.randn(2, 12))
    given = x, weight, bias, residual, 0.1, True, False, rms, groups
    own = apply.apply(*given)
    with unfused():
        found = apply.apply(*given)
    assert all(relative_error(*pair) <= 1e-6 for pair in zip(found, own, strict=True))


@pytest.mark.parametrize(
    ("rms", "summed", "dtype"), [(True, True, torch.bfloat16), (False, False, torch.float32)]
)
def test_norms_of_mamba_ssm_compute_the_same(
    mamba_ssm: MambaSSM, rms: bool, summed: bool, dtype: torch.dtype
) -> None:
    norm = importlib.import_module("mamba_ssm.ops.triton.layer_norm")
    x, residual = torch.randn(2, 5, 12).to(dtype), torch.randn(2, 5, 12) if summed else None
    weight, bias = torch.randn(2, 12)
    no_second, no_scale = [None] * 3, None
    with unfused():
        found = norm.LayerNormFn.apply(
            x, weight, bias, residual, *no_second, 0.1, 0.0, no_scale, True, True, rms, False
        )
    total = x.float() if residual is None else x + residual
    reference = norm.rms_norm_ref if rms else norm.layer_norm_ref
    assert relative_error(found[0], reference(total, weight, bias, eps=0.1).to(dtype)) <= 1e-6
    assert torch.equal(found[1], total)


def test_nothing_stays_replaced(fla: fla_cpu.FLA) -> None:
    norm = importlib.import_module("fla.modules.norm.layernorm").LayerNormFunction
    mlp = importlib.import_module("fla.modules.mlp")
    mixing = importlib.import_module("fla.models.rwkv7.modeling_rwkv7").RWKV7FeedForward
    before, names = (norm.apply, mlp.swiglu), (sorted(vars(norm)), sorted(vars(mixing)))
    with unfused(), unfused():
        assert norm.apply != before[0] and mlp.swiglu != before[1]
    assert (norm.apply, mlp.swiglu) == before
    assert (sorted(vars(norm)), sorted(vars(mixing))) == names
