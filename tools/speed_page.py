"""Make docs/speed.md and its picture anew, from what the benchmarks have measured.

Usage: python -m tools.speed_page RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``python -m benchmarks`` and ``python -m benchmarks.long_context``, and DOCS the one to
write to; by default that of this checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import budgets
from benchmarks.plot import draw
from benchmarks.quantities import AS_IT_IS
from benchmarks.report import markdown
from captum_ssm.viz.figure import LINES, new_figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, OWN = "speed.md", "speed"
FIRST_PICTURE, PICTURE = "images/speed_calls.png", "images/speed.png"
#: The pages of parts, and the kinds that are on the first.
FIRST = "recurrences"
PARTS = {FIRST: "Recurrences alone", "matrices": "Matrix states and attention alone"}
IN_MODELS = ("Mamba", "Vim-S", "Mamba-2", "RG-LRU", "RWKV-4")
#: What a user calls, and the length at which the first table compares it.
CALLS = (
    *("ImplicitAttentionRollout", "MambaAttribution"),
    *("LatimFlow", "LatimFlow, centred", "LatimLogit, projection"),
)
OF_DEEP = ("rollout row, unified", *CALLS)
LENGTH = 1024

Row = Mapping[str, Any]

_TEXT = """\
# Speed

![What each method costs on each model, in passes forward and backward]({first_picture})

What explanations cost, beside one forward and backward pass of the same model (`f+b`, with respect
to its embeddings or pixels) and beside the least arithmetic or traffic that the quantity can be
(its bound), in units that are calibrated on the same machine in the same run. Sizes are those of a
130M model (width 768, 1536 channels, 16 states) with {layers} layers, float32, one thread of a CPU,
measured on {date} with {versions}.

## Calls

Time in passes `f+b`, at {length} tokens (Vim-S: 197), with the runs of the model that a call needs:

{calls}

Memory, in MiB above what the process held before:

{memory}

Of models as deep as they are in use, with {deep_layers} layers, time in passes `f+b`; the row is
what rollout does when the model has run:

{deep}

{scans}

Rollout and LatimFlow are linear in the length. MambaAttribution forms every entry of every layer's
matrix, a strip of rows at a time; so does LatimLogit with `mixing="alti"`, for every row of the
layers but the last, which takes the time of {passes} passes through the layer at 1024 tokens:
`mixing="projection"` is its cheap choice.

## Long inputs

A model of four such layers, on one thread of a virtual machine. The own seconds are the program's:
the others are the system's, which maps memory anew for every tensor of this size, and takes longer
for a page the more there are.

{long}

A growth exponent is that of a time between the two lengths; errors are against float64, at some
columns, relative to the greatest entry. What rollout reads of a run is kept while it takes at most
a quarter of the free memory, as it does at the lesser length; else it is made a second time, which
adds a quarter to its time.

Where Linux has transparent huge pages, `THP_MEM_ALLOC_ENABLE=1` in the environment lets torch take
large tensors' memory in few large pages. Measured so, the first method took a seventh less time at
the greater length on 2026-11-22, and the second a quarter less.

## Parts

What operators take alone, given the model's run, on a processor: {parts}.

![Time, memory and error of each quantity against length]({picture})

```{{toctree}}
:hidden:

{tree}
speed/gpu
```

{on_a_gpu}

## Measuring anew

```bash
# needs half an hour of a quiet machine
python -m benchmarks --out results
# needs ten minutes of it
python -m benchmarks --families Mamba Vim-S --lengths 1024 --layers 24 --out results/deep
# needs a minute of it
python -m benchmarks --families Mamba --lengths 64 128 256 \\
    --calls LatimFlow "f+b, scan as it is" --out results/short
# needs a quarter of an hour, and 20 GB of memory
python -m benchmarks.long_context --out results
# needs a few minutes of any machine
python -m benchmarks.budgets
# needs what these five have found
python -m tools.speed_page results
```
"""

_SCANS = """\
A pass is one with the scan repaired (`captum_ssm.tracing.repaired_scans`). As transformers has it
for processors, its backward pass grows with the square of the length: a pass of Mamba so takes
{times} times as long as LatimFlow at {lengths} tokens."""

_ON_A_GPU = """\
## On a GPU, counted

[Measured on a GPU](speed/gpu.md) has times and memory. The figures of this section are counts: the
paths that calls take on a GPU were run on a device that stands in for it
(`benchmarks/stand_in.py`): a processor holds its numbers, and what it is asked to do is counted.
`f+b` is a pass of the same model, in which what packages have a fused
kernel of is one launch, and one more in the backward. In calls the scan of Mamba, linear
attention with one decay per head, delta rules, short convolutions and recurrences of channels are
one launch each, the scan's gradients two: of these there are Triton kernels in
`captum_ssm/operators/kernels`, tested by Triton's interpreter. Small models of {layers} layers;
eight times the width adds hardly a launch. A wait is one of the host for the device: checks are
noted there and read together at the end.

{counts}

The counts are committed, and a test fails if launches, waits or bytes grow by a twentieth.

Each operation of torch counts all it reads and writes, while a fused kernel keeps its states to
itself. How long the steps of a scan or of a delta rule wait for each other is in no count."""
_PARTS = """\
# {title}

Rows and matrices are those of the operators alone, given the model's run: a rollout row is that of
all {layers} layers, a matrix one layer's; `scan` is the recurrence alone, `unified` with gate,
convolution, activation and skip. `textbook` and `exponentials` are the obvious ways to the same
matrix: the loop over triples of tokens of published code, and products of decays for all pairs at
once. What takes microseconds is far from its bound, which counts arithmetic and not calls.
[Where and when](../speed.md) it was measured.

{parts}

