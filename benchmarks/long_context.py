"""A rollout row, LatimFlow and a span of an answer of a Mamba of 130M's width at 131,072 tokens.

    python -m benchmarks.long_context --out results
    python -m benchmarks.long_context --layers 24 --only "LatimFlow, chunk_tokens=4096" --out deep
    python -m benchmarks.long_context --model "hybrid 3:1" --length 32768 --layers 24 --out hybrid

prints time and peak memory on a CPU at an eighth of the length and at the whole.  What a folder
holds already is not measured again, so that a run that was stopped goes on where it was.  For the
Mamba, some columns of all are compared with float64.  There the row is found from the other side,
by carrying one token's unit vector (for LatimFlow and the span: its embedding) forward through the
layers, which shares no code with the methods but the operators.  The exit status is 1 if the
program's own time grows by more than the length to the power of 1.05 (a hybrid's may, for it has
attention), if memory passes 20 GB, or if anything is not finite or wrong by more than 1e-5.  The
system's share, which maps memory, depends on the machine, and may grow by more.
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

from benchmarks import models
from benchmarks.measure import Cost, measure
from benchmarks.report import markdown, write
from captum_ssm import ImplicitAttentionRollout, LatimFlow, SSMLLMAttribution, trace
from captum_ssm.tracing import repaired_scans

#: Bounds: memory in MiB, growth exponent, error.
MEMORY, EXPONENT, ERROR = 20e9 / 2**20, 1.05, 1e-5
#: How far before the query the columns lie that are held to float64.
BEFORE = (0, 40, 900)
SHORTER = 8
CHUNK = 4096
#: Tokens of the span, which end with one that is not read.
SPAN = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", default="Mamba", help="a family of benchmarks.models")
    parser.add_argument("--only", nargs="+", help="names of methods; default: all")
    parser.add_argument("--out", type=Path, help="folder for long_context.csv and each measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = models.build(options.model, options.layers)
    lengths = (options.length // SHORTER, options.length)
    inputs = [models.example(options.model, length) for length in lengths]
    rows, found = [], {}
    every = methods(model)
    for name in options.only or every:
        call = every[name]
        costs = [measured(call, name, ids, options.out) for ids in inputs]
        found[name] = costs[1].result[0]
        exponent, own_exponent = (
            math.log(last / first) / math.log(SHORTER)
            for first, last in zip(*((c.seconds, c.own_seconds) for c in costs), strict=True)
        )
        rows += [
            {
                "method": name,
                "tokens": length,
                "seconds": cost.seconds,
                "growth": exponent,
                "own seconds": cost.own_seconds,
                "own growth": own_exponent,
                "peak MiB": cost.mebibytes,
                "finite": bool(cost.result.isfinite().all()),
            }
            for length, cost in zip(lengths, costs, strict=True)
        ]
    del costs
    errors, is_mamba = {}, options.model == "Mamba"
    if is_mamba:
        print("float64", file=sys.stderr, flush=True)
        errors = against_float64(model, inputs[1], found)
    for row in rows:
        row["error"] = errors.get(row["method"]) if row["tokens"] == options.length else None
    print(markdown(rows))
    if options.out is not None:
        shown = [{name: x for name, x in row.items() if name != "finite"} for row in rows]
        write(options.out / "long_context.csv", shown)
    if not all(passed(row, EXPONENT if is_mamba else math.inf) for row in rows):
        raise SystemExit(1)


def measured(call: Callable[[Tensor], Tensor], name: str, ids: Tensor, folder: Path | None) -> Cost:
    """The cost of a call, or what the folder says of it."""
    kept = folder and folder / f"{name}, {ids.shape[1]}.pt"
    if kept is not None and kept.exists():
        return Cost(**torch.load(kept))
    print(f"{name}, {ids.shape[1]} tokens", file=sys.stderr, flush=True)
    cost = measure(lambda: call(ids), repeats=1)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(cost), kept)
    return cost


def methods(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name: ids (1, L) to relevance (1, L)."""
    rollout, flow = ImplicitAttentionRollout(model), LatimFlow(model, rule="frozen")
    chunked = LatimFlow(model, rule="frozen", chunk_tokens=CHUNK)
    return {
        "ImplicitAttentionRollout": lambda ids: rollout.attribute(
            ids, query=-1, components="exact"
        ),
        "LatimFlow": lambda ids: flow.attribute(ids, target=models.target("Mamba")),
        f"LatimFlow, chunk_tokens={CHUNK}": lambda ids: chunked.attribute(
            ids, target=models.target("Mamba")
        ),
        "a span": lambda ids: _of_span(SSMLLMAttribution(flow, _Numbers()), ids),
    }


