"""The captum-ssm command: help, errors, files that are there, pipes and libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from matplotlib.image import imread
from transformers.utils import logging

import captum_ssm
from captum_ssm import LatimFlow, LatimNorm, compare
from captum_ssm.attr.catalogue import METHODS
from captum_ssm.cli import _COMMANDS, explain, main, methods
from captum_ssm.cli.architectures import architectures_table
from captum_ssm.errors import OptionError
from captum_ssm.linear import FAMILY
from captum_ssm.mixers.table import BUILT_IN
from captum_ssm.models import load_bundled

ROOT = Path(__file__).parents[2]
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"


@pytest.mark.slow
def test_demo(tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setattr("captum_ssm.cli.demo._SCORED", 4)
    printed = run("demo", "--prompt", PROMPT, "--out", folder)
    assert PROMPT in printed and "Answer    lamp" in printed and "position 3" in printed
    assert printed.index("LatimFlow:") < printed.index("LatimNorm:")
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(PROMPT)])
    flow = LatimFlow(model).attribute(ids, target=(-1, vocabulary.id_of("lamp")))[0]
    norm = LatimNorm(model).attribute(ids)[0]
    for title, relevance in {"LatimFlow": flow, "LatimNorm": norm}.items():
        part = printed[printed.index(f"{title}:") :].splitlines()[1:6]
        best = relevance.abs().topk(5).indices.tolist()
        told = [line.split()[:3] for line in part]
        assert [(int(at), word) for at, word, _ in told] == [(i, PROMPT.split()[i]) for i in best]
        values = [float(value) for *_, value in told]
        assert values == pytest.approx(relevance[best].tolist(), abs=1e-4)
    for name in ("relevance.png", "matrices.png"):
        picture = imread(folder / name)
        assert picture.shape[0] > 200 and picture.shape[1] > 800
        assert float(picture.std()) > 0.02  # not an empty page


def test_errors(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence; with --debug their traceback."""
    assert "unknown word" in run("demo", "--prompt", "who owns what", code=1)
    with pytest.raises(ValueError, match="unknown word"):
        main(["--debug", "demo", "--prompt", "who owns what"])
    asked = ["explain", "recall-mamba", "--text", "anna"]
    misfit = ModuleNotFoundError("Could not import.")
    misfit.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(OptionError):
        main(["--debug", *asked, "--method", "Magic"])
    for error, code, said in (
        (RuntimeError("odd"), 1, "odd (RuntimeError; run captum-ssm --debug ... for a traceback)"),
        (misfit, 1, "import. torchvision does not fit torch"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        monkeypatch.setattr(explain, "run", Mock(side_effect=error))
        assert said in run(*asked, code=code)


def test_errors_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [], ["explain", "recall-mamba"], ["explain"], ["serve", "recall-mamba"],
        ["serve", "--texts", "x"], ["explain", "recall-mamba", "--text", "a", "--rule", "none"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    told = capsys.readouterr().err
    assert all(rule in told for rule in FAMILY) and told.count("required") >= 2
    for asked, said in (
        (["explain", "--help"], "captum-ssm explain recall-mamba --text"),
        (["--version"], f"captum-ssm {captum_ssm.__version__}\n"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(asked)
        assert caught.value.code == 0 and said in capsys.readouterr().out


def test_architectures(run: Callable[..., str]) -> None:
    lines = run("architectures").splitlines()
    head = ["family", "package", "tested with", "LatimFlow", "fold methods", "generated text"]
    assert re.split(r"  +", lines[0]) == [*head, "mixer class"]
    assert any("transformers.models.mamba.modeling_mamba.MambaMixer" in line for line in lines)
    page = (ROOT / "docs" / "architectures.md").read_text().splitlines()
    built_in = {f"`{line.class_path}`" for line in BUILT_IN}
    table = architectures_table(markdown=True).splitlines()
    lines = [line for line in table if line.split("|")[-2].strip() in built_in]
    assert len(lines) == len(BUILT_IN)
    assert [line for line in page if line.startswith("|")][2:] == lines


def test_methods(run: Callable[..., str]) -> None:
    page = (ROOT / "docs" / "methods" / "index.md").read_text("utf-8")
    assert run("methods", "--markdown") in page
    *lines, empty, captums = run("methods").splitlines()
    assert [line.split()[0] for line in lines[1:]] == [method.name for method in METHODS]
    assert not empty and captums.startswith("Of Captum: IntegratedGradients, Saliency, ")


SHORT = "anna owns the lamp . ? anna owns the"
NAMES = tuple(command.__name__.rpartition(".")[2] for command in _COMMANDS)


def test_help_imports_nothing_that_takes_long() -> None:
    """Not of the command, and not of any of its commands."""
    script = f"""
import contextlib, io, sys
from captum_ssm.cli import main
for asked in (["--help"], ["--version"], *([name, "--help"] for name in {NAMES})):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(asked)
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert imported.isdisjoint(("torch", "numpy", "captum", "transformers", "matplotlib", "flask"))
    assert "captum_ssm" in imported and len(done.stdout.split()) < 300


def test_nothing_is_replaced_unless_asked(tmp_path: Path, run: Callable[..., str]) -> None:
    """Not the second picture either, and before the model is loaded."""
    names = ("found.json", "found.html", "found-2.png", "matrices.png", "a-roles.png")
    for name in names:
        (tmp_path / name).write_text("first")
    for name in names[:3]:
        out = tmp_path / name.replace("-2", "")
        asked = ["explain", "no-such-model", "--text", SHORT, SHORT, "--out", out]
        said = run(*asked, code=1)
        assert said.startswith(f"captum-ssm: {tmp_path / name} already") and "--force" in said
        assert "neither a folder, a file nor" in run(*asked, "--force", code=1)
    text = ["explain", "recall-mamba", "--text", SHORT]
    for asked in (
        ["demo", "--out", tmp_path],
        [*text, "--answer", "lamp", "--out", tmp_path / "matrices.png"],
        [*text, "--rule", "centered", "--out", tmp_path / "a.png"],
    ):
        assert "already exists" in run(*asked, code=1)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"first"}
    out = tmp_path / "found.json"
    run(*text, "--method", "latim-norm", "--out", out, "--force")
    assert out.read_text() != "first"


@pytest.mark.parametrize(
    "asked", [["--help"], pytest.param(["architectures"], marks=pytest.mark.slow)]
)
def test_a_reader_that_has_gone(asked: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "captum_ssm", *asked]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode in (0, 141) and done.stderr == ""  # argparse passes over it


def test_libraries_are_quiet_and_this_package_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --debug they speak."""
    told: list[int] = []
    ours = {"__name__": "captum_ssm.some", "__warningregistry__": {}}

    def talk(options: object) -> None:
        told.append(logging.get_verbosity())
        warnings.warn("another package's", UserWarning, stacklevel=1)
        exec("import warnings; warnings.warn('ours')", ours)

    monkeypatch.setattr(methods, "run", talk)
    monkeypatch.setattr(logging.logging.getLogger("transformers"), "level", logging.WARNING)
    monkeypatch.setattr(logging, "_tqdm_active", True)
    with pytest.warns(UserWarning, match="ours") as seen:
        assert main(["methods"]) == 0
    assert [str(each.message) for each in seen] == ["ours"]
    assert logging.is_progress_bar_enabled()
    with pytest.warns(UserWarning) as seen:
        assert main(["--debug", "methods"]) == 0
    assert [str(each.message) for each in seen] == ["another package's", "ours"]
    assert told == [logging.ERROR, logging.WARNING]


@pytest.mark.slow
def test_what_is_held_against_another_is_called_so(tmp_path: Path, run: Callable[..., str]) -> None:
    out, path = tmp_path / "found.json", "Integrated Gradients"
    asked = ["explain", "recall-mamba", "--text", SHORT, "--target", "lamp", "--contrast", "kite"]
    chosen = ["--method", "latimflow", "occlusion", "integrated-gradients", "--out", out]
    run(*asked, *chosen, "--option", "n_steps=3")
    (example,) = json.loads(out.read_text())["examples"]
    assert list(example["relevance"]) == ["LatimFlow, against kite", "Occlusion", path]
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(SHORT)])
    lamp, kite = vocabulary.encode("lamp kite")
    assert example["contrast"] == {"LatimFlow, against kite": [-1, kite]}
    flow = LatimFlow(model).attribute(ids, (-1, lamp), contrast=(-1, kite))[0]
    few = compare(model, ids, "IntegratedGradients", (-1, lamp), options={path: {"n_steps": 3}})
    for name, relevance in {"LatimFlow, against kite": flow, path: few[path][0]}.items():
        torch.testing.assert_close(torch.tensor(example["relevance"][name]), relevance)
