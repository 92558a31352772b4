"""Make docs/results/answers.md and its tables, from what ``evaluate`` has recorded.

Usage: python tools/answers_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``evaluate answers erasers forgotten-passkeys`` and DOCS the one to write
to; by default that of this checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from captum_ssm_bench import EXPERIMENTS, Line, Records, lines
from captum_ssm_bench.experiments.answers.erasers import TAKEN_OUT
from captum_ssm_bench.experiments.answers.hops import ALONE, HOPS, SUMMED
from captum_ssm_bench.experiments.every_experiment import FAILING
from captum_ssm_bench.harness.tables import as_csv, labels_of, legend, markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TABLES = "results/answers.md", "results"
#: The experiments of the page, each a section of it.
NAMES = ("answers", "erasers", "forgotten-passkeys")

_TEXT = """\
# Whole answers, counted

Where did the last word of an answer come from, if it rests on words that the model has written
itself? What do states still hold of a token, and who took the rest? Does that tell whether a long
text is still answered? [Whole answers](../methods/answers.md) says how to ask; here it is counted
what comes out, on small trained models.

Made on {date} with {machine}.

## What came out

- **Hops find the way back.** The last word of a chained answer is traced through the words before
  it to the fact that the question asked for: by `rule="half"` or `"centred"`, what each hop adds
  names all three facts in their order in {order} of the texts, with one question and
  with two. The last word's own explanation names them in {alone}. The misses that were
  looked at, of Mamba-2 with two questions, all have another root: the fact that the first answer
  ended with, whose word is still in the reach of the convolution where the second one begins.
- **By `rule="frozen"` they do not:** {frozen}. It gives nothing to a
  word that asks, so that there is nothing to go on from; with hops `LatimFlow` goes by `"centred"`.
- **Read hops by what each adds.** Of the relevance after both hops, the three largest facts are the
  chain in no more than {chain} of the texts: each hop passes on a part, and the root's is small.
- **The explanations of all words, summed,** name the chain in {summed_one} of the texts
  with one question, in no order, and in {summed_two} of those with two, whose facts they
  cannot tell apart.
- **Who erased, and how much, is exactly predicted in Mamba-2's first layer**, well in Mamba's where
  the eraser is taken out, and elsewhere in part or not at all. That the absence of the one that is
  named returns most of all is so in {first} of the texts, for first layers: a loss is
  shared out among all who had a part in it, and what comes back without one of them is another
  question. The one whose step undone is predicted to return most always does in Mamba-2; for the
  others that names the right one hardly oftener, in {undone} of the texts.
- **More is read of passkeys that are answered** than of those that are lost, in all three models,
  with correlations of {read}. How much of the state the digit takes up tells so in
  Mamba-2 and, better than what is read, in the gated delta rule. In Mamba it is the same for right
  and wrong answers: what fails there is not the keeping.

## Chained answers

![How often each fact of the chain is first in its hop, and all of them in
order](../images/results/answers.png)

*m p . g a . p g . e i . ? m* is answered by *p g a*: facts link a letter to the next, in random
order, among others of which some make a chain of their own. Explained is the last word, here *a*,
by `LatimFlow` with `contrast="all"`, one part of the prompt for each fact. Its source is the last
fact, *g a*. The *g* that it was asked by was written by the model, from *p g*, the link; and the
*p* from *m p*, the root. With two questions, the second chain is asked for behind the first answer,
which the models never saw in training.

{answers_table}

{answers_legend} [All numbers](answers.csv).

## Who erased

![How often the eraser that is named is the one without which most comes
back](../images/results/erasers.png)

The token that `StateMemory` names as main eraser of a source is taken out of the text, or exchanged
for another word that stands elsewhere in it. The source is what is answered, where it was stated;
the state is looked at when the question has been read. Predicted is what the state would hold of
the source if nothing but the eraser's own step were another: undone where it is taken out; that of
the other word, as it is where it stands, where it is exchanged. All of it is read off the first
run, and nothing is fitted.

That is right as long as all other steps stay what they were:

