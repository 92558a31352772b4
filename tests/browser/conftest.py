"""A page of a real headless Chromium; see ``tests/helpers/browser.py`` for its verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.made import MAKE
from helpers.browser import Page, chromium, program

from captum_ssm.insights import AttributionVisualizer


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the page of a name, once."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def write(name: str) -> Path:
        torch.manual_seed(3)
        MAKE[name](folder / f"{name}.html")
        return folder / f"{name}.html"

    return write


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser, started once."""
    path = program()
    if path is None:
        pytest.skip("needs Chromium, see CONTRIBUTING.md")
    with chromium(path) as started:
        yield started


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """An empty page, 1280 x 900."""
    page = Page(browser)
    yield page
    page.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")])
def view(page: Page, request: pytest.FixtureRequest) -> int:
    """Its width, which is set with a theme."""
    width, scheme = request.param
    page.resize(width, 800)
    page.prefer(scheme)
    return int(width)


@pytest.fixture
def made(written: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """The page that a file of tests calls PAGE."""
    return written(request.module.PAGE)


@pytest.fixture
def opened(page: Page, view: int, made: Path) -> Iterator[Page]:
    """The page in the file ``made``, wide and light, and narrow and dark.

    Nothing may go wrong there, nothing may be fetched, and it is never wider than its window.
    """
    page.goto(made)
    yield page
    assert page.overflow() <= 0
    assert page.errors == [] and page.dialogs == []
    assert page.requests == [made.as_uri()]


@pytest.fixture
def wide(page: Page, made: Path) -> Iterator[Page]:
    """The same, wide alone, and without looking for what is wider than the window."""
    page.resize(1280, 800)
    page.goto(made)
    yield page
    assert page.errors == [] and page.dialogs == []
    assert page.requests == [made.as_uri()]


@pytest.fixture
def shown(page: Page, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page of a visualizer, served or kept; in the end finds that all went well there."""
    served: list[AttributionVisualizer] = []

    def open_(visualizer: AttributionVisualizer, *, kept: bool = False, width: int = 1280) -> Page:
        served.append(visualizer)
        page.resize(width, 800)
        if kept:
            visualizer.snapshot(tmp_path / "kept.html")
            page.goto(tmp_path / "kept.html")
        else:
            visualizer.serve()
            page.goto(visualizer.url)
        page.settle()
        page.evaluate("document.querySelector('#choosing').open = true")
        return page

    yield open_
    assert page.errors == [] and page.dialogs == []
    own = [f"http://127.0.0.1:{visualizer.serve()}/" for visualizer in served]
    assert all(url.startswith(("file:", *own)) for url in page.requests)
    for visualizer in served:
        visualizer.close()
