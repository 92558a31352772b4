"""Make docs/results.md and the tables beside it, from what ``captum-ssm evaluate`` has recorded.

Usage: python tools/results_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` and DOCS the one to write to; by default that of this checkout.  In RESULTS/trainings may
lie what was recorded of several trainings of each model, with ``--models``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from captum_ssm.bench import EXPERIMENTS, Experiment, Line, Records, lines
from captum_ssm.bench.experiments.counterparts import counterparts
from captum_ssm.bench.harness.excerpt import ROWS, excerpt
from captum_ssm.bench.harness.runner import Result
from captum_ssm.bench.harness.tables import as_csv, labels_of, legend, markdown, sample_size
from captum_ssm.bench.harness.verdicts import Comparison, Outcome, Verdict, verdicts
from captum_ssm.bench.published.beyond import BEYOND
from captum_ssm.bench.published.on_images import IMAGES
from captum_ssm.bench.published.on_texts import TEXTS
from captum_ssm.bench.published.on_tokens import TOKENS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TABLES = "results.md", "results"
OWN_PAGES = (
    "causal",
    "roles",
    "knockout",
    "hybrid-parts",
    "graphs",
    "answers",
    "erasers",
    "forgotten-passkeys",
    "motifs",
)

Results = Mapping[str, Sequence[Result]]

PUBLISHED = (*TOKENS, *TEXTS, *IMAGES)

#: What becomes of a question that no paper has answered.
ANSWERS = {
    Outcome.CONFIRMED: "better",
    Outcome.REFUTED: "worse",
    Outcome.OPEN: "not told apart",
}

_TEXT = """\
# Results

What `captum-ssm evaluate` measured on the small trained models that come with the package, whose
right answers are known, and what that says of the orderings of methods that the papers publish.
Pages of their own have [interventions](results/causal.md), [roles](results/roles.md),
[knock-outs](results/knockout.md), [graphs](results/graphs.md), [whole answers](results/answers.md)
and [motifs in DNA](results/motifs.md).

Made on {date} with {machine}.

## What the papers say

A published ordering is *confirmed* if the interval of the paired difference lies on its side of 0,
*refuted here* if on the other, else *not confirmed*. The gain is by how much the row said to be
better is better, with its interval; both rows are measured on the same examples. Where a paper
looks at one layer, the best one is chosen on every second example and compared on the others.

{counts}

{missing}

The models here are small, with one to four layers and 12 to 300 thousand parameters, and learned
one task each; those of the papers have up to 48 layers. An ordering refuted here may hold there.
LATIM's tables are of its maps with `silu` and of the formulation `s6` of the hidden-attention
paper (HA); UN is the unified paper. What they say of images comes from their scripts
(`published code`), which differ from their equations; both are compared. The activation maps (CAM)
of UN's table 6 are a transformer's, here both sides are of one model; the reductions of HA's table
9 are taken for those of rollout, as in its table 5; and LATIM's tables 5 and 6 are of models that
were not trained for retrieval, unlike those here.

{published}

## What is asked here

Does the exact division of the activation (`linearized`) find sources better than LATIM's own
(`silu`), do the exact relevances of the whole network (`LatimFlow`) do so better than the papers'
and the usual methods, and does the unified formulation of implicit attention better than `s6`?

{asked}

## Vision Mamba beside a transformer

Maps of models of equal size that learned the same scenes, beside what finds the objects without a
model. The papers' transformer is DeiT (UN, tables 1, 3 and 6; HA, tables 1 and 2). The transformer
here was trained to tell what each pixel shows as well, and Vision Mamba was not: that one finds
objects better than the other says nothing of their architectures. VMamba, in two stages, was
trained as Vision Mamba was; it has no gate, so that LatimFlow and MambaLRP say the same of it.

{counterparts}

## Tables

Of each method and formulation the best row, and of these the best {rows} by the first column, with
the baselines that look at no model wherever they are; the best layer is chosen on the same examples
here, which favours methods with several.

{tables}

{again}This page is made by

```
captum-ssm evaluate --all --out RESULTS
python tools/results_page.py RESULTS
```
"""

_AGAIN = """\
## Trained again

What is above is of one training of each model. Here models were trained with several seeds, of
weights and data (`captum-ssm train NAME --seed 1 --out FOLDER`), and explained together
(`captum-ssm evaluate --models NAME NAME=FOLDER --out RESULTS/trainings`); the intervals are over
trainings and their examples, so that what they exclude does not hang on one training.

{counts}

{published}

{asked}

{tables}