- The steps of Mamba-2's first layer are read off their own token, without the convolution, and the
  prediction is exact.
- Those of Mamba's first layer, of RG-LRU and of the delta rule's keys come behind a convolution of
  four tokens: the three behind the eraser change as well. Where a fact has two words this is much,
  and in the delta rule a neighbour that has become like the eraser erases in its place.
- RWKV-4 divides by the sum of all weights, in which each token's step depends on those before it.
- From the second layer on all that is read depends on what the first one wrote. Those of Mamba and
  Mamba-2 here keep more than 0.99 of everything, and there is next to nothing to predict.

An exchange is predicted far worse where a convolution comes first: another word in the same place
erases much as the one before it did.

{erasers_table}

{erasers_legend} [All numbers](erasers.csv).

## Forgotten passkeys

![How what states hold and what is read of a passkey go along with right
answers](../images/results/forgotten-passkeys.png)

Models that learned passkeys in texts of 64 to 128 tokens are asked in texts of {lengths} tokens,
where some answers go wrong. One digit of each is asked for, behind the right ones before it.

{passkeys_table}

{passkeys_legend} [All numbers](forgotten-passkeys.csv).

The models have one layer, so that none had to be chosen. Correlations are far from 1 even where
shares differ much: what a model says depends on all else that is read as well. The gated delta rule
seldom fails even here, and what is said of it rests on few failures.

This page is made by

```
captum-ssm-bench evaluate answers erasers forgotten-passkeys --out RESULTS
python tools/answers_page.py RESULTS
python tools/results_page.py
```
"""


def main(folder: Path, docs: Path = DOCS) -> None:
    tables = {
        name: lines(EXPERIMENTS[name], list(Records(folder / EXPERIMENTS[name].name)))
        for name in NAMES
    }
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    (docs / TABLES).mkdir(parents=True, exist_ok=True)
    for name, found in tables.items():
        (docs / TABLES / f"{name}.csv").write_text(as_csv(EXPERIMENTS[name], found), "utf-8")
    (docs / PAGE).write_text(page(tables, machine), encoding="utf-8")


def page(tables: Mapping[str, Sequence[Line]], machine: Mapping[str, str]) -> str:
    """The page, from the lines of each experiment."""
    answers, erasers, passkeys = (tables[name] for name in NAMES)
    taken = [line for line in erasers if line.method == TAKEN_OUT.method]
    asking = [line for line in answers if line.formulation in ("half", "centred")]
    one, two = (f"{count}, {SUMMED}" for count in ("one question", "two questions"))
    return _TEXT.format(
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        order=spread(asking, "in order", HOPS),
        alone=spread(asking, "in order", ALONE),
        frozen=spread([x for x in answers if x.formulation == "frozen"], "in order", HOPS),
        chain=spread(asking, "chain", HOPS).rpartition(" ")[2],
        summed_one=spread(asking, "chain", one),
        summed_two=spread(asking, "chain", two),
        first=spread(taken, "named first", "layer 0"),
        undone=spread(
            [line for line in taken if "mamba2" not in line.model], "undone first", "layer 0"
        ),
        read=spread(passkeys, "correlation", "read, layer 0"),
        lengths=", ".join(str(each) for each in sorted(FAILING.values())),
        **{f"{name.rpartition('-')[2]}_table": table(tables[name]) for name in NAMES},
        **{f"{name.rpartition('-')[2]}_legend": legend(EXPERIMENTS[name]) for name in NAMES},
    )


def spread(found: Sequence[Line], column: str, row: str) -> str:
    """The least and the greatest number of a column in rows that end so."""
    values = [line.entries[column].value for line in found if line.row.endswith(row)]
    return f"{min(values):.3f} to {max(values):.3f}"


def table(found: Sequence[Line]) -> str:
    """A row for each line."""
    labels, columns = labels_of(found), list(found[0].entries)
    cells = [
        [line.model, *(getattr(line, name) for name in labels), *map(str, line.entries.values())]
        for line in found
    ]
    head = ["model", *labels, *columns]
    return markdown(head, cells)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
