"""Make the pages of results and their pictures from the tables in docs/results.

Usage: python tools/results_page.py [DOCS], where DOCS is the folder of the tables and of the pages;
by default that of this checkout.  ``python tools/results_tables.py`` makes the tables.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import results_answers
from matplotlib.figure import Figure
from results_tables import (
    AGAIN,
    DOCS,
    MEASURED,
    ORDERINGS,
    OWN_PAGES,
    PUBLISHED,
    TABLES,
    Judged,
    judged,
    read_lines,
)

from captum_ssm_bench import EXPERIMENTS, Experiment, Line
from captum_ssm_bench.experiments.counterparts import counterparts
from captum_ssm_bench.harness.excerpt import ROWS, excerpt
from captum_ssm_bench.harness.tables import labels_of, legend, markdown, picture, sample_size
from captum_ssm_bench.harness.verdicts import Outcome

PICTURES = "images/results"
SHOWN = (Outcome.CONFIRMED, Outcome.REFUTED, Outcome.OPEN)
#: What becomes of a question that no paper has answered.
ANSWERS = {
    Outcome.CONFIRMED: "better",
    Outcome.REFUTED: "worse",
    Outcome.OPEN: "not told apart",
}
#: Columns of a picture at most.
_PANELS = 4
_DOTS_PER_INCH = 80
_MADE = """\
This page is made from the tables beside it, and they from what the command records:

```
captum-ssm-bench evaluate {what} --out RESULTS
python tools/results_tables.py RESULTS
python tools/results_page.py
```
"""

_EXPERIMENT = """\
# {title}

![The best rows of each model, with intervals]({picture})

Made on {machine}. Of each method and formulation the best row, and of these the best {rows} by the
first column, with the baselines that look at no model wherever they are; the best layer is chosen
on the same examples here, which favours methods with several. [All rows]({name}.csv).

{tables}

{legend}

{beside}{made}"""

_BESIDE = """\
## Models of several kinds

Maps of models that learned the same scenes, beside what finds the objects without a model. The
papers' transformer is DeiT. The transformer here was trained to tell what each pixel shows as
well, and Vision Mamba was not: that one finds objects better than the other says nothing of their
architectures. VMamba, in two stages, was trained as Vision Mamba was; it has no gate, so that
LatimFlow and MambaLRP say the same of it.

{table}

"""

_ORDERINGS = """\
# The papers' orderings

The papers publish which method does better than which. Here the same is measured on the small
trained models that come with the package. An ordering is *confirmed* if the interval of the paired
difference lies on its side of 0, *refuted here* if on the other, else *not confirmed*.

![How many of the orderings of each paper are confirmed, not confirmed and refuted
here](../{picture})

{counts}

One by one: {links}. {missing}

The models here are small, with one to four layers and 12 to 300 thousand parameters, and learned
one task each; those of the papers have up to 48 layers. An ordering refuted here may hold there.
LATIM's tables are of its maps with `silu` and of the formulation `s6` of the hidden-attention paper
(HA); UN is the unified paper. What they say of images comes from their scripts (`published code`),
which differ from their equations; both are compared. The activation maps (CAM) of UN's table 6 are
a transformer's, here both sides are of one model; the reductions of HA's table 9 are taken for
those of rollout, as in its table 5; and LATIM's tables 5 and 6 are of models that were not trained
for retrieval, unlike those here.

## Questions that no paper asked

Does the exact division of the activation (`linearized`) find sources better than LATIM's own
(`silu`), do the exact relevances of the whole network (`LatimFlow`, by `rule="frozen"`) do so
better than the papers' and the usual methods, and does the unified formulation of implicit
attention better than `s6`? In how many of the models:

{asked}

[One by one](orderings-asked.md).

{made}"""

_ONE_BY_ONE = """\
# {title}

The gain is by how much the row said to be better is better, with its interval; both rows are
measured on the same examples. Where a paper looks at one layer, the best one is chosen on every
second example and compared on the others. [What the verdicts mean, and how many there are of
each](orderings.md); [all as one table]({table}.csv).

{parts}
"""

_AGAIN = """\
# Trained again

