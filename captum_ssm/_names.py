"""Find names despite different case, spaces, dashes or underscores, or small misspellings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def find_name(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that equals ``name`` except for case and separators, or None.

    Example:
        >>> from captum_ssm._names import find_name
        >>> find_name("latim_flow", ["MambaLRP", "LatimFlow"])
        'LatimFlow'
    """
    names = dict.fromkeys(known)
    if name in list(names):
        return str(name)
    matches = [x for x in names if _normalized(x) == _normalized(str(name))]
    return matches[0] if len(matches) == 1 else None


def suggest(name: object, known: Iterable[str]) -> str:
    """Return a question with the most similar known name, to append to an error message.

    Returns:
        A space and the question; empty if no known name is similar.

    Example:
        >>> from captum_ssm._names import suggest
        >>> suggest("latinflow", ["MambaLRP", "LatimFlow"])
        ' Did you mean LatimFlow?'
    """
    known_names = {_normalized(x): x for x in known}
    closest = get_close_matches(_normalized(str(name)), known_names, n=1)
    return f" Did you mean {known_names[closest[0]]}?" if closest else ""


def _normalized(name: str) -> str:
    """Return the name in lower case, without spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name.lower())
