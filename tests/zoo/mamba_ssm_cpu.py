"""The mamba_ssm package on the CPU.

mamba_ssm's modules call CUDA and Triton kernels through module globals. Here those globals are
pointed at the reference functions that mamba_ssm ships beside its kernels, so that its own
modules, unchanged, run forward and backward without a GPU. The references compute in float32
whatever the dtype of the input.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SKIP_REASON = "mamba-ssm needs special install steps, see CONTRIBUTING.md"

# transformers takes mamba_ssm's kernels for these models if it can import them at this point.
TRANSFORMERS_MODELS = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2",
    "nemotron_h", "zamba", "zamba2",
)  # fmt: skip


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: None = None, *,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """The function of the causal_conv1d package: ``x`` is (batch, channels, tokens)."""
    assert seq_idx is None
    channels, width = weight.shape
    out = F.conv1d(x, weight[:, None], bias, padding=width - 1, groups=channels)
    out = out[..., : x.shape[-1]]
    return out if activation is None else F.silu(out)


class MambaSSM:
    """mamba_ssm's classes, and factories for small models of them.

    ``fused`` chooses the path a mixer takes. False: the module calls its own submodules and a
    scan function. True: one function is handed every weight and no submodule is called, which
    needs causal_conv1d and so the ``mamba_ssm_fused`` fixture.
    """

    def __init__(self, modules: dict[str, ModuleType], *, causal_conv1d: bool) -> None:
        self.package = modules["mamba_ssm"]
        self.Mamba = self.package.Mamba
        self.Mamba2 = self.package.Mamba2
        self.MambaLMHeadModel = self.package.MambaLMHeadModel
        self._config = modules["mamba_ssm.models.config_mamba"].MambaConfig
        self._causal_conv1d = causal_conv1d

    def make_mamba(self, d_model: int = 8, *, fused: bool | None = None, **options: Any) -> Any:
        options = {"d_state": 4, "use_fast_path": self._path(fused)} | options
        return self.Mamba(d_model, **options)

    def make_mamba2(self, d_model: int = 8, *, fused: bool | None = None, **options: Any) -> Any:
        options = {
            "d_state": 4, "headdim": 4, "chunk_size": 8, "use_mem_eff_path": self._path(fused),
        } | options  # fmt: skip
        return self.Mamba2(d_model, **options)

    def make_lm(
        self, d_model: int = 8, *, fused: bool | None = None, ssm_cfg: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """A language model of two layers; ``options`` are those of ``MambaConfig``.

        The norms are RMSNorm modules; ``fused_add_norm=True`` has them applied by a function
        instead, together with the residual sum.
        """
        ssm_cfg = ssm_cfg or {}
        if ssm_cfg.get("layer") == "Mamba2":
            small = {"d_state": 4, "headdim": 4, "chunk_size": 8}
            small["use_mem_eff_path"] = self._path(fused)
        else:
            small = {"d_state": 4, "use_fast_path": self._path(fused)}
        options = {
            "n_layer": 2, "vocab_size": 16, "rms_norm": True, "fused_add_norm": False,
        } | options  # fmt: skip
        config = self._config(d_model=d_model, ssm_cfg=small | ssm_cfg, **options)
        return self.MambaLMHeadModel(config)

    def make_hybrid(self, d_model: int = 8, *, d_intermediate: int = 0, **options: Any) -> Any:
        """A language model whose second layer is attention; ``options`` are those of ``MHA``."""
        small = {"num_heads": 4, "num_heads_kv": 2, "causal": True}
        return self.make_lm(
            d_model, attn_layer_idx=[1], attn_cfg=small | options, d_intermediate=d_intermediate
        )

    def _path(self, fused: bool | None) -> bool:
        if fused and not self._causal_conv1d:
            raise ValueError("fused mixers need the mamba_ssm_fused fixture")
        return self._causal_conv1d if fused is None else fused


def install(
    monkeypatch: pytest.MonkeyPatch, *, causal_conv1d: bool, interpreted: bool = False
) -> MambaSSM:
    """Make mamba_ssm importable and runnable on the CPU until ``monkeypatch`` is undone.

    If ``interpreted``, the Triton kernels stay, for Triton's interpreter.
    """
    if importlib.util.find_spec("mamba_ssm") is None:
        pytest.skip(SKIP_REASON)
    modules = _import_mamba_ssm()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    _replace_cuda(monkeypatch, modules, with_causal_conv1d=causal_conv1d)
    if not interpreted:
        _replace_triton(monkeypatch, modules)
    return MambaSSM(modules, causal_conv1d=causal_conv1d)


@cache
def _import_mamba_ssm() -> dict[str, ModuleType]:
    """Import mamba_ssm once and return its modules, leaving ``sys.modules`` as it was."""
    for name in TRANSFORMERS_MODELS:
        if importlib.util.find_spec(f"transformers.models.{name}"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("selective_scan_cuda") is None:
            kernels = ModuleType("selective_scan_cuda")
            patch.setitem(sys.modules, "selective_scan_cuda", kernels)
        importlib.import_module("mamba_ssm")
        modules = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in ("mamba_ssm", "selective_scan_cuda")
        }
    if not hasattr(modules["selective_scan_cuda"], "fwd"):
        for name in modules:
            sys.modules.pop(name, None)
    return modules


def _replace_cuda(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType], *, with_causal_conv1d: bool
) -> None:
    scan = modules["mamba_ssm.ops.selective_scan_interface"]
    ssd = modules["mamba_ssm.ops.triton.ssd_combined"]
    mamba = modules["mamba_ssm.modules.mamba_simple"]
    mamba2 = modules["mamba_ssm.modules.mamba2"]
    attention = modules["mamba_ssm.modules.mha"]

    def convolve(x: Tensor, weight: Tensor, bias: Any, *none: bool | None) -> Tensor:
        *unused, activated = none
        assert not any(unused)
        return causal_conv1d(x, weight, bias, activation="silu" if activated else None)

    def convolve_back(
        x: Tensor, weight: Tensor, bias: Any, up: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        *unused, into, of_state, activated = rest
        assert not any([*unused, of_state])
        leaves = [y.detach().requires_grad_() for y in (x, weight, bias) if y is not None]
        with torch.enable_grad():
            out = causal_conv1d(*leaves, activation="silu" if activated else None)
        found = torch.autograd.grad(out, leaves, up)
        return into.copy_(found[0]), *found[1:], *[None] * (3 - len(found))

    conv = causal_conv1d if with_causal_conv1d else None
    for module in (scan, ssd, mamba, mamba2, attention):
        monkeypatch.setattr(module, "causal_conv1d_fn", conv)
    monkeypatch.setattr(ssd, "causal_conv1d_fwd_function", convolve)
    monkeypatch.setattr(ssd, "causal_conv1d_bwd_function", convolve_back)
    for module in (mamba, mamba2):
        monkeypatch.setattr(module, "causal_conv1d_update", None)
    for module in (scan, mamba):
        monkeypatch.setattr(module, "selective_scan_fn", scan.selective_scan_ref)
    monkeypatch.setattr(mamba, "mamba_inner_fn", scan.mamba_inner_ref)


def _replace_triton(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]) -> None:
    ssd = modules["mamba_ssm.ops.triton.ssd_combined"]
    norm = modules["mamba_ssm.ops.triton.layer_norm"]
    gated_norm = modules["mamba_ssm.ops.triton.layernorm_gated"]
    block = modules["mamba_ssm.modules.block"]
    mamba = modules["mamba_ssm.modules.mamba_simple"]
    mamba2 = modules["mamba_ssm.modules.mamba2"]
    lm = modules["mamba_ssm.models.mixer_seq_simple"]

    def add_norm(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
        eps: float = 1e-6, dropout_p: float = 0.0, prenorm: bool = False,
        residual_in_fp32: bool = False, is_rms_norm: bool = False,
    ) -> Any:  # fmt: skip
        assert dropout_p == 0.0
        total = x if residual is None else x + residual
        if residual_in_fp32:
            total = total.float()
        reference = norm.rms_norm_ref if is_rms_norm else norm.layer_norm_ref
        out = reference(total, weight, bias, eps=eps).to(x.dtype)
        return (out, total) if prenorm else out

    def chunk_scan(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
        seq_idx: None = None, cu_seqlens: None = None, return_final_states: bool = False,
        return_varlen_states: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        assert seq_idx is None and not return_final_states and not return_varlen_states
        return ssd.ssd_selective_scan(x, dt.to(x.dtype), A, B, C, **options)

    @wraps(mamba2.mamba_split_conv1d_scan_combined)
    def split_conv1d_scan(*args: Any, seq_idx: None = None, **options: Any) -> Tensor:
        assert seq_idx is None
        norm_weight = options["rmsnorm_weight"]
        if norm_weight is not None:
            group_size = len(norm_weight) // options["ngroups"]
            ssd.rmsnorm_fn = partial(gated_norm.rms_norm_ref, group_size=group_size)
        return ssd.mamba_split_conv1d_scan_ref(*args, **options)

    for module in (mamba, mamba2):
        monkeypatch.setattr(module, "selective_state_update", None)
    monkeypatch.setattr(mamba2, "mamba_chunk_scan_combined", chunk_scan)
    monkeypatch.setattr(mamba2, "mamba_split_conv1d_scan_combined", split_conv1d_scan)
    for module in (norm, block, lm):
        monkeypatch.setattr(module, "layer_norm_fn", add_norm)
    monkeypatch.setattr(norm, "rms_norm_fn", partial(add_norm, is_rms_norm=True))
    for module in (ssd, gated_norm):
        monkeypatch.setattr(module, "rmsnorm_fn", gated_norm.rms_norm_ref)