The other pages are of one training of each model. Here models were trained with several seeds, of
weights and data (`captum-ssm-bench train NAME --seed 1 --out FOLDER`), and explained together
(`captum-ssm-bench evaluate --models NAME NAME=FOLDER --out RESULTS/trainings`); the intervals are
over trainings and their examples, so that what they exclude does not hang on one training.

{tables}

## Orderings

{counts}

One by one: {links}. Maps of the published code were not made of these.
"""

_ONE_AGAIN = """\
# {title}, trained again

![The best rows of each model, over its trainings](../{picture})

The intervals are over [several trainings](again.md) of each model, and their examples.

{tables}

{legend}
"""

#: What is drawn of experiments whose pages other tools make: columns, and which lines.
#: A group of models is called by their number in brackets.
DRAWN: dict[str, tuple[Sequence[str], Callable[[Line], bool]]] = {
    "roles": (("query", "key", "content"), lambda line: " (" in line.model),
    "hybrid-parts": (("accuracy",), lambda line: not line.row),
    "graphs": (
        ("token", "accuracy"),
        lambda line: " (" in line.model and line.method != "nodes",
    ),
    "answers": (
        ("last fact", "link", "root", "in order"),
        lambda line: not line.row.endswith("summed"),
    ),
    "erasers": (
        ("named first", "undone first", "blindly"),
        lambda line: line.method == "taken out",
    ),
    "forgotten-passkeys": (("correlation", "answered right"), lambda line: True),
    "motifs": (("AP", "pointing", "positions", "variants"), lambda line: True),
}

#: By how the names of their tables begin.
PAPERS = {"latim": "LATIM", "ha": "HA", "un": "UN"}


def main(docs: Path = DOCS) -> None:
    for name, text in pages(docs).items():
        (docs / name).write_text(text, encoding="utf-8")
    (docs / PICTURES).mkdir(parents=True, exist_ok=True)
    for name, draw in pictures(docs).items():
        draw().savefig(docs / PICTURES / f"{name}.png", dpi=_DOTS_PER_INCH)


def pages(docs: Path = DOCS) -> dict[str, str]:
    """The texts of all pages, by their paths, from the tables that there are."""
    place = docs / TABLES
    measured = json.loads((place / MEASURED).read_text(encoding="utf-8"))
    tables, again = known_tables(place), known_tables(place, AGAIN)
    once, several = (judged(place / f"{begin}{ORDERINGS}.csv") for begin in ("", AGAIN))
    beside = counterparts(tables)
    found = {
        name: experiment_page(EXPERIMENTS[name], table, measured[name], beside.get(name, []))
        for name, table in tables.items()
    }
    own = {name: page.partition("\n")[0].removeprefix("# ") for name, page in found.items()}
    found |= orderings_pages(once) if once else {}
    found |= again_pages(again, several) if again else {}
    whole = {f"{TABLES}/{name}.md": wrapped(text) for name, text in found.items()}
    said = answers(docs, tables)
    return whole | ({"results.md": wrapped(results_answers.page(said, own, found))} if said else {})


def answers(docs: Path, tables: Mapping[str, Sequence[Line]]) -> dict[str, results_answers.Answer]:
    """What the first page says; nothing where tables that it is about are not there."""
    once, causal = judged(docs / TABLES / f"{ORDERINGS}.csv"), lines_of(docs / TABLES, "causal")
    if not (causal and once and "segmentation" in tables):
        return {}
    return results_answers.answers(causal, tables["segmentation"], tally(once))


def pictures(docs: Path = DOCS) -> dict[str, Callable[[], Figure]]:
    """What draws the pictures, by their names."""
    place, tables = docs / TABLES, known_tables(docs / TABLES)
    found: dict[str, Callable[[], Figure]] = {}
    for begin, known in (("", tables), (AGAIN, known_tables(place, AGAIN))):
        for name, table in known.items():
            shown = [line for own in of_models(table) for line in excerpt(EXPERIMENTS[name], own)]
            columns = EXPERIMENTS[name].columns[:_PANELS]
            found[f"{begin}{name}"] = partial(picture, columns, shown)
    for name, (wanted, is_shown) in DRAWN.items():
        columns = tuple(c for c in EXPERIMENTS[name].columns if c.name in wanted)
        shown = [line for line in lines_of(place, name) if is_shown(line)]
        if shown:
            found[name] = partial(picture, columns, shown)
    said = answers(docs, tables)
    if said:
        causal = lines_of(place, "causal")
        found["which_method"] = partial(results_answers.overview, causal)
    return found | {name: answer.draw for name, answer in said.items()}


def wrapped(text: str) -> str:
    """Paragraphs in lines of a width that is easy to read; tables and blocks as they are."""
    blocks, inside = [], False
    for block in text.split("\n\n"):
        plain = not inside and not block.startswith(("|", "#", "!", "-", "`", ":"))
        inside ^= block.count("```") % 2 == 1
        blocks.append(
            textwrap.fill(block, 100, break_long_words=False, break_on_hyphens=False)
            if plain
            else block
        )
    return "\n\n".join(blocks).rstrip() + "\n"


def known_tables(place: Path, begin: str = "") -> dict[str, list[Line]]:
    """The tables of experiments that have no page of their own, by experiment."""
    found = {n: lines_of(place, n, begin) for n in EXPERIMENTS if n not in OWN_PAGES}
    return {name: table for name, table in found.items() if table}


def lines_of(place: Path, name: str, begin: str = "") -> list[Line]:
    """The table of an experiment; none if there is no such file."""
    path = place / f"{begin}{name}.csv"
    return read_lines(EXPERIMENTS[name], path) if path.exists() else []


def of_models(table: Iterable[Line]) -> list[list[Line]]:
    """The lines of each model."""
    found = list(table)
    return [
        [line for line in found if line.model == model]
        for model in sorted({x.model for x in found})
    ]


# --- experiments ----------------------------------------------------------------------------------


def experiment_page(
    experiment: Experiment,
    table: Sequence[Line],
    machine: Mapping[str, str],
    beside: Sequence[tuple[str, Line]],
) -> str:
    """The page of one experiment: its picture, the best rows of each model, and where they lie."""
    name = experiment.name
    versions = ", ".join(f"{key} {value}" for key, value in machine.items() if key != "date")
    return _EXPERIMENT.format(
        title=experiment.title,
        picture=f"../{PICTURES}/{name}.png",
        machine=f"{machine['date']} with {versions}",
        rows=ROWS,
        name=name,
        tables=by_model(experiment, table, "##"),
        legend=legend(experiment),
        beside=_BESIDE.format(table=side_by_side(experiment, beside)) if beside else "",
        made=_MADE.format(what=name),
    )


def by_model(experiment: Experiment, table: Sequence[Line], level: str) -> str:
    """The best rows of an experiment, model by model."""
    names = [column.name for column in experiment.columns]
    parts = []
    for lines in of_models(table):
        own = excerpt(experiment, lines)
        labels = labels_of(own)
        rows = [
            [*(getattr(line, label) for label in labels), *(str(line.entries[n]) for n in names)]
            for line in own
        ]
        parts.append(
            f"{level} {own[0].model}, {sample_size(own)}\n\n{markdown([*labels, *names], rows)}"
        )
    return "\n\n".join(parts)


def side_by_side(experiment: Experiment, found: Sequence[tuple[str, Line]]) -> str:
    """A table of the maps that models of several kinds share."""
    rows = [
        [kind, line.model, line.method, line.formulation, *map(str, line.entries.values())]
        for kind, line in found
    ]
    names = [column.name for column in experiment.columns]
    return markdown(["map", "model", "method", "formulation", *names], rows)


# --- orderings ------------------------------------------------------------------------------------


def orderings_pages(found: Sequence[Judged]) -> dict[str, str]:
    """What became of the papers' orderings, and of questions beside them."""
    published = [each for each in found if each.source]
    asked = [each for each in found if not each.source]
    pages = {
        ORDERINGS: _ORDERINGS.format(
            picture=f"{PICTURES}/orderings.png",
            counts=counts(published),
            links=links(published, ORDERINGS),
            missing=unmeasured(published),
            asked=summary(asked),
            made=_MADE.format(what="--all"),
        ),
        f"{ORDERINGS}-asked": _ONE_BY_ONE.format(
            title="Questions that no paper asked, one by one",
            table=ORDERINGS,
            parts=one_by_one(asked),
        ),
    }
    return pages | by_paper(published, ORDERINGS, "")


