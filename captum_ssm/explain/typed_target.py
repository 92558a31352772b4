"""Convert a target that was typed on the command line, such as a word, to Captum's form."""

from __future__ import annotations

import re
from typing import Any

from ..attr.call.given import Reader, classes_of
from ..errors import OptionError, TargetError
from ..viz.html.example import Subject

_ID = re.compile(r"id:(\d+)")


def read_target(subject: Subject, text: str, *, language: bool, option: str = "--target") -> Any:
    """Convert the text of a target to Captum's form: the next token, or a class.

    Returns:
        For a language model (-1, token id), the last position; otherwise the index of a class.

    Raises:
        OptionError: if the text is not one token, or not a class.

    Example:
        >>> from captum_ssm.explain.typed_target import read_target
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.viz.html.example import find_subject
        >>> model, vocabulary = load_bundled("recall-mamba")
        >>> subject = find_subject(model, None, None, vocabulary, None)
        >>> read_target(subject, "lamp", language=True) == (-1, vocabulary.id_of("lamp"))
        True
    """
    given = _ID.fullmatch(text)
    if given or (text.isdecimal() and not language):
        number = int(given[1] if given else text)
        return (-1, number) if language else number
    labels = list(subject.labels or ())
    if text in labels and not language:
        return labels.index(text)
    codec = subject.codec if language else None
    try:
        found = Reader(codec, subject.forward_func, subject.module).target(text)
    except TargetError as error:
        message = str(error).removeprefix("target=")
        raise OptionError(f"{option} {message} To pass a token id, write id:NUMBER.") from error
    if isinstance(found, tuple) is language and not isinstance(found, str):
        return found
    if language:
        raise OptionError(f"{option} {text} needs a tokenizer. Pass the token as id:NUMBER.")
    names = list(labels or classes_of(subject.module))
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    known = (", ".join(names[:10]) or "none") + rest
    raise OptionError(
        f"{option} {text!r} is neither a number nor one of the classes ({known}). Pass the number "
        "of a class, or the names of all classes with --labels."
    )
