"""Jamba and Zamba: their Mamba-1 mixers, and the whole hybrids."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.versions import VERSION_4
from oracles import conv_matrices, diagonal_matrices, relative_error, scan_matrices
from torch import Tensor
from zoo.attention import attention_model, eagerly
from zoo.mamba import padded_batch

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution, trace
from captum_ssm.attr.engine.fold import stages
from captum_ssm.errors import CachedStateError
from captum_ssm.tracing import Layer, repaired_scans

pytest.importorskip("transformers")

# Jamba's norms of very few features blow rounding errors up, for unlucky draws
FLOAT32 = 2e-5
FAMILIES = ["jamba", "zamba"]
#: An epsilon that keeps the norms of two features well conditioned.
NORMS = {"rms_norm_eps": 0.05}


def hybrid(family: str, attention: str = "sdpa", **options: Any) -> Any:
    return attention_model(family, attention, **NORMS | options)


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def is_mamba(layer: Layer) -> bool:
    return "Mamba" in type(layer.mixer.module).__name__


@dataclass
class Parts:
    exact: Tensor  # (B, D, L, L)
    unified: Tensor  # the same without the skip
    output: Tensor  # (B, L, E)


def mixer_parts(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> Parts:
    """The mixer's matrices and output from its parameters, in float64, head by head."""
    mixer = copy.deepcopy(mixer).double()
    hidden = hidden.double()
    batch, tokens, _ = hidden.shape
    keep = torch.ones(batch, tokens, 1) if mask is None else mask[:, :, None]
    keep = keep.double()
    of_version_4 = hasattr(mixer, "slow_forward")  # there the mask silences x, not what enters
    projected = mixer.in_proj(hidden if of_version_4 else hidden * keep)
    if type(mixer).__name__ == "ZambaMambaMixer":
        x, z = projected[..., 0::2], projected[..., 1::2]
        heads = [
            (mixer.x_proj_weight[g], mixer.dt_proj_weight[g], mixer.dt_proj_bias[g])
            for g in range(mixer.n_mamba_heads)
        ]
    else:
        x, z = projected.chunk(2, -1)
        heads = [(mixer.x_proj.weight, mixer.dt_proj.weight, mixer.dt_proj.bias)]
    x = x * keep if of_version_4 else x
    channels = x.shape[-1]
    shape = (batch, tokens, channels, 1)
    taps = mixer.conv1d.weight[:, 0]
    width = taps.shape[1]
    conv = conv_matrices(taps[:, None], [width - 1 - k for k in range(width)], (1, *shape[1:]))
    u = torch.einsum("xdij,bjd->bid", conv, x)
    if mixer.conv1d.bias is not None:
        u = u + mixer.conv1d.bias
    ratio = torch.sigmoid(u)
    v = keep * ratio * u
    per_head = channels // len(heads)
    log_rates = mixer.A_log.reshape(channels, -1)
    scans = []
    for g, (select, widen, bias) in enumerate(heads):
        mine = slice(g * per_head, (g + 1) * per_head)
        rank, state = mixer.time_step_rank, mixer.ssm_state_size
        t, b, c = F.linear(v[..., mine], select).split([rank, state, state], -1)
        if hasattr(mixer, "dt_layernorm"):
            t, b, c = (
                s / (s.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
                for s, norm in (
                    (t, mixer.dt_layernorm),
                    (b, mixer.b_layernorm),
                    (c, mixer.c_layernorm),
                )
            )
        dt = torch.log1p(torch.exp(F.linear(t, widen, bias)))
        scans.append(scan_matrices(dt, -log_rates[mine].exp(), b, c))
    scan = torch.cat(scans, 1)
    skip = diagonal_matrices(mixer.D.reshape(1, 1, -1, 1), shape)
    gate = diagonal_matrices((z * torch.sigmoid(z))[..., None], shape)
    silenced = diagonal_matrices(keep[..., None], shape)
    before = silenced @ diagonal_matrices(ratio[..., None], shape) @ conv @ silenced
    y = torch.einsum("bdij,bjd->bid", gate @ (scan + skip), v)
    return Parts(gate @ (scan + skip) @ before, gate @ scan @ before, mixer.out_proj(y))


def check(layer: Layer, mask: Tensor | None = None) -> None:
    assert layer.reconstruction_error() <= FLOAT32
    parts = mixer_parts(layer.mixer.module, layer.call.hidden_states, mask)
    assert relative_error(layer.output, parts.output) <= FLOAT32
    assert relative_error(layer.linear.output(), parts.output) <= FLOAT32
    assert relative_error(layer.operator.dense(None), parts.exact) <= FLOAT32
    # channels may cancel in their mean
    error = (layer.operator.dense("mean") - parts.exact.mean(1)).abs().max()
    assert error <= FLOAT32 * parts.exact.abs().max()


# --- the mixers ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_reproduces_the_module(family: str, batch: int, tokens: int) -> None:
    model = hybrid(family)
    found = [x for x in record(model, torch.randint(1, 23, (batch, tokens))) if is_mamba(x)]
    assert len(found) >= 2
    for layer in found:
        assert layer.linear.mask is None
        check(layer)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [
    {"mamba_proj_bias": True},
    {"mamba_conv_bias": False},
    {"mamba_d_conv": 2, "mamba_d_state": 1},
    {"mamba_d_state": 16, "mamba_expand": 3, "mamba_dt_rank": 5},
])  # fmt: skip
def test_options(family: str, options: dict[str, Any]) -> None:
    model = hybrid(family, **options)
    for layer in record(model, torch.randint(1, 23, (2, 7))):
        if is_mamba(layer):
            check(layer)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_zamba_heads(heads: int) -> None:
    model = hybrid("zamba", n_mamba_heads=heads, mamba_proj_bias=True)
    ids, mask = padded_batch([9, 4])
    for layer in record(model, ids, attention_mask=mask):
        if is_mamba(layer):
            check(layer, mask)
            parts = mixer_parts(layer.mixer.module, layer.call.hidden_states, mask)
            some = layer.operator.select([30, 2, 17]).dense(None)
            assert relative_error(some, parts.exact[:, [30, 2, 17]]) <= FLOAT32


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding(family: str, bias: bool) -> None:
    model = hybrid(family, mamba_proj_bias=bias)
    ids, mask = padded_batch([9, 4, 1])
    for layer in record(model, ids, attention_mask=mask):
        linear = layer.linear
        assert linear.mask is not None and torch.equal(linear.mask, mask.bool())
        assert layer.reconstruction_error() <= FLOAT32
        if is_mamba(layer):
            check(layer, mask)
        matrices = layer.operator.dense(None)
        assert not matrices[(mask == 0)[:, None, None, :].expand_as(matrices)].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequence(family: str) -> None:
    for layer in record(hybrid(family), torch.randint(1, 23, (1, 70))):
        assert layer.reconstruction_error() <= FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    model = hybrid(family).bfloat16()
    for layer in record(model, torch.randint(1, 23, (2, 12))):
        assert layer.output.dtype == torch.bfloat16
        assert layer.values.dtype == layer.operator.dtype == torch.float32
        assert layer.reconstruction_error() <= 5e-2
        if is_mamba(layer):
            parts = mixer_parts(layer.mixer.module, layer.call.hidden_states)
            assert relative_error(layer.linear.output(), parts.output) <= FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_float64(family: str) -> None:
    model = hybrid(family).double()
    for layer in record(model, torch.randint(1, 23, (2, 9))):
        assert layer.operator.dtype == torch.float64
        if is_mamba(layer):
            parts = mixer_parts(layer.mixer.module, layer.call.hidden_states)
            assert relative_error(layer.linear.output(), parts.output) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_unchanged(family: str) -> None:
    model = hybrid(family)
    ids, mask = padded_batch([8, 5])
    with torch.no_grad():
        with repaired_scans():  # a trace's own loops, to the last digit
            before = model(ids, attention_mask=mask).logits
        with trace(model):
            assert torch.equal(model(ids, attention_mask=mask).logits, before)


def cache_of(family: str, model: Any) -> Any:
    """An empty cache; in version 4 every model has a class of its own."""
    if VERSION_4:
        code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        names = {"jamba": "HybridMambaAttentionDynamicCache", "zamba": "ZambaHybridDynamicCache"}
        return getattr(code, names[family])(model.config, 1, torch.float32)
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_refused(family: str) -> None:
    model = hybrid(family)
    layers = record(model, torch.randint(1, 23, (1, 5)), past_key_values=cache_of(family, model))
    for layer in layers:
        with pytest.raises(CachedStateError):
            _ = layer.operator


def test_zamba_layers_that_share_their_weights_stay_apart() -> None:
    """The shared transformer: tensors of several modules; in version 4 one, called repeatedly."""
    model = hybrid("zamba")
    first, second = (x for x in record(model, torch.randint(1, 23, (1, 6))) if not is_mamba(x))
    assert (first.mixer.module is second.mixer.module) == VERSION_4
    assert (
        first.mixer.module.q_proj.weight.data_ptr() == second.mixer.module.q_proj.weight.data_ptr()
    )
    assert not torch.equal(first.operator.dense("heads"), second.operator.dense("heads"))


# --- whole hybrids ---------------------------------------------------------------------------


def test_stages() -> None:
    ids = torch.randint(1, 23, (1, 6))
    zamba = stages(record(hybrid("zamba"), ids))
    assert [[is_mamba(layer) for layer in stage] for stage in zamba] == [
        [True],
        [False, True],
        [True],
        [False, True],
        [True],
    ]
    assert all(stage[0].joins == "feeds" for stage in zamba if len(stage) == 2)
    jamba = stages(record(hybrid("jamba"), ids))
    assert [[is_mamba(layer) for layer in stage] for stage in jamba] == [
        [True],
        [False],
        [True],
        [False],
    ]


def exact_matrices(model: Any, *args: Any, **kwargs: Any) -> list[tuple[bool, Tensor]]:
    """Mean matrices, skip left out, of every mixer in the order of the calls, in float64.

    Those of attention are the model's own weights when it runs eagerly.
    """
    exact = eagerly(model).double()
    calls: list[tuple[Any, Tensor, Any]] = []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((module, kwargs["hidden_states"], output))

    for module in exact.modules():
        if type(module).__name__.endswith(("MambaMixer", "Attention")):
            module.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        exact(*args, **kwargs)
        return [
            (True, mixer_parts(module, hidden, kwargs.get("attention_mask")).unified.mean(1))
            if "Mamba" in type(module).__name__
            else (False, output[1].mean(1))
            for module, hidden, output in calls
        ]


def weighted(matrices: list[tuple[bool, Tensor]], family: str) -> Tensor:
    """The product over blocks, last on the left.

    jamba: x += M x for each mixer.  zamba: a block with attention is x += M (x + F x).
    """
    tokens = matrices[0][1].shape[-1]
    eye = torch.eye(tokens, dtype=torch.float64)
    product, fed = eye.expand_as(matrices[0][1]), eye
    for is_mamba_, matrix in matrices:
        if family == "zamba" and not is_mamba_:
            fed = eye + matrix
            continue
        product = (eye + matrix @ fed) @ product
        fed = eye
    return product


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_is_the_product_in_the_models_order(family: str) -> None:
    model = hybrid(family)
    ids = torch.randint(1, 23, (2, 9))
    found = ImplicitAttentionRollout(model).attribute(ids, query=[8], verify=True)
    product = weighted(exact_matrices(model, ids), family)
    assert relative_error(found, product[:, 8]) <= 1e-5
    absolute = ImplicitAttentionRollout(model).attribute(ids, query=[3], absolute=True)
    product = weighted([(m, a.abs()) for m, a in exact_matrices(model, ids)], family)
    assert relative_error(absolute, product[:, 3]) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_attribution(family: str) -> None:
    model = hybrid(family)
    ids = torch.randint(1, 23, (2, 9))
    exact = copy.deepcopy(model).double()
    outputs: list[Tensor] = []
    for module in exact.modules():
        if type(module).__name__.endswith(("MambaMixer", "Attention")):
            module.register_forward_hook(
                lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
    logit = exact(ids).logits[:, -1, 4].sum()
    gradients = torch.autograd.grad(logit, outputs)
    for clamp in ("relu", "abs"):
        matrices = [
            (mixes, getattr(torch, clamp)(gradient.mean(-1, keepdim=True) * alpha))
            for gradient, (mixes, alpha) in zip(gradients, exact_matrices(model, ids), strict=True)
        ]
        found = MambaAttribution(model).attribute(ids, target=(-1, 4), clamp=clamp)
        assert relative_error(found, weighted(matrices, family)[:, -1]) <= 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_equals_single_examples(family: str, attention: str) -> None:
    model = hybrid(family, attention)
    lengths = [9, 4, 1]
    ids, mask = padded_batch(lengths)
    for method in (ImplicitAttention, ImplicitAttentionRollout, MambaAttribution):
        attribution = method(lambda i, m: model(i, attention_mask=m), model=model)
        together = attribution.attribute(ids, target=(-1, 7), additional_forward_args=mask)
        for row, length in enumerate(lengths):
            alone = attribution.attribute(
                ids[row : row + 1, -length:],
                target=(-1, 7),
                additional_forward_args=mask[row : row + 1, -length:],
            )
            assert relative_error(together[row : row + 1, -length:], alone) <= 2e-5
            assert not together[row, :-length].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_last_token_of_a_padded_batch(family: str) -> None:
    model = hybrid(family)
    ids, mask = padded_batch([7, 3])
    rollout = ImplicitAttentionRollout(lambda i, m: model(i, attention_mask=m), model=model)
    found = rollout.attribute(ids.flip(1), additional_forward_args=mask.flip(1), query="last")
    assert not found[1, 3:].any()
    assert found[1, 2] > 0.1