RetNet, GLA, RWKV-6 and DeltaNet have operators with random coefficients here, since no package has
a model of theirs that runs on a CPU.
"""


def main(results: Path, docs: Path = DOCS) -> None:
    names = "speed", "deep/speed", "short/speed", "long_context"
    found = [json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    speed = found[0]
    (docs / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    draw_calls(calls(speed["rows"], "of f+b"), docs / FIRST_PICTURE)
    draw(speed["rows"], docs / PICTURE, dpi=55)
    (docs / PAGE).write_text(page(*found), encoding="utf-8")
    (docs / OWN).mkdir(exist_ok=True)
    for name, title in PARTS.items():
        own = own_page(title, name == FIRST, speed)
        (docs / OWN / f"{name}.md").write_text(own, encoding="utf-8")


def page(*found: Mapping[str, Any]) -> str:
    """The page, from the records of the benchmarks: speed, deep, short and long ones."""
    speed, deep, short, long = found
    facts, rows = speed["facts"], speed["rows"]
    return _TEXT.format(
        layers=facts["layers"],
        date=facts["date"],
        versions=", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers")),
        length=LENGTH,
        calls=markdown(calls(rows, "of f+b")),
        memory=markdown(calls(rows, "peak MiB")),
        passes=all_rows(rows, facts["layers"]),
        deep_layers=deep["facts"]["layers"],
        deep=markdown(calls(deep["rows"], "of f+b", OF_DEEP)),
        scans=scans_as_they_are(short["rows"]),
        long=markdown(long["rows"]),
        parts=" and ".join(f"[{t[0].lower()}{t[1:]}]({OWN}/{n}.md)" for n, t in PARTS.items()),
        first_picture=FIRST_PICTURE,
        tree="\n".join(f"{OWN}/{name}" for name in PARTS),
        picture=PICTURE,
        on_a_gpu=on_a_gpu(json.loads(budgets.FILE.read_text(encoding="utf-8"))),
    )


def scans_as_they_are(rows: Sequence[Row]) -> str:
    """What is said of the scan of transformers, from times beside those of LatimFlow."""
    seconds = {(row["L"], row["quantity"]): row["seconds"] for row in rows}
    lengths = sorted({row["L"] for row in rows})
    times = [f"{seconds[n, AS_IT_IS] / seconds[n, 'LatimFlow']:.2g}" for n in lengths]
    return _SCANS.format(lengths=listed(map(str, lengths)), times=listed(times))


def listed(words: Iterable[str]) -> str:
    """Words with commas, and "and" before the last."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def on_a_gpu(table: Mapping[str, Any]) -> str:
    """The section of the page on what calls ask of a GPU, from ``benchmarks/budgets.json``."""
    few, many = map(str, budgets.LENGTHS)
    rows = [
        {
            "model": family,
            "call": call,
            f"launches a layer, L = {few}": lengths[few][call]["launches"] / budgets.LAYERS,
            f"L = {many}": at[call]["launches"] / budgets.LAYERS,
            "waits": at[call]["synchronisations"],
            "bytes of f+b": at[call]["bytes"] / at["f+b"]["bytes"],
        }
        for family, lengths in table["families"].items()
        for at in [lengths[many]]
        for call in at
    ]
    return _ON_A_GPU.format(layers=budgets.LAYERS, counts=markdown(rows))


def own_page(title: str, first: bool, speed: Mapping[str, Any]) -> str:
    """The page of what operators take alone: those of :data:`IN_MODELS`, or of all others."""
    rows = speed["rows"]
    named = [f for f in dict.fromkeys(row["family"] for row in rows) if (f in IN_MODELS) == first]
    tables = "\n\n".join(f"## {family}\n\n{markdown(parts(rows, family))}" for family in named)
    return _PARTS.format(title=title, layers=speed["facts"]["layers"], parts=tables)


def calls(rows: Sequence[Row], column: str, wanted: Sequence[str] = CALLS) -> list[Row]:
    """A column of the quantities wanted of every model: one row each, at the length compared."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["L"]):
        if row["quantity"] in wanted and row["L"] <= LENGTH:
            cells = found.setdefault(row["family"], dict.fromkeys(("model", *wanted)))
            cells["model"] = row["family"]
            if cells[row["quantity"]] is None:
                cells[row["quantity"]] = row[column]
    order = dict.fromkeys(row["family"] for row in rows)
    return [found[family] for family in order if family in found]


def draw_calls(table: Sequence[Row], path: Path) -> None:
    """The first table as dots: a line for each model, a colour for each call."""
    figure, axis = new_figure(7.2, 0.34 * len(table) + 1.2)
    for number, call in enumerate(CALLS):
        points = [(row[call], y) for y, row in enumerate(table) if row[call] is not None]
        style = {"marker": "osD^v"[number], "linestyle": "", "color": LINES[number], "label": call}
        axis.plot(*zip(*points, strict=True), **style)
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.set_yticks(range(len(table)), [row["model"] for row in table])
    label = "passes forward and backward of the model"
    axis.set(xlim=(0, None), xlabel=label, ylim=(len(table), -1))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def all_rows(rows: Sequence[Row], layers: int) -> str:
    """From how many to how many passes through its layer all rows of one take."""
    whole = "LatimNorm of a layer, all tokens"
    found = [row["of f+b"] for row in rows if (row["quantity"], row["L"]) == (whole, LENGTH)]
    return f"{layers * min(found):.0f} to {layers * max(found):.0f}"


def parts(rows: Sequence[Row], family: str) -> list[Row]:
    """A family's rows without its name, and without columns that hold nothing."""
    its = [{**row, "family": None} for row in rows if row["family"] == family]
    kept = [name for name in its[0] if any(row[name] is not None for row in its)]
    return [{name: row[name] for name in kept} for row in its]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
