"""The registered models are trained once, shared among processes, and kept in half precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from captum_ssm.errors import CheckpointError
from captum_ssm.tracing import repaired_scans
from captum_ssm_bench.training import fresh


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = ["pairs-mamba-101", "translation-rwkv-102", "copying-qwen3-next-103"]
    for name in names:
        recipe, seed = fresh.FRESH[name]
        monkeypatch.setitem(fresh.FRESH, name, (replace(recipe, steps=(1,)), seed))
    monkeypatch.setattr(fresh, "FRESH", {name: fresh.FRESH[name] for name in names})
    return names


def test_all_that_are_registered_are_there() -> None:
    text = (Path(fresh.FOLDER).parent / "REGISTERED.md").read_text(encoding="utf-8")
    left_out = len(fresh.SEEDS)  # of RWKV-4, which does not learn to copy
    assert f"In all {len(fresh.FRESH) + left_out} models" in text.replace("\n", " ")
    assert all(str(seed) in text for seed in fresh.SEEDS)


def test_each_is_trained_once(
    short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh.main(5, tmp_path, part=1, parts=2)
    assert [*fresh.stored(tmp_path)] == short[1:2]
    fresh.main(0, tmp_path)  # no time is left
    assert [*fresh.stored(tmp_path)] == short[1:2]
    capsys.readouterr()
    fresh.main(5, tmp_path)
    trained = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert trained == [short[0], short[2]]
    assert all(0 <= answered < 1 for answered in fresh.stored(tmp_path).values())


def test_it_is_read_as_it_was_measured(short: list[str], tmp_path: Path) -> None:
    fresh.main(5, tmp_path)
    for name in short:
        one, other = (fresh.load_fresh(name, tmp_path) for _ in range(2))
        own, task = one.state_dict(), fresh.FRESH[name][0].task
        assert all(torch.equal(x, x.half().float()) for x in own.values() if x.is_floating_point())
        with torch.no_grad(), repaired_scans():
            ids = task.batch(task.draw(2, 0)).input_ids
            assert torch.equal(one(ids).logits, other(ids).logits)
    with pytest.raises(CheckpointError, match="do not fit"):
        fresh.fill(
            fresh.FRESH[short[0]][0].new(), fresh.load_file(tmp_path / f"{short[1]}.safetensors")
        )
