"""The model of bytes: its texts, a training that goes on, and the weights that are kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from captum_ssm_bench.tasks.byte_texts import MECHANISMS
from captum_ssm_bench.training import byte_recipe
from captum_ssm_bench.training.loop import train_model
from captum_ssm_bench.training.small import ModelSize

SMALL = replace(
    byte_recipe.BYTES_BAMBA,
    size=ModelSize("bamba", layers=2, hidden=32),
    steps=(4, 2),
    weights=((1, 1, 1), (3, 1, 1)),
    stops=(1, None),
    batch_size=1,
)


def test_first_bytes_of_answers_are_marked(seed: int) -> None:
    rng = random.Random(seed)
    asking = 0
    for _ in range(20):
        ids, first = byte_recipe.training_text(rng, (1, 1, 1))
        assert len(ids) == len(first) == 129
        for place in (i for i, each in enumerate(first) if each):
            assert bytes(ids[:place])[-1:] in (b"=", b" ")
            asking += 1
    assert asking > 20


def test_a_training_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_recipe, "_HELD_OUT", 2)
    path, kept, lines = tmp_path / "checkpoint", [], []

    def keep(line: str) -> None:
        if line.startswith("step 2/"):
            kept.append(path.with_suffix(".2").read_bytes())  # of step 1 of the second round

    whole = train_model(SMALL, 3, log_every=1, log=keep, checkpoint=path)
    path.with_suffix(".2").write_bytes(kept[0])
    again = train_model(SMALL, 3, log_every=1, log=lines.append, checkpoint=path)
    assert [line.split()[1] for line in lines] == ["2/2"]
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_kept_weights_answer_as_noted() -> None:
    """All texts of the measurement, of the mechanism that has the fewest lengths."""
    model = byte_recipe.load_bytes()
    noted = byte_recipe.stored()
    assert noted.keys() == MECHANISMS.keys()
    assert byte_recipe.BYTES_BAMBA.new().num_parameters() == pytest.approx(1e6, rel=0.1)
    found = byte_recipe.answered(model, "names", 512, byte_recipe.HELD_OUT_SEED + 1)
    assert found == pytest.approx(noted["names"], abs=0.01)
