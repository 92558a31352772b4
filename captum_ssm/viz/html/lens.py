"""Predict after each block of a model, as if the later blocks were missing.

The model runs again, and every block returns the recorded output of one block. The last norm and
the head then read this block's residual stream (the logit lens, nostalgebraist 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
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

#: The largest number of entries of all runs' outputs together; else some blocks are left out.
_ENTRIES = 2**28
#: A table with fewer blocks is omitted.
_LEAST = 2


def predictions_by_block(
    subject: Subject, example: ShownExample, known: Outline
) -> list[dict[str, Any]]:
    """Return the likeliest answer after each block, and the explained answer's probability.

    Returns:
        One entry per block in the order of the run. No entries if the explained output is not a
        class, if the blocks are in no module list, or if the last entry is not the model's output.
    """
    if not known.predictions:
        return []
    try:
        blocks = lists_of_blocks(subject.module, find_mixers(subject.module))
    except OptionError:
        return []
    calls: list[tuple[str, Any]] = []
    with torch.no_grad():
        with in_place_of(blocks, partial(_recorded, calls, blocks)):
            whole = _run(subject, example)
        outputs = []
        for name, returned in _spread(calls, _ENTRIES // whole.numel()):
            with in_place_of(blocks, lambda *_, returned=returned, **__: returned):
                outputs.append((name, _run(subject, example)))
    index = target_index(known.target, whole)
    if len(outputs) < _LEAST or index is None or not torch.allclose(outputs[-1][1], whole):
        return []
    place = tuple(index[0, :-1].tolist())
    return [_said(subject, name, output, place, int(index[0, -1])) for name, output in outputs]


def _recorded(
    calls: list[tuple[str, Any]],
    names: Mapping[nn.Module, str],
    block: nn.Module,
    forward: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    returned = forward(*args, **kwargs)
    copies = {id(x): x.clone() for x in tensors_in(returned)}
    calls.append((names[block], swapped(returned, copies)))
    return returned


def _run(subject: Subject, example: ShownExample) -> Tensor:
    given = subject.forward_func, example.inputs, example.additional
    return logits_of(call_model(*given)).detach()


def _spread(calls: list[tuple[str, Any]], most: int) -> list[tuple[str, Any]]:
    """Return at most ``most`` calls, evenly spaced and including the last one."""
    count = min(len(calls), most)
    return [calls[(n + 1) * len(calls) // count - 1] for n in range(count)]


def _said(
    subject: Subject, name: str, output: Tensor, place: tuple[int, ...], asked: int
) -> dict[str, Any]:
    chances = output[(0, *place)].cpu().double().softmax(-1)
    best = int(chances.argmax())
    return {
        "name": name,
        "best": visible_text(label_of(subject, best, output)),
        "chance": float(chances[best]),
        "explained": float(chances[asked]),
    }
