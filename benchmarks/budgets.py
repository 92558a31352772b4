"""What calls ask of a GPU, counted on a device that stands in for one.

    python -m benchmarks.budgets --out benchmarks/budgets.json

Nothing is measured: launches, bytes, arithmetic and waits of the host are counted, which depend on
no machine.  What models run on a GPU as one kernel is one launch, and one more for its backward.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.counts import Counts
from benchmarks.stand_in import StandIn
from captum_ssm import ImplicitAttentionRollout, LatimALTI, LatimFlow, MambaAttribution
from captum_ssm.operators.kernels.scan_backward import selective_scan
from captum_ssm.tracing.repair.loops import replacing
from captum_ssm.tracing.repair.recurrences import rg_lru, wkv

FILE = Path(__file__).with_suffix(".json")
LAYERS = 2
LENGTHS = (256, 1024)
#: What may grow before a test fails.
SLACK = 1.05
COUNTED = ("launches", "synchronisations", "bytes", "flops")

Call = Callable[[nn.Module, Tensor], Any]
CALLS: dict[str, Call] = {
    "f and b": lambda model, ids: _gradient(model, ids),
    "rollout": lambda model, ids: ImplicitAttentionRollout(model).attribute(ids, query=-1),
    "MambaAttribution": lambda model, ids: MambaAttribution(model).attribute(ids, TARGET),
    "LatimFlow, frozen": lambda model, ids: LatimFlow(model).attribute(ids, TARGET, rule="frozen"),
    "LatimFlow": lambda model, ids: LatimFlow(model).attribute(ids, TARGET),
    "LatimALTI": lambda model, ids: LatimALTI(model).attribute(ids, TARGET),
}
TARGET = (-1, models.WORD)
FAMILIES = ("Mamba", "Mamba-2", "RG-LRU", "RWKV-4", "Gated DeltaNet", "softmax")


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def _state_and_last(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return rg_lru(x, *args, **kwargs)


#: What packages have kernels of, and what computes the same on a processor in their place; None is
#: the package's own.
_KERNELS: tuple[tuple[str, str, Callable[..., Any] | None], ...] = (
    (_modeling("mamba"), "mamba_selective_scan", selective_scan),
    (_modeling("mamba"), "causal_conv1d_fn", None),
    (_modeling("mamba2"), "mamba2_chunk_scan", None),
    (_modeling("mamba2"), "causal_conv1d_fn", None),
    (_modeling("recurrent_gemma"), "RecurrentGemmaRglru._rnn_scan", None),
    (_modeling("rwkv"), "rwkv_linear_attention", None),
    (_modeling("qwen3_next"), "torch_chunk_gated_delta_rule", None),
    (_modeling("qwen3_next"), "causal_conv1d_fn", None),
)


@contextmanager
def fused(device: StandIn) -> Iterator[None]:
    """A context in which the packages' loops and convolutions are kernels of the device.

    Args:
        device: the device.
    """

    def kernel(on_processor: Callable[..., Any] | None) -> Callable[..., Any]:
        return lambda original: device.kernel(on_processor or original)

    undo = replacing([(name, path, kernel(found)) for name, path, found in _KERNELS])
    try:
        yield
    finally:
        undo()
