"""A model's answers to prompts of the recall task."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError, OptionError
from .recall import Example, recall_vocabulary


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
        some = [list(example.tokens) for example in examples[start : start + batch_size]]
        width = max(map(len, some))
        # padded on the left, so that the last token of each row ends the question
        ids = [[recall_vocabulary().pad_id] * (width - len(row)) + row for row in some]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in some]
        both = [torch.tensor(rows, device=device) for rows in (ids, mask)]
        output = model(input_ids=both[0], attention_mask=both[1])
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
