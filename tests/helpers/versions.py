"""What tests need to know of the version of transformers that they run with."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

VERSION_4 = transformers.__version__.startswith("4.")

#: Marks a test of code that version 4 has not, or that is otherwise there.
transformers5 = pytest.mark.skipif(
    VERSION_4, reason=f"not for transformers {transformers.__version__}, see CONTRIBUTING.md"
)


def named(name: str) -> Any:
    """A class of transformers; without it the test is skipped."""
    found = getattr(transformers, name, None)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}, see CONTRIBUTING.md")
    return found


def not_in_4(family: str, *families: str) -> None:
    """Skip the test for families that version 4 computes wrongly on a CPU, or that are refused."""
    if VERSION_4 and family in families:
        pytest.skip(f"{family} of transformers {transformers.__version__}, see CONTRIBUTING.md")
