"""Models are written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.full_disk import ROOM, contents, full_disk
from zoo.small import mamba_lm

from captum_ssm.errors import WriteError
from captum_ssm.models import VisionMamba
from captum_ssm_bench.training.saving import save_of_transformers, save_plain


def test_a_full_disk(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 6}
    model = VisionMamba(**settings, num_classes=3, d_state=2)
    save_plain(model, settings, tmp_path)
    before = contents(tmp_path)
    with full_disk(), pytest.raises(WriteError, match=f"{tmp_path}.*could not be written: .*large"):
        save_plain(model, settings, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("room", [ROOM, 2000])
def test_a_full_disk_under_weights_of_transformers(tmp_path: Path, room: int) -> None:
    """The first file does not fit, or its weights, which a library of Rust writes."""
    with full_disk(room), pytest.raises(WriteError, match=f"{tmp_path} could not .*too large"):
        save_of_transformers(mamba_lm(), tmp_path)
