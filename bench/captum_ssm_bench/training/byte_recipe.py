"""A language model of bytes, on texts that Python packages ship, mixed with planted mechanisms.

The texts are read from the installed packages when a model is trained, and are kept nowhere else:
Python's own help topics (``pydoc_data.topics``, under the PSF license) and the docstrings of NumPy
(BSD-3-Clause). Other versions of the two give other texts, and so other weights.

``python -m captum_ssm_bench.training.byte_recipe CHECKPOINT`` trains the registered model, and goes
on from the checkpoint.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from captum_ssm.models.folders import model_of
from captum_ssm.tracing import repaired_scans

from ..tasks.byte_texts import MECHANISMS, ByteText, drawn
from .fresh import FOLDER, filled, halved
from .loop import one_thread, train_model
from .recipe import HELD_OUT_SEED, Recipe, Round, Scores
from .saving import save_of_transformers
from .small import MODELS, ModelSize, settings_of

#: The number of bytes; byte 0 is in no text.
_BYTES = 256
#: Bytes of a training text, and of a passage that packages ship.
_LENGTH, _PASSAGE = 128, 48
#: The share of planted texts among the parts of a training text.
_PLANTED = 0.8
#: Texts of each mechanism that a line of progress is measured on, and of the final measurement.
_HELD_OUT, _MEASURED = 64, 512


@cache
def shipped() -> bytes:
    """Return the texts of packages."""
    named = {name: getattr(np, name) for name in sorted(dir(np)) if not name.startswith("_")}
    docstrings = (each.__doc__ or "" for each in named.values())
    return "\n".join([*(topics[name] for name in sorted(topics)), *docstrings]).encode()


@dataclass(frozen=True)
class ByteRecipe(Recipe):
    """How the model of bytes is made.

    The loss is the cross entropy of all bytes, plus the one of the first bytes of answers.

    Attributes:
        task: by name, what draws a text of each mechanism.
        size: the model.
        steps: optimizer steps of each round.
        weights: of each round, how often each mechanism is drawn, relative to the others.
        stops: of each round, the step after which it ends early, if it does.
        batch_size: texts per step. Default: 16.
        learning_rate: the peak. Default: 1.5e-3.
    """

    task: Mapping[str, object]
    size: ModelSize
    steps: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    stops: tuple[int | None, ...]
    batch_size: int = 16
    learning_rate: float = 1.5e-3

    def new(self) -> nn.Module:
        settings = settings_of(self.size, _BYTES, pad_id=0)
        model: nn.Module = model_of(MODELS[self.size.architecture], settings)
        return model

    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        def loss(weights: Sequence[int]) -> Tensor:
            # by torch's generator, which a checkpoint keeps
            rng = random.Random(int(torch.randint(2**62, ())))
            texts = [training_text(rng, weights) for _ in range(self.batch_size)]
            ids, answers = (torch.tensor(each) for each in zip(*texts, strict=True))
            with torch.autocast("cpu", torch.bfloat16):  # half as long again without
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            found = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            return found.mean() + found[answers[:, 1:].flatten()].mean()

        def score() -> float:
            found = [answered(model, name, _HELD_OUT, HELD_OUT_SEED) for name in MECHANISMS]
            return min(found)

        return [
            Round(steps, partial(loss, weights), score, self.learning_rate, stop=stop)
            for steps, weights, stop in zip(self.steps, self.weights, self.stops, strict=True)
        ]

    def measure(self, model: nn.Module) -> Scores:
        return {
            name: {"answered": answered(model, name, _MEASURED, HELD_OUT_SEED + 1)}
            for name in MECHANISMS
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        save_of_transformers(model, folder)


def training_text(rng: random.Random, weights: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return bytes, planted texts and passages in turn, and which of them begin an answer."""
    ids: list[int] = []
    first: list[bool] = []
    while len(ids) <= _LENGTH:
        if rng.random() < _PLANTED:
            often = zip(MECHANISMS.values(), weights, strict=True)
            mechanism = rng.choice([each for each, weight in often for _ in range(weight)])
            text = mechanism(rng)
            parts = [(text.prompt, text.answer.encode())]
            parts += [(prompt.encode(), answer.encode()) for prompt, answer in text.further]
        else:
            start = rng.randrange(len(shipped()) - _PASSAGE)
            parts = [(shipped()[start : start + _PASSAGE], b"")]
        for prompt, answer in (*parts, (b"\n", b"")):
            ids += [*prompt, *answer]
            first += [*[False] * len(prompt), *(place == 0 for place in range(len(answer)))]
    return ids[: _LENGTH + 1], first[: _LENGTH + 1]


@torch.no_grad()
def answered(model: nn.Module, mechanism: str, count: int, seed: int) -> float:
    """Return the share of texts whose whole answer is the most likely one at each of its bytes."""
    rng = random.Random(f"{seed}/{mechanism}")
    by_length: dict[int, list[ByteText]] = {}
    for text in (drawn(mechanism, rng) for _ in range(count)):
        by_length.setdefault(len(text.ids()), []).append(text)
    right = 0
    for texts in by_length.values():
        ids, asked = torch.tensor([text.ids() for text in texts]), len(texts[0].answer)
        with repaired_scans():
            predicted = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        right += int((predicted[:, :-1] == ids[:, 1:])[:, -asked:].all(-1).sum())
    return right / count


#: The registered model: two layers of Mamba-2, and one of softmax attention. The second round has
#: more pairs, since the first had not learned them.
SEED = 101
BYTES_BAMBA = ByteRecipe(
    MECHANISMS,
    ModelSize("bamba", 3, hidden=192, head_dim=96),
    steps=(4000, 1000),
    weights=((1, 1, 1), (3, 1, 1)),
    stops=(2300, None),
)
PATH = FOLDER / f"bytes-bamba-{SEED}.safetensors"


def stored() -> dict[str, float]:
    """Return by mechanism the share of held-out texts that the model answers; none without it."""
    if not PATH.exists():
        return {}
    with safe_open(PATH, "pt") as file:
        noted = file.metadata()  # in any order
    return {name: float(noted[name]) for name in MECHANISMS}


def load_bytes() -> nn.Module:
    """Return the registered model in evaluation mode."""
    return filled(BYTES_BAMBA, PATH)


def main(checkpoint: Path, path: Path = PATH) -> None:
    """Train the registered model, or go on, and keep it in half precision."""
    with one_thread():
        model = train_model(BYTES_BAMBA, SEED, checkpoint=checkpoint)
        state = halved(model)
        found = {name: scores["answered"] for name, scores in BYTES_BAMBA.measure(model).items()}
    save_file(state, path, {name: str(share) for name, share in found.items()})
    print(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
