"""The commands that pages show: all are accepted, and those that need nothing run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from helpers.documents import PAGES, Command, commands

from captum_ssm.cli import main
from captum_ssm.explain.methods import method_classes

COMMANDS = [x for page in PAGES for x in commands(page) if x.program == "captum-ssm"]
#: Servers end when they are interrupted; the gate runs README.md's demo.
NOT_HERE = ("serve", "demo")


class Parsed(Exception):
    """Carries what the parser made of a command line out of the command."""


def parsed(command: Command, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the real parser makes of a command."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
        raise Parsed(parse(parser, arguments))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            main(command.arguments)
    found: argparse.Namespace = caught.value.args[0]
    return found


def runs() -> list[Command]:
    """The commands that can be run."""
    return [
        command
        for command in {each.arguments: each for each in COMMANDS}.values()
        if not command.needs and not command.launched and command.arguments[0] not in NOT_HERE
    ]


def test_pages_show_commands() -> None:
    shown = {command.arguments[0] for command in COMMANDS}
    assert {"demo", "explain"} <= shown
    assert {command.page for command in COMMANDS} >= {"README.md", "docs/quickstart.md"}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_are_accepted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(command, monkeypatch)
    if options.command == "explain":
        method_classes(options.method)


@pytest.mark.slow
@pytest.mark.parametrize("command", runs(), ids=str)
def test_commands_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.arguments) == 0
