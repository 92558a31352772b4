"""The gated delta rule of qwen3_next, olmo_hybrid and kimi_linear: the operator is the module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_checks import (
    Formula,
    apply_linear,
    causal_taps,
    check,
    check_attribution_by_hand,
    check_formula,
    check_formula_output,
    check_half,
    check_methods,
    check_same_logits,
    check_typical,
    keep_of,
    per_value_channel,
    record,
    record_one,
)
from oracles import diagonal_matrices, padded_batch, randomise, relative_error, times
from torch import Tensor

from captum_ssm.errors import CachedStateError, InputError
from captum_ssm.mixers import delta
from captum_ssm.mixers.base import Call

transformers = pytest.importorskip("transformers")

# for any draw; typical is 1e-6, most of it the rounding of the models' own chunked form
FLOAT32 = 1e-5
FAMILIES = ["qwen3_next", "olmo_hybrid", "kimi_linear"]
NAMES = {"qwen3_next": "Qwen3-Next", "olmo_hybrid": "OLMo Hybrid", "kimi_linear": "Kimi Linear"}
KERNELS = [
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
]
COMMON = {
    "vocab_size": 19,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-3,  # norms of few channels that do not blow rounding errors up
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


def config(family: str, **options: Any) -> Any:
    if family == "qwen3_next":
        own = transformers.Qwen3NextConfig
        small = {**GROUPED, "head_dim": 8, "num_experts": 0}
    elif family == "olmo_hybrid":
        own, small = transformers.OlmoHybridConfig, {**GROUPED, "linear_allow_neg_eigval": True}
    else:
        own = transformers.KimiLinearConfig
        small = {
            "num_key_value_heads": 2,
            "linear_num_heads": 2,
            "linear_head_dim": 5,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
            "kv_lora_rank": 6,
            "mlp_layer_types": ["dense"] * len(options.get("layer_types", "123")),
        }
    return own(**COMMON | small | options)


class Family:
    """One family's classes, on the models' own torch functions in place of fla's kernels."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for kernel in KERNELS:
            if hasattr(modeling, kernel):
                reference = getattr(modeling, kernel)
                while hasattr(reference, "__wrapped__"):
                    reference = reference.__wrapped__
                monkeypatch.setattr(modeling, kernel, reference)
        mixer, model = {
            "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextForCausalLM"),
            "olmo_hybrid": ("OlmoHybridGatedDeltaNet", "OlmoHybridForCausalLM"),
            "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearForCausalLM"),
        }[name]
        self.mixer_class, self._model = getattr(modeling, mixer), getattr(modeling, model)
        self.adapter: Callable[[Any, Call], Any] = getattr(delta, name)

    def mixer(self, **options: Any) -> Any:
        return randomise(self.mixer_class(config(self.name, **options), 0))

    def model(self, **options: Any) -> Any:
        return randomise(self._model(config(self.name, **options)))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    return Family(request.param, monkeypatch)


