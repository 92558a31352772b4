"""RWKV-7: the published checkpoints load, and the logits are those of plain loops and of fla."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import rwkv7 as oracle
from torch import Tensor

from captum_ssm.errors import CheckpointError, OptionError
from captum_ssm.models import RWKV7, load_rwkv7

#: Published models: width, blocks, ranks of w, a, v and g, and how many parameters they have.
RELEASED = {
    "0.1B": (768, 12, (64, 64, 32, 128), 191_034_624),
    "0.4B": (1024, 24, (64, 64, 32, 128), 450_767_872),
    "1.5B": (2048, 24, (96, 96, 64, 256), 1_527_404_544),
}
#: Four names of norms, embeddings and head, and 30 of every block; three of v, but for the first,
#: which has a norm of its own.
NAMES = {12: 4 + 12 * 33 - 3 + 2, 24: 4 + 24 * 33 - 3 + 2}
SMALL: dict[str, Any] = {
    "vocab_size": 20, "width": 12, "depth": 3, "head_size": 4, "inner": 10, "decay_rank": 2,
    "step_rank": 3, "value_rank": 4, "gate_rank": 5,
}  # fmt: skip


def small(**options: Any) -> Any:
    return oracle.randomise(RWKV7(**SMALL | options))


def saved(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(weights, tmp_path / "rwkv7.pth")
    return tmp_path / "rwkv7.pth"


@pytest.mark.slow
@pytest.mark.parametrize("size", RELEASED)
def test_sizes_of_published_models(size: str) -> None:
    width, depth, ranks, count = RELEASED[size]
    names = "decay_rank", "step_rank", "value_rank", "gate_rank"
    with torch.device("meta"):
        model = RWKV7(width=width, depth=depth, **dict(zip(names, ranks, strict=True)))
    assert len(model.state_dict()) == NAMES[depth]
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("depth", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
def test_round_trip(depth: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small(depth=depth).to(dtype)
    before = torch.get_rng_state()
    loaded = load_rwkv7(saved(model.state_dict(), tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.training and {p.dtype for p in loaded.parameters()} == {dtype}
    ids = torch.randint(20, (2, 7))
    assert torch.equal(loaded(ids), model(ids))
    unused = {f"blocks.0.att.v{n}": torch.randn(3) for n in range(3)}  # of later checkpoints
    loaded = load_rwkv7(saved(model.state_dict() | unused, tmp_path))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    path = tmp_path / "rwkv7.safetensors"
    pytest.importorskip("safetensors.torch").save_file(model.state_dict(), path)
    assert torch.equal(load_rwkv7(str(path))(ids), model(ids))


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = small(depth=2)
    for key in ("emb.weight", "blocks.0.ln0.bias", "blocks.1.att.v0", "blocks.1.ffn.x_k"):
        weights = model.state_dict()
        del weights[key]
        with pytest.raises(CheckpointError, match=r"rwkv7\.pth does not fit.*lack") as caught:
            load_rwkv7(saved(weights, tmp_path))
        assert repr(key) in str(caught.value)
    for key, shape in (
        ("blocks.1.ffn.s_emb.weight", (2, 3)),  # which no model has
        ("blocks.7.att.v1", (2, 3)),
        ("emb.weight", (20,)),
        ("blocks.1.att.w2", (2, 13)),
    ):
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            load_rwkv7(saved(model.state_dict() | {key: torch.zeros(shape)}, tmp_path))
    for options in ({"width": 13}, {"depth": 0}, {"head_size": 0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            RWKV7(**SMALL | options)


def test_logits_are_those_of_loops() -> None:
    model, ids = small(), torch.randint(20, (2, 70))
    for row, logits in zip(ids, model(ids), strict=True):
        wanted = oracle.forward(model.state_dict(), row)
        assert relative_error(logits, wanted) <= 1e-5
        assert relative_error(model.double()(row[None])[0], wanted) <= 1e-12
        model.float()
