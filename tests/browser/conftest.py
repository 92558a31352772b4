"""A page of a real headless Chromium; see ``tests/helpers/chromium_page.py`` for what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.chromium import Chromium, Page, program


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """The browser, started once."""
    path = program()
    if path is None:
        pytest.skip("needs Chromium, see CONTRIBUTING.md")
    with Chromium(path, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(chromium: Chromium) -> Iterator[Page]:
    """An empty page, 1280 x 900.

    Tests open something with ``page.goto(path or url)`` and look by ``page.evaluate``, ``text``,
    ``count`` and ``style``; they act by ``hover``, ``click``, ``key`` and ``type``; they read
    ``errors``, ``requests`` and ``dialogs``; ``resize``, ``prefer("dark")`` and ``screenshot``
    change and show what it looks like.
    """
    page = chromium.new_page()
    yield page
    chromium.close_page(page)


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def opened(page: Page, made: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page in the file ``made``, at both widths and in both themes.

    Nothing may go wrong there, nothing may be fetched, and it is never wider than its window.
    """
    width, scheme = request.param
    page.resize(width, 800)
    page.prefer(scheme)
    page.goto(made)
    yield page
    assert page.overflow() <= 0
    assert page.errors == [] and page.dialogs == []
    assert page.requests == [made.as_uri()]