def by_paper(published: Sequence[Judged], stem: str, more: str) -> dict[str, str]:
    """A page for each paper, with a table for each of its own."""
    pages = {}
    for short, paper in PAPERS.items():
        own = [each for each in published if each.source.startswith(paper)]
        parts = [
            f"## {source}\n\n{one_by_one([each for each in own if each.source == source])}"
            for source in dict.fromkeys(each.source for each in own)
        ]
        if parts:
            pages[f"{stem}-{short}"] = _ONE_BY_ONE.format(
                title=f"{paper}'s orderings{more}", table=stem, parts="\n\n".join(parts)
            )
    return pages


def again_pages(tables: Mapping[str, Sequence[Line]], found: Sequence[Judged]) -> dict[str, str]:
    """What came out of several trainings."""
    published = [each for each in found if each.source]
    pages = {
        f"{AGAIN}{name}": _ONE_AGAIN.format(
            title=EXPERIMENTS[name].title,
            picture=f"{PICTURES}/{AGAIN}{name}.png",
            tables=by_model(EXPERIMENTS[name], table, "##"),
            legend=legend(EXPERIMENTS[name]),
        )
        for name, table in tables.items()
    }
    text = _AGAIN.format(
        tables="\n".join(f"- [{EXPERIMENTS[name].title}]({AGAIN}{name}.md)" for name in tables),
        counts=counts(published),
        links=links(published, f"{AGAIN}{ORDERINGS}"),
    )
    return {"again": text, **pages} | by_paper(published, f"{AGAIN}{ORDERINGS}", ", trained again")


