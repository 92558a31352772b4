"""Training of the bundled models, from scratch; ``captum-ssm-bench train NAME`` makes one again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from captum_ssm._files import filling, make_folder
from captum_ssm._names import suggest
from captum_ssm.errors import OptionError
from captum_ssm.tracing import repaired_scans

from .dictionary_recipes import DICTIONARY_RECIPES
from .image_recipes import IMAGE_RECIPES
from .language_recipes import LANGUAGE_RECIPES
from .recipe import Recipe, Round
from .text_recipes import TEXT_RECIPES

#: The recipes of models, by name.
RECIPES: dict[str, Recipe] = {**LANGUAGE_RECIPES, **IMAGE_RECIPES, **TEXT_RECIPES}


def recipe_of(name: str) -> Recipe:
    """The recipe of a bundled model or dictionary.

    Raises:
        OptionError: when there is no such recipe.
    """
    known = {**RECIPES, **DICTIONARY_RECIPES}
    if name not in known:
        raise OptionError(
            f"name={name!r}: no such bundled model.{suggest(name, known)} Use one of "
            f"{tuple(known)}."
        )
    return known[name]


def train(
    name: str,
    out: str | Path,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> nn.Module:
    """Makes a bundled model again: trains it, saves it and measures it.

    Args:
        name: of the bundled model.
        out: the folder to write it to; ``load_bundled(name, out)`` reads it.
        seed: of the initial weights and of the data. Default: 0.
        log: takes the lines of progress and the scores. Default: ``print``.

    Returns:
        The model in evaluation mode.

    Raises:
        WriteError: when the folder cannot be written to; files in it are what they were.
    """
    recipe = recipe_of(name)
    make_folder(Path(out))
    with one_thread():
        model = train_model(recipe, seed, log=log)
        with filling(Path(out)) as folder:
            recipe.save(model, folder)
        for what, scores in recipe.measure(model).items():
            found = ", ".join(f"{score} {value:.4f}" for score, value in scores.items())
            log(f"{what}: {found}")
    return model


def train_model(
    recipe: Recipe,
    seed: int = 0,
    *,
    log_every: int = 100,
    log: Callable[[str], None] = print,
    checkpoint: Path | None = None,
) -> nn.Module:
    """Trains a model from scratch and returns it in evaluation mode.

    The same seed on the same machine and versions gives the same model. With a checkpoint, a file
    for each round, a training that draws by torch's generator alone goes on where it was ended.
    """
    torch.manual_seed(seed)
    model = recipe.new()
    for number, each in enumerate(recipe.rounds(model, seed), 1):
        path = checkpoint and checkpoint.with_suffix(f".{number}")
        fit(model, each, log_every=log_every, log=log, checkpoint=path)
    return model.eval()


def fit(
    model: nn.Module,
    part: Round,
    *,
    log_every: int = 100,
    log: Callable[[str], None] = print,
    checkpoint: Path | None = None,
) -> None:
    """Trains a model in place for one round, with a line of progress each ``log_every`` steps.

    AdamW, gradients clipped at norm 1, a short warm-up followed by a cosine to zero. With each line
    all that the training goes on from is written to the checkpoint, if there is one.
    """
    steps = part.steps
    trained = [*model.parameters(), *(part.help.parameters() if part.help else ())]
    optimiser = torch.optim.AdamW(trained, lr=part.learning_rate, weight_decay=0.01)
    warm_up = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
    started, running, done = time.monotonic(), math.nan, 0
    if checkpoint is not None and checkpoint.exists():
        kept = torch.load(checkpoint)
        model.load_state_dict(kept["model"])
        optimiser.load_state_dict(kept["optimiser"])
        schedule.load_state_dict(kept["schedule"])
        torch.set_rng_state(kept["generator"])
        running, done = kept["running"], kept["step"]
    model.train()
    with repaired_scans():
        for step in range(done + 1, (part.stop or steps) + 1):
            current = part.loss()
            optimiser.zero_grad()
            current.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            schedule.step()
            value = current.item()
            running = value if step == 1 else running + 0.05 * (value - running)
            if step % log_every == 0 or step == steps:
                model.eval()
                share = part.score()
                model.train()
                seconds = time.monotonic() - started
                log(f"step {step}/{steps} loss {running:.4f} held-out {share:.4f} {seconds:.0f} s")
                if checkpoint is not None:
                    kept = {"step": step, "running": running, "model": model.state_dict()}
                    kept |= {"optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
                    new = checkpoint.with_suffix(".new")
                    torch.save(kept | {"generator": torch.get_rng_state()}, new)
                    new.replace(checkpoint)


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context of one thread: more change the order of sums, and the trained weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
