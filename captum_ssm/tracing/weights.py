"""Errors for weights of custom classes, such as quantized ones, that lack torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import CaptumSSMError, WeightsError

#: Torch's error for an operation that a class of tensors lacks.
_NO_FORM = "all __torch_dispatch__ handlers returned NotImplemented"


@contextmanager
def weights_blamed(model: nn.Module) -> Iterator[None]:
    """Raise an error that names layer and class if a weight's class lacks a torch operation.

    Args:
        model: the model that is run or read inside the ``with``.

    Yields:
        Nothing.

    Raises:
        WeightsError: in place of torch's error for the operation.

    Example:
        >>> from torch import nn
        >>> from captum_ssm.tracing import weights_blamed
        >>> with weights_blamed(nn.Linear(2, 2)):  # plain weights lack nothing
        ...     pass
    """
    try:
        yield
    except Exception as error:
        lacking = _lacking(error)
        named = None if lacking is None else next(_of_own_class(model), None)
        if named is None:
            raise
        name, weight = named
        raise WeightsError(
            f"Layer {name.rpartition('.')[0]!r}: its {name.rpartition('.')[2]} is of class "
            f"{type(weight).__name__}, which lacks an operation that this method needs: {lacking}. "
            "Load the model without quantization, or turn its weights into plain tensors. Methods "
            "that read fewer weights, such as ImplicitAttentionRollout, may not need the operation."
        ) from error


def _lacking(error: BaseException) -> str | None:
    """Return the message if an error, or its cause, is about a missing operation; else None."""
    cause = error.__cause__ if isinstance(error, CaptumSSMError) else error
    if isinstance(cause, NotImplementedError) or (
        isinstance(cause, TypeError) and _NO_FORM in str(cause)
    ):
        message = str(cause).strip() or "NotImplementedError"
        return message.splitlines()[0].rstrip(".:")
    return None


def _of_own_class(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (Tensor, nn.Parameter):
            yield name, tensor
