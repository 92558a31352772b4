"""Files of the bench: full disks, places that are no folders, names that lead elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.full_disk import ROOM, contents, full_disk

from captum_ssm.errors import DataNotFoundError, WriteError
from captum_ssm_bench import EXPERIMENTS, Key, Records, lines, write_tables
from captum_ssm_bench.cli import main
from captum_ssm_bench.harness import machine
from captum_ssm_bench.harness.subjects import retrained
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
    write(tmp_path, 1)
    before = contents(tmp_path)
    assert any(len(data or b"") > ROOM for data in before.values())
    with full_disk(), pytest.raises(WriteError, match=r"could not be written: .*large"):
        write(tmp_path, 2)
    assert contents(tmp_path) == before


def test_records_go_on_after_a_full_disk(tmp_path: Path) -> None:
    """The part that was cut off is removed, and measured again."""
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


def test_a_place_that_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("first")
    for arguments in (["train", "recall-mamba"], ["evaluate", "decomposition-error", "--quick"]):
        assert main([*arguments, "--out", str(tmp_path / "file")]) == 1
        assert f"captum-ssm-bench: {tmp_path / 'file'}" in capsys.readouterr().err
    with pytest.raises(WriteError, match="could not be written"):
        Records(tmp_path / "file")


def test_names_lead_to_no_other_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("../recall-mamba", "recall-mamba/../recall-mamba", "/", ""):
        assert main(["train", name, "--out", str(tmp_path / "out")]) == 1
        assert "no such bundled model" in capsys.readouterr().err
        assert main(["evaluate", name, "--out", str(tmp_path / "out")]) == 1
        assert main(["evaluate", "copying", "--models", f"{name}={tmp_path}"]) == 1
        assert capsys.readouterr().err.count("is not known") == 2
        assert not (tmp_path / "out").exists()
    with pytest.raises(DataNotFoundError, match=re.escape(f"recall-mamba={tmp_path}: there is no")):
        retrained("recall-mamba", tmp_path)
