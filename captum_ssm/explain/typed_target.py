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
    id_match = _ID.fullmatch(text)
    if id_match or (text.isdecimal() and not language):
        index = int(id_match[1] if id_match else text)
        return (-1, index) if language else index
    labels = list(subject.labels or ())
    if text in labels and not language:
        return labels.index(text)
    codec = subject.codec if language else None
    try:
        target = Reader(codec, subject.forward_func, subject.module).target(text)
    except TargetError as error:
        message = str(error).removeprefix("target=")
        raise OptionError(f"{option} {message} To pass a token id, write id:NUMBER.") from error
    # (position, token id) for a language model, a class index for others; text was not understood
    if isinstance(target, tuple) is language and not isinstance(target, str):
        return target
    if language:
        raise OptionError(f"{option} {text} needs a tokenizer. Pass the token as id:NUMBER.")
    names = list(labels or classes_of(subject.module))
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    listed = (", ".join(names[:10]) or "none") + rest
    raise OptionError(
        f"{option} {text!r} is neither a number nor one of the classes ({listed}). Pass the number "
        "of a class, or the names of all classes with --labels."
    )
