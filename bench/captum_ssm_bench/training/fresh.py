"""The fresh models of ``bench/REGISTERED.md``: three tasks, five mixers and five seeds, less one.

RWKV-4 does not learn to copy.

``python -m captum_ssm_bench.training.fresh`` trains those that are missing, for so many minutes.
Their weights are kept beside the package, rounded to half precision, and are no part of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from captum_ssm.errors import CheckpointError

from ..tasks.answers import answer_accuracy
from ..tasks.copying import SHORT_COPIES
from ..tasks.linked import LinkedBatch, LinkedTask
from ..tasks.pairs import FEW_PAIRS, PAIRS
from ..tasks.translation import NUMBER_WORDS
from .language_recipes import LanguageRecipe
from .loop import one_thread, train_model
from .recipe import HELD_OUT_SEED, Recipe
from .small import ModelSize

#: Where the weights are, a file for each model.
FOLDER = Path(__file__).resolve().parents[2] / "fresh"
SEEDS = (101, 102, 103, 104, 105)
#: The share of held-out texts that a model has to answer, and how many there are.
ENOUGH, _HELD_OUT = 0.9, 512
#: Weights that are the embeddings'.
_TIED = {"lm_head.weight", "head.weight"}

_DELTA, _BAMBA = ModelSize("gated-deltanet", head_dim=32), ModelSize("bamba")
_QWEN, _RWKV = ModelSize("qwen3-next", head_dim=32), ModelSize("rwkv")

#: By task and mixer; the seed stands behind.
_RECIPES = {
    "pairs-mamba": LanguageRecipe(PAIRS, ModelSize(), (1500,), draws=1),
    "pairs-gated-deltanet": LanguageRecipe(PAIRS, _DELTA, (600,), lasting_from=0, draws=1),
    "pairs-rwkv": LanguageRecipe(FEW_PAIRS, _RWKV, (2500,), draws=1, learning_rate=4e-3),
    "pairs-bamba": LanguageRecipe(PAIRS, _BAMBA, (1000,), draws=1, learning_rate=3e-3),
    "pairs-qwen3-next": LanguageRecipe(PAIRS, _QWEN, (800,), lasting_from=0, draws=1),
    "copying-mamba": LanguageRecipe(SHORT_COPIES, ModelSize(), (1000,)),
    "copying-gated-deltanet": LanguageRecipe(SHORT_COPIES, _DELTA, (600,), lasting_from=0),
    "copying-bamba": LanguageRecipe(SHORT_COPIES, _BAMBA, (600,), learning_rate=3e-3),
    "copying-qwen3-next": LanguageRecipe(SHORT_COPIES, _QWEN, (600,), lasting_from=0),
    "translation-mamba": LanguageRecipe(NUMBER_WORDS, ModelSize(), (700,)),
    "translation-gated-deltanet": LanguageRecipe(NUMBER_WORDS, _DELTA, (500,), lasting_from=0),
    "translation-rwkv": LanguageRecipe(NUMBER_WORDS, _RWKV, (2500,), learning_rate=4e-3),
    "translation-bamba": LanguageRecipe(NUMBER_WORDS, _BAMBA, (700,), learning_rate=3e-3),
    "translation-qwen3-next": LanguageRecipe(NUMBER_WORDS, _QWEN, (500,), lasting_from=0),
}

#: By name, such as ``"pairs-mamba-101"``, the recipe and the seed.
FRESH = {f"{name}-{seed}": (recipe, seed) for seed in SEEDS for name, recipe in _RECIPES.items()}


def stored(folder: Path = FOLDER) -> dict[str, float]:
    """Return the models that are there, each with the share of held-out texts that it answers."""
    found = {}
    for name in FRESH:
        path = folder / f"{name}.safetensors"
        if path.exists():
            with safe_open(path, "pt") as file:
                found[name] = float(file.metadata()["answered"])
    return found


def load_fresh(name: str, folder: Path = FOLDER) -> nn.Module:
    """Return a model in evaluation mode."""
    return filled(FRESH[name][0], folder / f"{name}.safetensors")


def filled(recipe: Recipe, path: Path) -> nn.Module:
    """Return the model of a recipe with the weights of a file, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        model = recipe.new()
    fill(model, load_file(path))
    return model.eval()


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill a model with weights of half precision."""
    found = model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - _TIED:
        raise CheckpointError(f"The weights do not fit the model: {found}.")
    model.tie_weights()  # type: ignore[operator]


def halved(model: nn.Module) -> dict[str, Tensor]:
    """Round the weights of a model to half precision, and return them."""
    state = {k: v.half().contiguous() for k, v in model.state_dict().items() if k not in _TIED}
    fill(model, state)
    return state


def held_out(task: LinkedTask) -> LinkedBatch:
    """Return the texts that a model has to answer; no training draws them."""
    return task.batch(task.draw(_HELD_OUT, HELD_OUT_SEED + 1))


def main(minutes: float, folder: Path = FOLDER, part: int = 0, parts: int = 1) -> None:
    """Train the models that are missing, until the time is over.

    ``parts`` processes share the work; this one does each model whose number leaves ``part``.
    """
    until = time.monotonic() + 60 * minutes
    folder.mkdir(exist_ok=True)
    for number, (name, (recipe, seed)) in enumerate(FRESH.items()):
        path = folder / f"{name}.safetensors"
        if path.exists() or number % parts != part or time.monotonic() > until:
            continue
        began = time.monotonic()
        with one_thread():
            model = train_model(recipe, seed, log=lambda _: None)
        state = halved(model)
        answered = answer_accuracy(model, held_out(recipe.task)).sequences
        save_file(state, path, {"answered": str(answered)})
        print(f"{name}: {answered:.4f}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    asked = parser.parse_args()
    main(asked.minutes, asked.folder, asked.part, asked.parts)