"""


def main(folder: Path, docs: Path = DOCS) -> None:
    results = recorded(folder)
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    (docs / TABLES).mkdir(parents=True, exist_ok=True)
    tables = {name: lines(EXPERIMENTS[name], found) for name, found in results.items()}
    for name, table in tables.items():
        (docs / TABLES / f"{name}.csv").write_text(as_csv(EXPERIMENTS[name], table), "utf-8")
    again = trained_again(recorded(folder / "trainings"))
    (docs / PAGE).write_text(page(results, tables, machine, again), encoding="utf-8")


def recorded(folder: Path) -> Results:
    """What was measured of each experiment, in their order, but for those with their own pages."""
    names = [name for name in EXPERIMENTS if name not in OWN_PAGES and (folder / name).is_dir()]
    known = {name: list(Records(folder / name)) for name in names}
    return {name: found for name, found in known.items() if found}


def page(
    results: Results, tables: Mapping[str, Sequence[Line]], machine: Mapping[str, str], again: str
) -> str:
    """The page, from results and tables by experiment, and its part on other trainings."""
    published = judged(results, PUBLISHED)
    parts = [section(EXPERIMENTS[name], table) for name, table in tables.items()]
    known = {each.comparison for each in published}
    return _TEXT.format(
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        counts=counts(published),
        missing=unmeasured([each for each in PUBLISHED if each not in known]),
        published=by_source(published),
        asked=answered(judged(results, BEYOND)),
        counterparts=side_by_side(tables),
        tables="\n\n".join(parts),
        rows=ROWS,
        again=again,
    )


def trained_again(results: Results) -> str:
    """The part of the page on models of several trainings; nothing if there are none."""
    if not results:
        return ""
    parts = [
        section(EXPERIMENTS[name], lines(EXPERIMENTS[name], found), linked=False)
        for name, found in results.items()
    ]
    published = judged(results, PUBLISHED)
    return _AGAIN.format(
        counts=counts(published),
        published=by_source(published),
        asked=answered(judged(results, BEYOND)),
        tables="\n\n".join(parts),
    )


def judged(results: Results, comparisons: Sequence[Comparison]) -> list[Verdict]:
    """The verdicts on all comparisons of experiments that were run, in their order."""
    found = [
        verdict
        for name, measured in results.items()
        for verdict in verdicts(EXPERIMENTS[name], measured, comparisons)
    ]
    return [verdict for verdict in found if verdict.outcome is not Outcome.MISSING]


def counts(found: Sequence[Verdict]) -> str:
    """How many orderings of each table are confirmed, refuted and open."""
    shown = (Outcome.CONFIRMED, Outcome.REFUTED, Outcome.OPEN)
    by_table: dict[str, Counter[Outcome]] = {}
    for verdict in found:
        by_table.setdefault(verdict.comparison.source, Counter())[verdict.outcome] += 1
    rows = [
        [source, *(str(outcomes[each]) for each in shown)] for source, outcomes in by_table.items()
    ]
    return markdown(["of", *(each.value for each in shown)], rows)


def unmeasured(comparisons: Sequence[Comparison]) -> str:
    """Which orderings of which tables are not measured here."""
    tables = Counter(f"{each.source} ({each.experiment})" for each in comparisons)
    if not tables:
        return "All that is listed for the experiments of this package was measured."
    listed = ", ".join(f"{count} of {table}" for table, count in tables.items())
    return f"Not measured here: {listed}."


def by_source(found: Sequence[Verdict]) -> str:
    """A table of verdicts for each published one."""
    grouped: dict[str, list[Verdict]] = {}
    for verdict in found:
        grouped.setdefault(verdict.comparison.source, []).append(verdict)
    head = ["model", "this", "against this", "by", "published", "gain here", "verdict"]
    parts = []
    for source, group in grouped.items():
        rows = [
            [*said(v), v.comparison.published or "-", str(v.gain), v.outcome.value] for v in group
        ]
        parts.append(f"### {source}\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def answered(found: Sequence[Verdict]) -> str:
    """How often each question has which answer, and a table of all answers."""
    shown = (Outcome.CONFIRMED, Outcome.REFUTED, Outcome.OPEN)
    by_question: dict[tuple[str, str], Counter[Outcome]] = {}
    for verdict in found:
        question = str(verdict.comparison.better), str(verdict.comparison.worse)
        by_question.setdefault(question, Counter())[verdict.outcome] += 1
    summary = [
        [*question, *(str(outcomes[each]) for each in shown)]
        for question, outcomes in by_question.items()
    ]
    rows = [[*said(v), str(v.gain), ANSWERS[v.outcome]] for v in found]
    return "\n\n".join(
        [
            "In how many of the models:",
            markdown(["this", "against this", *(ANSWERS[each] for each in shown)], summary),
            "One by one:",
            markdown(["model", "this", "against this", "by", "gain", "this is"], rows),
        ]
    )


def said(verdict: Verdict) -> tuple[str, str, str, str]:
    """The model, the two rows, and what they are compared by."""
    comparison = verdict.comparison
    return verdict.model, str(comparison.better), str(comparison.worse), comparison.column


def section(experiment: Experiment, table: Sequence[Line], linked: bool = True) -> str:
    """The best rows of an experiment, model by model, with a link to all rows if wanted."""
    names = [column.name for column in experiment.columns]
    parts = [f"### {experiment.title}"]
    for model in sorted({line.model for line in table}):
        own = excerpt(experiment, [line for line in table if line.model == model])
        labels = labels_of(own)
        rows = [
            [*(getattr(line, label) for label in labels), *(str(line.entries[n]) for n in names)]
            for line in own
        ]
        parts.append(f"{model}, {sample_size(own)}\n\n{markdown([*labels, *names], rows)}")
    link = f" [All rows]({TABLES}/{experiment.name}.csv)." if linked else ""
    parts.append(f"{legend(experiment)}{link}")
    return "\n\n".join(parts)


def side_by_side(tables: Mapping[str, Sequence[Line]]) -> str:
    """A table for each experiment on images, of the maps that models of several kinds share."""
    parts = []
    for name, found in counterparts(tables).items():
        columns = [column.name for column in EXPERIMENTS[name].columns]
        rows = [
            [kind, line.model, line.method, line.formulation, *map(str, line.entries.values())]
            for kind, line in found
        ]
        head = ["map", "model", "method", "formulation", *columns]
        parts.append(f"### {EXPERIMENTS[name].title}\n\n{markdown(head, rows)}")
    return "\n\n".join(parts) or "Not measured here."


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
