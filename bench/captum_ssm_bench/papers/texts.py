"""The tables of texts: HA tables 3, 8 and 9, UN table 2, LATIM tables 3, 5 and 6.

Models are read with their tokenizers from folders that transformers has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from captum_ssm.errors import DataError
from captum_ssm.explain.loading import Source, load
from captum_ssm.metrics import (
    Texts,
    answers_found,
    best_links,
    text_activation,
    text_pruning,
    words_of_tokens,
)
from captum_ssm.metrics.alignment import link_counts
from captum_ssm.tracing import repaired_scans

from ..data import (
    AlignedPair,
    ChoiceQuestion,
    LongPrompt,
    load_arc,
    load_gold_alignment,
    load_ruler,
)
from ..experiments.finding_sources import error_rate
from ..experiments.linked_texts import device_of
from ..experiments.token_maps import NO_CLAMP, REDUCTIONS, TokenMap, choice_maps, token_maps
from ..harness.experiment import Cell, Column
from ..harness.records import Numbers, Rows
from ..harness.tables import Side
from ..published import ALTI, ATTENTION, ATTRIBUTION, LOGIT, LRP, NORM
from .table import PaperTable, Published

#: Of a transformer's and of a Mamba's tables of changed texts.
_ON_WORDS = (
    Cell("MambaAttribution", "s6"),
    Cell("MambaAttribution", "unified"),
    Cell("TransformerAttribution", "lrp"),
    Cell("ImplicitAttention", "unified"),
    Cell("ImplicitAttentionRollout", "s6"),
    Cell("ImplicitAttentionRollout", "unified"),
    Cell("MambaLRP", "half"),
    Cell("LatimFlow", "frozen"),
)
_CHANGED = (Column("AUAC", ("auac",)), Column("AU-MSE", ("au_mse",), "low"))


class OnTexts(PaperTable):
    """Base of the tables of texts."""

    weights = "the folder of a language model and its tokenizer"

    @cached_property
    def tokenizers(self) -> WeakKeyDictionary[nn.Module, Any]:
        """Of each model."""
        return WeakKeyDictionary()

    def load(self, path: Path) -> nn.Module:
        loaded = load(Source(str(path)))
        self.tokenizers[loaded.model] = loaded.tokenizer
        return loaded.model

    def ids(self, model: nn.Module, text: str) -> Tensor:
        """Token ids (1, L) where the model is."""
        return torch.tensor([self.tokenizers[model].encode(text)], device=device_of(model))

    @cached_property
    def maps(self) -> Mapping[Cell, TokenMap]:
        """The methods, by cell."""
        known = {**token_maps(), **choice_maps()}
        return {cell: known[cell] for cell in self.cells() if cell in known}

    def cells(self) -> Sequence[Cell]:
        return _ON_WORDS


class ArcQuestions(OnTexts):
    """Maps of the right answer's label against what models make of changed questions."""

    name = "arc"
    title = "Tokens that answers to ARC's questions follow from"
    sources = "HA tables 3, 8, 9; UN table 2"
    files = ("ARC-Easy-Test.jsonl",)
    columns = _CHANGED
    note = "The papers do not print their prompt; here a question is followed by its choices."
    published: ClassVar[Published] = {
        Side("MambaAttribution", "unified"): {"AUAC": "0.934, 0.939", "AU-MSE": "1.588, 1.082"},
        Side("MambaAttribution", "s6"): {"AUAC": "0.915, 0.918", "AU-MSE": "1.765, 1.239"},
        Side("ImplicitAttentionRollout", "s6"): {"AUAC": "0.8813", "AU-MSE": "2.102"},
        Side("ImplicitAttentionRollout", "s6, max"): {"AUAC": "0.8420", "AU-MSE": "1.899"},
        Side("ImplicitAttentionRollout", "s6, min"): {"AUAC": "0.7611", "AU-MSE": "2.344"},
        Side("MambaAttribution", f"s6, {NO_CLAMP}"): {"AUAC": "0.7564", "AU-MSE": "2.421"},
    }

    def cells(self) -> Sequence[Cell]:
        choices = [Cell("ImplicitAttentionRollout", f"s6, {name}") for name in REDUCTIONS]
        return (*_ON_WORDS, *choices, Cell("MambaAttribution", f"s6, {NO_CLAMP}"))

    def read(self, *paths: Path) -> Sequence[ChoiceQuestion]:
        return load_arc(paths[0])

    def measure(self, model: nn.Module, example: ChoiceQuestion, cell: Cell) -> Rows:
        labels = label_tokens(self.tokenizers[model], example)
        ids = self.ids(model, example.prompt)
        found = self.maps[cell](model, ids, [(ids.shape[1] - 1, labels[example.answer])])

        def answers(given: Tensor) -> Tensor:
            logits: Tensor = model(given).logits[:, -1, labels]
            return logits

        texts = Texts(answers, ids, self.tokenizers[model].unk_token_id)
        return {row: areas(texts, each, example.answer) for row, each in found.items()}


