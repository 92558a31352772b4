"""The bundled dictionaries: features of a layer of a bundled model, learned from its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.inside.dictionary import SparseAutoencoder
from captum_ssm.tracing import repaired_scans
from captum_ssm.tracing.hooks import hooked, swap_first

from ..bundled import load_bundled
from ..tasks.answers import answer_accuracy
from ..tasks.linked import LinkedTask
from ..tasks.recall_task import RecallTask
from .recipe import HELD_OUT_SEED, Recipe, Round, Scores

#: Texts that go through the model at once.
_AT_ONCE = 256
#: Texts that are measured on, in training and after it.
_HELD_OUT, _MEASURED = 512, 2048
#: A feature that was not active for so many steps is helped, and so many of them at once.
_UNUSED_FOR, _HELPED = 100, 32
#: How much what is left over counts where it is to be told by features that are not used.
_HELP = 1 / 32


@dataclass(frozen=True)
class DictionarySize:
    """How many features a dictionary has.

    Attributes:
        features: how many there are. Default: 256.
        k: how many are active at once. Default: 3.
    """

    features: int = 256
    k: int = 3


@dataclass(frozen=True)
class DictionaryRecipe(Recipe):
    """How a dictionary is made; the loss is the share of variance that it leaves over.

    The encoder keeps the k largest features (Makhzani & Frey 2014; Gao et al. 2024).  Each feature
    begins as one of the outputs, and those that are never among the largest are drawn to what the
    others leave over.

    Attributes:
        task: draws the texts.
        size: of the dictionary.
        steps: optimiser steps of each round.
        model: name of the bundled model. Default: ``"recall-mamba"``.
        layer: name of the module whose output is told. Default: ``"backbone.layers.0"``.
        texts: how many texts the model reads. Default: 6144.
        batch_size: tokens per step. Default: 1024.
        learning_rate: the peak. Default: 2e-3.
    """

    task: LinkedTask
    size: DictionarySize
    steps: tuple[int, ...]
    model: str = "recall-mamba"
    layer: str = "backbone.layers.0"
    texts: int = 6144
    batch_size: int = 1024
    learning_rate: float = 2e-3

    def new(self) -> SparseAutoencoder:
        explained: Any = load_bundled(self.model)[0]
        return SparseAutoencoder(
            explained.config.hidden_size,
            self.size.features,
            "topk",
            k=self.size.k,
            layer=self.layer,
            metadata={"model_name": self.model},
        )

    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        assert isinstance(model, SparseAutoencoder)
        explained, _ = load_bundled(self.model)
        outputs = self.outputs(explained, self.texts, seed)
        held_out = self.outputs(explained, _HELD_OUT, HELD_OUT_SEED)
        variance = (outputs - outputs.mean(0)).square().sum(-1).mean()
        unused = torch.zeros(self.size.features)
        with torch.no_grad():
            model.b_dec.copy_(outputs.mean(0))
            chosen = outputs[torch.randperm(len(outputs))[: self.size.features]]
            model.W_dec.copy_(F.normalize(chosen - model.b_dec, dim=-1))
            model.W_enc.copy_(model.W_dec.T)

        def loss() -> Tensor:
            with torch.no_grad():  # what a feature is does not depend on its length
                model.W_dec.copy_(F.normalize(model.W_dec, dim=-1))
            x = outputs[torch.randint(len(outputs), (self.batch_size,))]
            active = model.encode(x)
            left = x - model.decode(active)
            used = (active > 0).any(0)
            unused.add_(1).masked_fill_(used, 0)
            told = _by_unused(model, x, unused > _UNUSED_FOR)
            help_ = 0.0 if told is None else (left.detach() - told).square().sum(-1).mean()
            return (left.square().sum(-1).mean() + _HELP * help_) / variance

        def score() -> float:
            return explained_share(model, held_out)

        return [Round(steps, loss, score, self.learning_rate) for steps in self.steps]

    @torch.no_grad()
    def outputs(self, model: nn.Module, count: int, seed: int) -> Tensor:
        """What the layer puts out at the tokens of texts, (tokens, E)."""
        examples, pad = self.task.draw(count, seed), self.task.vocabulary.pad_id
        found: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            found.append(x[real])
            return x

        with rewritten(model, self.layer, keep), repaired_scans():
            for start in range(0, count, _AT_ONCE):
                ids = self.task.batch(examples[start : start + _AT_ONCE]).input_ids
                real = ids != pad
                model(input_ids=ids, attention_mask=real.long())
        return torch.cat(found)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> Scores:
        assert isinstance(model, SparseAutoencoder)
        explained, _ = load_bundled(self.model)
        x = self.outputs(explained, _MEASURED, HELD_OUT_SEED + 1)
        batch = self.task.batch(self.task.draw(_MEASURED, HELD_OUT_SEED + 2))
        accuracy = {"untouched": answer_accuracy(explained, batch).sequences}
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "of the dictionary": model,
            "of the mean": lambda each: x.mean(0).expand_as(each),
        }
        for name, rewrite in ways.items():
            with rewritten(explained, self.layer, rewrite):
                accuracy[name] = answer_accuracy(explained, batch).sequences
        dead = (model.encode(x) <= 0).all(0).sum()
        return {
            "features": {"explained": explained_share(model, x), "dead": float(dead)},
            "accuracy with outputs": accuracy,
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, SparseAutoencoder)
        model.save(folder)


def _by_unused(model: SparseAutoencoder, x: Tensor, unused: Tensor) -> Tensor | None:
    """What the features that are not used would say, the largest of them; None if all are used."""
    if not bool(unused.any()):
        return None
    before = ((x - model.b_dec) @ model.W_enc + model.b_enc)[:, unused]
    largest = before.topk(min(_HELPED, before.shape[-1]), dim=-1)
    active = torch.zeros_like(before).scatter(-1, largest.indices, largest.values.relu())
    return active @ model.W_dec[unused]


@torch.no_grad()
def explained_share(model: SparseAutoencoder, x: Tensor) -> float:
    """The share of the variance of vectors (N, E) that a dictionary tells."""
    left = (x - model(x)).square().sum()
    return float(1 - left / (x - x.mean(0)).square().sum())


@contextmanager
def rewritten(model: nn.Module, layer: str, rewrite: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A context in which a layer's output is replaced by what is made of it."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return swap_first(output, rewrite)[0]

    with hooked(model.get_submodule(layer).register_forward_hook, hook):
        yield


#: By the name of the bundled dictionary, which is that of its model with "-dictionary" behind it.
DICTIONARY_RECIPES = {
    "recall-mamba-dictionary": DictionaryRecipe(RecallTask(), DictionarySize(), steps=(2500,)),
}
