"""Make docs/results/knockout.md, its picture and tables, from what ``evaluate`` found.

Usage: python tools/knockout_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``evaluate knockout hybrid-parts`` and DOCS the one to write to; by default
that of this checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from captum_ssm.tracing import find_mixers
from captum_ssm.viz.figure import LINES, new_figure
from captum_ssm_bench import EXPERIMENTS, Cell, Line, Records, lines, load_bundled
from captum_ssm_bench.experiments.knockout.experiment import (
    AS_IT_IS,
    BY_SHARE,
    EDGES,
    EXACT_NORMS,
    HELD,
    RULES,
)
from captum_ssm_bench.experiments.knockout.parts import HEAD_OFF, HEADS_ALONE
from captum_ssm_bench.experiments.knockout.paths import STEPS
from captum_ssm_bench.harness.groups import group_lines
from captum_ssm_bench.harness.runner import Result
from captum_ssm_bench.harness.tables import as_csv, legend, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PICTURE, TABLES = "results/knockout.md", "images/knockout.png", "results"
KNOCKOUT, PARTS = EXPERIMENTS["knockout"], EXPERIMENTS["hybrid-parts"]
HALVES = ("all", "large", "even")
R, SIGNS, ERROR = "r", "signs", "error"
BOTH_HELD = Cell("mixers, norms held")
#: Panels of the picture that stand side by side.
_ACROSS = 6
#: Characters of a line of text.
_WIDTH = 100

_TEXT = """\
# Edges and knock-outs

{found}

![What the answer's logit loses if single edges are cut, against what it was estimated to lose, by
model: as the model is, and with later coefficients and norms held]({picture})

Made on {date} with {machine}.

## What is measured

Of each model {edges} edges, single messages from one token to another in one layer: {each} of each
of {examples} texts or images, half of them drawn in proportion to the size of their estimated
effects (*large*), half evenly (*even*). The effect is what the logit of the task's answer loses,
held against no other word. It is estimated by {{py:class}}`~captum_ssm.EdgeEffects`, from one
forward and one backward run for all edges, and held against {{py:class}}`~captum_ssm.knock_out` of
each edge by itself.

## Estimates as they are

{groups}

{models}

{legend}

## What is to blame where they miss

An edge's message is cut, and all that follows runs on as it would. Here it runs on with some
coefficients as they were before the cut: those of later *mixers* (their operators: steps, B and C,
keys and queries, gates and norms within), the denominators of *norms* outside of mixers, the
*gates* that MLPs multiply with. An estimate whose gradient holds the same is *matched*. What makes
matched estimates right where it is held is what bends the effects of the others.

{held}

Matched r, model by model:

{blame}

Gates are those of the MLPs of Bamba, Griffin, RWKV-4 and Qwen3-Next; other models have none. What
is left where all is held is linear, and its gradient exact, but for the activations in the MLPs of
RWKV-4 and ViT and the soft cap of Griffin's logits.

## Other estimates

Three others of the same edges, against the same knock-outs of the model as it is:

- *exact norms*: `EdgeEffects(model, exact_norms=True)` takes each norm that reads what a layer
  writes as it is without the message, in place of its gradient: right where one norm and the head
  are all that follows, and of first order in what other layers make of the message. Nothing in it
  was set by looking at these texts.
- *by share*: with a large message gone its layer would write the token less, and the norms behind
  it would grow. The share of what is written that the message is (of its length, along it) says how
  far to go: the estimate is the mean of the gradient's from the run as it is to one in which the
  layer writes so much less. {steps} steps to a layer that writes nothing serve all its edges. It is
  one of a few that were tried on these texts, and the one without a number to set.
- *by rule*: `EdgeEffects(model, rule=...)` takes the gradient of the network that is made linear,
  in which all norms are held.

{rules}

{rules_by_model}

## By layer

The gradient against the model as it is, of the edges of each layer; of some there are few.

{layers}

[All numbers]({table}).

## Hybrids in parts

![How many answers are right with parts of a hybrid alone, and
without](../images/results/hybrid-parts.png)

