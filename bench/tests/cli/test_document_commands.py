"""The commands that pages show: all are accepted, and those that need nothing run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from helpers.documents import PAGES, Command, commands

from captum_ssm_bench import EXPERIMENTS
from captum_ssm_bench.cli import evaluate, main, train

COMMANDS = [x for page in PAGES for x in commands(page) if x.program == "captum-ssm-bench"]


def test_pages_show_commands() -> None:
    assert {command.arguments[0] for command in COMMANDS} == {"evaluate", "train"}
    assert "docs/howto/evaluation_at_scale.md" in {command.page for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_are_accepted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are the names of experiments, methods, formulations and models."""
    seen: list[argparse.Namespace] = []
    for module in (evaluate, train):
        monkeypatch.setattr(module, "run", seen.append)
    assert main(command.arguments) == 0
    (options,) = seen
    if options.command == "evaluate" and not options.list:
        assert evaluate._of_paper(options) or evaluate._experiments(options, EXPERIMENTS)


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if not each.needs and not each.launched], ids=str
)
def test_commands_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.arguments) == 0
