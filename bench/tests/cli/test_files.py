"""Disks that are full and folders that cannot be written to: clear errors, and old files whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.full_disk import check_no_folder, check_writer, full_disk

from captum_ssm.errors import WriteError
from captum_ssm_bench import EXPERIMENTS, Key, Records, lines, write_tables
from captum_ssm_bench.cli import main
from captum_ssm_bench.harness import machine
from captum_ssm_bench.training import loop


def tables(folder: Path, examples: int) -> None:
    experiment = EXPERIMENTS["decomposition-error"]
    keys = [Key(experiment.name, "m", "Latim", "silu", 0, i) for i in range(examples)]
    found = [(key, {"mean": {"error": 0.1 + 0.01 * key.example}}) for key in keys]
    write_tables(experiment, lines(experiment, found), folder)


def machine_note(folder: Path, examples: int) -> None:
    machine.note(folder, torch.device("cpu"))


def trained(folder: Path, examples: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        recipe = loop.recipe_of("recall-mamba")
        patch.setattr(type(recipe), "measure", lambda *_: {})
        loop.train("recall-mamba", folder, examples, lambda line: None, steps=1, hidden=8)


@pytest.mark.parametrize("write", [tables, machine_note, trained])
def test_a_full_disk(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    check_writer(write, tmp_path / "results")


@pytest.mark.parametrize("write", [tables, trained])
def test_a_place_that_is_no_folder(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    check_no_folder(write, tmp_path)


def test_records_go_on_after_a_full_disk(tmp_path: Path) -> None:
    """What was cut off is taken off, and measured again."""
    records = Records(tmp_path)

    def append(example: int) -> None:
        records.append(Key("e", "m", "n", "f", 0, example), {"": {"x": example / 7}})

    append(0)
    own = tmp_path / "records-0.jsonl"
    room = own.stat().st_size + 20
    with full_disk(room), pytest.raises(WriteError, match=r"records-0\.jsonl could not be written"):
        append(1)
    assert own.stat().st_size == room and [key.example for key, _ in records] == [0]
    append(1)
    append(2)
    assert [key.example for key, _ in records] == [0, 1, 2]


def test_the_command_says_so_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("first")
    for arguments in (
        ["train", "recall-mamba", "--out", str(tmp_path / "file")],
        ["evaluate", "decomposition-error", "--quick", "--out", str(tmp_path / "file")],
    ):
        assert main(arguments) == 1
        assert f"captum-ssm-bench: {tmp_path / 'file'}" in capsys.readouterr().err
