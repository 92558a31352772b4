"""The pages: their code runs as written, and what they teach is true."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import metadata
from pathlib import Path

import pytest
import transformers
from helpers.documents import PAGES, ROOT, blocks, links, run
from helpers.marks import slow_but
from zoo.language import byte_tokenizer
from zoo.small import mamba_lm

from captum_ssm.mixers.registry import how_to

#: The page that plain pytest runs.
QUICK = ("README.md",)


#: The model that README.md loads. Tests load a random model of the same class.
CHECKPOINT = "state-spaces/mamba-130m-hf"


def save_checkpoint(folder: Path) -> str:
    """Save a small random Mamba with a tokenizer of bytes and one word; return the folder."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([" Paris"])
    mamba_lm(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def pictures_closed() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.parametrize("page", slow_but(QUICK, [page for page in PAGES if blocks(page)]))
def test_python_blocks_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # flash-linear-attention, where it is imported, registers a Mamba of its own
    load = transformers.MambaForCausalLM.from_pretrained
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    names = run(page, {CHECKPOINT: save_checkpoint(tmp_path / "checkpoint")})
    if page == "README.md":
        assert "+" in capsys.readouterr().out and (tmp_path / "report.html").exists()
    if "relevance" in names:
        assert names["relevance"].isfinite().all()


def test_links_of_pages_that_sphinx_does_not_read_lead_to_files() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert [link for link in links(page) if not (ROOT / link).exists()] == []


def test_the_description_of_the_distribution_has_absolute_links() -> None:
    links = re.findall(r"\]\(([^)]*)\)", metadata("captum_ssm").json["description"])
    assert len(links) > 20 and all(link.startswith("https://") for link in links)


def test_errors_give_the_address_of_the_page_on_adapters() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    address, path = how_to().split("/blob/main/")
    assert address == settings["metadata"]["url"] and (ROOT / path).is_file()


def test_the_files_to_read_first_have_the_named_parts() -> None:
    rows = [
        line.split(" | ")[0]
        for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and ".py`" in line and line.count("|") == 3
    ]
    named = [part for row in rows for part in row.removeprefix("| ").split("; ")]
    assert len(named) > 8
    for part in named:
        file, *parts = re.findall(r"`([^`]+)`", part)
        source = (ROOT / "captum_ssm" / file).read_text(encoding="utf-8")
        for name in (word for each in parts for word in each.split(".")):
            assert re.search(rf"^ *(def|class) {name}\b|^ *{name} =", source, re.M), (file, name)


@pytest.mark.parametrize("path", [*(ROOT / "tutorials").glob("*.ipynb")], ids=lambda p: p.stem)
def test_notebooks_have_short_cells_and_no_output(path: Path) -> None:
    """The build of the pages runs them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    assert "You will see" in "".join(cells[0]["source"])
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        assert len(cell["source"]) <= 20 and source.strip(), source
        assert not any(word in source for word in ("filterwarnings", "set_verbosity")), source
