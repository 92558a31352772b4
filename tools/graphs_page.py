"""Make docs/results/graphs.md and its table, from what ``evaluate`` has recorded.

Usage: python tools/graphs_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``evaluate graphs`` and DOCS the one to write to; by default that of this
checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from captum_ssm_bench import EXPERIMENTS, Cell, Line, Records, lines
from captum_ssm_bench.experiments.knockout.graphs import (
    CHANCE,
    DIRECT_CUT,
    DRAWS,
    LARGE,
    NODE_RULES,
    NODES,
    OF_NODES,
    PATH,
    PATH_RULES,
    SOURCES_CUT,
    WHOLE,
)
from captum_ssm_bench.harness.groups import group_lines
from captum_ssm_bench.harness.tables import Entry, as_csv, legend, markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TABLES = "results/graphs.md", "results"
GRAPHS = EXPERIMENTS["graphs"]
TOKEN, PLACE, ACCURACY, OTHERS, MESSAGES = (column.name for column in GRAPHS.columns[:5])
R, SIGNS, ERROR = (column.name for column in GRAPHS.columns[5:])
SIZES = ("all", "large")
TWO_BLOCKS, ONE_BLOCK, _ = GRAPHS.groups
#: Characters of a line of text.
_WIDTH = 100
#: How a point of a list is set.
_POINT: Any = {"initial_indent": "- ", "subsequent_indent": "  ", "break_on_hyphens": False}

_TEXT = """\
# Graphs and interventions

{found}

Made on {date} with {machine}.

## What is measured

The bundled language models have one right answer to each text. Of each model {examples} texts, and
of each text the {{py:func}}`~captum_ssm.attribution_graph` of the answer's logit less the mean of
all (`contrast="mean"`), held against two kinds of interventions:

- *The path*. Nodes are what blocks return at each token, and the graph is pruned to 80 % of the
  influence. `graph.path()` leads from a token to the answer. Does it begin with a *token* that is a
  source of the answer by the task's form, and does the last message on it come from the *place*
  where that stands? What it sends from one token to another is cut in the mixer of the block
  between ({{py:func}}`~captum_ssm.knock_out`). *Others cut* is the same for as many messages in the
  same layers, to the same tokens, from tokens drawn from those that are not on the path ({draws}
  draws). *Sources cut*: all that the sources send to other tokens is cut, in all layers; a model
  that is still right then does not go by messages from there. *{direct}*: only
  what they send to the token that asks is, in all layers.
- *The nodes*. Nodes are what mixers return at each token, the {nodes} that add most.
  {{py:func}}`~captum_ssm.inside.against_truth` takes each off the stream and holds what the logit
  loses against the graph's `effects()`. *Large* are those whose true effect is more than {large} of
  it. Nodes that can do nothing, such as what the last mixer returns where nobody reads it, are left
  out, and with them models of one mixer, where one node is left.

## Paths

![Where paths begin, and how many answers are right without them](../images/results/graphs.png)

{groups}

A path that begins at the token that asks, and stays there, sends no message: without it nothing is
cut, and there are no others.

{paths}

{verdict}

## Nodes

{node_groups}

{nodes_by_model}

{legend} [All numbers]({table}).

This page is made by

```
captum-ssm-bench evaluate graphs --out RESULTS
python tools/graphs_page.py RESULTS
python tools/results_page.py
```
"""

_FOUND = """\
By `rule="frozen"` the path that carries most begins at a source of the answer: in {token:.0%} of
texts of models of two blocks, and in {token_one:.0%} of those of one. It has {messages:.2f}
and {messages_one:.2f} messages on average, and without them {cut:.0%} and {cut_one:.0%} of answers
are right; without as many others in the same layers {others:.0%} and {others_one:.0%}, and without
all that the sources send {sources:.0%} and {sources_one:.0%}. Where an answer is kept, there is
often a second route for it, by the other block; and none is lost by a path where the answer has
many sources. By `rule="centred"`, which counts who asked
as well, {centred:.0%} and {centred_one:.0%} of paths begin at a source: most of the others stay at
the token that asks, and cutting says nothing of them. What the graph says single nodes add goes
along with what the logit loses without them, by r = {r_frozen:.2f} (frozen), {r_half:.2f} (half)
and {r_centred:.2f} (centred); their signs agree for {signs_frozen:.0%}, {signs_half:.0%} and
{signs_centred:.0%}, of large ones for {large_frozen:.0%}, {large_half:.0%} and
{large_centred:.0%}."""

_VERDICT = """\
Where the answer is kept without the path of the frozen rule:

