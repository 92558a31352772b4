"""Make docs/results/causal.md, its picture and tables, from what ``evaluate`` recorded.

Usage: python tools/causal_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``evaluate causal`` and DOCS the one to write to; by default that of this
checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from captum_ssm.tracing import find_mixers
from captum_ssm.viz import plot_intervals
from captum_ssm_bench import EXPERIMENTS, Experiment, Line, Records, lines, load_bundled
from captum_ssm_bench.experiments.causal.interventions import DRAWS, PERMUTATIONS
from captum_ssm_bench.experiments.causal.methods import SHAPLEY
from captum_ssm_bench.harness.groups import differences, group_lines
from captum_ssm_bench.harness.tables import as_csv, legend, markdown
from captum_ssm_bench.harness.verdicts import Side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, CHOICE = "results/causal.md", "results/causal-choosing.md"
PICTURE, TABLES = "images/causal.png", "results"
CAUSAL = EXPERIMENTS["causal"]
AGAINST = Side("ExpectedGradients", "8 references")
AGREEMENT, PASSES = "ρ Shapley", "passes"
#: What the picture shows, of the groups whose names begin so.
DRAWN, CONFIRMING = (AGREEMENT, "ρ left out", "insertion", "top 1"), "confirming"
#: The methods of the table of models.
BY_MODEL = ("LatimFlow", "ExpectedGradients", "Occlusion", "leave-one-out", SHAPLEY.method)

_TEXT = """\
# Relevance and interventions

Does a token that is called relevant change the answer when it is replaced? Here each method's
relevance is held against what replacing tokens and patches does to small trained models, and
against what the method costs.

![Agreement of each method with interventions, with intervals, on models that nothing was chosen
on]({picture})

Made on {date} with {machine}.

## What is measured

The truth is the Shapley value of each token for the target's logit: what the logit gains when the
token is put back, averaged over what else is there. It is sampled: {pairs} orders and their
reverses, each with a reference of its own, in which every token that can be replaced is one of its
kind from another text of the task: a key by a key, a digit by a digit. What is the only one of its
kind stays. In an image patches are replaced by those that another scene has at their place.

The sample is not the whole truth: half of the orders agrees with the other half only as far as the
line *{truth}* of each table says. By that, the true values themselves would have a ρ of about

{ceilings}

| column | what it says |
| --- | --- |
| ρ, r, τ Shapley | correlation with these values: Spearman's, Pearson's, Kendall's |
| ρ left out | that with what the logit loses if a token alone is replaced, over {draws} draws |
| insertion, deletion | area under the probability as tokens are put in, or out, the best first |
| sufficiency | the probability with the most relevant three tenths alone |
| top 1 | how often the most relevant token is one that the answer is read off |
| mask AP | average precision of the map as a guess at the object's pixels |
| error of the sum | what the sum of relevance is off that of the values, as a share of the latter |
| passes | runs of the model, forward and backward together |

Models that [rules are chosen on](causal-choosing.md) and models that confirm what was chosen are
kept apart, and fixed in the code: what has been tried until it was good on the first is judged by
the second alone. Every model counts alike.

{groups}

{gains}

Each number says by how much the method is better on the same examples, in the column's unit; of the
Shapley values it says little, as they are held against themselves. [All gains]({gain_table}), of
the models to choose on, too.

## Model by model

{agreement} on every model. [All numbers]({table}).

{models}

This page is made by

```
captum-ssm-bench evaluate causal --out RESULTS
python tools/causal_page.py RESULTS
```
"""

_CHOICE = """\
# Interventions on the models that rules are chosen on

What has been tried until it was good on these models looks better on them than it is; it is
[confirmed on others](causal.md), where the columns are explained, too.

