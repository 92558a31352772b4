"""Predict one example with and without some edges, the messages between its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attr.call.inputs import as_tuple, call_model
from ..attr.call.targets import contrasted, logits_of, target_index
from ..edges import EdgeEffects, Edges, knock_out
from ..edges.cut import Replacement
from ..errors import OptionError
from ..tracing import find_model

#: The number of most probable answers to list, with and without the edges.
_NAMED = 3

_POSITION = re.compile(r"-?\d+")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


class ChangedAnswer(NamedTuple):
    """A class or token ``label``, and its probability with all edges and without the cut edges."""

    label: str
    before: float
    without: float


class Cut(NamedTuple):
    """The effect of cutting edges on one example.

    Attributes:
        answers: the explained class or token, and the most probable ones with and without the
            edges; empty for a model that returns one scalar.
        before: the explained scalar (such as a logit) with all edges.
        without: the explained scalar without the cut edges.
        estimated: the estimated decrease of this scalar; None if ``selection`` or a replacement is
            used.
    """

    answers: list[ChangedAnswer]
    before: float
    without: float
    estimated: float | None

    @property
    def true(self) -> float:
        """The true decrease of the explained scalar: ``before`` minus ``without``."""
        return self.before - self.without


def cut_edges(
    method: EdgeEffects,
    inputs: Tensor,
    target: Any,
    edges: Edges | Sequence[Edges],
    label: Callable[[int, Tensor], str],
    *,
    additional: Any = None,
    replace: Replacement = None,
) -> Cut:
    """Run one example with and without some edges, and estimate their effect.

    Args:
        method: the method that estimates effects, with the model.
        inputs: the example, a batch of one.
        target: the explained class or token, in all forms that Captum accepts.
        edges: the edges to cut; several are cut together.
        label: function from the index of a class or token, and the model's output, to a name.
        additional: further arguments of the model. Default: None.
        replace: the replacement of messages, see :func:`~captum_ssm.knock_out`. Default: None,
            messages are removed.

    Raises:
        CaptumSSMError: if :func:`~captum_ssm.knock_out` or :meth:`EdgeEffects.attribute
            <captum_ssm.EdgeEffects.attribute>` does not accept the edges or the target.

    Example:
        >>> import torch
        >>> from captum_ssm import EdgeEffects, Edges
        >>> from captum_ssm.explain.knockout import cut_edges
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled()
        >>> prompt = "anna owns the lamp . bob owns the kite . ? anna owns the"
        >>> ids, lamp = torch.tensor([vocabulary.encode(prompt)]), vocabulary.id_of("lamp")
        >>> def label(index, output):
        ...     return vocabulary.vocab[index]
        >>> found = cut_edges(EdgeEffects(model), ids, (-1, lamp), Edges(1, 3, -1), label)
        >>> lamp = found.answers[0]
        >>> lamp.label, round(lamp.before, 2), round(lamp.without, 2)
        ('lamp', 1.0, 0.15)
        >>> found.estimated > 1, found.true > 1
        (True, True)
    """
    module = find_model(method.forward_func, method.model)

    def run() -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return logits_of(call_model(method.forward_func, inputs, as_tuple(additional)))

    before = run()
    cuts = [edges] if isinstance(edges, Edges) else edges
    with knock_out(module, *cuts, replace=replace):
        without = run()
    estimated = None
    if replace is None and not any(edge.selection for edge in cuts):
        estimated = float(method.attribute(inputs, target, additional).of(*cuts))
    return Cut(
        answers=_changed_answers(before, without, target, label),
        before=float(contrasted(before, target)[0]),
        without=float(contrasted(without, target)[0]),
        estimated=estimated,
    )


def read_tokens(
    option: str, items: Sequence[str], names: Sequence[str], text: str
) -> slice | list[int]:
    """Convert positions, words or one slice on the command line to a list or slice of positions.

    Args:
        option: the name of the command's option, for errors.
        items: positions such as ``3`` or ``-1``, words, or a slice such as ``0:4`` or ``:``.
        names: the tokens of the text.
        text: the text.

    Raises:
        OptionError: if a word is not in the text or occurs several times, or if a slice is combined
            with other tokens.

    Example:
        >>> from captum_ssm.explain.knockout import read_tokens
        >>> names = ["the", " red", " la", "mp"]
        >>> read_tokens("--from", ["lamp", "0"], names, "the red lamp")
        [2, 3, 0]
        >>> read_tokens("--to", ["1:"], names, "the red lamp")
        slice(1, None, None)
    """
    slice_match = _SLICE.fullmatch(items[0])
    if slice_match and len(items) == 1:
        start, stop = (None if bound is None else int(bound) for bound in slice_match.groups())
        return slice(start, stop)
    positions: list[int] = []
    for item in items:
        if _SLICE.fullmatch(item):
            raise OptionError(f"{option} {item}: pass only a slice, or list all positions instead.")
        added = [int(item)] if _POSITION.fullmatch(item) else _find_word(option, item, names, text)
        positions += [position for position in added if position not in positions]
    return positions


def _find_word(option: str, word: str, names: Sequence[str], text: str) -> list[int]:
    """Return the positions of a word's tokens; raise if the text has the word never or twice."""
    matches = []
    # a word of the text may have several tokens; other words can only be one token, such as <s>
    for first in range(len(names)):
        for last in range(first, len(names) if word in text else first + 1):
            joined = "".join(names[first : last + 1]).strip()
            if joined == word:
                matches.append(list(range(first, last + 1)))
            if joined and (len(joined) >= len(word) or not word.startswith(joined)):
                break  # too long, or a different beginning
    if len(matches) == 1:
        return matches[0]
    if not matches:
        known = ", ".join(f"{i} {name.strip()!r}" for i, name in enumerate(names))
        raise OptionError(
            f"{option} {word}: the text does not contain this word. The tokens are {known}. Pass a "
            "word of the text, or a position."
        )
    positions = " and ".join(", ".join(map(str, match)) for match in matches)
    raise OptionError(
        f"{option} {word}: the word occurs {len(matches)} times, at {positions}. Pass the position "
        "of one of them."
    )


def _changed_answers(
    before: Tensor, without: Tensor, target: Any, label: Callable[[int, Tensor], str]
) -> list[ChangedAnswer]:
    """Return the probabilities of the explained answer and of the most probable answers."""
    index = target_index(target, before)
    if index is None or before.shape[-1] == 1:
        return []
    *position, explained = index[0].tolist()
    chances = [  # the distribution before and without the edges
        output[(0, *position)].detach().cpu().double().softmax(-1) for output in (before, without)
    ]
    best = [chance.topk(min(_NAMED, len(chance))).indices.tolist() for chance in chances]
    return [
        ChangedAnswer(label(k, before), *(float(chance[k]) for chance in chances))
        for k in dict.fromkeys([explained, *best[0], *best[1]])
    ]
