"""Make docs/decomposition_error.md and its picture anew.

Usage: python tools/decomposition_page.py [DOCS], where DOCS is the folder to write to; by default
that of this checkout.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_ssm import LatimNorm
from captum_ssm.attr.vectors.taps import ACTIVATIONS
from captum_ssm.viz.figure import new_figure
from captum_ssm_bench import load_bundled
from captum_ssm_bench.training.language_recipes import LANGUAGE_RECIPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: Panels of the picture beside each other.
_COLUMNS = 4
PAGE, PICTURE = "decomposition_error.md", "images/decomposition_error.png"
PROMPTS, SEED = 8, 20_251

#: By activation, one error per layer.
Errors = Mapping[str, list[float]]

#: One for each activation, told apart with most kinds of colour vision (Okabe and Ito).
_COLOURS = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00")

_TEXT = """\
# Decomposition error

LATIM divides what a mixer returns among the tokens that it came from. The activation behind the
short convolution stands in the way: it is not additive, so that it cannot be applied to what each
token sends into it and the results be added up. `activation` chooses what stands in for it:

| `activation` | share of the token at tap k | |
| --- | --- | --- |
| `"linearized"` | s · tap, where s = SiLU(u) / u is frozen at the sum u of all taps | the default |
| `"silu"` | SiLU(tap) | the paper's default |
| `"taylor1"` | tap / 2 | the paper's |
| `"taylor2"` | tap / 2 + tap² / 4 | the paper's |
| `"relu"` | max(tap, 0) | the paper's |
| `"identity"` | tap | the paper's, exact in models trained without activation |

The decomposition error of a layer is what the shares miss of the output y that the module itself
returned, mean |y - sum over tokens of T(x) - constant| / mean |y|, over real tokens and features.

## Measured

`LatimNorm(model, activation=...).decomposition_error(...)` in the models that ship with the
package, on {prompts} prompts of the task that each was trained for, drawn with seed {seed}.

{tables}

![Bars of the errors above, by model, layer and activation]({picture})

Linearised, nothing but rounding is missing, in models that were never retrained for it. Of the
stand-ins, the one that misses least is {best}.

## In the paper

[LATIM](https://arxiv.org/abs/2502.15612), table 4, of Mamba-2 with 370M parameters and 48 layers:

| activation | layers 0-16 | layers 16-32 | layers 32-48 |
| --- | --- | --- | --- |
| SiLU | 0.21 | 0.45 | 0.57 |
| SiLU, trained on | 0.21 | 0.43 | 0.54 |
| ReLU, trained on with ReLU | 0.35 | 0.83 | 1.07 |
| identity, trained on without activation | 0.00 | 0.00 | 0.00 |

The last two rows are of models whose own activation was replaced and which were trained on for it:
the error of 0 is bought with training. Figure 4 of the paper compares stand-ins in models with
SiLU; there SiLU itself misses least in every layer. The paper speaks of the average difference of
the outputs and gives no formula, so that its figures and those above compare in kind only.

This page is made by

```
python tools/decomposition_page.py
```

and a test holds it to what is measured.
"""


def main(docs: Path = DOCS) -> None:
    errors = {name: measured(name) for name in LANGUAGE_RECIPES}
    (docs / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    picture(errors).savefig(docs / PICTURE, dpi=80)
    (docs / PAGE).write_text(page(errors), encoding="utf-8")


def measured(name: str) -> Errors:
    """The errors of a bundled model on its own task, by activation."""
    model, _ = load_bundled(name)
    ids, mask = prompts(name)

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = model(ids, attention_mask=mask).logits
        return logits

    return {
        activation: LatimNorm(run, model, activation=activation).decomposition_error(
            ids, additional_forward_args=mask
        )
        for activation in ACTIVATIONS
    }


def prompts(name: str) -> tuple[Tensor, Tensor]:
    """Prompts of the task of a bundled model, the same ones each time: ids and mask (B, L)."""
    task = LANGUAGE_RECIPES[name].task
    batch = task.batch(task.draw(PROMPTS, SEED))
    return batch.input_ids, batch.attention_mask


def page(errors: Mapping[str, Errors]) -> str:
    """The page, from the errors by model."""
    tables = "\n\n".join(f"### {name}\n\n{table(found)}" for name, found in errors.items())
    return _TEXT.format(
        prompts=PROMPTS, seed=SEED, tables=tables, best=best(errors), picture=PICTURE
    )


def table(errors: Errors) -> str:
    """One model's errors, a row for each activation and a column for each layer."""
    layers = range(len(next(iter(errors.values()))))
    rows = [["`activation`", *(f"layer {i}" for i in layers)], ["---"] * (len(layers) + 1)]
    rows += [[f'`"{name}"`', *(f"{e:.3f}" for e in found)] for name, found in errors.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def best(errors: Mapping[str, Errors]) -> str:
    """Which stand-ins miss least, with the number of layers in which they do."""
    least: Counter[str] = Counter()
    for found in errors.values():
        stand_ins = {name: row for name, row in found.items() if name != "linearized"}
        for layer in zip(*stand_ins.values(), strict=True):
            least[min(zip(layer, stand_ins, strict=True))[1]] += 1
    counts = ", ".join(f'`"{name}"` in {count}' for name, count in least.most_common())
    return f"{counts} of {least.total()} layers"


def picture(errors: Mapping[str, Errors]) -> Figure:
    """The errors as bars: a panel for each model, a group for each layer."""
    columns = min(_COLUMNS, len(errors))
    lines = -(-len(errors) // columns)
    size = 3.4 * columns, 2.8 * lines + 0.4
    figure, axes = new_figure(*size, nrows=lines, ncols=columns, sharey=True, squeeze=False)
    panels = axes.flat
    for axis, (name, found) in zip(panels, errors.items(), strict=False):
        _bars(axis, found)
        axis.set_title(name, size=10)
    for axis in panels[len(errors) :]:
        axis.remove()
    for axis in axes[:, 0]:
        axis.set_ylabel("decomposition error")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    beside = min(len(labels), 2 * columns)
    figure.legend(handles, labels, loc="outside lower center", ncols=beside, frameon=False)
    return figure


def _bars(axis: Any, errors: Errors) -> None:
    width = 0.9 / len(errors)
    for i, (activation, found) in enumerate(errors.items()):
        places = [layer + (i - (len(errors) - 1) / 2) * width for layer in range(len(found))]
        bars = axis.bar(places, found, width, label=activation, color=_COLOURS[i])
        axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
    axis.set_xticks(range(len(found)), [f"layer {layer}" for layer in range(len(found))])
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
