"""What surrounds every command: its version, help, files that are there, pipes and libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

import captum_ssm
from captum_ssm import LatimFlow, compare
from captum_ssm.cli import _COMMANDS, main, methods
from captum_ssm.models import load_bundled

PROMPT = "anna owns the lamp . ? anna owns the"
NAMES = tuple(command.__name__.rpartition(".")[2] for command in _COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"captum-ssm {captum_ssm.__version__}\n"


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
        asked = ["explain", "no-such-model", "--text", PROMPT, PROMPT, "--out", out]
        said = run(*asked, code=1)
        assert said.startswith(f"captum-ssm: {tmp_path / name} is already") and "--force" in said
        assert "no such folder" in run(*asked, "--force", code=1)
    text = ["explain", "recall-mamba", "--text", PROMPT]
    for asked in (
        ["demo", "--out", tmp_path],
        [*text, "--answer", "lamp", "--out", tmp_path / "matrices.png"],
        [*text, "--rule", "centred", "--out", tmp_path / "a.png"],
    ):
        assert "is already there" in run(*asked, code=1)
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
def test_what_is_held_against_another_is_called_so(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    asked = ["explain", "recall-mamba", "--text", PROMPT, "--target", "lamp", "--contrast", "kite"]
    chosen = ["--method", "latimflow", "occlusion", "integrated-gradients", "--out", str(out)]
    assert main([*asked, *chosen, "--option", "n_steps=3"]) == 0
    (example,) = json.loads(out.read_text())["examples"]
    path = "Integrated Gradients"
    assert list(example["relevance"]) == ["LatimFlow, against kite", "Occlusion", path]
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(PROMPT)])
    lamp, kite = vocabulary.encode("lamp kite")
    flow = LatimFlow(model).attribute(ids, (-1, lamp), contrast=(-1, kite))[0]
    few = compare(model, "IntegratedGradients", ids, (-1, lamp), options={path: {"n_steps": 3}})
    wanted = {"LatimFlow, against kite": flow, path: few[path][0]}
    for name, relevance in wanted.items():
        torch.testing.assert_close(torch.tensor(example["relevance"][name]), relevance)
