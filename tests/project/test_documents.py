"""The pages: their code runs as written, and what they teach is true."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.documents import PAGES, ROOT, blocks, links, run
from helpers.marks import slow_but
from oracles import relative_error

from captum_ssm import trace

ARCHITECTURE = "docs/howto/adding_an_architecture.md"
METHOD = "docs/howto/adding_a_method.md"
GALLERY = "docs/gallery.md"
#: Pages that plain pytest runs.
QUICK = ("README.md", "docs/quickstart.md")


@pytest.fixture(autouse=True)
def pictures_closed() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


# --- all pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    slow_but(QUICK, [page for page in PAGES if blocks(page)]),
)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(page)
    if "relevance" in names:
        assert names["relevance"].isfinite().all()


def test_links_of_pages_that_sphinx_does_not_read_lead_to_files() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert [link for link in links(page) if not (ROOT / link).exists()] == []


# --- the gallery ---------------------------------------------------------------------------------


def test_every_picture_of_the_gallery_has_its_lines() -> None:
    """At most ten below each, which end by drawing it; no picture is left over."""
    text = (ROOT / GALLERY).read_text("utf-8")
    shown = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    first, *codes = blocks(GALLERY)
    assert len(shown) == len(codes) >= 10
    for code in (first, *codes):
        assert len(code.strip().splitlines()) <= 10
    for code in codes:
        assert re.search(r"^figure, \w+ = plot_", code, re.MULTILINE)
    folder = ROOT / "docs/images/gallery"
    assert {f"images/gallery/{path.name}" for path in folder.iterdir()} == set(shown)


# --- adding an architecture ----------------------------------------------------------------------


def test_how_to_adapters_are_the_modules() -> None:
    """Followed to the letter, the page gives adapters that reproduce its modules in float64."""
    page = run(ARCHITECTURE)
    for name in ("S4D", "SmoothingMixer"):
        module = page[name](6).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        hidden = torch.randn(2, 33, 6, dtype=torch.float64)
        with torch.no_grad(), trace(module) as t:
            output = module(hidden)
        (layer,) = t.layers
        assert relative_error(layer.linear.output(), output) <= 1e-12


def test_how_to_s4d_is_the_recurrence() -> None:
    """The page's kernel is that of h[t] = exp(dt A) h[t-1] + B u[t], discretised by a hold."""
    module = run(ARCHITECTURE)["S4D"](3).double()
    hidden = torch.randn(2, 21, 3, dtype=torch.float64)
    with torch.no_grad(), trace(module) as t:
        module(hidden)
        a = torch.complex(-module.log_rate.exp(), module.frequency)
        decay = torch.exp(module.log_dt.exp() * a)
        state = torch.zeros(2, *a.shape, dtype=a.dtype)
        wanted = []
        for u in hidden.unbind(1):
            state = decay * state + (decay - 1) / a * u[..., None]
            read = 2 * (torch.view_as_complex(module.c) * state).sum(-1).real
            wanted.append(read + module.skip * u)
    found = t.layers[0].operator.apply(hidden[..., None]).squeeze(-1)
    assert relative_error(found, torch.stack(wanted, 1)) <= 1e-12


# --- adding a method -----------------------------------------------------------------------------


def test_how_to_method_is_short() -> None:
    (block,) = (block for block in blocks(METHOD) if "(ImplicitMethod):" in block)
    assert len(block[block.index("class ") :].splitlines()) < 50


def test_notebooks_are_stored_without_output() -> None:
    """The build of the pages runs them."""
    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert cells and not any(cell.get("outputs") for cell in cells), path.name