def areas(texts: Texts, relevance: Tensor, label: int) -> Numbers:
    """What becomes of a text by a map (1, L)."""
    with torch.no_grad(), repaired_scans():
        activation = text_activation(texts, relevance.detach(), label).area()
        pruning = text_pruning(texts, relevance.detach()).area()
    return {"auac": float(activation), "au_mse": float(pruning)}


def label_tokens(tokenizer: Any, question: ChoiceQuestion) -> list[int]:
    """The token of each choice's label, as it follows the prompt."""
    found = [tokenizer.encode(f" {x}", add_special_tokens=False) for x in question.labels]
    if not all(found):
        raise DataError(
            f"Question {question.name!r} has labels {question.labels}, for which the tokenizer has "
            "no token."
        )
    return [tokens[-1] for tokens in found]


class Alignment(OnTexts):
    """Maps of translation models against gold links, by layer.

    A source, what stands between the two and the translation are read in one text; each token of
    the translation is asked about where it is predicted.
    """

    name = "alignment"
    title = "Alignment of words with gold links"
    sources = "LATIM table 3"
    files = ("source sentences", "translations", "links")
    weights = "the folder of a model that was trained to translate, and its tokenizer"
    columns = (Column("AER", ("predicted", "sure", "hit_sure", "hit_possible"), "low", error_rate),)
    note = (
        "The paper takes the best layer on the sentences that it reports. Ranges are over models "
        "and pairs of languages."
    )
    published: ClassVar[Published] = {
        ATTENTION: {"AER": "0.69-0.85"},
        ATTRIBUTION: {"AER": "0.66-0.87"},
        LRP: {"AER": "0.47-0.68"},
        NORM: {"AER": "0.35-0.52"},
        ALTI: {"AER": "0.38-0.55"},
        LOGIT: {"AER": "0.60-0.76"},
    }
    #: What stands between a sentence and its translation.
    between = "="

    def cells(self) -> Sequence[Cell]:
        return [*(Cell(*side[:2]) for side in self.published), Cell("LatimFlow", "frozen")]

    def read(self, *paths: Path) -> Sequence[AlignedPair]:
        source, target, links = paths
        return load_gold_alignment(source, target, links)

    def measure(self, model: nn.Module, example: AlignedPair, cell: Cell) -> Rows:
        tokenizer = self.tokenizers[model]
        source, target = (_spelled(words, tokenizer) for words in (example.source, example.target))
        between = tokenizer.encode(f" {self.between}", add_special_tokens=False)
        start = len(source.ids) + len(between)
        ids = torch.tensor([[*source.ids, *between, *target.ids]], device=device_of(model))
        asked = [(start - 1 + i, token) for i, token in enumerate(target.ids)]
        sure, possible = (links[None] for links in example.matrices())
        rows = {}
        for row, found in self.maps[cell](model, ids[:, :-1], asked).items():
            inside = found[None, :, : len(source.ids)].detach().cpu().double()
            links = best_links(words_of_tokens(inside, target.words, source.words))
            counted = link_counts(links, sure, possible)
            rows[row] = {name: float(count) for name, count in counted._asdict().items()}
        return rows


class _Spelled(NamedTuple):
    ids: list[int]
    words: list[int]


def _spelled(words: Sequence[str], tokenizer: Any) -> _Spelled:
    """Token ids of words, and the word of each token."""
    pieces = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in words]
    of = [i for i, piece in enumerate(pieces) for _ in piece]
    return _Spelled([token for piece in pieces for token in piece], of)


class RulerTasks(OnTexts):
    """Whether models say what RULER's long texts ask for, by task."""

    name = "ruler"
    title = "Answers to RULER's long texts"
    sources = "LATIM tables 5, 6"
    files = ("a folder for each task",)
    columns = (Column("found", ("found",)),)
    #: Tokens of an answer.
    tokens = 32

    def cells(self) -> Sequence[Cell]:
        return [Cell("answers")]

    def read(self, *paths: Path) -> Sequence[tuple[str, LongPrompt]]:
        files = sorted(paths[0].glob("*/validation.jsonl"))
        if not files:
            raise DataError(
                f"{paths[0]} holds no TASK/validation.jsonl, as RULER's generator writes them."
            )
        return [(file.parent.name, prompt) for file in files for prompt in load_ruler(file)]

    def measure(self, model: nn.Module, example: tuple[str, LongPrompt], cell: Cell) -> Rows:
        task, prompt = example
        ids = self.ids(model, prompt.prompt)
        with torch.no_grad(), repaired_scans():
            out = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.tokens,
                do_sample=False,
            )
        said = self.tokenizers[model].decode(out[0, ids.shape[1] :])
        return {task: {"found": float(answers_found([said], [prompt.answers])[0])}}
