"""The pages: their code runs as written, their links lead somewhere, what they teach is true."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.documents import NOTEBOOKS, PAGES, ROOT, blocks, links, run
from oracles import relative_error

from captum_ssm import trace

ARCHITECTURE = "docs/howto/adding_an_architecture.md"
METHOD = "docs/howto/adding_a_method.md"
GALLERY = "docs/gallery.md"
#: Pages that other sessions run.
SESSIONS = {
    GALLERY: pytest.mark.full,
    "docs/howto/evaluation_at_scale.md": pytest.mark.bench,
    "docs/howto/long_contexts.md": pytest.mark.full,
}


@pytest.fixture(autouse=True)
def pictures_closed() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


# --- all pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=SESSIONS.get(page, ())) for page in PAGES if blocks(page)],
)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(page)
    if "relevance" in names:
        assert names["relevance"].isfinite().all()


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS])
def test_links_lead_to_files(page: str) -> None:
    place = (ROOT / page).parent
    assert [link for link in links(page) if not (place / link).exists()] == []


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


def test_the_gallerys_tool_draws_each_picture_by_the_lines_below_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nfrom captum_ssm.viz import plot_text\n```\n"
        '![A word.](a/one.png)\n\n```python\nfigure, _ = plot_text(["a"], [1.0])\n```\n'
        "```python\nraise AssertionError\n```\n"
    )
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/gallery_pictures.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.draw(page, tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["one.png"]


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


def test_how_to_adapters_are_short() -> None:
    adapters = [block for block in blocks(ARCHITECTURE) if "def linearize_" in block]
    assert len(adapters) == 3
    assert all(len(block.splitlines()) < 40 for block in adapters)


# --- adding a method -----------------------------------------------------------------------------


def test_how_to_method_is_short() -> None:
    (block,) = (block for block in blocks(METHOD) if "(ImplicitMethod):" in block)
    assert len(block[block.index("class ") :].splitlines()) < 50


def test_the_strata_are_those_that_imports_are_held_to() -> None:
    """In the table of CONTRIBUTING and on the picture of the house."""
    contract = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^layers = \[(.*?)^\]", contract, re.DOTALL | re.MULTILINE)
    assert listed is not None
    rooms = [re.findall(r"\w+", row) for row in re.findall(r'"(.*)"', listed[1])]
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Strata")[1]
    table = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in re.findall(r"^\|.*", text, re.M)]
    above = {"__main__", "evaluation", "tasks"}
    wanted = [set(row) for row in rooms if not above & set(row)]
    assert [set(row) for row in table if row] == wanted
    drawn = re.findall(r">(\w+)</text>", (ROOT / "docs/images/house.svg").read_text("utf-8"))
    assert {room for row in wanted for room in row if room[0] != "_"} <= set(drawn)


def test_what_to_read_first_is_as_long_as_is_said() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Where do I add")[0]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert len(files) == 10
    lines = sum(len((ROOT / "captum_ssm" / x).read_text("utf-8").splitlines()) for x in files)
    said = re.search(r"([\d,]+) lines of which", text)
    assert said is not None
    assert abs(lines - int(said[1].replace(",", ""))) <= 0.1 * lines
