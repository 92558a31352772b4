"""Whether a model answers right, and from the sources that are known to be the right ones.

Shapes: B texts, L tokens of the longest, S exchanges of a source for another.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.tracing import repaired_scans

from .linked import LinkedBatch, Targets

#: Rows that go through the model at once.
_AT_ONCE = 64


class Accuracy(NamedTuple):
    """Shares of what was answered right.

    Attributes:
        tokens: of all answered tokens.
        sequences: of all texts, right in every answered token.
    """

    tokens: float
    sequences: float


class SwapCheck(NamedTuple):
    """What exchanging the sources of one answered token does to the predicted answer.

    Attributes:
        moved: share of exchanges after which the predicted token is the one that now follows.
        strayed: share of all other predicted tokens that changed; NaN where there are none.
    """

    moved: float
    strayed: float


def answer_accuracy(model: torch.nn.Module, batch: LinkedBatch) -> Accuracy:
    """How much a model answers right, each token from the right ones before it.

    Args:
        model: a causal language model in the manner of transformers, called with ``input_ids``
            and ``attention_mask`` and answering with ``logits``.
        batch: the texts.

    Returns:
        The shares of answered tokens, and of texts, for which the most likely words of the whole
        vocabulary are the right ones.
    """
    rows, queries, tokens = batch.targets
    pad = batch.task.vocabulary.pad_id
    right = _predicted(model, batch.input_ids, pad)[rows, queries] == tokens
    wrong = rows.new_zeros(len(batch.input_ids)).index_add_(0, rows, (~right).long())
    return Accuracy(float(right.double().mean()), float((wrong == 0).double().mean()))


def swap_check(model: torch.nn.Module, batch: LinkedBatch, seed: int) -> SwapCheck:
    """Whether the gold is the cause: sources are exchanged, the answer that is fed is not.

    Each answered token whose source belongs to a family of the task has its turn: all its sources
    become another word of the family, and the token is to become what follows from that.  A model
    for which the gold decides, and decides nothing else, has ``moved`` 1 and ``strayed`` 0.

    Args:
        model: as in :func:`answer_accuracy`.
        batch: the texts.
        seed: of the words put in, each another than the one it replaces.

    Returns:
        The share of exchanges that the prediction follows, and that of other predictions changed.

    Raises:
        InputError: when no source of the batch belongs to a family of its task.
    """
    changed, (rows, queries, tokens) = _exchanges(batch, random.Random(seed))
    each = torch.arange(len(rows), device=rows.device)
    pad = batch.task.vocabulary.pad_id
    before = _predicted(model, batch.input_ids, pad)[rows]
    after = _predicted(model, changed, pad)
    others = torch.zeros_like(batch.context)
    others[batch.targets.rows, batch.targets.queries] = True
    others = others[rows]
    others[each, queries] = False
    return SwapCheck(
        moved=float((after[each, queries] == tokens).double().mean()),
        strayed=float((after != before)[others].double().mean()),
    )


def _exchanges(batch: LinkedBatch, rng: random.Random) -> tuple[Tensor, Targets]:
    """Ids with the sources of one token exchanged, (S, L), and what is to follow, each (S,)."""
    id_of = batch.task.vocabulary.id_of
    families = [[(id_of(a), id_of(b)) for a, b in family] for family in batch.task.families]
    others = {pair: [p for p in family if p != pair] for family in families for pair in family}
    sources: dict[tuple[int, int, int], list[int]] = {}
    for row, query, source, token in zip(*(x.tolist() for x in batch.links), strict=True):
        sources.setdefault((row, query, token), []).append(source)

    ids = batch.input_ids.tolist()
    changed: list[list[int]] = []
    following: list[tuple[int, int, int]] = []
    for (row, query, token), positions in sources.items():
        choices = others.get((ids[row][positions[0]], token))
        if choices:
            word, follower = rng.choice(choices)
            changed.append([word if p in positions else old for p, old in enumerate(ids[row])])
            following.append((row, query, follower))
    if not changed:
        raise InputError("batch has no source that a family of its task could exchange.")
    device = batch.input_ids.device
    targets = Targets(*torch.tensor(following, device=device).unbind(1))
    return torch.tensor(changed, device=device), targets


@torch.no_grad()
def _predicted(model: torch.nn.Module, input_ids: Tensor, pad: int) -> Tensor:
    """The most likely next id at each token, over the whole vocabulary, as ``input_ids``."""
    found = []
    for ids in torch.split(input_ids, _AT_ONCE):
        with repaired_scans():
            output = model(input_ids=ids, attention_mask=(ids != pad).long())
        found.append(output.logits.argmax(-1))
    return torch.cat(found)
