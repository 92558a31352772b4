"""The result of SSMLLMAttribution, a subclass of Captum's LLMAttributionResult."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from captum.attr import LLMAttributionResult
from torch import Tensor

from ..engine.result import Result, part
from .codec import Pieces
from .hops import SpanHop
from .prompt import Prompt


@part
@dataclass(frozen=True, eq=False)
class SpanParts:
    """Explanations of the spans of a text.

    Attributes:
        ranges: the range of tokens of each span.
        names: the text of each span.
        features: the names of the prompt's features.
        hops: the relevance for all spans after 0, 1, ... hops.
    """

    ranges: Sequence[range]
    names: list[str]
    features: list[str]
    hops: list[SpanHop]

    @property
    def outputs(self) -> Tensor:
        """The sum of contributions to each span (S,): for exact methods, the explained value."""
        return self.hops[0].total

    @property
    def delta(self) -> Tensor:
        """The spans' outputs minus all relevance after the last hop (S,), 0 up to rounding."""
        return self.outputs - self.hops[-1].total

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per hop, span and source of relevance, for a DataFrame."""
        rows = []
        for hop_number, hop in enumerate(self.hops):
            # kind, names of the n sources, and relevance (S, n)
            sources = (
                ("prompt", self.features, hop.prompt),
                ("text", self.names, hop.text),
                ("unresolved", self.names, hop.unresolved),
                ("constants", [""], hop.constants[:, None]),
            )
            for index, span in enumerate(self.names):
                common = {"hop": hop_number, "span": index, "of": span}
                rows += [
                    {**common, "kind": kind, "from": name, "relevance": relevance}
                    for kind, names, values in sources
                    for name, relevance in zip(names, values[index].tolist(), strict=True)
                ]
        return rows

    def to_json(self) -> str:
        """Return the attributes, outputs and delta as a JSON string."""
        return json.dumps(
            {
                "spans": [[span.start, span.stop] for span in self.ranges],
                "names": self.names,
                "features": self.features,
                "outputs": self.outputs.tolist(),
                "delta": self.delta.tolist(),
                "hops": [
                    {name: value.tolist() for name, value in vars(hop).items()} for hop in self.hops
                ],
            }
        )


def result_of_spans(
    prompt: Prompt,
    hops: Sequence[SpanHop],
    spans: Sequence[range],
    names: list[str],
    pieces: Pieces | None,
) -> SSMLLMAttributionResult:
    """Sum relevance of tokens over features and spans; ``names`` and ``pieces`` are of spans."""

    def by_span(on_text: Tensor) -> Tensor:
        """Sum relevance of tokens (S, n) over the tokens of each span, (S, S)."""
        return torch.stack([on_text[:, s.start : s.stop].sum(1) for s in spans], 1)

    hops_by_feature = []
    for hop in hops:
        features = prompt.features(hop.prompt)
        text, unresolved = by_span(hop.text), by_span(hop.unresolved)
        assigned = features.sum(1) + text.sum(1) + unresolved.sum(1)
        # constants, and tokens in no feature or span
        hops_by_feature.append(SpanHop(features, text, unresolved, hop.total - assigned))
    parts = SpanParts(tuple(spans), names, prompt.names, hops_by_feature)
    last = hops_by_feature[-1]
    return SSMLLMAttributionResult(
        seq_attr=last.prompt.sum(0).float(),
        token_attr=last.prompt.float(),
        generated_attr=(hops[-1].text + hops[-1].unresolved).float(),
        input_tokens=prompt.names,
        output_tokens=names,
        spans=parts,
        input_pieces=prompt.pieces,
        output_pieces=pieces,
    )


def subtract_results(
    first: SSMLLMAttributionResult, second: SSMLLMAttributionResult
) -> SSMLLMAttributionResult:
    """Return ``first`` minus the prompt's relevance in ``second``, the result for a second text.

    All other relevance of ``second`` is subtracted from the constants: it is on different tokens.
    """
    assert first.spans is not None and second.spans is not None
    hop_count = max(len(first.spans.hops), len(second.spans.hops))  # the shorter repeats its last
    hops = []
    for i in range(hop_count):
        hop, other = (x[min(i, len(x) - 1)] for x in (first.spans.hops, second.spans.hops))
        not_on_prompt = other.total - other.prompt.sum(1)
        prompt = hop.prompt - other.prompt
        hops.append(SpanHop(prompt, hop.text, hop.unresolved, hop.constants - not_on_prompt))
    return SSMLLMAttributionResult(
        seq_attr=hops[-1].prompt.sum(0).float(),
        token_attr=hops[-1].prompt.float(),
        generated_attr=first.generated_attr,
        input_tokens=first.input_tokens,
        output_tokens=first.output_tokens,
        spans=replace(first.spans, hops=hops),
        input_pieces=first.input_pieces,
        output_pieces=first.output_pieces,
    )


class SSMLLMAttributionResult(Result, LLMAttributionResult):
    """Captum's LLMAttributionResult, plus the relevance of the text's tokens to later tokens.

    It is the result of :class:`~captum_ssm.SSMLLMAttribution`.

    Args:
        generated_attr, spans, input_pieces, output_pieces: see the attributes below.
        **parts: ``seq_attr``, ``token_attr``, ``input_tokens`` and ``output_tokens``, as in
            Captum's LLMAttributionResult.

    Attributes:
        seq_attr: relevance of each feature of the prompt to the whole text (n_in,).
        token_attr: relevance of each feature of the prompt to each token of the text (n_out, n_in).
        generated_attr: relevance of each token of the text (column) to each later token (row),
            (n_out, n_out); 0 on and above the diagonal.
        input_tokens: the names of the prompt's features.
        output_tokens: the names of the text's tokens.
        spans: explanations of spans, if ``attribute`` was called with spans; then ``token_attr``,
            ``generated_attr`` and ``output_tokens`` have one row per span. Default: None.
        input_pieces: each feature's piece of the prompt's text; joined, the pieces are the text. If
            several tokens make one character, the first has the character and the others ``""``.
            A special token has None. Default: None, not known.
        output_pieces: the same for the text's tokens or spans. Default: None, not known.

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

    def __init__(
        self,
        *,
        generated_attr: Tensor,
        spans: SpanParts | None = None,
        input_pieces: Pieces | None = None,
        output_pieces: Pieces | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.generated_attr = generated_attr
        self.spans = spans
        self.input_pieces, self.output_pieces = input_pieces, output_pieces

    def __repr__(self) -> str:
        inputs, outputs = (len(x) for x in (self.input_tokens, self.output_tokens))
        return f"SSMLLMAttributionResult({outputs} tokens of an answer to {inputs} of a prompt)"

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per text token and prompt feature, or the rows of ``spans``."""
        if self.spans is not None:
            return self.spans.rows()
        return [
            {"of": token, "from": feature, "relevance": relevance}
            for token, row in zip(self.output_tokens, self.token_attr.tolist(), strict=True)
            for feature, relevance in zip(self.input_tokens, row, strict=True)
        ]

    def _state(self) -> dict[str, Any]:
        """Return the constructor arguments by name, for ``save``."""
        of_captum = ("seq_attr", "token_attr", "input_tokens", "output_tokens")
        names = (*of_captum, "generated_attr", "spans", "input_pieces", "output_pieces")
        state = {name: getattr(self, name) for name in names}
        probabilities = getattr(self, "output_probs", None)  # missing in Captum 0.8
        return state if probabilities is None else {**state, "output_probs": probabilities}

    def plot_token_attr(self, show: bool = False) -> Any:
        """Draw a heat map of ``token_attr``; see Captum's LLMAttributionResult.

        Args:
            show: show the figure instead of returning it with its axes. Default: False.

        Returns:
            The figure and its axes; None with ``show=True``.
        """
        with _no_mathematics():
            return super().plot_token_attr(show)

    def plot_seq_attr(self, show: bool = False) -> Any:
        """Draw a bar for each entry of ``seq_attr``; see Captum's LLMAttributionResult.

        Args:
            show: show the figure instead of returning it with its axes. Default: False.

        Returns:
            The figure and its axes; None with ``show=True``.
        """
        with _no_mathematics():
            return super().plot_seq_attr(show)


@contextmanager
def _no_mathematics() -> Iterator[None]:
    """Make matplotlib draw dollar signs in tokens as text, not as formulas."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield
