"""Gated delta rules of transformers: the operator is the module."""

from __future__ import annotations

import pytest
import torch
from helpers import hybrid_checks as hybrid
from oracles import relative_error
from oracles.delta_formula import formula
from zoo.mamba import padded_batch

from captum_ssm.errors import CachedStateError, InputError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.registry import adapter_for

pytest.importorskip("transformers")

from zoo.delta import FAMILIES, Family

# for any draw; typical is 1e-6, most of it the rounding of the models' own chunked form
FLOAT32 = 1e-5


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    return Family(request.param, monkeypatch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_reproduces_the_module(family: Family, tokens: int, batch: int) -> None:
    mixer = family.mixer()
    hidden = torch.randn(batch, tokens, 12)
    layer = hybrid.record_one(mixer, hidden)
    wanted = formula(mixer, hidden, {})
    assert relative_error(layer.output, wanted.output) <= FLOAT32
    hybrid.check(layer, FLOAT32)
    hybrid.check_formula_output(wanted, getattr(mixer, "out_proj", None) or mixer.o_proj)
    hybrid.check_formula(layer, wanted, 2e-5)


def test_float64_against_the_formula(family: Family) -> None:
    mixer = family.mixer().double()
    hidden = torch.randn(2, 11, 12, dtype=torch.float64)
    layer = hybrid.record_one(mixer, hidden)
    assert layer.linear.operator.dtype == torch.float64
    hybrid.check_formula(layer, formula(mixer, hidden, {}), 1e-10)
    hybrid.check(layer, FLOAT32)


@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_kernels(family: Family, kernel: int) -> None:
    mixer = family.mixer(linear_conv_kernel_dim=kernel)
    for tokens in (1, max(1, kernel - 1), 9):
        hybrid.check(hybrid.record_one(mixer, torch.randn(2, tokens, 12)), FLOAT32)


def test_other_activations(family: Family) -> None:
    mixer = family.mixer(hidden_act="gelu").double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    hybrid.check_formula(hybrid.record_one(mixer, hidden), formula(mixer, hidden, {}), 1e-10)


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 3), (2, 6)])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid"])
def test_groups(name: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(name, monkeypatch)
    mixer = family.mixer(linear_num_key_heads=heads[0], linear_num_value_heads=heads[1])
    mixer = mixer.double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    layer = hybrid.record_one(mixer, hidden)
    hybrid.check_formula(layer, formula(mixer, hidden, {}), 1e-10)
    hybrid.check(layer, FLOAT32)


@pytest.mark.parametrize("negative", [False, True])
def test_negative_eigenvalues(negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = Family("olmo_hybrid", monkeypatch).mixer(linear_allow_neg_eigval=negative).double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    hybrid.check_formula(hybrid.record_one(mixer, hidden), formula(mixer, hidden, {}), 1e-10)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("bailing_hybrid", "kda_safe_gate", False),
        ("bailing_hybrid", "kda_lower_bound", -0.4),
        ("glm5_next", "linear_lower_bound", None),
        ("glm5_next", "linear_lower_bound", -0.4),
    ],
)
def test_bounds_of_decays(
    name: str, option: str, value: float | bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer = Family(name, monkeypatch).mixer(**{option: value}).double()
    hidden = 3 * torch.randn(2, 8, 12, dtype=torch.float64)
    layer = hybrid.record_one(mixer, hidden)
    hybrid.check_formula(layer, formula(mixer, hidden, {}), 1e-10)
    hybrid.check(layer, FLOAT32)


@pytest.mark.parametrize("where", ["left", "right", "middle", "everything"])
def test_padding(family: Family, where: str) -> None:
    mixer = family.mixer().double()
    hidden = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    hidden_tokens = {"left": slice(0, 4), "right": slice(6, 9), "middle": slice(3, 5)}
    mask[1, hidden_tokens.get(where, slice(0, 9))] = 0
    layer = hybrid.record_one(mixer, hidden, attention_mask=mask)
    hybrid.check(layer, FLOAT32)
    hybrid.check_formula(layer, formula(mixer, hidden, {"attention_mask": mask}), 1e-10)
    found = layer.linear.mask
    assert found is not None and torch.equal(found, mask.bool())
    assert not layer.operator.dense(None)[1][:, :, mask[1] == 0].any()
    assert not layer.linear.bias.any()


def test_typical_errors(family: Family) -> None:
    """In float32 also against the float64 formula, closer to it than the module's chunks are."""
    errors, exact, halves = [], [], []
    for _ in range(7):
        mixer, hidden = family.mixer(), torch.randn(2, 30, 12)
        layer = hybrid.record_one(mixer, hidden)
        errors.append(hybrid.check(layer, FLOAT32))
        exact.append(relative_error(layer.linear.output(), formula(mixer, hidden, {}).output))
        half = hybrid.record_one(mixer.to(torch.bfloat16), hidden.to(torch.bfloat16))
        halves.append(hybrid.check_half(half, 3e-1))
    hybrid.check_typical(errors, 2e-6)
    hybrid.check_typical(exact, 1e-6)
    hybrid.check_typical(halves, 4e-2)


def test_whole_model(family: Family) -> None:
    model = family.model()
    ids, mask = padded_batch([70, 41, 1])
    layers = hybrid.record(model, ids, attention_mask=mask)
    assert [layer.architecture for layer in layers] == [family.name] * 3
    for layer in layers:
        hybrid.check(layer, 3 * FLOAT32)  # of more than a chunk's tokens, each correcting the last
    hybrid.check_same_logits(model, ids, attention_mask=mask)


def test_methods(family: Family) -> None:
    hybrid.check_methods(family.model(), *padded_batch([12, 7]))


def test_attribution_by_hand(family: Family) -> None:
    hybrid.check_attribution_by_hand(
        family.model(), family.mixer_class, formula, torch.randint(19, (2, 9))
    )


def test_caches_and_packed_sequences_are_refused(family: Family) -> None:
    hidden, mixer = torch.randn(1, 4, 12), family.mixer()
    (_, adapter) = adapter_for(mixer) or pytest.fail("no adapter")
    for args, kwargs in (((hidden, object()), {}), ((hidden,), {"cache_params": object()})):
        with pytest.raises(CachedStateError):
            adapter(mixer, Call(args, kwargs, hidden))
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(InputError, match=name):
            adapter(mixer, Call((hidden,), {name: torch.tensor([0, 2, 4])}, hidden))
