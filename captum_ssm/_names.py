"""Find names despite different case, spaces, dashes or underscores, or small misspellings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def known_as(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that equals ``name`` except for case and separators, or None.

    Example:
        >>> from captum_ssm._names import known_as
        >>> known_as("latim_flow", ["MambaLRP", "LatimFlow"])
        'LatimFlow'
    """
    names = dict.fromkeys(known)
    if name in list(names):
        return str(name)
    found = [each for each in names if _plain(each) == _plain(str(name))]
    return found[0] if len(found) == 1 else None


def meant(name: object, known: Iterable[str]) -> str:
    """Return a question with the most similar known name, to append to an error message.

    Returns:
        A space and the question; empty if no known name is similar.

    Example:
        >>> from captum_ssm._names import meant
        >>> meant("latinflow", ["MambaLRP", "LatimFlow"])
        ' Did you mean LatimFlow?'
    """
    plain = {_plain(each): each for each in known}
    alike = get_close_matches(_plain(str(name)), plain, n=1)
    return f" Did you mean {plain[alike[0]]}?" if alike else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower())
