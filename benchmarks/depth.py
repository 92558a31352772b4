"""Memory and time of LatimFlow as a model gets deeper, with and without graphs inside its blocks.

The estimate is computed from the model's configuration, as ``captum-ssm estimate`` does.

    python -m benchmarks.depth --tokens 1024 --out docs/speed
    python -m benchmarks.depth --tokens 4096 --layers 6 --chunks 0 1024 --out docs/speed

Each row is measured in a process of its own.  A stream is the model's width times its tokens, 4
bytes each; a model that keeps no graph in its blocks keeps one for each block.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import torch

from benchmarks import models
from benchmarks.measure import measure
from benchmarks.report import Row, markdown, write
from captum_ssm import LatimFlow
from captum_ssm.explain.estimate import estimate_memory

LAYERS = (6, 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--families", nargs="+", default=["Mamba", "hybrid 3:1"])
    parser.add_argument("--rules", nargs="+", default=["frozen", "centered"])
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--recompute", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--chunks", nargs="+", type=int, help="chunk_tokens, in place of recompute")
    parser.add_argument("--out", type=Path, help="folder for depth.csv, or with chunks chunks.csv")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(row(*json.loads(options.one))))
        return
    how = options.recompute if options.chunks is None else options.chunks
    asked = product(options.families, options.rules, how, options.layers)
    rows: list[Row] = []
    for each in asked:
        one = json.dumps([*each, options.tokens, options.chunks is not None])
        command = [sys.executable, "-m", "benchmarks.depth", "--one", one]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        print(markdown(rows[-1:], header=len(rows) == 1), flush=True)
    if options.out is not None:
        write(options.out / ("depth.csv" if options.chunks is None else "chunks.csv"), rows)


def row(family: str, rule: str, how: int, layers: int, tokens: int, in_chunks: bool) -> Row:
    """Measure one call; ``how`` is ``chunk_tokens``, 0 for None, or ``recompute``."""
    torch.set_num_threads(1)
    model = models.build(family, layers)
    way = {"chunk_tokens": how or None} if in_chunks else {"recompute": bool(how)}
    explain = LatimFlow(model, rule=rule, **way)  # type: ignore[arg-type]
    target = models.target(family)
    explain.attribute(models.example(family, 32), target)
    ids = models.example(family, tokens)
    cost = measure(lambda: explain.attribute(ids, target, return_convergence_delta=True)[1])
    estimate = estimate_memory(model.config, tokens, rule=rule, **way)  # type: ignore[arg-type]
    streams = {} if in_chunks else {"streams MiB": layers * tokens * models.WIDTH * 4 / 2**20}
    return {
        "model": family,
        "rule": rule,
        **way,
        "layers": layers,
        "tokens": tokens,
        "peak MiB": cost.mebibytes,
        "estimate MiB": estimate.activations / 2**20,
        **streams,
        "seconds": cost.seconds,
        "delta": float(cost.result.abs().max()),
    }


if __name__ == "__main__":
    main()
