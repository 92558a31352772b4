"""The first page of the results: a question, its answer and the picture that it is read off.

Every number and every name in an answer is looked up in the tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure
from results_pictures import bars, draw

from captum_ssm.viz import plot_intervals
from captum_ssm_bench import EXPERIMENTS, Line
from captum_ssm_bench.experiments.causal.methods import SHAPLEY
from captum_ssm_bench.harness.tables import Entry, markdown
from captum_ssm_bench.harness.verdicts import Outcome

CAUSAL = EXPERIMENTS["causal"]
TOP, RHO, INSERTION, OBJECT, PASSES = "top 1", "ρ Shapley", "insertion", "mask AP", "passes"
PRECISION = "mAP"
#: Beginnings of the names of groups of models that nothing was chosen on.
TEXTS, IMAGES = "confirming (", "confirming on images"
#: What every other method is held against, and what costs a run for each token or draw.
TRUE = (SHAPLEY.method, "leave-one-out")
#: What asks no model.
BLIND = ("random",)
#: Passes that an explanation costs at most, if it is to cost about a gradient.
CHEAP = 3
#: By what is explained, the models of the third question.
KINDS = {
    "valence-bert": "transformer,\ntexts",
    "scenes-vit": "transformer,\nimages",
    "scenes-vim": "Vision Mamba",
    "scenes-vim-first": "Vision Mamba,\ncls first",
    "pairs-bamba": "hybrid,\npairs",
    "copying-bamba": "hybrid,\ncopying",
    "two-passkeys-mamba": "longer texts,\nMamba",
    "two-passkeys-mamba2": "longer texts,\nMamba-2",
}
#: Models of images, by what they are, and the maps of them that are shown.
SEEING = {"scenes-vim": "Vision Mamba", "scenes-vmamba": "VMamba", "scenes-vit": "transformer"}
MAPS = {
    "LatimFlow": ("LatimFlow", "patches"),
    "LatimFlow, size alone": ("LatimFlow", "patches, absolute"),
    "MambaLRP": ("MambaLRP", "patches"),
    "LatimLogit": ("LatimLogit", "linearized"),
    "LatimALTI rollout": ("LatimALTI rollout", "linearized"),
    "TransformerAttribution": ("TransformerAttribution", "lrp"),
    "MambaAttribution": ("MambaAttribution", "unified"),
    "ImplicitAttentionRollout": ("ImplicitAttentionRollout", "unified"),
    "ImplicitAttention": ("ImplicitAttention", "unified"),
    "IntegratedGradients": ("IntegratedGradients", "patches"),
    "IntegratedGradients, size alone": ("IntegratedGradients", "patches, absolute"),
    "FeatureAblation": ("FeatureAblation", "patches"),
    "GradCAM": ("GradCAM", ""),
    "brightness, no model": ("brightness", "patches"),
    "random, no model": ("random", "patches"),
}

_PAGE = """\
# Results

Which method to trust, by what was measured on the small trained models that come with the package,
whose right answers are known. Each answer is read off the picture below it.

{answers}

## Which method finds the source?

![How often each method names a right token first, by model](images/results/source.png)

How often the most relevant token is one that the answer is read off, on models that nothing was
chosen on. {source} Where several of a column are marked as equal (=), all of them are at the top of
the scale: that is no tie between methods but the end of what the task can tell.

[By role](results/roles.md), and {sources}.

## Whose ranking agrees with interventions?

![Agreement of each method with interventions, by cost](images/results/agreement.png)

Correlation of relevance with the Shapley values of replacing tokens; insertion is the area under
the probability as tokens are put in, the most relevant first. {agreement} [Relevance and
interventions](results/causal.md).

## Which is safe for a transformer, a Vision Mamba, a hybrid, a longer text?

![Agreement of each method with interventions, by the kind of model](images/results/safe.png)

The same correlation by the kind of model; longer texts have 64 to 128 tokens. Vision Mambas and the
hybrid that copies are among the models that nothing was chosen on, the others are not. {safe}

What becomes of texts of thousands of tokens is measured by [what states hold](results/answers.md),
not by Shapley values, and what methods cost there by [speed](speed.md).

## Which finds the object in an image?

