"""mamba_ssm's Mamba2Simple on the CPU, with the package's references in place of its kernels."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor


class Simple:
    """mamba_ssm's Mamba2Simple on the CPU, with the package's references in place of kernels."""

    def __init__(self, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "mamba_ssm.modules.mamba2_simple"
        self.module = importlib.import_module(name)
        minimal = importlib.import_module("mamba_ssm.modules.ssd_minimal")
        for imported in (self.module, minimal):
            del sys.modules[imported.__name__]
            monkeypatch.setitem(sys.modules, imported.__name__, imported)
        mamba2 = sys.modules["mamba_ssm.modules.mamba2"]
        ssd = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
        plain_scan = ssd.ssd_selective_scan

        def from_states(x: Tensor, *args: Any, states: Tensor, **options: Any) -> Tensor:
            """The package's scan, and what its minimal one makes of the states alone."""
            dt, A, B, C = args
            out = plain_scan(x, dt, A, B, C, **options)
            if options.get("dt_softplus"):
                dt = torch.nn.functional.softplus(dt + options["dt_bias"])
            dt = dt.clamp(*options.get("dt_limit", (0.0, float("inf"))))
            B, C = (s.repeat_interleave(x.shape[2] // s.shape[2], 2) for s in (B, C))
            nothing = torch.zeros_like(x)
            run = minimal.ssd_minimal_discrete
            return out + run(nothing, A * dt, B, C, x.shape[1], initial_states=states[:, None])[0]

        def chunk_scan(*args: Any, initial_states: Any = None, **options: Any) -> Tensor:
            if initial_states is None:
                return mamba2.mamba_chunk_scan_combined(*args, **options)
            del options["chunk_size"], options["seq_idx"]
            return from_states(*args, states=initial_states, **options)

        def fused(*args: Any, initial_states: Any = None, **options: Any) -> Tensor:
            with pytest.MonkeyPatch.context() as patch:
                if initial_states is not None:
                    patch.setattr(
                        ssd,
                        "ssd_selective_scan",
                        lambda *a, **o: from_states(*a, states=initial_states, **o),
                    )
                return mamba2.mamba_split_conv1d_scan_combined(*args, **options)

        monkeypatch.setattr(self.module, "causal_conv1d_fn", mamba2.causal_conv1d_fn)
        monkeypatch.setattr(self.module, "mamba_chunk_scan_combined", chunk_scan)
        monkeypatch.setattr(self.module, "mamba_split_conv1d_scan_combined", fused)

    def make(self, width: int, *, fused: bool, **options: Any) -> Any:
        small = {"d_state": 5, "headdim": 4, "chunk_size": 8, "use_mem_eff_path": fused}
        return self.module.Mamba2Simple(width, **small | options)
