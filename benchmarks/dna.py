"""Relevance of every base of long DNA, by LatimFlow on a Caduceus of both strands and a HyenaDNA.

    python -m benchmarks.dna --out results

prints time and peak memory on a CPU at an eighth of the length and at the whole; both models have
two layers and random weights.  The exit status is 1 if the program's own time grows by more than
the length to the power of 1.15, which leaves room for the logarithm of Fourier transforms, if
memory grows by more than the length to the power of 1.05, or if parts do not add up.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import measure
from benchmarks.report import markdown, write
from captum_ssm import LatimFlow, variant_effects
from captum_ssm.models import Caduceus, HyenaDNA, OneHot

SHORTER = 8
#: Bounds: growth exponents of time and memory, and what is left of an output.
TIME, MEMORY, DELTA = 1.15, 1.05, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder for dna.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, model in models(options.width, options.length).items():
        for what, call in calls(OneHot(model)).items():
            print(f"{name}, {what}", file=sys.stderr, flush=True)
            lengths = (options.length // SHORTER, options.length)
            costs = [
                measure(lambda x=x, call=call: call(x), repeats=1) for x in map(sequence, lengths)
            ]
            time, memory = (
                math.log(last / first) / math.log(SHORTER)
                for first, last in (
                    [cost.own_seconds for cost in costs],
                    [cost.mebibytes or 1 for cost in costs],
                )
            )
            rows += [
                {
                    "model": name,
                    "call": what,
                    "L": length,
                    "own seconds": cost.own_seconds,
                    "time exponent": time,
                    "peak MiB": cost.mebibytes,
                    "memory exponent": memory,
                    "left over": float(cost.result[1].abs().max()),
                }
                for length, cost in zip(lengths, costs, strict=True)
            ]
    print(markdown(rows))
    if options.out is not None:
        write(options.out / "dna.csv", rows)
    if not all(map(passed, rows)):
        raise SystemExit(1)


def models(width: int, length: int) -> dict[str, nn.Module]:
    """By name, classifiers of DNA of up to so many bases."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "HyenaDNA": HyenaDNA(width, 2, l_max=length, num_classes=2),
        "Caduceus-PS": Caduceus(width, 2, num_classes=2),
    }
    return {name: model.eval().requires_grad_(False) for name, model in made.items()}


def calls(reader: nn.Module) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """By name, from a sequence to something of its shape, and what it leaves of the output."""

    def flow(x: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = LatimFlow(reader).attribute(
            x, 1, return_convergence_delta=True
        )
        return found

    def variants(x: Tensor) -> tuple[Tensor, Tensor]:
        return variant_effects(reader, x, 1), torch.zeros(1)

    return {"LatimFlow": flow, "variant_effects": variants}


def sequence(length: int) -> Tensor:
    """One of random bases, (1, 4, length)."""
    return torch.nn.functional.one_hot(torch.randint(4, (1, length)), 4).mT.float()


def passed(row: dict[str, Any]) -> bool:
    """Whether a row keeps to the bounds."""
    return (
        row["time exponent"] <= TIME
        and row["memory exponent"] <= MEMORY
        and row["left over"] <= DELTA
    )


if __name__ == "__main__":
    main()