[A study of RecurrentGemma and Jamba](https://arxiv.org/abs/2510.19861) finds that retrieval hangs
on their attention alone, and that few of its heads are enough.
{{py:func}}`~captum_ssm.edges.parts_off` asks the same of other models.

{verdict}

{parts}

Each head by itself, off or the only one of its layer that is on (accuracy):

{heads}

{parts_legend} [All numbers]({parts_table}).

This page is made by

```
captum-ssm-bench evaluate knockout hybrid-parts --out RESULTS
python tools/knockout_page.py RESULTS
python tools/results_page.py
```
"""

_FOUND = """\
The gradient tells whether cutting a message between tokens will lower the answer's logit or raise
it: signs agree for {signs:.0%} of edges on language models and for {signs_images:.0%} on images. By
how much, it does not tell where single messages carry the answer: r is {r:.2f}, and {r_images:.2f}
on images. To blame are the norms behind them: with their denominators held r is {norms:.2f}, and
{both:.2f} with the coefficients of later mixers held, too. Taken as they are without the message,
norms that read it first hand mend most of it, by the same one gradient: r is {exact:.2f} and
{exact_images:.2f}, and signs agree for {exact_signs:.0%} and {exact_signs_images:.0%}. An estimate
that goes some way towards the cut, with {gradients} gradients of each layer, is as near by r, and
less so by signs and sizes. Hybrids read their answers by attention
alone, but find them by both kinds of layers."""

_VERDICT = """\
Here, in hybrids of one layer of each kind, the first holds in part and the second does not. The
answer comes to the token that asks by attention alone: without attention, or without its messages
from the answer to the asking token, it is found no more often than by chance; without the same
messages of the SSM nothing is lost, nor with these alone left of all that attention carries between
tokens. But without the SSM most answers are lost, too: it tells attention where to look. For
*pairs* it needs no more than the previous token for that, the key beside a value; in *copying*
messages from further back have a part. And each head of attention can go for next to nothing, as
the others do its work, while each by itself loses a good part of the answers."""


def main(folder: Path, docs: Path = DOCS) -> None:
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    results = {each.name: list(Records(folder / each.name)) for each in (KNOCKOUT, PARTS)}
    edges, parts = results[KNOCKOUT.name], lines(PARTS, results[PARTS.name])
    groups, models = group_lines(KNOCKOUT, edges), lines(KNOCKOUT, edges)
    for place in (docs / TABLES, (docs / PICTURE).parent):
        place.mkdir(parents=True, exist_ok=True)
    for experiment, table in ((KNOCKOUT, [*groups, *models]), (PARTS, parts)):
        path = docs / TABLES / f"{experiment.name}.csv"
        path.write_text(as_csv(experiment, table), encoding="utf-8")
    picture(edges).savefig(docs / PICTURE, dpi=60)
    (docs / PAGE).write_text(page(groups, models, parts, machine), encoding="utf-8")


def page(
    groups: Sequence[Line],
    models: Sequence[Line],
    parts: Sequence[Line],
    machine: Mapping[str, str],
) -> str:
    """The page, from the lines of groups, models, and parts of hybrids."""
    rows = [AS_IT_IS, *HELD]
    estimates = [AS_IT_IS, EXACT_NORMS, BY_SHARE, *RULES]
    matched = [column.name for column in KNOCKOUT.columns[3:]]
    examples = max(line.examples for line in models)
    return _TEXT.format(
        found=found(groups),
        picture=f"../{PICTURE}",
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        edges=EDGES * examples,
        each=EDGES,
        examples=examples,
        groups=by_cell(groups, [AS_IT_IS], HALVES, (R, SIGNS, ERROR)),
        models=as_they_are(models),
        legend=legend(KNOCKOUT),
        held=by_cell(groups, rows, HALVES[:1], matched, "held"),
        blame=across(models, rows, matched[0]),
        steps=STEPS,
        rules=by_cell(groups, estimates, HALVES[:1], (R, SIGNS, ERROR), "estimate"),
        rules_by_model=across(models, estimates, R),
        layers=by_layer(models),
        table=f"{KNOCKOUT.name}.csv",
        verdict=_VERDICT,
        parts=of_parts(parts),
        heads=of_heads(parts),
        parts_legend=legend(PARTS),
        parts_table=f"{PARTS.name}.csv",
    )


def found(groups: Sequence[Line]) -> str:
    """What was found, in words."""

    def of(group: str, cell: Cell, column: str) -> float:
        for line in groups:
            if line.model.startswith(group) and cell == _cell(line) and line.row == HALVES[0]:
                return line.entries[column].value
        return float("nan")

    language, images = KNOCKOUT.groups
    text = _FOUND.format(
        gradients=STEPS + 1,
        exact=of(language, EXACT_NORMS, R),
        exact_images=of(images, EXACT_NORMS, R),
        exact_signs=of(language, EXACT_NORMS, SIGNS),
        exact_signs_images=of(images, EXACT_NORMS, SIGNS),
        signs=of(language, AS_IT_IS, SIGNS),
        signs_images=of(images, AS_IT_IS, SIGNS),
        r=of(language, AS_IT_IS, R),
        r_images=of(images, AS_IT_IS, R),
        norms=of(language, Cell("norms held"), "r, matched"),
        both=of(language, BOTH_HELD, "r, matched"),
    )
    return fill(text, _WIDTH)


def by_cell(
    table: Sequence[Line],
    cells: Sequence[Cell],
    rows: Sequence[str],
    columns: Sequence[str],
    what: str = "",
) -> str:
    """A row for each group, cell, and row of the table; ``what`` heads the cells, if it is said."""
    halves = len(rows) > 1
    head = ["models", *([what] if what else []), *(["edges"] if halves else []), *columns]
    found = {(line.model, _cell(line), line.row): line.entries for line in table}
    shown = []
    for model in dict.fromkeys(line.model for line in table):
        for cell in cells:
            for row in rows:
                labels = [*([_label(cell)] if what else []), *([row] if halves else [])]
                entries = found[model, cell, row]
                shown.append([model, *labels, *(str(entries[name]) for name in columns)])
    return markdown(head, shown)


def as_they_are(models: Sequence[Line]) -> str:
    """A row for each model, and columns for both numbers of each half."""
    columns = [(name, half) for name in (R, SIGNS) for half in HALVES]
    found = {(line.model, line.row): line.entries for line in models if _cell(line) == AS_IT_IS}
    return markdown(
        ["model", "mixers", *map(", ".join, columns)],
        (
            [model, mixers(model), *(str(found[model, half][name]) for name, half in columns)]
            for model in ordered(models)
        ),
    )


def across(models: Sequence[Line], cells: Sequence[Cell], column: str) -> str:
    """A row for each model and a column for each cell: one number of all edges."""
    numbers = {
        (line.model, _cell(line)): line.entries[column].value
        for line in models
        if line.row == HALVES[0]
    }
    return markdown(
        ["model", *map(_label, cells)],
        ([model, *(f"{numbers[model, cell]:.2f}" for cell in cells)] for model in ordered(models)),
    )


def by_layer(models: Sequence[Line]) -> str:
    """A row for each layer of each model."""
    columns = (R, SIGNS, ERROR)
    return markdown(
        ["model", "layer", *columns],
        (
            [model, line.row.removeprefix("layer "), *(str(line.entries[c]) for c in columns)]
            for model in ordered(models)
            for line in models
            if line.model == model and _cell(line) == AS_IT_IS and line.row.startswith("layer")
        ),
    )


def of_parts(parts: Sequence[Line]) -> str:
    """A row for each model and part, but for single heads."""
    columns = [column.name for column in PARTS.columns]
    order = [cell for cell in PARTS.cells() if cell.method not in (HEAD_OFF, HEADS_ALONE)]
    return markdown(
        ["model", "what is cut", *columns],
        (
            [line.model, _label(cell), *(str(line.entries[name]) for name in columns)]
            for model in dict.fromkeys(line.model for line in parts)
            for cell in order
            for line in parts
            if line.model == model and _cell(line) == cell
        ),
    )


def of_heads(parts: Sequence[Line]) -> str:
    """A row for each head of each model."""
    accuracy = PARTS.columns[0].name
    numbers = {
        (line.model, line.formulation, line.row, line.method): str(line.entries[accuracy])
        for line in parts
    }
    heads = dict.fromkeys(key[:3] for key in numbers if key[3] == HEAD_OFF)
    return markdown(
        ["model", "kind", "head", "off", "alone"],
        ([*head, numbers[(*head, HEAD_OFF)], numbers[(*head, HEADS_ALONE)]] for head in heads),
    )


def picture(results: Sequence[Result]) -> Figure:
    """A panel for each model, a dot for each edge."""
    drawn = {AS_IT_IS: "estimated", BOTH_HELD: "matched"}
    dots: dict[str, dict[Cell, list[tuple[float, float]]]] = {}
    for key, rows in results:
        cell, numbers = Cell(key.method, key.formulation), rows[HALVES[0]]
        if cell in drawn:
            own = dots.setdefault(key.model, {}).setdefault(cell, [])
            for i in range(int(numbers["n"])):
                own.append((numbers[f"{drawn[cell]} {i}"], numbers[f"true {i}"]))
    names = [name for group in KNOCKOUT.groups.values() for name in group if name in dots]
    down = -(-len(names) // _ACROSS)
    figure, axes = new_figure(2.1 * _ACROSS, 2.1 * down, nrows=down, ncols=_ACROSS, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for cell, colour in zip(drawn, LINES, strict=False):
            x, y = zip(*dots[name][cell], strict=True)
            axis.scatter(x, y, s=4, alpha=0.5, color=colour, linewidths=0, label=_label(cell))
        axis.axline((0, 0), slope=1, color="0.7", linewidth=0.8, zorder=0)
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=6)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(),
        loc="outside lower right",
        fontsize=8,
        markerscale=3,
    )
    figure.supxlabel("estimated loss of the answer's logit", fontsize=9)
    figure.supylabel("true loss", fontsize=9)
    return figure


def ordered(models: Sequence[Line]) -> list[str]:
    """The models that were measured, group by group."""
    measured = {line.model for line in models}
    return [name for group in KNOCKOUT.groups.values() for name in group if name in measured]


def mixers(name: str) -> str:
    """The families of a model's mixers."""
    found = find_mixers(load_bundled(name)[0])
    return ", ".join(dict.fromkeys(mixer.architecture.family for mixer in found))


def _cell(line: Line) -> Cell:
    return Cell(line.method, line.formulation)


def _label(cell: Cell) -> str:
    return ", ".join(filter(None, cell))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