def tally(found: Iterable[Judged]) -> dict[str, Counter[str]]:
    """The verdicts on each table's orderings."""
    by_table: dict[str, Counter[str]] = {}
    for each in found:
        if each.source:
            by_table.setdefault(each.source, Counter())[each.verdict] += 1
    return by_table


def counts(found: Sequence[Judged]) -> str:
    """How many orderings of each table are confirmed, refuted and open."""
    rows = [
        [source, *(str(verdicts[each.value]) for each in SHOWN)]
        for source, verdicts in tally(found).items()
    ]
    return markdown(["of", *(each.value for each in SHOWN)], rows)


def links(found: Sequence[Judged], stem: str) -> str:
    """To the pages of the papers."""
    there = {
        short: paper
        for short, paper in PAPERS.items()
        if any(each.source.startswith(paper) for each in found)
    }
    return ", ".join(f"[{paper}]({stem}-{short}.md)" for short, paper in there.items())


def unmeasured(found: Sequence[Judged]) -> str:
    """Which orderings of which tables are not measured here."""
    known = {(x.experiment, x.source, x.better, x.worse, x.column) for x in found}
    missing = Counter(
        f"{x.source} ({x.experiment})"
        for x in PUBLISHED
        if (x.experiment, x.source, str(x.better), str(x.worse), x.column) not in known
    )
    if not missing:
        return "All that is listed for the experiments of this package was measured."
    listed = ", ".join(f"{count} of {table}" for table, count in missing.items())
    return f"Not measured here: {listed}."


def summary(asked: Sequence[Judged]) -> str:
    """In how many of the models each question has which answer."""
    by_question: dict[tuple[str, str], Counter[str]] = {}
    for each in asked:
        by_question.setdefault((each.better, each.worse), Counter())[each.verdict] += 1
    rows = [
        [*question, *(str(verdicts[each.value]) for each in SHOWN)]
        for question, verdicts in by_question.items()
    ]
    return markdown(["this", "against this", *(ANSWERS[each] for each in SHOWN)], rows)


def one_by_one(found: Sequence[Judged]) -> str:
    """A row for each verdict."""
    head = ["model", "this", "against this", "by", "published", "gain here", "verdict"]
    said = {each.value: answer for each, answer in ANSWERS.items()}
    rows = [
        [x.model, x.better, x.worse, x.column, x.published or "-", str(x.entry), x.verdict]
        if x.source
        else [x.model, x.better, x.worse, x.column, str(x.entry), said[x.verdict]]
        for x in found
    ]
    if found and not found[0].source:
        head = ["model", "this", "against this", "by", "gain", "this is"]
    return markdown(head, rows)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
