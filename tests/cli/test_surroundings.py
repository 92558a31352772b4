"""What surrounds every command: its version, help, files that are there, pipes and libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
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


@pytest.mark.parametrize("name", ["evaluate", "train"])
@pytest.mark.parametrize("rest", [[], ["--list"], ["copying", "--out", "x", "--help"]])
def test_commands_of_the_other_program_say_so(
    name: str, rest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, *rest])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"captum-ssm: {name} is a command of captum-ssm-bench")
    assert said.count("\n") == 1


@pytest.mark.parametrize("ending", [".json", ".html", ".png"])
def test_nothing_is_replaced_unless_asked(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the second picture either, and before the model is loaded."""
    out = tmp_path / f"found{ending}"
    there = tmp_path / ("found-2.png" if ending == ".png" else out.name)
    there.write_text("first")
    asked = ["explain", "no-such-model", "--text", PROMPT, PROMPT, "--out", str(out)]
    assert main(asked) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"captum-ssm: {there} is already there.") and "--force" in said
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]
    assert main([*asked, "--force"]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_pictures_of_roles_are_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-roles.png").write_text("first")
    asked = ["explain", "recall-mamba", "--text", PROMPT, "--out", str(tmp_path / "a.png")]
    assert main([*asked, "--rule", "centred"]) == 1
    assert "a-roles.png is already there" in capsys.readouterr().err


def test_other_commands_replace_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "matrices.png").write_text("first")
    answer = ["--text", PROMPT, "--answer", "lamp", "--out", str(tmp_path / "matrices.png")]
    for asked in (
        ["demo", "--out", str(tmp_path)],
        ["explain", "recall-mamba", *answer],
    ):
        assert main(asked) == 1
        assert "is already there" in capsys.readouterr().err
    assert {path.read_text() for path in tmp_path.iterdir()} == {"first"}


def test_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    out.write_text("first")
    asked = ["explain", "recall-mamba", "--text", PROMPT, "--method", "latim-norm"]
    assert main([*asked, "--out", str(out), "--force"]) == 0
    assert out.read_text() != "first"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "asked", [["--help"], pytest.param(["architectures"], marks=pytest.mark.processes)]
)
def test_a_reader_that_has_gone(asked: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "captum_ssm", *asked]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode in (0, 141) and done.stderr == ""  # argparse passes over it


def test_libraries_are_quiet_and_this_package_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_command_line_has_both_kinds_of_methods_and_their_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    asked = ["explain", "recall-mamba", "--text", PROMPT, "--out", str(out), "--force"]
    for options, said in (
        (["--option", "n_steps"], "--option n_steps: write NAME=VALUE"),
        (["--option", "n_steps=5"], "is taken by IntegratedGradients, and none of them is named"),
        (["--option", "colour=red"], "is taken by no method"),
        (["--method", "integrated gradients", "--option", "n_steps=many"], "use a whole number"),
        (["--method", "guided_backprop"], "GuidedBackprop: it changes how torch.nn.ReLU"),
        (["--contrast", "zebra"], "--contrast 'zebra': unknown word"),
        (["--method", "LatimNorm", "--contrast", "all"], "--contrast is taken by LatimFlow"),
    ):
        assert main([*asked, *options]) == 1
        assert said in capsys.readouterr().err
        assert not out.exists()


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
