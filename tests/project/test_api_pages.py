"""The names that packages export: all resolve, and the reference has each on one page."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import captum_ssm

API = Path(__file__).resolve().parents[2] / "docs" / "api"
#: Packages of several pages, by how the names of these begin; and what has its place elsewhere.
PACKAGES = {
    "methods": ("captum_ssm", {"CaptumSSMError"}),
    "operators": ("captum_ssm.operators", {"discard_smallest"}),
    "metrics": ("captum_ssm.metrics", set()),
    "models": ("captum_ssm.models", set()),
    "tasks": ("captum_ssm_bench.tasks", set()),
}


@pytest.mark.parametrize("stem", PACKAGES)
def test_every_name_is_on_one_page(stem: str) -> None:
    package, elsewhere = PACKAGES[stem]
    module, listed = import_module(package), []
    for page in API.glob(f"{stem}_*.md"):
        text = page.read_text(encoding="utf-8")
        assert f".. currentmodule:: {package}\n" in text and page.stem in first_page(stem)
        listed += re.findall(r"\.\. auto(?:class|function):: (\w+)", text)
    own = {name for name in module.__all__ if callable(getattr(module, name))}
    assert len(set(listed)) == len(listed)
    assert set(listed) == own - elsewhere


def first_page(stem: str) -> list[str]:
    return (API / f"{stem}.md").read_text(encoding="utf-8").split()


def test_every_public_name_resolves() -> None:
    assert len(set(captum_ssm.__all__)) == len(captum_ssm.__all__)
    for name in captum_ssm.__all__:
        assert getattr(captum_ssm, name) is not None, name
    assert set(captum_ssm.__all__) <= set(dir(captum_ssm))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = captum_ssm.no_such_name