- *Many sources.* The most frequent word is told by all its occurrences together. No single message
  carries it: all answers are lost without all that they send, and none without the path.
- *Two routes.* The source sends to the token that asks in both blocks. In *p N l G g J l* of
  pairs-mamba2 one message is enough: without that of the path *G* is 4.6 ahead of all other words,
  without that of the other block 8.0, and without both 1.5 behind. So it is where answers are fewer
  without what sources send to the asking token in all layers than without the path:
  {direct_pairs2:.0%} and {cut_pairs2:.0%} in pairs-mamba2, {direct_words:.0%} and {cut_words:.0%}
  in translation-gated-deltanet.
- *The lesser of two routes.* In *e N g L k C a F a* of pairs-gated-deltanet the path goes by the
  second block. Without its message *F* is 7.5 ahead, in place of 7.7; without that of the first
  block, which the graph gives as much, it is 8.2 behind. In this model {cut_pairs:.0%} of answers
  are right without the path, and {direct_pairs:.0%} without both.
- *A lead that is all but gone.* In *five hundred and ninety two | fünf hundert zwei und* of
  translation-mamba2 no other message than that of the path brings *ninety* to the last token.
  Without it *neunzig* is still 0.4 ahead of all other words, in place of 9.6.
- *Words that need no source.* Some answers are right without any message from their sources:
  {free_words:.0%} in translation-rwkv, {free_digits:.0%} in passkey-mamba2. No path can be missed
  there."""


def main(folder: Path, docs: Path = DOCS) -> None:
    results = list(Records(folder / GRAPHS.name))
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    groups, models = group_lines(GRAPHS, results), lines(GRAPHS, results)
    (docs / TABLES).mkdir(parents=True, exist_ok=True)
    (docs / TABLES / f"{GRAPHS.name}.csv").write_text(as_csv(GRAPHS, [*groups, *models]), "utf-8")
    (docs / PAGE).write_text(page(groups, models, machine), encoding="utf-8")


def page(groups: Sequence[Line], models: Sequence[Line], machine: Mapping[str, str]) -> str:
    """The page, from the lines of groups and models."""
    return _TEXT.format(
        found=found(groups),
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        examples=max(line.examples for line in models),
        draws=DRAWS,
        direct=DIRECT_CUT.method.capitalize(),
        nodes=NODES,
        large=f"{LARGE:.0%}",
        groups=of_paths(groups),
        paths="\n\n".join(
            f"By `rule={rule!r}`:\n\n{paths_by_model(models, rule)}" for rule in PATH_RULES
        ),
        verdict=verdict(models),
        node_groups=of_nodes(groups),
        nodes_by_model=nodes_by_model(models),
        legend=legend(GRAPHS),
        table=f"{GRAPHS.name}.csv",
    )


def found(groups: Sequence[Line]) -> str:
    """What was found, in words."""
    numbers = by_key(groups)
    names = {name.partition(" (")[0]: name for name, _, _ in numbers}

    def of(column: str, cell: Cell, row: str = "", group: str = TWO_BLOCKS) -> float:
        entries = numbers.get((names.get(group, group), cell, row))
        return entries[column].value if entries else float("nan")

    frozen, centred = (Cell(PATH, rule) for rule in PATH_RULES)
    nodes = {rule: Cell(OF_NODES, rule) for rule in NODE_RULES}
    said = {
        name + end: of(column, cell, group=group)
        for end, group in (("", TWO_BLOCKS), ("_one", ONE_BLOCK))
        for name, column, cell in (
            ("token", TOKEN, frozen),
            ("cut", ACCURACY, frozen),
            ("others", OTHERS, frozen),
            ("messages", MESSAGES, frozen),
            ("sources", ACCURACY, SOURCES_CUT),
            ("centred", TOKEN, centred),
        )
    }
    for name, column, row in (("r", R, "all"), ("signs", SIGNS, "all"), ("large", SIGNS, "large")):
        said |= {f"{name}_{rule}": of(column, cell, row) for rule, cell in nodes.items()}
    return fill(_FOUND.format(**said), _WIDTH)


def verdict(models: Sequence[Line]) -> str:
    """Where answers are kept without the path."""
    numbers, path = by_key(models), Cell(PATH, PATH_RULES[0])

    def right(model: str, cell: Cell) -> float:
        entries = numbers.get((model, cell, ""))
        return entries[ACCURACY].value if entries else float("nan")

    text = _VERDICT.format(
        direct_pairs=right("pairs-gated-deltanet", DIRECT_CUT),
        cut_pairs=right("pairs-gated-deltanet", path),
        direct_pairs2=right("pairs-mamba2", DIRECT_CUT),
        cut_pairs2=right("pairs-mamba2", path),
        direct_words=right("translation-gated-deltanet", DIRECT_CUT),
        cut_words=right("translation-gated-deltanet", path),
        free_words=right("translation-rwkv", SOURCES_CUT),
        free_digits=right("passkey-mamba2", SOURCES_CUT),
    )
    first, *points = text.split("\n- ")
    filled = (fill(" ".join(each.split()), _WIDTH, **_POINT) for each in points)
    return "\n".join([first, *filled])


def of_paths(groups: Sequence[Line]) -> str:
    """A row for each group and what is cut."""
    columns = (TOKEN, PLACE, ACCURACY, OTHERS, MESSAGES)
    order = [CHANCE, WHOLE, SOURCES_CUT, DIRECT_CUT, *(Cell(PATH, rule) for rule in PATH_RULES)]
    numbers = by_key(groups)
    return markdown(
        ["models", "what is cut", *columns],
        (
            [model, ", ".join(filter(None, cell)), *(str(numbers[at][name]) for name in columns)]
            for model in dict.fromkeys(line.model for line in groups)
            for cell in order
            if (at := (model, cell, "")) in numbers
        ),
    )


def paths_by_model(models: Sequence[Line], rule: str) -> str:
    """A row for each model: its path by a rule, and what is right with and without it."""
    numbers, cut = by_key(models), (WHOLE, SOURCES_CUT, DIRECT_CUT)

    def row(model: str) -> list[Entry]:
        path = numbers[model, Cell(PATH, rule), ""]
        others = [numbers[model, cell, ""][ACCURACY] for cell in cut]
        return [path[TOKEN], path[PLACE], *others, path[ACCURACY], path[OTHERS]]

    return markdown(
        ["model", TOKEN, PLACE, *(cell.method for cell in cut), "path cut", OTHERS],
        ([model, *map(str, row(model))] for model in ordered(models)),
    )


def of_nodes(groups: Sequence[Line]) -> str:
    """A row for each size of nodes and rule."""
    columns, numbers = (R, SIGNS, ERROR), by_key(groups)
    return markdown(
        ["models", "nodes", "rule", *columns],
        (
            [model, size, rule, *(str(numbers[at][name]) for name in columns)]
            for model in dict.fromkeys(line.model for line in groups)
            for size in SIZES
            for rule in NODE_RULES
            if (at := (model, Cell(OF_NODES, rule), size)) in numbers
        ),
    )


def nodes_by_model(models: Sequence[Line]) -> str:
    """A row for each model and size of nodes, and columns for both numbers by each rule."""
    numbers = by_key(models)
    columns = [(name, Cell(OF_NODES, rule)) for name in (R, SIGNS) for rule in NODE_RULES]
    return markdown(
        ["model", "nodes", *(f"{name}, {cell.formulation}" for name, cell in columns)],
        (
            [model, size, *(str(numbers[model, cell, size][name]) for name, cell in columns)]
            for model in ordered(models)
            for size in SIZES
            if (model, columns[0][1], size) in numbers
        ),
    )


def by_key(table: Sequence[Line]) -> dict[tuple[str, Cell, str], Mapping[str, Entry]]:
    """Entries by model, or group of models, cell and row."""
    return {
        (line.model, Cell(line.method, line.formulation), line.row): line.entries for line in table
    }


def ordered(models: Sequence[Line]) -> list[str]:
    """The models that were measured, group by group."""
    measured = {line.model for line in models}
    return [name for group in GRAPHS.groups.values() for name in group if name in measured]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
