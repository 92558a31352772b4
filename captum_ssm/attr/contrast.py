"""What a target is held against: nothing, another target, the mean, or all alternatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteError, OptionError, TargetError
from .targets import select, target_index

CONTRASTS = ("mean", "others", "all")


def contrasted(output: Tensor, target: Any, contrast: Any = None) -> tuple[Tensor, Tensor | None]:
    """The number to explain per example (B,), linear in the output, and its constant summand.

    Args:
        output: what the model returned, (B, ..., V).
        target: one of Captum's forms.
        contrast: None for the output itself; ``"mean"``, less the mean over the last dimension;
            ``"others"``, the log-odds against all other entries; ``"all"``, the log-probability;
            or a second target, whose output is taken off. Logarithms are linear in the output
            with the probabilities frozen; the entropy that this leaves is the constant.
            Default: None.

    Raises:
        TargetError, OptionError: when the target or the contrast does not fit the output.
        NonFiniteError: when the number is NaN or infinite, as where the model overflows.
    """
    number, constant = _contrasted(output, target, contrast)
    if not bool(torch.isfinite(number).all()):
        example = int((~torch.isfinite(number)).nonzero()[0])
        found = float(number.detach()[example])
        raise NonFiniteError(
            f"The model's output for target={target!r} is {found} for example "
            f"{example}, which cannot be divided into parts. Run the model in a wider dtype than "
            f"{output.dtype}, or choose a target whose output is finite."
        )
    return number, constant


def _contrasted(output: Tensor, target: Any, contrast: Any) -> tuple[Tensor, Tensor | None]:
    index = target_index(target, output)
    chosen = select(output, index)
    if contrast is None:
        return chosen, None
    if not isinstance(contrast, str):
        return chosen - select(output, _second(contrast, output)), None
    if contrast not in CONTRASTS or index is None:
        raise OptionError(
            f"contrast={contrast!r} with target={target!r}: use None, a second target, or, with a "
            f"target, one of {CONTRASTS}."
        )
    example = torch.arange(len(output), device=output.device)
    entries = output[(example, *index[:, :-1].unbind(-1))]  # (B, V)
    if contrast == "mean":
        return chosen - entries.mean(-1), None
    scores = entries.detach().to(torch.promote_types(entries.dtype, torch.float32))
    if contrast == "others":
        if entries.shape[-1] == 1:
            raise OptionError("contrast='others', but the output has one entry and no others.")
        scores = scores.scatter(1, index[:, -1:], float("-inf"))
    shares = torch.softmax(scores, -1)
    entropy = torch.special.entr(shares).sum(-1)
    return chosen - (shares.to(entries) * entries).sum(-1) - entropy.to(entries), -entropy


def _second(contrast: Any, output: Tensor) -> Tensor | None:
    try:
        return target_index(contrast, output)
    except TargetError as error:
        raise TargetError(f"contrast={contrast!r} is read as a second target. {error}") from None
