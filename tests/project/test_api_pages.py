"""The names that packages export: all resolve, and the reference has each on one page."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import captum_ssm

API = Path(__file__).resolve().parents[2] / "docs" / "api"
#: The page of each package that lists names one by one; and names that another page has.
PACKAGES = {
    "methods": ("captum_ssm", {"CaptumSSMError"}),
    "operators": ("captum_ssm.operators", {"discard_smallest"}),
    "metrics": ("captum_ssm.metrics", set()),
    "models": ("captum_ssm.models", set()),
    "bench": ("captum_ssm_bench.tasks", set()),
}


@pytest.mark.parametrize("stem", PACKAGES)
def test_every_name_is_on_one_page(stem: str) -> None:
    package, elsewhere = PACKAGES[stem]
    module, text = import_module(package), (API / f"{stem}.md").read_text(encoding="utf-8")
    listed = re.findall(r"\.\. auto(?:class|function):: (\w+)", text)
    summary = re.search(r"\.\. autosummary::\n\n((?:   \w+\n)+)", text)
    own = {name for name in module.__all__ if callable(getattr(module, name))}
    assert f".. currentmodule:: {package}\n" in text
    assert len(set(listed)) == len(listed)
    assert set(listed) == own - elsewhere
    assert summary is not None and summary[1].split() == listed


def test_every_public_name_resolves() -> None:
    assert len(set(captum_ssm.__all__)) == len(captum_ssm.__all__)
    for name in captum_ssm.__all__:
        assert getattr(captum_ssm, name) is not None, name
    assert set(captum_ssm.__all__) <= set(dir(captum_ssm))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = captum_ssm.no_such_name
