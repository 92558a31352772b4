"""Make docs/results/roles.md and its table, from what ``evaluate`` has recorded.

Usage: python tools/roles_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``evaluate roles`` and DOCS the one to write to; by default that of this
checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from captum_ssm_bench import EXPERIMENTS, Line, Records, lines
from captum_ssm_bench.experiments.causal.interventions import DRAWS
from captum_ssm_bench.experiments.roles import CHANCE, LOST
from captum_ssm_bench.harness.groups import group_lines
from captum_ssm_bench.harness.tables import as_csv, legend, markdown, sample_size

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TABLES = "results/roles.md", "results"
ROLES = EXPERIMENTS["roles"]

_TEXT = """\
# Roles, counted

Which token asked, which one was matched, which one was answered? [Content or
cause](../methods/content_or_cause.md) says how `LatimFlow(...).decompose(...).roles` tells these
apart. Here it is counted how often the first token by each role is the right one, on small trained
models of three architectures and on tasks whose form says which one is right.

![Of each task how often the right token is first by each role, beside what names one
blindly](../images/results/roles.png)

Made on {date} with {machine}.

## What is right

| task | content | key | query |
| --- | --- | --- | --- |
| recall | the object of the asked fact | its owner there | its owner in the question |
| pairs | the value of the asked pair | its key there | the key that stands last |
| passkeys | the digit that is answered | the statement up to it | the question up to the answer |

The answer is read off one token. In recall and pairs one other tells where it stands, and one asks
for it. *the passkey of anna is 4 1 7* is stated and, to ask for the last digit, said again after a
*?* as far as *4 1*: any of these words can tell whose digit it is and which of them, so that all of
those in the statement are right as key, and all of those in the question as query. All of it
follows from the form of the texts, and no model was looked at. Every answered word counts, those
that a model gets wrong, too.

Two lines of each table say what the others are to be held to. *{chance}* is how often one that is
named blindly would be right. *{lost}* is how often it becomes another if all
right tokens of a role are exchanged for others of their kinds ({draws} draws): a model that keeps
it goes by something else, and nothing can find what it does not do.

## By task

Models of one task count alike.

{groups}

## Where another token is first

- Where one passkey is stated, there is no other to tell it from, and most answers stay what they
  are if the words before a digit are exchanged. There a digit of the passkey is often first as key,
  the answered one or a later one. Where two are stated, the owner has to be matched.
- What passes no mixer counts as content. If the token that asks is the word that is answered, such
  as at the second digit of *3 3*, it adds to the answer by itself, and can be first. The
  passkeys whose content is not found are all so, but for those of the gated delta rule that learned
  one passkey: there the asking digit adds to others, too.
- The gated delta rule of *pairs* has two layers: where another token than the key is first, it is
  the value that stands beside it.

## Model by model

{models}

{legend} [All numbers]({table}).

This page is made by

```
captum-ssm-bench evaluate roles --out RESULTS
python tools/roles_page.py RESULTS
python tools/results_page.py
```
"""


def main(folder: Path, docs: Path = DOCS) -> None:
    results = list(Records(folder / ROLES.name))
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    groups, models = group_lines(ROLES, results), lines(ROLES, results)
    (docs / TABLES).mkdir(parents=True, exist_ok=True)
    (docs / TABLES / f"{ROLES.name}.csv").write_text(as_csv(ROLES, [*groups, *models]), "utf-8")
    (docs / PAGE).write_text(page(groups, models, machine), encoding="utf-8")


def page(groups: Sequence[Line], models: Sequence[Line], machine: Mapping[str, str]) -> str:
    """The page, from the lines of groups and models."""
    return _TEXT.format(
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        chance=CHANCE.method,
        lost=LOST.method,
        draws=DRAWS,
        groups=table(groups),
        models=table([line for group in ROLES.groups.values() for line in of(models, group)]),
        legend=legend(ROLES),
        table=f"{ROLES.name}.csv",
    )


def of(models: Sequence[Line], group: Sequence[str]) -> list[Line]:
    """The lines of the models of a group, in its order."""
    return [line for name in group for line in models if line.model == name]


def table(rows: Sequence[Line]) -> str:
    """A row for each line, with its examples, the rule, and each role."""
    roles = [column.name for column in ROLES.columns]
    head = ["models", "examples", "rule", *roles]
    cells = [
        [
            line.model,
            sample_size([line]).removesuffix(" examples"),
            line.formulation or line.method,
            *(str(line.entries[role]) for role in roles),
        ]
        for line in rows
    ]
    return markdown(head, cells)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
