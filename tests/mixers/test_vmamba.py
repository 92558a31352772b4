"""VMamba: the operator is the module, and methods across its stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.hybrid_checks import check, record
from oracles import relative_error
from oracles import vmamba as oracle
from torch import Tensor, nn

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    MambaAttribution,
    register_mixer,
    trace,
)
from captum_ssm.errors import OptionError, UnsupportedMixerError
from captum_ssm.models import VMamba
from captum_ssm.models.vmamba import SS2D
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

FLOAT32 = 1e-5
SIZES = [(3, 4), (1, 5), (4, 1)]
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("options", "form"), FORMS)
def test_the_operator_is_the_module(
    options: dict[str, Any], form: dict[str, Any], size: tuple[int, int]
) -> None:
    module, hidden = mixer(**options), torch.randn(2, size[0] * size[1], 5)
    wanted = by_hand(module, hidden, size, **form)
    output = torch.stack([one.output for one in wanted])
    (layer,) = record(module, hidden, size=size)
    assert layer.architecture == "VMamba" and layer.operator.mixing.value == "controlled"
    check(layer)
    assert relative_error(layer.output, output) <= FLOAT32
    module.double()
    (layer,) = record(module, hidden.double(), size)
    check(layer, 1e-12)
    assert relative_error(layer.output, output) <= 1e-11
    assert torch.equal(
        layer.values.squeeze(-1), module.in_proj(hidden.double())[..., : layer.values.shape[2]]
    )
    matrices = torch.stack([one.matrices() for one in wanted])
    operator = layer.operator.per_channel()
    assert relative_error(operator.dense(None), matrices) <= 1e-11
    assert relative_error(operator.dense(), matrices.mean(1)) <= 1e-11
    assert relative_error(operator.rows([1]), matrices.mean(1)[:, [1]]) <= 1e-11
    assert relative_error(operator.mean_rmatvec(torch.ones(2, len(hidden[0])).double()),
                          matrices.mean(1).sum(1)) <= 1e-11  # fmt: skip


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-2), (torch.float16, 1e-2)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    module = mixer(forward_type="v05").to(dtype)
    (layer,) = record(module, torch.randn(2, 12, 5).to(dtype), size=(3, 4))
    assert layer.output.dtype == dtype and layer.values.dtype == torch.float32
    check(layer, tolerance)


def test_another_class_of_that_name_is_refused() -> None:
    other = type("SS2D", (nn.Linear,), {"__module__": "classification.models.vmamba"})
    with pytest.raises(UnsupportedMixerError, match=r"models\.vmamba\.SS2D mixes tokens and has"):
        find_mixers(nn.Sequential(other(2, 2)))


def test_a_subclass_is_served() -> None:
    class Own(SS2D):
        pass

    module = oracle.randomise(Own(5, d_state=3))
    (layer,) = record(module, torch.randn(2, 12, 5), size=(3, 4))
    check(layer)
    with pytest.raises(OptionError, match="a class or its full name"):
        register_mixer("SS2D", lambda module, call: call)


# --- whole models ---------------------------------------------------------------------------


#: By what makes maps coarser: its kernel and padding.
COARSER = {"v1": (2, 0), "v2": (2, 0), "v3": (3, 1)}


def model(downsample: str = "v3", **options: Any) -> Any:
    small = {"depths": (1, 2, 1), "dims": 4, "num_classes": 5, "d_state": 2, "mlp_ratio": 2.0}
    return oracle.randomise(VMamba(**small | {"downsample": downsample} | options))


def images(batch: int = 2) -> Tensor:
    """Of which stages have 4 x 8, 2 x 4 and 1 x 2 tokens."""
    return torch.randn(batch, 3, 16, 32)


class Reference:
    """A float64 run of a model: of each layer the mean matrix, and the gradient's mean."""

    def __init__(self, model: Any, pictures: Tensor, target: int) -> None:
        model = copy.deepcopy(model).double()
        calls: list[tuple[Any, Tensor, tuple[int, int]]] = []
        outputs: list[Tensor] = []

        def note(module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
            calls.append((module, args[0].detach(), kwargs["size"]))
            outputs.append(out)

        for module in model.modules():
            if isinstance(module, SS2D):
                module.register_forward_hook(note, with_kwargs=True)
        gradients = torch.autograd.grad(model(pictures.double())[:, target].sum(), outputs)
        self.sizes = [size for _, _, size in calls]
        self.means = [
            torch.stack([one.matrices().mean(0) for one in by_hand(module, hidden, size)])
            for module, hidden, size in calls
        ]
        self.gradients = [gradient.mean(-1, keepdim=True) for gradient in gradients]

    def folded(self, matrices: list[Tensor], coarser: str) -> Tensor:
        """The mean row of the last layer, carried to the first, (B, h, w)."""
        rows = []
        for example in range(len(matrices[0])):
            row = torch.full((len(matrices[-1][0]),), 1 / len(matrices[-1][0])).double()
            for number in reversed(range(len(matrices))):
                if len(row) != len(matrices[number][0]):
                    at = row.view(self.sizes[number + 1])
                    row = oracle.spread(at, self.sizes[number], *COARSER[coarser]).flatten()
                row = row + row @ matrices[number][example]
            rows.append(row.view(self.sizes[0]))
        return torch.stack(rows)


@pytest.mark.parametrize("downsample", ["v3", "v1", "v2"])
def test_rollouts_go_through_all_stages(downsample: str) -> None:
    network, pictures = model(downsample), images()
    reference = Reference(network, pictures, target=1)
    method: Any = ImplicitAttentionRollout(network)
    found = method.attribute(pictures, components="exact", per_token=True)
    wanted = reference.folded(reference.means, downsample)
    assert relative_error(found, wanted) <= FLOAT32
    weighted = [(g * m).relu() for g, m in zip(reference.gradients, reference.means, strict=True)]
    method = MambaAttribution(network)
    found = method.attribute(pictures, target=1, components="exact", per_token=True)
    assert relative_error(found, reference.folded(weighted, downsample)) <= FLOAT32


def test_maps_of_every_layer() -> None:
    network, pictures = model(), images()
    with torch.no_grad(), trace(network) as t:
        network(pictures)
    assert [layer.map.size for layer in t.layers] == [(4, 8), (2, 4), (2, 4), (1, 2)]
    for layer in t.layers:
        check(layer)
    found = ImplicitAttention(network).matrices(pictures, components="exact")
    reference = Reference(network, pictures, target=1)
    for matrix, wanted in zip(found, reference.means, strict=True):
        assert relative_error(matrix, wanted) <= FLOAT32
