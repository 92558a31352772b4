"""RWKV-7: the published checkpoints load, and the logits are those of plain loops and of fla."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import rwkv7 as oracle
from torch import Tensor
from zoo import fla_cpu

from captum_ssm import LatimFlow, trace
from captum_ssm.errors import CheckpointError, OptionError
from captum_ssm.models import RWKV7, load_rwkv7
from captum_ssm.models.rwkv7 import RWKV7TimeMix

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
    "vocab_size": 20,
    "width": 12,
    "depth": 3,
    "head_size": 4,
    "inner": 10,
    "decay_rank": 2,
    "step_rank": 3,
    "value_rank": 4,
    "gate_rank": 5,
}


def small(**options: Any) -> Any:
    return oracle.randomise(RWKV7(**SMALL | options))


def saved(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(weights, tmp_path / "rwkv7.pth")
    return tmp_path / "rwkv7.pth"


@pytest.mark.slow
@pytest.mark.parametrize("size", RELEASED)
def test_names_and_shapes_of_published_models(size: str) -> None:
    width, depth, ranks, count = RELEASED[size]
    wanted = oracle.shapes(65536, width, depth, head=64, ranks=ranks, inner=4 * width)
    assert len(wanted) == NAMES[depth]
    names = "decay_rank", "step_rank", "value_rank", "gate_rank"
    with torch.device("meta"):
        model = RWKV7(width=width, depth=depth, **dict(zip(names, ranks, strict=True)))
    assert {name: tuple(w.shape) for name, w in model.state_dict().items()} == wanted
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
        ("blocks.0.att.r_k", (3, 5)),
        ("blocks.1.att.w2", (2, 13)),
        ("blocks.0.att.g1", (12, 0)),
    ):
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            load_rwkv7(saved(model.state_dict() | {key: torch.zeros(shape)}, tmp_path))
    for options in ({"width": 13}, {"depth": 0}, {"head_size": 0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            RWKV7(**SMALL | options)


class Trap:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_no_code_of_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"emb.weight": Trap()}, tmp_path / "rwkv7.pth")
    with pytest.raises(CheckpointError, match="without running code") as caught:
        load_rwkv7(tmp_path / "rwkv7.pth")
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert "code ran" not in capsys.readouterr().out


def test_logits_are_those_of_loops() -> None:
    model, ids = small(), torch.randint(20, (2, 70))
    for row, logits in zip(ids, model(ids), strict=True):
        wanted = oracle.forward(model.state_dict(), row)
        assert relative_error(logits, wanted) <= 1e-5
        assert relative_error(model.double()(row[None])[0], wanted) <= 1e-12
        model.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, ids = small(width=64, head_size=32), torch.randint(20, (2, 9))
    wanted = model(ids)
    found = model.to(dtype)(ids)
    assert found.dtype == dtype
    assert relative_error(found, wanted) <= (1e-1 if dtype is torch.bfloat16 else 2e-2)


@pytest.mark.slow
def test_gradients_reach_every_weight() -> None:
    """Those of the mixing are held to differences."""
    mixer = RWKV7TimeMix(
        4, 2, decay_rank=2, step_rank=2, value_rank=2, gate_rank=2
    ).double()  # fmt: skip
    oracle.randomise(mixer)
    x, first = (torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, first: mixer(x, first)[0], (x, first))
    mixer(x, first)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in mixer.parameters())


OF_FLA = {
    "att.receptance": "attn.r_proj",
    "att.key": "attn.k_proj",
    "att.value": "attn.v_proj",
    "att.output": "attn.o_proj",
    "att.ln_x": "attn.g_norm",
    "att.": "attn.",
    "ln0": "pre_norm",
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "emb": "model.embeddings",
    "blocks": "model.layers",
    "ln_out": "model.norm",
    "head.": "lm_head.",
}


def of_fla(weights: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by the names and in the shapes of fla."""
    found = {}
    for key, weight in weights.items():
        *_, kind, name = ("", *key.split("."))
        if kind == "att" and len(name) == 2 and name[1] in "012":
            part = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[name[1]]
            key, weight = key.removesuffix(name) + f"{name[0]}_lora.lora.{part}", weight.squeeze()
            weight = weight.T if weight.dim() == 2 else weight
        for ours, theirs in OF_FLA.items():
            key = key.replace(ours, theirs)
        found[key] = weight.reshape(like[key].shape)
    return found


@pytest.mark.slow
def test_a_model_of_fla_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"decay_rank": 4, "step_rank": 4, "value_rank": 3, "gate_rank": 5}
    ours = oracle.randomise(RWKV7(19, 128, 3, 64, 40, **sizes))
    theirs = fla_cpu.install(monkeypatch).model(
        "RWKV7",
        hidden_size=128,
        num_hidden_layers=3,
        intermediate_size=40,
        head_dim=64,
        decay_low_rank_dim=4,
        a_low_rank_dim=4,
        v_low_rank_dim=3,
        gate_low_rank_dim=5,
        fuse_norm=False,
    )
    theirs.load_state_dict(of_fla(ours.state_dict(), theirs.state_dict()))
    ids = torch.randint(19, (2, 11))
    assert relative_error(ours(ids), theirs(ids).logits) <= 1e-5
    with torch.no_grad(), trace(ours) as t:
        ours(ids)
    assert len(t.layers) == 3
    found, wanted = (LatimFlow(model).attribute(ids, (-1, 3)) for model in (ours, theirs))
    assert relative_error(found, wanted) <= 1e-4
