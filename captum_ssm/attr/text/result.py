"""The relevance of a prompt to a text, as Captum's own result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from captum.attr import LLMAttributionResult
from torch import Tensor


class SSMLLMAttributionResult(LLMAttributionResult):
    """Captum's LLMAttributionResult, with what the text's own tokens add to each other.

    :class:`~captum_ssm.SSMLLMAttribution` returns it.

    Args:
        generated_attr: as below.
        **parts: ``seq_attr``, ``token_attr``, ``input_tokens`` and ``output_tokens``, as Captum's
            LLMAttributionResult takes them.

    Attributes:
        seq_attr: relevance of each feature of the prompt to the whole text (n_in,).
        token_attr: relevance of each feature of the prompt to each token of the text
            (n_out, n_in).
        generated_attr: relevance of each token of the text to each later one (n_out, n_out), zero
            from the diagonal on.
        input_tokens: the names of the prompt's features.
        output_tokens: the names of the text's tokens.

    Example:
        >>> from captum_ssm import ImplicitAttention, SSMLLMAttribution
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled()
        >>> explain = SSMLLMAttribution(ImplicitAttention(model), vocabulary)
        >>> result = explain.attribute("anna owns the", target="lamp .")
        >>> type(result).__name__, tuple(result.seq_attr.shape), tuple(result.token_attr.shape)
        ('SSMLLMAttributionResult', (3,), (2, 3))
        >>> bool(result.generated_attr.triu().any())
        False
    """

    def __init__(self, *, generated_attr: Tensor, **parts: Any) -> None:
        super().__init__(**parts)
        self.generated_attr = generated_attr

    def plot_token_attr(self, show: bool = False) -> Any:
        """A heat map of ``token_attr``; see Captum's LLMAttributionResult.

        Args:
            show: show the figure instead of returning it with its axes. Default: False.

        Returns:
            The figure and its axes; None with ``show=True``.
        """
        with _no_mathematics():
            return super().plot_token_attr(show)

    def plot_seq_attr(self, show: bool = False) -> Any:
        """A bar for each entry of ``seq_attr``; see Captum's LLMAttributionResult.

        Args:
            show: show the figure instead of returning it with its axes. Default: False.

        Returns:
            The figure and its axes; None with ``show=True``.
        """
        with _no_mathematics():
            return super().plot_seq_attr(show)


@contextmanager
def _no_mathematics() -> Iterator[None]:
    """Dollar signs of tokens are no formulas for matplotlib to set, and to fail at."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield
