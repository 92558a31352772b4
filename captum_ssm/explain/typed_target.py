"""What is explained, from what the user typed."""

from __future__ import annotations

import re
from typing import Any

from ..errors import InputError, OptionError
from ..viz.html.example import Subject

_ID = re.compile(r"id:(\d+)")


def read_target(subject: Subject, text: str, *, language: bool, option: str = "--target") -> Any:
    """The target in Captum's form.

    Returns:
        A class's number; or, for a language model, the last position and the token's id.

    Raises:
        OptionError: when the text is not one token, or no class.

    Example:
        >>> from captum_ssm.explain.typed_target import read_target
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.viz.html.example import find_subject
        >>> model, vocabulary = load_bundled("recall-mamba")
        >>> subject = find_subject(model, None, None, vocabulary, None)
        >>> read_target(subject, "lamp", language=True) == (-1, vocabulary.id_of("lamp"))
        True
    """
    return (-1, _token(subject, text, option)) if language else _class(subject, text, option)


def _token(subject: Subject, text: str, option: str) -> int:
    given = _ID.fullmatch(text)
    if given:
        return int(given[1])
    if subject.codec is None:
        raise OptionError(f"{option} {text}: without a tokenizer, name the token as id:NUMBER.")
    try:
        return subject.codec.token(text)
    except InputError as error:
        raise OptionError(f"{option} {text!r}: {error} An id is written as id:NUMBER.") from error


def _class(subject: Subject, text: str, option: str) -> int:
    own = getattr(getattr(subject.module, "config", None), "id2label", None) or {}
    given = {name: number for number, name in enumerate(subject.labels or ())}
    names = {str(name): number for number, name in own.items()} | given
    if text in names:
        return int(names[text])
    number = _ID.fullmatch(text)
    if number or text.isdecimal():
        return int(number[1] if number else text)
    known = ", ".join(list(given or names)[:10]) or "none"
    raise OptionError(
        f"{option} {text!r} is no number and none of the classes ({known}). Give a class's number, "
        "or name the classes by --labels."
    )
