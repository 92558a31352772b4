"""``captum-ssm-bench evaluate`` and ``train``, as users call them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from bench_helpers.tables import read_table
from helpers.documents import PAGES, Command, commands

pytest.importorskip("transformers")

import captum_ssm
from captum_ssm_bench import EXPERIMENTS
from captum_ssm_bench.cli import evaluate, main, train


def test_the_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "passkey", "--models", "passkey-mamba", "--examples", "2"]
    assert main([*arguments, "--methods", "LatimFlow", "Saliency", "--out", str(tmp_path)]) == 0
    title, model, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "Sources of a passkey in filler text"
    assert model == "passkey-mamba, 2 examples"
    assert head.split() == ["method", "formulation", "top", "1", "AER", "AUC", "AP", "R@K"]
    assert {row.split()[0] for row in rows[:2]} == {"LatimFlow", "Saliency"}
    written = {line["method"]: line for line in read_table(tmp_path, "passkey")}
    for row in rows[:2]:
        value = written[row.split()[0]]["AUC"]
        assert row.split()[-3] == f"{value:.3f}"
    assert rows[2:] == [str(tmp_path / name) for name in ("passkey.csv", "machine.json")]


def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copying = ["evaluate", "copying"]
    for arguments, message in (
        (["evaluate"], "Use --all or some of copying"),
        (["evaluate", "copyin"], "the experiments: 'copyin' is not known. Did you mean copying?"),
        ([*copying, "--examples", "0"], "use 1 or more"),
        ([*copying, "--methods", "Flow"], "--methods: 'Flow' is not known"),
        ([*copying, "--models", "passkey-mamba"], "--models: 'passkey-mamba'"),
        (["evaluate", "--all", "--formulations", "siul"], "--formulations: 'siul' is not known"),
        (
            [*copying, "--methods", "LatimFlow", "--formulations", "silu"],
            "No experiment has these methods, formulations and models together",
        ),
        (["train", "../recall-mamba", "--out", "x"], "no such bundled model"),
    ):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 1, arguments
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_in_place_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_text("first")
    assert main(["train", "recall-mamba", "--out", str(tmp_path)]) == 1
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "first"


def test_the_program_has_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"captum-ssm-bench {captum_ssm.__version__}\n"
    assert main(["evaluate", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("captum-ssm-bench: the experiments: 'nothing'")


# --- the commands that pages show ------------------------------------------------------------

COMMANDS = [x for page in PAGES for x in commands(page) if x.program == "captum-ssm-bench"]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_of_pages_are_accepted(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the names of experiments, methods, formulations and models; those run that can."""
    monkeypatch.chdir(tmp_path)
    if not command.needs:
        assert main(command.arguments) == 0
        return
    seen: list[argparse.Namespace] = []
    for module in (evaluate, train):
        monkeypatch.setattr(module, "run", seen.append)
    assert main(command.arguments) == 0
    (options,) = seen
    if options.command == "evaluate":
        assert evaluate._experiments(options, EXPERIMENTS)
