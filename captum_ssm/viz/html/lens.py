"""Predict after each block of a model, as if the later blocks were missing.

The model runs again, and every block returns the recorded output of one block. The last norm and
the head then read this block's residual stream (the logit lens, nostalgebraist 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attr.call.inputs import call_model
from ...attr.call.targets import logits_of, target_index
from ...errors import OptionError
from ...linear.blocks import in_place_of, lists_of_blocks
from ...tracing import find_mixers
from ...tracing.hooks import swapped, tensors_in
from ..labels import visible_text
from .example import ShownExample, Subject
from .outline import Outline, label_of
from .page import Facts

#: The largest number of entries of all runs' outputs together; else some blocks are left out.
_MAX_ENTRIES = 2**28
#: A table with fewer blocks is omitted.
_MIN_BLOCKS = 2


def predictions_by_block(subject: Subject, example: ShownExample, outline: Outline) -> list[Facts]:
    """Return the likeliest answer after each block, and the explained answer's probability.

    The list is empty if the explained output is not a class, if the blocks are in no module list,
    or if the last entry is not the model's output.
    """
    if not outline.predictions:
        return []
    try:
        blocks = lists_of_blocks(subject.module, find_mixers(subject.module))
    except OptionError:
        return []
    calls: list[tuple[str, Any]] = []
    with torch.no_grad():
        with in_place_of(blocks, partial(_record_output, calls, blocks)):
            final_output = _logits(subject, example)
        outputs = []
        for name, block_output in _evenly_spaced(calls, _MAX_ENTRIES // final_output.numel()):
            with in_place_of(blocks, lambda *_, block_output=block_output, **__: block_output):
                outputs.append((name, _logits(subject, example)))
    index = target_index(outline.target, final_output)
    if len(outputs) < _MIN_BLOCKS or index is None:
        return []
    if not torch.allclose(outputs[-1][1], final_output):  # something runs after the last block
        return []
    *place, explained = index[0].tolist()
    return [_prediction(subject, name, output, place, explained) for name, output in outputs]


def _record_output(
    calls: list[tuple[str, Any]],
    names: Mapping[nn.Module, str],
    block: nn.Module,
    forward: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block's forward, and append its name and a copy of its output to ``calls``."""
    output = forward(*args, **kwargs)
    # later blocks may change the output in place
    copies = {id(x): x.clone() for x in tensors_in(output)}
    calls.append((names[block], swapped(output, copies)))
    return output


def _logits(subject: Subject, example: ShownExample) -> Tensor:
    output = call_model(subject.forward_func, example.inputs, example.additional)
    return logits_of(output).detach()


def _evenly_spaced(calls: list[tuple[str, Any]], limit: int) -> list[tuple[str, Any]]:
    """Return at most ``limit`` calls, evenly spaced and including the last one."""
    count = min(len(calls), limit)
    return [calls[(i + 1) * len(calls) // count - 1] for i in range(count)]


def _prediction(
    subject: Subject, name: str, output: Tensor, place: Sequence[int], explained: int
) -> Facts:
    """Return a block's likeliest answer at ``place``, and the ``explained`` one's probability."""
    probabilities = output[(0, *place)].cpu().double().softmax(-1)
    best = int(probabilities.argmax())
    return {
        "name": name,
        "best": visible_text(label_of(subject, best, output)),
        "chance": float(probabilities[best]),
        "explained": float(probabilities[explained]),
    }
