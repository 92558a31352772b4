"""Make docs/results/motifs.md and its table, from what ``evaluate`` has recorded.

Usage: python tools/motifs_page.py RESULTS [DOCS], where RESULTS is the folder that was given as
``--out`` to ``evaluate motifs`` and DOCS the one to write to; by default that of this
checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from captum_ssm_bench import EXPERIMENTS, Line, Records, lines
from captum_ssm_bench.experiments.motifs import TRUTH
from captum_ssm_bench.harness.tables import as_csv, legend, markdown, sample_size

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TABLES = "results/motifs.md", "results"
MOTIFS = EXPERIMENTS["motifs"]

_TEXT = """\
# Motifs in DNA

Which bases does a model of DNA go by, and what would another base do? Two small models, a Caduceus
that reads both strands alike and a HyenaDNA, tell which of two motifs a sequence of 64 bases holds.
Here they are asked for the class *both motifs* on sequences that hold both, each on either strand.

![How well each method finds the positions of the motifs and the effects of
variants](../images/results/motifs.png)

Made on {date} with {machine}.

## What is right

The 14 positions of the motifs are known, and what each of the 192 other bases would do is found by
trying it: *{truth}*, 192 runs of the model. A method's score of a position is what the
target would lose, on average, with another base there. LatimFlow and *Gradient* say it for all
variants from one run and one pass back, as [variant_effects](../howto/dna.md) does;
IntegratedGradients takes 32, and FeatureAblation one run for each position, in which all bases are
as likely there.

{models}

{legend} [All numbers]({table}).

## What this says

{says}

This page is made by

```
{train}
captum-ssm-bench evaluate motifs --out RESULTS \\
    --models {asked}
python tools/motifs_page.py RESULTS
python tools/results_page.py
```
"""

#: What was read off the table, which a test holds to it.
SAYS = """\
- The positions of the motifs are found by LatimFlow's rules that give gates a share, by
  IntegratedGradients in the Caduceus alone, and by FeatureAblation nearly as well as by trying
  every base. *Gradient* is next to nothing in HyenaDNA: where a model is sure its slope is 0, or
  noise.
- Of what one pass back gives, the rules `"centred"` and `"equal"` come closest to what variants do.
  `"centred"` was chosen on the first training of each model, and is no worse on two others of the
  Caduceus; it is the default of `variant_effects`.
- None of the estimates of variants is close: a rank correlation of 0.8, at which one could do
  without trying, is not reached. These models tell a motif from one that is spoiled, and are sure:
  any change within a motif takes all of it away, other changes do nearly nothing, and a slope says
  neither. Where a variant matters, try it: `captum_ssm.edges.mutagenesis`.
"""


def main(folder: Path, docs: Path = DOCS) -> None:
    results = list(Records(folder / MOTIFS.name))
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    models = lines(MOTIFS, results)
    (docs / TABLES).mkdir(parents=True, exist_ok=True)
    (docs / TABLES / f"{MOTIFS.name}.csv").write_text(as_csv(MOTIFS, models), "utf-8")
    (docs / PAGE).write_text(page(models, machine), encoding="utf-8")


def page(models: Sequence[Line], machine: Mapping[str, str]) -> str:
    """The page, from the lines of the models."""
    trainings = {line.model: line.trainings for line in models}
    again = [(name, seed) for name, count in trainings.items() for seed in range(1, count)]
    return _TEXT.format(
        date=machine["date"],
        machine=", ".join(f"{name} {value}" for name, value in machine.items() if name != "date"),
        truth=TRUTH,
        models=table(models),
        legend=legend(MOTIFS),
        table=f"{MOTIFS.name}.csv",
        says=SAYS.rstrip(),
        train="\n".join(
            f"captum-ssm-bench train {name} --seed {seed} --out {name}-{seed}"
            for name, seed in again
        ),
        asked=" ".join([*trainings, *(f"{name}={name}-{seed}" for name, seed in again)]),
    )


def table(rows: Sequence[Line]) -> str:
    """A row for each line, with its examples, the method, and the columns."""
    columns = [column.name for column in MOTIFS.columns]
    head = ["model", "examples", "method", *columns]
    cells = [
        [
            line.model,
            sample_size([line]).removesuffix(" examples"),
            ", ".join(filter(None, (line.method, line.formulation))),
            *(str(line.entries[column]) for column in columns),
        ]
        for line in rows
    ]
    return markdown(head, cells)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
