"""timm and mambavision beside a CPU build of torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from zoo import mamba_ssm_cpu


def timm() -> Any:
    """The package; torchvision names operators that a CPU build lacks when it is imported."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
    return pytest.importorskip("timm", reason="timm needs torchvision, see CONTRIBUTING.md")


def mambavision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """mambavision's models, with the reference scan of mamba_ssm until ``monkeypatch`` is undone.

    Needs :func:`timm` first.
    """
    mamba_ssm_cpu.install(monkeypatch, causal_conv1d=False)
    reason = "mambavision is installed with timm, see CONTRIBUTING.md"
    pytest.importorskip("mambavision", reason=reason)
    models = importlib.import_module("mambavision.models.mamba_vision")
    scans = sys.modules["mamba_ssm.ops.selective_scan_interface"]
    monkeypatch.setattr(models, "selective_scan_fn", scans.selective_scan_ref)
    return models


#: Operators are defined as long as what defined them exists.
_kept: list[torch.library.Library] = []