def formula(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Formula:
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    keep = keep_of(kwargs.get("attention_mask"), hidden)
    hidden = hidden * keep[..., None]
    q, k, v, z, beta, log_decay = _PARTS[type(module).__name__](module, hidden)
    heads, per_head = v.shape[-2:]
    key_heads, state = k.shape[-2:]

    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    conv = causal_taps(module.conv1d, tokens)
    u = torch.einsum("xcij,bjc->bic", conv, mixed)
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[module.activation]
    s = act(u)
    q, k = (
        x.reshape(batch, tokens, key_heads, state) for x in s[..., : -v[0, 0].numel()].chunk(2, -1)
    )
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // key_heads, 2) for x in (q / state**0.5, k))
    core = _delta_matrices(q, k, beta, log_decay)

    core = per_value_channel(core, per_head)
    width = heads * per_head
    ratio = torch.where(u == 0, 0.5, s / torch.where(u == 0, 1.0, u))[..., -width:].view(v.shape)
    inner = diagonal_matrices(ratio, v.shape) @ conv[:, -width:]
    inner = inner @ diagonal_matrices(keep[..., None, None], v.shape)
    mixing = core @ inner
    y = times(mixing, v)
    norm = getattr(module, "norm", None) or module.o_norm
    sigmoid = 1 / (1 + torch.exp(-z))
    gate = sigmoid if norm.activation == "sigmoid" else z * sigmoid
    rms = (y.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    alpha = diagonal_matrices(gate * norm.weight.detach().double() / rms, v.shape) @ mixing
    out_proj = getattr(module, "out_proj", None) or module.o_proj
    out = times(alpha, v).flatten(2)
    return Formula(v, alpha, apply_linear(out_proj, out))


def _delta_matrices(q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), entry by entry."""
    batch, tokens, heads, _ = q.shape
    log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None].expand_as(q)
    reads, writes = (torch.zeros(batch, heads, tokens, tokens).double() for _ in range(2))
    for i in range(tokens):
        for j in range(i + 1):
            kept = torch.exp(log_decay[:, j + 1 : i + 1].sum(1)) * k[:, j]
            reads[:, :, i, j] = (q[:, i] * kept).sum(-1)
            if j < i:
                writes[:, :, i, j] = beta[:, i] * (k[:, i] * kept).sum(-1)
    inverse = torch.linalg.inv(torch.eye(tokens).double() + writes)
    return reads @ inverse * beta.transpose(1, 2)[:, :, None]


def _qwen_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """The projections are laid out key head by key head."""
    batch, tokens, _ = hidden.shape
    groups, state, per_head = module.num_k_heads, module.head_k_dim, module.head_v_dim
    each = module.num_v_heads // groups
    wide = apply_linear(module.in_proj_qkvz, hidden).view(batch, tokens, groups, -1)
    q, k, v, z = wide.split([state, state, each * per_head, each * per_head], -1)
    b, a = apply_linear(module.in_proj_ba, hidden).view(batch, tokens, groups, -1).chunk(2, -1)
    v, z = (x.reshape(batch, tokens, -1, per_head) for x in (v, z))
    return q, k, v, z, torch.sigmoid(b.flatten(2)), _log_decay(module, a.flatten(2))


def _olmo_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    q, k = (
        apply_linear(p, hidden).unflatten(-1, (module.num_k_heads, -1))
        for p in (module.q_proj, module.k_proj)
    )
    v, z = (
        apply_linear(p, hidden).unflatten(-1, (module.num_v_heads, -1))
        for p in (module.v_proj, module.g_proj)
    )
    beta = torch.sigmoid(apply_linear(module.b_proj, hidden))
    beta = 2 * beta if module.allow_neg_eigval else beta
    return q, k, v, z, beta, _log_decay(module, apply_linear(module.a_proj, hidden))


def _kimi_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    forget, heads = module.forget_gate, module.num_heads
    q, k, v, a, z = (
        x.unflatten(-1, (heads, -1))
        for x in (
            apply_linear(module.q_proj, hidden),
            apply_linear(module.k_proj, hidden),
            apply_linear(module.v_proj, hidden),
            apply_linear(forget.f_b_proj, apply_linear(forget.f_a_proj, hidden))
            + forget.dt_bias.detach().double(),
            apply_linear(module.g_b_proj, apply_linear(module.g_a_proj, hidden)),
        )
    )
    log_decay = -forget.A_log.detach().double().exp() * torch.nn.functional.softplus(a)
    return q, k, v, z, torch.sigmoid(apply_linear(module.b_proj, hidden)), log_decay


def _log_decay(module: Any, a: Tensor) -> Tensor:
    steps = torch.nn.functional.softplus(a + module.dt_bias.detach().double())
    return -module.A_log.detach().double().exp() * steps


_PARTS = {
    "Qwen3NextGatedDeltaNet": _qwen_parts,
    "OlmoHybridGatedDeltaNet": _olmo_parts,
    "KimiLinearDeltaAttention": _kimi_parts,
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_reproduces_the_module(family: Family, tokens: int, batch: int) -> None:
    mixer = family.mixer()
    hidden = torch.randn(batch, tokens, 12)
    layer = record_one(mixer, hidden)
    wanted = formula(mixer, hidden, {})
    assert relative_error(layer.output, wanted.output) <= FLOAT32
    check(layer, FLOAT32)
    check_formula_output(wanted, getattr(mixer, "out_proj", None) or mixer.o_proj)
    check_formula(layer, wanted, 2e-5)


def test_float64_against_the_formula(family: Family) -> None:
    mixer = family.mixer().double()
    hidden = torch.randn(2, 11, 12, dtype=torch.float64)
    layer = record_one(mixer, hidden)
    assert layer.linear.operator.dtype == torch.float64
    check_formula(layer, formula(mixer, hidden, {}), 1e-10)
    check(layer, FLOAT32)


@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_kernels(family: Family, kernel: int) -> None:
    mixer = family.mixer(linear_conv_kernel_dim=kernel)
    for tokens in (1, max(1, kernel - 1), 9):
        check(record_one(mixer, torch.randn(2, tokens, 12)), FLOAT32)


def test_other_activations(family: Family) -> None:
    mixer = family.mixer(hidden_act="gelu").double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    check_formula(record_one(mixer, hidden), formula(mixer, hidden, {}), 1e-10)


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 3), (2, 6)])
@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid"])
def test_groups(name: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(name, monkeypatch)
    mixer = family.mixer(linear_num_key_heads=heads[0], linear_num_value_heads=heads[1])
    mixer = mixer.double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    layer = record_one(mixer, hidden)
    check_formula(layer, formula(mixer, hidden, {}), 1e-10)
    check(layer, FLOAT32)


@pytest.mark.parametrize("negative", [False, True])
def test_negative_eigenvalues(negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = Family("olmo_hybrid", monkeypatch).mixer(linear_allow_neg_eigval=negative).double()
    hidden = torch.randn(2, 8, 12, dtype=torch.float64)
    check_formula(record_one(mixer, hidden), formula(mixer, hidden, {}), 1e-10)


@pytest.mark.parametrize("where", ["left", "right", "middle", "everything"])
def test_padding(family: Family, where: str) -> None:
    mixer = family.mixer().double()
    hidden = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    hidden_tokens = {"left": slice(0, 4), "right": slice(6, 9), "middle": slice(3, 5)}
    mask[1, hidden_tokens.get(where, slice(0, 9))] = 0
    layer = record_one(mixer, hidden, attention_mask=mask)
    check(layer, FLOAT32)
    check_formula(layer, formula(mixer, hidden, {"attention_mask": mask}), 1e-10)
    found = layer.linear.mask
    assert found is not None and torch.equal(found, mask.bool())
    assert not layer.operator.dense(None)[1][:, :, mask[1] == 0].any()
    assert not layer.linear.bias.any()


def test_typical_errors(family: Family) -> None:
    """In float32 also against the float64 formula, closer to it than the module's chunks are."""
    errors, exact, halves = [], [], []
    for _ in range(7):
        mixer, hidden = family.mixer(), torch.randn(2, 30, 12)
        layer = record_one(mixer, hidden)
        errors.append(check(layer, FLOAT32))
        exact.append(relative_error(layer.linear.output(), formula(mixer, hidden, {}).output))
        half = record_one(mixer.to(torch.bfloat16), hidden.to(torch.bfloat16))
        halves.append(check_half(half, 3e-1))
    check_typical(errors, 1e-6)
    check_typical(exact, 1e-6)
    check_typical(halves, 4e-2)


def test_whole_model(family: Family) -> None:
    model = family.model()
    ids, mask = padded_batch([70, 41, 1])
    layers = record(model, ids, attention_mask=mask)
    assert [layer.architecture for layer in layers] == [NAMES[family.name]] * 3
    for layer in layers:
        check(layer, FLOAT32)
    check_same_logits(model, ids, attention_mask=mask)


def test_methods(family: Family) -> None:
    check_methods(family.model(), *padded_batch([12, 7]))


def test_attribution_by_hand(family: Family) -> None:
    check_attribution_by_hand(
        family.model(), family.mixer_class, formula, torch.randint(19, (2, 9))
    )


def test_caches_and_packed_sequences_are_refused(family: Family) -> None:
    hidden, mixer = torch.randn(1, 4, 12), family.mixer()
    for args, kwargs in (((hidden, object()), {}), ((hidden,), {"cache_params": object()})):
        with pytest.raises(CachedStateError):
            family.adapter(mixer, Call(args, kwargs, hidden))
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(InputError, match=name):
            family.adapter(mixer, Call((hidden,), {name: torch.tensor([0, 2, 4])}, hidden))
