"""VMamba: the operator is the module, and methods across its stages."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import check, record, record_one
from oracles import relative_error
from oracles import vmamba as oracle
from torch import Tensor, nn

from captum_ssm import ImplicitAttentionRollout, register_mixer
from captum_ssm.errors import OptionError, UnsupportedMixerError
from captum_ssm.mixers.parts.token_map import TokenMap, square_windows
from captum_ssm.models import VMamba
from captum_ssm.models.vmamba import SS2D
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

FLOAT32 = 1e-5
#: Options of the mixer, and what they are to the oracle.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"forward_type": "v0"}, {"gate": "act"}),
    ({"forward_type": "v2_nozact", "conv_bias": False}, {"gate": "plain"}),
    ({"forward_type": "v05_noz_oact_no32"}, {"out_act": True}),
    ({"forward_type": "v05_noz_onnone", "d_conv": 0}, {}),
    ({"forward_type": "v051d", "act": "gelu"}, {"kind": "rows", "gate": "act", "act": "gelu"}),
    ({"forward_type": "v052d_noz", "d_conv": 5}, {"kind": "rows both ways"}),
    ({"act": "relu", "dt_rank": 3, "ssm_ratio": 1.5}, {"act": "relu"}),
]


def mixer(**options: Any) -> Any:
    return oracle.randomise(SS2D(5, **{"d_state": 3} | options))


def by_hand(module: nn.Module, hidden: Tensor, size: tuple[int, int], **form: Any) -> list[Any]:
    weights = {name: w.detach().double() for name, w in module.state_dict().items()}
    return [oracle.Mixer(weights, example.double(), size, **form) for example in hidden]


@pytest.mark.parametrize(("options", "form"), FORMS)
def test_contract(options: dict[str, Any], form: dict[str, Any]) -> None:
    def matrices(module: Any, hidden: Tensor, kwargs: Any) -> Tensor:
        wanted = by_hand(module, hidden, kwargs["size"], **form)
        assert relative_error(
            module(hidden, **kwargs), torch.stack([x.output for x in wanted])
        ) <= (1e-11)
        return torch.stack([x.matrices() for x in wanted])

    for size in ((3, 4), (1, 5), (4, 1)):
        # an operator refers to the mixer's own parameters, and a map has no other lengths
        clauses = ("float32", "float64", "bfloat16", "matrices", "batches")
        tokens = size[0] * size[1]
        contract.holds(mixer(**options), 5, matrices, tokens=tokens, clauses=clauses, size=size)


def test_parts_that_are_left_out_become_the_identity() -> None:
    module, hidden = mixer(forward_type="v0").double(), torch.randn(1, 6, 5).double()
    (layer,) = record(module, hidden, size=(2, 3))
    (wanted,) = by_hand(module, hidden, (2, 3), gate="act")
    eye = torch.eye(6).double()
    skip = module.Ds.view(4, -1).sum(0)
    found = layer.linear.restrict({"skip"}).operator.dense(None)[0]
    assert torch.allclose(found, skip[:, None, None] * eye)
    for kept in ({"conv"}, {"gate"}, {"norm"}, {"activation"}):
        operator = layer.linear.restrict(kept).operator.per_channel()
        assert bool(operator.mixes_tokens) == (kept == {"conv"})
    gate = torch.nn.functional.silu(module.in_proj(hidden).chunk(2, -1)[1])[0]
    found = layer.linear.restrict({"gate"}).operator.dense(None)[0]
    assert torch.allclose(found, gate.T[:, :, None] * eye)
    assert wanted.output.shape == (6, 5)


def test_classes_by_name() -> None:
    other = type("SS2D", (nn.Linear,), {"__module__": "classification.models.vmamba"})
    with pytest.raises(UnsupportedMixerError, match=r"models\.vmamba\.SS2D mixes tokens and has"):
        find_mixers(nn.Sequential(other(2, 2)))
    own = oracle.randomise(type("Own", (SS2D,), {})(5, d_state=3))
    check(record_one(own, torch.randn(2, 12, 5), size=(3, 4)))
    with pytest.raises(OptionError, match="a class or its full name"):
        register_mixer("SS2D", lambda module, call: call)


# --- whole models ---------------------------------------------------------------------------


#: By what makes maps coarser: its kernel and padding.
COARSER = {"v1": (2, 0), "v2": (2, 0), "v3": (3, 1)}


def model(downsample: str = "v3", **options: Any) -> Any:
    small = {"depths": (1, 2, 1), "dims": 4, "num_classes": 5, "d_state": 2, "mlp_ratio": 2.0}
    return oracle.randomise(VMamba(**small | {"downsample": downsample} | options))


@pytest.mark.parametrize("downsample", COARSER)
def test_rollouts_go_through_all_stages(downsample: str) -> None:
    network = model(downsample).double()
    # maps of odd sizes are cut off by the first version
    pictures = torch.randn(2, 3, *((16, 32) if downsample == "v1" else (20, 28))).double()
    layers = record(network, pictures)
    sizes = [layer.map.size for layer in layers]
    wanted = []
    for example in range(2):
        row = torch.full(sizes[-1], 1 / math.prod(sizes[-1])).double()
        for layer, size in zip(layers[::-1], sizes[::-1], strict=True):
            if row.shape != size:
                row = oracle.spread(row, size, *COARSER[downsample])
            (by,) = by_hand(layer.mixer.module, layer.call.hidden_states[[example]], size)
            row = row + (row.flatten() @ by.matrices().mean(0)).view(size)
        wanted.append(row)
    found = ImplicitAttentionRollout(network).attribute(
        pictures, components="exact", per_token=True
    )
    assert relative_error(found, torch.stack(wanted)) <= FLOAT32


# --- maps and their windows ------------------------------------------------------------------


@pytest.mark.parametrize("size", [(6, 6), (5, 7), (1, 4), (9, 2)])
@pytest.mark.parametrize("side", [1, 3, 8])
def test_square_windows(size: tuple[int, int], side: int) -> None:
    windows = square_windows(size, side, torch.device("cpu"))
    across = -(-size[1] // side)
    assert windows.places.shape == (-(-size[0] // side) * across, side * side)
    assert windows.tokens == size[0] * size[1]
    for w, held in enumerate(windows.places.tolist()):
        for place, (i, j) in enumerate(itertools.product(range(side), repeat=2)):
            row, column = w // across * side + i, w % across * side + j
            inside = row < size[0] and column < size[1]
            assert held[place] == (row * size[1] + column if inside else -1)


def test_outputs_in_order() -> None:
    windows = square_windows((5, 4), 3, torch.device("cpu"))
    tokens = torch.randn(2, 20, 6)
    padded = torch.cat([tokens, torch.full((2, 1, 6), torch.nan)], 1)  # place -1 is padding
    cut = padded[:, windows.places].flatten(0, 1)  # (B W, T, E)
    assert torch.equal(TokenMap((5, 4), windows).in_order(cut), tokens)
