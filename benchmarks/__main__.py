"""Time and memory of operators and of whole calls, as ratios of figures taken in one process.

    python -m benchmarks --out docs/speed
    python -m benchmarks --check

The first writes ``operators.csv``, where every kind of operator stands with its operations at a
length and at twice the length, and ``calls.csv``, its memory and its picture, where methods stand
beside one forward and backward pass of the same model.  It needs a quarter of an hour of a quiet
machine.

The second measures small operators, and fails if gradients of coefficients cost more than 8 times
the map, or if a cost that should be linear in the length grows by more than 2.5 for twice the
length: a kernel then forms pairs of tokens, or computes with numbers too small to be normal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.kinds import KINDS, QUADRATIC
from benchmarks.measure import Cost, measure, processor_seconds
from benchmarks.report import Row, markdown, write
from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, MambaAttribution, trace
from captum_ssm.operators import Operator
from captum_ssm.tracing import repaired_scans
from captum_ssm.viz.figure import LINES, new_figure

#: Gradients may cost so many times the map, and what is linear grow so much with the length.
GRADIENTS, GROWTH = 8.0, 2.5
#: Lengths of the tables, and the length and channels of a head of the check.
TOKENS, WIDTH = 1024, 64
CHECKED_TOKENS, CHECKED_WIDTH = 512, 32
#: How often each is timed in the check.  What seems too much is measured again, each time after
#: a longer pause of so many seconds: other processes can only add to it.
ROUNDS, ATTEMPTS, PAUSE = 9, 5, 10
ROWS = 16
ONE = torch.ones(1, 1, 1, 1)
#: Operations whose cost is linear in the length, and the one whose cost is its square.
LINEAR = ("apply", "transpose", "row", "strip of 16", "gradients")
EVERY = (*LINEAR, "matrix")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the tables and the picture")
    parser.add_argument("--only", choices=("operators", "calls"), help="one of the tables")
    parser.add_argument("--families", nargs="+", choices=models.FAMILIES, default=models.FAMILIES)
    parser.add_argument("--layers", type=int, default=2, help="of the models; default: 2")
    parser.add_argument("--check", action="store_true", help="fail where a bound is broken")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        raise SystemExit(bool(broken()))
    if options.only != "calls":
        rows = _printed(operators(list(KINDS), EVERY, TOKENS, WIDTH))
        if options.out is not None:
            write(options.out / "operators.csv", rows)
    if options.only != "operators":
        rows = _printed(calls(options.families, options.layers))
        if options.out is not None:
            for column, name in (("f+b", "calls.csv"), ("MiB", "calls_memory.csv")):
                write(options.out / name, beside(rows, column))
            draw(rows, options.out / "calls.png")


def _printed(found: Iterator[Row]) -> list[Row]:
    """Print the rows as they come."""
    rows: list[Row] = []
    for row in found:
        rows.append(row)
        print(markdown([row], header=len(rows) == 1), flush=True)
    return rows


# --- operators -------------------------------------------------------------------------------


def operators(
    kinds: Sequence[str], operations: Sequence[str], tokens: int, width: int
) -> Iterator[Row]:
    """Measure kinds at a length, and at twice the length.

    Args:
        kinds: names of :data:`benchmarks.kinds.KINDS`.
        operations: names of :data:`EVERY`.
        tokens: the shorter length.
        width: channels of a head.
    """
    for kind in kinds:
        costs = [_costs(kind, operations, length, width) for length in (tokens, 2 * tokens)]
        for operation in costs[0]:
            short, long = (each[operation] for each in costs)
            yield {
                "kind": kind,
                "operation": operation,
                "times apply": long.seconds / costs[1]["apply"].seconds,
                "time of twice the length": long.seconds / short.seconds,
                "MiB": short.mebibytes,
                "MiB of twice the length": long.mebibytes,
            }


def _costs(kind: str, operations: Sequence[str], tokens: int, width: int) -> dict[str, Cost]:
    found = _of_kind(kind, tokens, width)
    return {name: measure(found[name]) for name in operations if name in found}


def _of_kind(kind: str, tokens: int, width: int) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    return _operations(KINDS[kind](tokens, width))


def _operations(operator: Operator) -> dict[str, Callable[[], Any]]:
    values, gradient = torch.randn(2, *operator.shape)
    last = torch.zeros(operator.shape[:2])
    last[:, -1] = 1
    tokens = operator.shape.tokens
    found = {
        "apply": lambda: operator.apply(values),
        "transpose": lambda: operator.transpose(gradient),
        "row": lambda: operator.mean_rmatvec(last),
        "strip of 16": lambda: operator.entries(ONE, {0: ONE}, range(tokens - ROWS, tokens)),
        "matrix": lambda: operator.dense("mean"),
    }
    if operator.roles:
        found["gradients"] = lambda: operator.backward(values, gradient)
    return {name: torch.no_grad()(call) for name, call in found.items()}


def broken(kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """Print the small table; return the bounds that no attempt kept."""
    least: dict[tuple[str, str], tuple[float, float]] = {}
    left = list(kinds)
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        for kind in left:
            for operation, (times, growth) in _ratios(kind).items():
                most = least.get((kind, operation), (times, growth))
                least[kind, operation] = min(times, most[0]), min(growth, most[1])
        faults = [key for key, ratios in least.items() if _too_much(key, *ratios)]
        left = list(dict.fromkeys(kind for kind, _ in faults))
        if not left:
            break
    lines = {
        (
            kind,
            operation,
        ): f"{kind}, {operation}: {times:.2f} times apply, twice as long {growth:.2f}"
        for (kind, operation), (times, growth) in least.items()
    }
    for key, line in lines.items():
        print(line + " BROKEN" * (key in faults))
    return [lines[key] for key in faults]


def _ratios(kind: str) -> dict[str, tuple[float, float]]:
    """For each operation: how many times apply it takes, and how many times half the length.

    All that is compared takes turns: other processes then slow it down alike.
    """
    lengths = (CHECKED_TOKENS, 2 * CHECKED_TOKENS)
    short, long = (_of_kind(kind, tokens, CHECKED_WIDTH) for tokens in lengths)
    found = {}
    for operation in (name for name in LINEAR if name in long):
        turns = (long[operation], long["apply"], short[operation])
        rounds = [[processor_seconds(call) for call in turns] for _ in range(1 + ROUNDS)][1:]
        times, growth = (
            statistics.median(first / each[number] for first, *each in rounds) for number in (0, 1)
        )
        found[operation] = times, growth
    return found


def _too_much(key: tuple[str, str], times: float, growth: float) -> bool:
    kind, operation = key
    most = GROWTH**2 if kind in QUADRATIC else GROWTH
    return growth > most or (operation == "gradients" and times > GRADIENTS)


# --- calls -----------------------------------------------------------------------------------


def calls(families: Sequence[str], layers: int) -> Iterator[Row]:
    """Measure what users call, in passes forward and backward of the same model."""
    for family in families:
        if family == "Gated DeltaNet" and find_spec("fla") and not torch.cuda.is_available():
            print(f"{family} is left out: where fla is installed, its kernels need a GPU")
            continue
        model, x = models.build(family, layers), models.example(family, TOKENS)
        asked = _calls(model, x, models.target(family))
        costs = {name: measure(call) for name, call in asked.items()}
        for name, cost in costs.items():
            passes = cost.seconds / costs["f+b"].seconds
            found = {"model": family, "layers": layers, "call": name}
            yield {**found, "f+b": passes, "MiB": cost.mebibytes}


def _calls(model: Any, x: torch.Tensor, target: Any) -> dict[str, Callable[[], Any]]:
    @torch.no_grad()
    def forward() -> None:
        with trace(model, operators=False):  # which keeps no cache
            model(x)

    rollout, weighted, flow = (
        kind(model) for kind in (ImplicitAttentionRollout, MambaAttribution, LatimFlow)
    )
    asked = {"target": target, "per_token": True}
    found = {
        "f+b": repaired_scans()(lambda: models.gradient(model, x)),
        "forward run": forward,
        "Rollout": lambda: rollout.attribute(x, query=-1, per_token=True),
        "MambaAttribution": lambda: weighted.attribute(x, **asked),
        **{
            f"LatimFlow {rule}": partial(flow.attribute, x, rule=rule, **asked)
            for rule in ("balanced", "frozen", "centered")
        },
    }
    if isinstance(target, tuple):
        logit = LatimLogit(model)
        options = {**asked, "mixing": "projection"}
        found["LatimLogit"] = lambda: logit.attribute(x, **options)
    return found


def beside(rows: Sequence[Row], column: str) -> list[Row]:
    """Put the calls of a model beside each other: a row for each model and its layers."""
    names = [name for name in dict.fromkeys(row["call"] for row in rows) if name != "f+b"]
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        start = {"model": row["model"], "layers": row["layers"], **dict.fromkeys(names)}
        cells = found.setdefault((row["model"], row["layers"]), start)
        if row["call"] in names:
            cells[row["call"]] = row[column]
    return list(found.values())


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the calls as dots: a line for each model, the cheapest first; a color for each call."""
    shown = [row for row in rows if row["call"] not in ("f+b", "forward run")]
    costs: dict[str, list[float]] = {}
    for row in shown:
        costs.setdefault(row["model"], []).append(row["f+b"])
    names = sorted(costs, key=lambda name: sum(costs[name]) / len(costs[name]))
    figure, axis = new_figure(7.2, 0.34 * len(names) + 1.2)
    for number, call in enumerate(dict.fromkeys(row["call"] for row in shown)):
        of_call = [(row["f+b"], names.index(row["model"])) for row in shown if row["call"] == call]
        style = {"marker": "osD^v<"[number], "linestyle": "", "color": LINES[number], "label": call}
        axis.plot(*zip(*of_call, strict=True), **style)
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.set(
        xlim=(0, None), xlabel="passes forward and backward of the model", ylim=(len(names), -1)
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