class _Numbers:
    """A tokenizer whose words are the ids."""

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _of_span(explain: SSMLLMAttribution, ids: Tensor) -> Tensor:
    """Relevance of all that is read (1, L) to the tokens of the span together."""
    start = ids.shape[1] + 1 - SPAN
    found = explain.attribute(ids[:, :start], spanned(ids), spans="all")
    assert found.generated_attr is not None
    return torch.cat([found.token_attr, found.generated_attr[:, :-1]], 1)


def spanned(ids: Tensor) -> Tensor:
    """The tokens of the span (SPAN,): the last that are read but the first of all, and a word."""
    return torch.cat([ids[0, 1 - SPAN :], torch.tensor([models.WORD])])


def passed(row: dict[str, Any], exponent: float) -> bool:
    """Whether a row keeps to the bounds, and grows by at most the exponent."""
    return (
        row["finite"]
        and row["own growth"] <= exponent
        and (row["peak MiB"] or 0) <= MEMORY
        and (row["error"] or 0) <= ERROR
    )


@torch.no_grad()
def against_float64(model: Any, ids: Tensor, found: dict[str, Tensor]) -> dict[str, float]:
    """By method, the greatest error at the columns, relative to the greatest entry.

    All tokens run through the model, but only those from the first column on carry anything; their
    coefficients follow from what enters the layer at them and at the few before that the
    convolution reads.
    """
    model = model.double()
    stream = model.get_input_embeddings()(ids)
    end = slice(-max(BEFORE) - model.config.conv_kernel, None)
    near = stream[:, end]
    columns = [near.shape[1] - 1 - before for before in BEFORE]
    units = [_only(torch.ones_like(near[..., 0]), column) for column in columns]
    shares = [_only(near, column) for column in columns]
    with repaired_scans():
        for block in model.backbone.layers:
            with trace(block) as record:
                block(near)
            linear = record.layers[0].linear
            unified = linear.operator.per_channel()
            units = [unit + unified.mean_matvec(unit) for unit in units]
            shares = [
                share + branch(block, linear.operator, rescaled(block.norm, share, near))
                for share in shares
            ]
            stream = block(stream)
            near = stream[:, end]
    heads = model.get_output_embeddings().weight
    head = heads[models.WORD]
    ends = [rescaled(model.backbone.norm_f, share, near)[0, -SPAN:] for share in shares]
    wanted = {
        "ImplicitAttentionRollout": torch.stack([unit[0, -1] for unit in units]),
        **dict.fromkeys(
            ("LatimFlow", f"LatimFlow, chunk_tokens={CHUNK}"),
            torch.stack([end_of[-1] @ head for end_of in ends]),
        ),
        "a span": torch.stack([(end_of * heads[spanned(ids)]).sum() for end_of in ends]),
    }
    return {
        name: float((found[name][end][columns] - right).abs().max() / found[name].abs().max())
        for name, right in wanted.items()
        if name in found
    }


def branch(block: Any, operator: Any, x: Tensor) -> Tensor:
    """The mixer's frozen map of what it would read."""
    inside = x @ block.mixer.in_proj.weight.chunk(2)[0].T
    return operator.apply(inside[..., None])[..., 0] @ block.mixer.out_proj.weight.T


def rescaled(norm: Any, x: Tensor, stream: Tensor) -> Tensor:
    """x through an RMSNorm with the scale that the stream has there."""
    scale = (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return norm.weight * (x * scale)


def _only(x: Tensor, column: int) -> Tensor:
    """Zeros but for one token of x (1, L, ...)."""
    kept = torch.zeros_like(x)
    kept[:, column] = x[:, column]
    return kept


if __name__ == "__main__":
    main()