![How well maps tell the object's pixels, by model](images/results/objects.png)

Average precision of maps as guesses at the object's pixels. {objects}

[Objects](results/segmentation.md), [several objects](results/pseudo-masks.md), [removing
pixels](results/image-perturbation.md).

## Do the papers' orderings hold?

![How many of the papers' orderings are confirmed here](images/results/orderings.png)

{orderings} [One by one](results/orderings.md), and [trained again](results/again.md) with other
seeds. With the papers' own data and weights, each of their tables is a [command](howto/papers.md).

## All that was measured

{listed}
- [Relevance and interventions](results/causal.md)
- [Roles, counted](results/roles.md): who asks, who is matched, whose content is moved
- [Knock-outs](results/knockout.md): what single messages do when they are cut
- [Graphs](results/graphs.md): whether the paths and nodes of graphs are those that matter
- [Whole answers](results/answers.md): where they came from, and what states remember
- [Motifs in DNA](results/motifs.md)
- [What LATIM's decomposition misses](decomposition_error.md), [speed](speed.md)

```{{toctree}}
:hidden:

results/causal
results/causal-choosing
results/roles
results/knockout
results/graphs
results/answers
results/motifs
{tree}
```
"""


class Answer(NamedTuple):
    """What is said to a question.

    Attributes:
        question: as the table of answers has it.
        text: the answer.
        draw: makes the picture that it is read off.
    """

    question: str
    text: str
    draw: Callable[[], Figure]


class Scored(NamedTuple):
    """A method's number.

    Attributes:
        name: of the method, with its formulation.
        entry: the number with its interval.
        passes: what it costs.
    """

    name: str
    entry: Entry
    passes: float

    def __str__(self) -> str:
        return f"`{self.name}` {self.entry}"


def answers(
    causal: Sequence[Line], seen: Sequence[Line], tally: Mapping[str, Counter[str]]
) -> dict[str, Answer]:
    """What the tables answer, by the names of the pictures.

    Args:
        causal: relevance against interventions.
        seen: maps against objects.
        tally: by table of a paper, what became of its orderings.
    """
    return {
        "source": source(causal),
        "agreement": agreement(causal),
        "safe": safe(causal),
        "objects": objects(seen),
        "orderings": orderings(tally),
    }


def page(said: Mapping[str, Answer], own: Mapping[str, str], listed: Iterable[str]) -> str:
    """The page.

    Args:
        said: the answers.
        own: the titles of experiments' pages, by name.
        listed: the names of all pages.
    """
    of_sources = ("copying", "translation", "passkey", "two-passkeys", "frequent-word", "recall")
    short = {name: own[name].partition(" (")[0] for name in of_sources if name in own}
    return _PAGE.format(
        answers=markdown(["question", "answer"], [each[:2] for each in said.values()]),
        **{name: each.text for name, each in said.items()},
        sources=", ".join(
            f"[{title[0].lower()}{title[1:]}](results/{name}.md)" for name, title in short.items()
        ),
        listed="\n".join(f"- [{title}](results/{name}.md)" for name, title in own.items()),
        tree="\n".join(f"results/{name}" for name in listed),
    )


# --- answers --------------------------------------------------------------------------------------


def source(causal: Sequence[Line]) -> Answer:
    """Which methods name a right token first."""
    (group,) = _groups(causal, TEXTS)
    names = [name for name in CAUSAL.groups["confirming"] if ranked(causal, name, TOP)]
    columns = {name: name.replace("-", "-\n", 1) for name in names}
    found = ranked(causal, group, TOP)
    best, second = [each for each in found if each.name not in _labels(causal, TRUE)][:2]
    true = next(each for each in found if each.name == SHAPLEY.method)
    return Answer(
        "Which method finds the source?",
        f"{best} of the texts of {len(names)} models, then {second}. The largest true Shapley "
        f"value is on such a token in {true.entry}.",
        partial(matrix, causal, {group: "all of them", **columns}, TOP),
    )


def agreement(causal: Sequence[Line]) -> Answer:
    """Which methods agree with interventions, at which cost."""
    (group,) = _groups(causal, TEXTS)
    found = [each for each in ranked(causal, group, RHO) if each.name not in BLIND]
    true = _labels(causal, TRUE)
    cheap = [each for each in found if each.passes <= CHEAP]
    dear = [each for each in found if each.passes > CHEAP and each.name not in true]
    above = [each for each in dear if each.entry.value > cheap[0].entry.value]
    more = ", ".join(f"{each} for {each.passes:.0f}" for each in above)
    shown = {
        f"{CHEAP} passes or fewer": cheap,
        "more passes": dear,
        "interventions themselves": [each for each in found if each.name in true],
    }
    groups = {
        heading: {
            f"{each.name} · {each.passes:.0f}": [
                _of(causal, group, each.name).entries[name].interval for name in (RHO, INSERTION)
            ]
            for each in some
        }
        for heading, some in shown.items()
    }
    title = "Texts of models that nothing was chosen on; behind each method its passes"
    return Answer(
        "Whose ranking agrees with interventions?",
        f"For {CHEAP} passes or fewer {cheap[0]} and {cheap[1]}; "
        f"{f'above it, for more passes, {more}' if above else 'nothing dearer has more'}.",
        lambda: plot_intervals(groups, (RHO, INSERTION), title=title)[0],
    )


def safe(causal: Sequence[Line]) -> Answer:
    """Which methods agree on every kind of model."""
    found = {each.name: each for each in ranked(causal, _groups(causal, TEXTS)[0], RHO)}
    least = {
        name: min(_of(causal, model, name).entries[RHO].value for model in KINDS) for name in found
    }
    order = sorted(least, key=lambda name: -least[name])
    apart = _labels(causal, (*TRUE, *BLIND))
    worst = {n: least[n] for n in order if found[n].passes <= CHEAP and n not in BLIND}
    best, second = list(worst)[:2]
    return Answer(
        "Which is safe for any kind of model?",
        f"For {CHEAP} passes or fewer, the worst case of `{best}` is {worst[best]:.2f} and that of "
        f"`{second}` {worst[second]:.2f}; others fall as low as {min(worst.values()):.2f}.",
        partial(matrix, causal, KINDS, RHO, sorted(order, key=apart.__contains__)),
    )


def objects(seen: Sequence[Line]) -> Answer:
    """Which maps tell the object from what is around it."""
    names = {cell: name for name, cell in MAPS.items()}
    known = [
        replace(line, method=names[line.method, line.formulation], formulation="")
        for line in seen
        if (line.method, line.formulation) in names and not line.row
    ]
    parts = []
    for model, kind in SEEING.items():
        rows = [line for line in known if line.model == model]
        best, second = sorted(rows, key=lambda line: -line.entries[PRECISION].value)[:2]
        both = (f"`{line.method}` {line.entries[PRECISION]}" for line in (best, second))
        parts.append(f"{kind}: {' and '.join(both)}")
    return Answer(
        "Which finds the object in an image?",
        f"{'; '.join(parts)}.",
        partial(matrix, known, SEEING, PRECISION, list(MAPS)),
    )


def orderings(tally: Mapping[str, Counter[str]]) -> Answer:
    """How many of the papers' orderings are confirmed."""
    whole = sum(tally.values(), Counter())
    total = sum(whole.values())
    confirmed, refuted = whole[Outcome.CONFIRMED.value], whole[Outcome.REFUTED.value]
    return Answer(
        "Do the papers' orderings hold?",
        f"Of {total} that were measured here {confirmed} are confirmed and {refuted} refuted; of "
        f"the other {total - confirmed - refuted} the intervals contain 0.",
        partial(bars, tally),
    )


def overview(causal: Sequence[Line]) -> Figure:
    """What is looked at where one chooses a method."""
    (texts,), (images,) = _groups(causal, TEXTS), _groups(causal, IMAGES)
    asked = {
        (texts, TOP): "finds the\nsource,\ntexts",
        (texts, RHO): "agrees with\ninterventions,\ntexts",
        (images, RHO): "agrees with\ninterventions,\nimages",
        (images, OBJECT): "finds the\nobject,\nimages",
        (texts, PASSES): "passes",
    }
    entries = {
        (line.label, where): line.entries[where[1]]
        for where in asked
        for line in causal
        if line.model == where[0]
    }
    return draw(_order(causal, texts, RHO), asked, entries, {(texts, PASSES)})


# --- looking up -----------------------------------------------------------------------------------


def ranked(table: Sequence[Line], model: str, column: str) -> list[Scored]:
    """All methods on a model or group, the best first."""
    found = [
        Scored(line.label, line.entries[column], line.entries[PASSES].value)
        for line in table
        if line.model == model and not math.isnan(line.entries[column].value)
    ]
    return sorted(found, key=lambda each: -each.entry.value)


def _groups(table: Sequence[Line], begin: str) -> list[str]:
    return [x for x in dict.fromkeys(line.model for line in table) if x.startswith(begin)]


def _of(table: Sequence[Line], model: str, name: str) -> Line:
    return next(line for line in table if line.model == model and line.label == name)


def _labels(table: Sequence[Line], methods: Iterable[str]) -> set[str]:
    return {line.label for line in table if line.method in methods}


def _order(table: Sequence[Line], model: str, column: str) -> list[str]:
    """The names of methods, the true values and what looks at no model last."""
    names = [each.name for each in ranked(table, model, column)]
    apart = _labels(table, (*TRUE, *BLIND))
    return [name for name in names if name not in apart] + [n for n in names if n in apart]


# --- pictures -------------------------------------------------------------------------------------


def matrix(
    table: Sequence[Line],
    models: Mapping[str, str],
    column: str,
    order: Sequence[str] | None = None,
) -> Figure:
    """One number of each method on each model."""
    names = order or _order(table, next(iter(models)), column)
    entries = {(line.label, line.model): line.entries[column] for line in table}
    return draw(names, models, entries)
