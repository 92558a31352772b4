"""Compute language-model logits only at the positions of the targets, to save memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ...errors import TargetError
from ...tracing import runnable
from .targets import CONTRASTS, Against, SumTarget, second_index, target_index

#: The argument of transformers language models for the positions at which the head runs.
_ARGUMENT = "logits_to_keep"
#: A vocabulary size above all real ones, used before the model's vocabulary size is known.
_ANY_VOCABULARY = 2**31


@dataclass(frozen=True)
class Kept:
    """The K positions of L at which a language model's head runs.

    Attributes:
        positions: the positions, in increasing order.
        tokens: the number of tokens of the sequence, L.
    """

    positions: tuple[int, ...]
    tokens: int

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword argument for the model: a number of last positions, or a tensor."""
        count = len(self.positions)
        are_last = self.positions[0] == self.tokens - count
        return {_ARGUMENT: count if are_last else torch.tensor(self.positions)}

    def fit(self, output: Tensor) -> bool:
        """Return True if the output (B, K, V) has logits for exactly this number of positions."""
        return output.dim() == 3 and output.shape[1] == len(self.positions)

    def whole(self, output: Tensor) -> Tensor:
        """Return zeros (B, L, V), the shape of all logits, in the memory of a single scalar."""
        return output.new_zeros(()).expand(len(output), self.tokens, output.shape[-1])

    def among(self, output: Tensor, target: Any, contrast: Any) -> tuple[Any, Any]:
        """Convert positions in a target and a contrast to indices into the kept positions.

        Args:
            output: logits at the kept positions, (B, K, V).
            target, contrast: see :func:`~captum_ssm.attr.call.targets.contrasted`.
        """
        all_logits = self.whole(output)  # zeros, read only for their shape
        if contrast is not None and not isinstance(contrast, str):
            contrast = self._reindex(contrast, second_index(contrast, all_logits))
        return self._reindex(target, target_index(target, all_logits)), contrast

    def _reindex(self, target: Any, index: Tensor | None) -> Any:
        """Convert a target or a contrast for :meth:`among`; ``index`` is from target_index."""
        if index is None:
            return None
        if isinstance(target, SumTarget):  # index (B, n, 2)
            positions = index[..., 0].cpu().contiguous()
            return target.with_positions(
                torch.searchsorted(torch.tensor(self.positions), positions)
            )
        return [(self.positions.index(p), token) for p, token in index.tolist()]  # index (B, 2)


def kept_positions(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    additional: tuple[Any, ...],
    questions: Iterable[Against],
    modules: Sequence[nn.Module] = (),
) -> Kept | None:
    """Return the positions at which the head must run; None if the head must run at all positions.

    A head with a vocabulary of 50,000 takes as much memory as many layers.  Transformers language
    models have an argument for these positions, which does not change the logits at them. The head
    must run at all positions if ``modules``, whose activations are needed, include it.
    """
    arguments = (inputs, *additional)
    if inputs.dim() not in (2, 3) or not _head_can_be_limited(forward_func, arguments, modules):
        return None
    batch, tokens = inputs.shape[:2]
    all_logits = torch.zeros(()).expand(batch, tokens, _ANY_VOCABULARY)  # the memory of a scalar
    positions: set[int] = set()
    for question in questions:
        contrast = question.contrast
        is_named = isinstance(contrast, str)
        if is_named and contrast not in CONTRASTS:  # refused after the run
            return None
        # a named contrast is computed at the target's own positions
        contrasts = () if contrast is None or is_named else (contrast,)
        try:
            indices = [target_index(target, all_logits) for target in (question.target, *contrasts)]
        except TargetError:  # raised again with the output's shape, after the run
            return None
        for index in indices:
            if index is None:  # target=None, the only value of an output (B, 1)
                return None
            positions.update(index[..., 0].flatten().tolist())
    return Kept(tuple(sorted(positions)), tokens) if 0 < len(positions) < tokens else None


def _head_can_be_limited(
    forward_func: Callable[..., Any], arguments: Sequence[Any], modules: Sequence[nn.Module]
) -> bool:
    """Return True if a transformers model can run its head at some positions only.

    Return False if hooks on the head, or further ``modules``, need logits of all positions.
    """
    model: Any = runnable(forward_func)
    if not isinstance(model, nn.Module):  # a bound method of the model; a function may do anything
        owner = getattr(model, "__self__", None)
        if not isinstance(owner, nn.Module) or model not in (owner.forward, owner.__call__):
            return False
        model = owner
    forward, call = type(model).forward, type(model).__call__
    package = getattr(inspect.unwrap(forward), "__module__", None) or ""  # `forward` has decorators
    if package.split(".")[0] != "transformers" or call is not nn.Module.__call__:
        return False
    signature = inspect.signature(forward)
    if _ARGUMENT not in signature.parameters:
        return False
    try:
        by_name = signature.bind(model, *arguments).arguments
    except TypeError:
        return False
    if by_name.get(_ARGUMENT) is not None or by_name.get("labels") is not None:
        return False  # the user's own limit, or a loss over all logits
    head = model.get_output_embeddings()
    if any(part is head for module in modules for part in module.modules()):
        return False
    return type(head) is nn.Linear and not (
        _is_changed(model) or _is_changed(head) or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _is_changed(module: nn.Module) -> bool:
    """Return True if hooks or a replaced ``forward`` may change the module's output."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)
