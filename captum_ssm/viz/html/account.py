"""What an explained number is made of besides the relevance of the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...attr import LatimFlow, LatimLogit
from .example import Example, Subject


class Account(NamedTuple):
    """A sum: relevance, of all that the input holds, and ``bias`` and ``delta`` are ``output``.

    Attributes:
        output: the explained number.
        bias: what biases and other constants add.
        delta: what is missing.
    """

    output: float
    bias: float
    delta: float


def account_of(method: Any, subject: Subject, example: Example, target: Any) -> Account | None:
    """The account of a method that decomposes the output; None for any other.

    Args:
        method: the method, or a class to be made on the subject.
        subject: the model.
        example: the example.
        target: what is explained, in Captum's forms.
    """
    if isinstance(method, type):
        method = method(subject.forward_func, subject.module, subject.layers)
    if not isinstance(method, LatimFlow | LatimLogit):
        return None
    found = method.decompose(example.inputs, target, example.additional or None)
    return Account(float(found.output), float(found.bias), float(found.delta))
