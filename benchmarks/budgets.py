"""What calls ask of a GPU, counted on a device that stands in for one.

    PYTHONPATH=tests python -m benchmarks.budgets

writes ``docs/speed/counts.csv`` anew.  Nothing is measured: launches, bytes, arithmetic and waits
of the host are counted, which depend on no machine.  What packages have a fused kernel of is one
launch, and one more for its backward.
"""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.counts import Counts
from helpers.stand_in import StandIn
from torch import Tensor, nn

from benchmarks import models
from benchmarks.report import write
from captum_ssm import ImplicitAttentionRollout, LatimALTI, LatimFlow, MambaAttribution
from captum_ssm.operators.kernels.scan_backward import selective_scan
from captum_ssm.tracing.repair.loops import replacing

FILE = Path(__file__).parents[1] / "docs" / "speed" / "counts.csv"
LAYERS, VOCABULARY = 2, 32
#: How much of a count may be added before a test fails, and of which.
SLACK, HELD = 1.05, ("launches", "synchronisations", "bytes")
LENGTHS = (256, 1024)
TARGET = models.target("Mamba")
#: What makes the vectors of all pairs of tokens is counted at the smaller length alone.
OF_PAIRS = ("LatimALTI",)

Model = nn.Module
#: Counts by name.
Row = dict[str, float]


# --- models --------------------------------------------------------------------------------------


#: Options of the small models.
SMALL: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba-2": {"state_size": 16, "head_dim": 16, "num_heads": 4},
    "RG-LRU": {"lru_width": 32, "num_attention_heads": 4, "intermediate_size": 64},
    "RWKV-4": {},
    "Gated DeltaNet": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
    },
    "softmax": {"num_attention_heads": 2, "intermediate_size": 64},
}
FAMILIES: dict[str, Callable[[int], Model]] = {
    name: partial(models.build, name, vocab_size=VOCABULARY, hidden_size=32, **options)
    for name, options in SMALL.items()
}


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


#: What packages have kernels of, and what computes the same on a processor where their own code
#: would hold the states of all tokens; None is their own code.
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
        return lambda original: device.kernel(on_processor or inspect.unwrap(original))

    undo = replacing([(name, path, kernel(found)) for name, path, found in _KERNELS])
    try:
        yield
    finally:
        undo()


# --- calls ---------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Model, Tensor], Any]] = {
    "f+b": models.gradient,
    "ImplicitAttentionRollout": lambda model, ids: ImplicitAttentionRollout(model).attribute(ids),
    "MambaAttribution": lambda model, ids: MambaAttribution(model).attribute(ids, TARGET),
    "LatimFlow, frozen": lambda model, ids: LatimFlow(model).attribute(ids, TARGET, rule="frozen"),
    "LatimFlow, centered": lambda model, ids: LatimFlow(model).attribute(
        ids, TARGET, rule="centered"
    ),
    "LatimALTI": lambda model, ids: LatimALTI(model).attribute(ids, TARGET),
}
#: Those beside f+b that are to take about as long.
NEAR = ("ImplicitAttentionRollout", "LatimFlow, frozen", "LatimFlow, centered")


def counted(model: Model, length: int, calls: tuple[str, ...]) -> dict[str, Row]:
    """What calls ask of the device, by their names.

    Args:
        model: on the host; it is sent to the device.
        length: how many tokens are explained.
        calls: names of :data:`CALLS`.
    """
    found = {}
    with StandIn() as device, fused(device):
        model.to("cuda")
        ids = (torch.arange(length) % VOCABULARY)[None].to("cuda")
        for name in calls:
            device.counts = Counts()
            CALLS[name](model, ids)
            found[name] = row(device.counts)
        model.to("cpu")
    return found


def row(counts: Counts) -> Row:
    """The numbers of the table."""
    return {
        "launches": counts.launches,
        "synchronisations": counts.synchronisations,
        "uploads": counts.uploads,
        "bytes": counts.bytes,
        "flops": counts.flops,
    }


def grown(found: Row, wanted: Row) -> list[str]:
    """The counts that are more than a twentieth above those of the table, by their names."""
    return [name for name in HELD if found[name] > SLACK * wanted[name]]


def of_family(family: str) -> dict[str, dict[str, Row]]:
    """The counts of a family, by length."""
    found = {}
    for length in LENGTHS:
        calls = tuple(x for x in CALLS if x not in OF_PAIRS or length == LENGTHS[0])
        found[str(length)] = counted(FAMILIES[family](LAYERS), length, calls)
    return found


def table() -> dict[str, dict[str, dict[str, Row]]]:
    """Read the counts that are committed: by family, length and call."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    with FILE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            family, length, call = line.pop("model"), line.pop("tokens"), line.pop("call")
            counts = {name: float(value) for name, value in line.items()}
            found.setdefault(family, {}).setdefault(length, {})[call] = counts
    return found


def main() -> None:
    torch.set_num_threads(1)  # by last digits some strips are left out, or not
    write(
        FILE,
        [
            {"model": name, "tokens": length, "call": call, **counts}
            for name in FAMILIES
            for length, calls in of_family(name).items()
            for call, counts in calls.items()
        ],
    )


if __name__ == "__main__":
    main()