{groups}
"""


def main(folder: Path, docs: Path = DOCS) -> None:
    results = list(Records(folder / CAUSAL.name))
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    groups, models = group_lines(CAUSAL, results), lines(CAUSAL, results)
    held, gains = differences(CAUSAL, results, AGAINST)
    named = {line.model for line in groups}
    gains = [line for line in gains if line.model in named]
    for place in (docs / TABLES, (docs / PICTURE).parent):
        place.mkdir(parents=True, exist_ok=True)
    for experiment, table in ((CAUSAL, [*groups, *models]), (held, gains)):
        path = docs / TABLES / f"{experiment.name}.csv"
        path.write_text(as_csv(experiment, table), encoding="utf-8")
    picture(groups).savefig(docs / PICTURE, dpi=70)
    text = page(groups, models, held, gains, machine)
    (docs / PAGE).write_text(text, encoding="utf-8")
    (docs / CHOICE).write_text(choice(groups), encoding="utf-8")


def page(
    groups: Sequence[Line],
    models: Sequence[Line],
    held: Experiment,
    gains: Sequence[Line],
    machine: Mapping[str, str],
) -> str:
    """The page, from the lines of groups and models, and what they gain."""
    confirming = [line for line in groups if line.model.startswith(CONFIRMING)]
    named = {line.model for line in confirming}
    return _TEXT.format(
        picture=f"../{PICTURE}",
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        pairs=PERMUTATIONS,
        draws=DRAWS,
        truth=SHAPLEY.method,
        ceilings=ceilings(groups),
        groups=f"{by_group(CAUSAL, confirming)}\n\n{legend(CAUSAL)}",
        gains=by_group(held, [line for line in gains if line.model in named]),
        gain_table=f"{held.name}.csv",
        agreement=AGREEMENT,
        table=f"{CAUSAL.name}.csv",
        models=side_by_side(models),
    )


def choice(groups: Sequence[Line]) -> str:
    """The page of the models that rules are chosen on."""
    own = [line for line in groups if not line.model.startswith(CONFIRMING)]
    return _CHOICE.format(groups=by_group(CAUSAL, own))


def ceilings(groups: Sequence[Line]) -> str:
    """The agreement with the sample of who knew the true values, from that of its halves."""
    found = []
    for line in (line for line in groups if line.method == SHAPLEY.method):
        half = max(line.entries[AGREEMENT].value, 0)
        both = 2 * half / (1 + half)  # after Spearman and Brown
        found.append(f"- {both**0.5:.2f} on {line.model}")
    return "\n".join(found)


def by_group(experiment: Experiment, table: Sequence[Line]) -> str:
    """A section for each group, its methods by agreement."""
    parts = [f"## {experiment.title}"]
    names = [column.name for column in experiment.columns]
    for group in dict.fromkeys(line.model for line in table):
        own = [line for line in table if line.model == group]
        own.sort(key=lambda line: -line.entries[AGREEMENT].value)
        known = [name for name in names if any(str(line.entries[name]) != "-" for line in own)]
        rows = [[_label(line), *(_number(line, name) for name in known)] for line in own]
        count = max(line.examples for line in own)
        parts.append(f"### {group}, {count} examples\n\n{markdown(['', *known], rows)}")
    return "\n\n".join(parts)


def side_by_side(models: Sequence[Line]) -> str:
    """A row for each model, with its mixers and its group, and a column for each method."""
    shown = [line for line in models if line.method in BY_MODEL]
    methods = sorted({_label(line) for line in shown})
    found = {(line.model, _label(line)): f"{line.entries[AGREEMENT].value:.2f}" for line in shown}
    measured = {line.model for line in shown}
    rows = [
        [name, mixers(name), group, *(found.get((name, method), "-") for method in methods)]
        for group, names in CAUSAL.groups.items()
        for name in names
        if name in measured
    ]
    return markdown(["model", "mixers", "group", *methods], rows)


def mixers(name: str) -> str:
    """The classes of a model's mixers."""
    found = find_mixers(load_bundled(name)[0])
    return ", ".join(dict.fromkeys(type(mixer.module).__name__ for mixer in found))


def picture(groups: Sequence[Line]) -> Figure:
    """What confirms, as dots with bars, the methods by their passes."""
    shown: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for line in sorted(groups, key=lambda line: line.entries[PASSES].value):
        if line.model.startswith(CONFIRMING):
            entries = [line.entries[name] for name in DRAWN]
            label = f"{_label(line)} · {_number(line, PASSES)}"
            shown.setdefault(line.model, {})[label] = [(e.low, e.value, e.high) for e in entries]
    title = "Agreement with interventions; behind each method its passes"
    return plot_intervals(shown, DRAWN, title=title)[0]


def _label(line: Line) -> str:
    return ", ".join(filter(None, (line.method, line.formulation)))


def _number(line: Line, column: str) -> str:
    """A number with its interval; of passes, which are counted, the mean."""
    entry = line.entries[column]
    return f"{entry.value:.0f}" if column == PASSES else str(entry)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
