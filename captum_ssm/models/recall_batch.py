"""Batches of prompts of the recall task, and a model's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError, OptionError
from .recall import Example, recall_vocabulary


@dataclass(frozen=True)
class RecallBatch:
    """Examples padded on the left to one length.

    The padding is on the left, so the last token of each row ends the question.

    Attributes:
        input_ids: token ids, ``(batch, length)``.
        attention_mask: 1 for words and 0 for padding, ``(batch, length)``.
        answer_ids: the token id of each example's answer, ``(batch,)``.
        offsets: the number of padding positions in each row, ``(batch,)``. Token i of an example
            is in column ``i + offset`` of ``input_ids``.
        examples: the examples in the order of the rows.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    answer_ids: torch.Tensor
    offsets: torch.Tensor
    examples: tuple[Example, ...]


def collate(examples: Sequence[Example], device: torch.device | str = "cpu") -> RecallBatch:
    """Pad examples on the left into one batch.

    Args:
        examples: the examples to pad, at least one.
        device: the tensors' device. Default: ``"cpu"``.

    Raises:
        InputError: when ``examples`` is empty.

    Example:
        >>> from captum_ssm.models.recall import parse_prompt
        >>> from captum_ssm.models.recall_batch import collate
        >>> short = parse_prompt("anna owns the lamp . ? anna owns the")
        >>> long = parse_prompt("anna owns the lamp . bob owns the kite . ? bob owns the")
        >>> batch = collate([short, long])
        >>> tuple(batch.input_ids.shape), batch.offsets.tolist()
        ((2, 14), [5, 0])
    """
    if not examples:
        raise InputError("examples is empty. Pass at least one example.")
    lengths = torch.tensor([len(example.tokens) for example in examples], device=device)
    width = int(lengths.max())
    offsets = width - lengths
    pad = recall_vocabulary().pad_id
    rows = [[pad] * (width - len(e.tokens)) + list(e.tokens) for e in examples]
    mask = (torch.arange(width, device=device)[None, :] >= offsets[:, None]).long()
    return RecallBatch(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=mask,
        answer_ids=torch.tensor([e.answer_id for e in examples], device=device),
        offsets=offsets,
        examples=tuple(examples),
    )


@torch.no_grad()
def predict(
    model: torch.nn.Module, examples: Sequence[Example], batch_size: int = 64
) -> torch.Tensor:
    """Predict the next token of each prompt: the id with the largest logit.

    Args:
        model: a causal language model with the interface of transformers: it accepts ``input_ids``
            and ``attention_mask``, and its output has ``logits``.
        examples: the prompts, at least one.
        batch_size: the number of prompts in one forward pass. Default: 64.

    Returns:
        The token ids, (count,), on the CPU.

    Raises:
        InputError: when ``examples`` is empty.
        OptionError: when ``batch_size`` is below 1.

    Example:
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.models.recall import parse_prompt
        >>> from captum_ssm.models.recall_batch import predict
        >>> model, vocabulary = load_bundled("recall-mamba")
        >>> example = parse_prompt("anna owns the lamp . bob owns the kite . ? bob owns the")
        >>> vocabulary.decode(predict(model, [example]))
        'kite'
    """
    if not examples:
        raise InputError("examples is empty. Pass at least one prompt.")
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size}: use 1 or more.")
    device = next(model.parameters()).device
    found: list[torch.Tensor] = []
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size], device)
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        found.append(output.logits[:, -1].argmax(-1).cpu())
    return torch.cat(found)


def accuracy(model: torch.nn.Module, examples: Sequence[Example], batch_size: int = 64) -> float:
    """Return the share of prompts, 0 to 1, for which the model predicts the right next word.

    Args:
        model: a causal language model; see :func:`predict`.
        examples: the prompts, at least one.
        batch_size: the number of prompts in one forward pass. Default: 64.

    Raises:
        InputError: when ``examples`` is empty.
        OptionError: when ``batch_size`` is below 1.

    Example:
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.models.recall import parse_prompt
        >>> from captum_ssm.models.recall_batch import accuracy
        >>> model, _ = load_bundled("recall-mamba")
        >>> accuracy(model, [parse_prompt("anna owns the lamp . ? anna owns the")])
        1.0
    """
    gold = torch.tensor([example.answer_id for example in examples])
    return float((predict(model, examples, batch_size) == gold).double().mean())
