"""Softmax attention of transformers: the operator is the module, its matrices are the model's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import contract
from oracles import relative_error
from torch import Tensor
from zoo.adapters import ADAPTERS
from zoo.attention import FAMILIES, IMAGES, attention_model, attention_names
from zoo.delta import Family

from captum_ssm import trace
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.mixers.parts.softmax import seen_pairs
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


#: Hybrids that hold such attention beside other mixers.
HYBRIDS = (
    *("bamba", "zamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "recurrent_gemma"),
    *("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
)


def some_input(family: str, batch: int = 2, tokens: int = 9) -> Tensor:
    if family in IMAGES:
        return torch.randn(batch, 3, 12, 12)
    return torch.randint(3, 19, (batch, tokens))


def padding(family: str, lengths: list[int]) -> Tensor:
    """A mask, padded on the left; on the right where the first token is what is read."""
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return mask.flip(1) if family == "bert" else mask


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model, layers=attention_names(model), operators=False) as t:
        model(*args, **kwargs)
    assert t.layers
    return t.layers


def eager_probabilities(model: Any, layers: list[Layer], *args: Any, **kwargs: Any) -> list[Tensor]:
    """What the modules return as weights when the model runs eagerly, on the same module inputs."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    eager.config.use_cache = False
    seen: list[Tensor] = []

    def same_input(recorded: Iterator[Tensor]) -> Callable[..., Any]:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": next(recorded)}
            return (next(recorded), *args[1:]), kwargs

        return hook

    for name in dict.fromkeys(layer.name for layer in layers):
        module = eager.get_submodule(name)
        recorded = (layer.call.hidden_states for layer in layers if layer.name == name)
        before = same_input(iter(list(recorded)))
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(lambda _, __, out: seen.append(out[1]))
    with torch.no_grad():
        eager(*args, **kwargs)
    return seen


def matrices(layer: Layer) -> Tensor:
    """The probabilities alone, without a gate, (B, H, L, L)."""
    return layer.linear.restrict({"scan"}).operator.dense("heads")


# --- reproduction ----------------------------------------------------------------------------


EAGER = ("bert", "llama", "gpt2")


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((x, "sdpa") for x in (*FAMILIES, *HYBRIDS)), *((x, "eager") for x in EAGER)],
)
def test_probabilities_equal_those_of_eager_attention(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a padded batch; eager attention reads padding where it is blind."""
    if family in HYBRIDS:
        model = ADAPTERS[family](monkeypatch).model
    else:
        model = attention_model(family, attention)
    mask = torch.ones(2, 9) if family in IMAGES else padding(family, [9, 4, 1])
    inputs = some_input(family, len(mask))
    given = {} if family in IMAGES else {"attention_mask": mask}
    layers = record(model, inputs, **given)
    for layer, wanted in zip(
        layers, eager_probabilities(model, layers, inputs, **given), strict=True
    ):
        contract.check(layer)
        found, shape = matrices(layer), layer.operator.shape
        assert layer.operator.dense(None).shape[1] == shape.heads * shape.per_head
        is_causal = family not in (*IMAGES, "bert")
        assert bool(found.triu(1).any()) != is_causal
        if family in IMAGES:
            assert relative_error(found, wanted) <= 1e-5
            continue
        assert layer.linear.mask is not None and torch.equal(layer.linear.mask, mask.bool())
        real = mask.bool()[:, None, :, None].expand_as(found)
        assert relative_error(found[real], wanted[real]) <= 1e-5
        assert not found[(mask == 0)[:, None, None, :].expand_as(found)].any()
        blind = (wanted * (mask == 1)[:, None, None, :]).sum(-1) < 0.999
        assert not found[blind].any()
        assert bool(blind.any()) == (family != "bert")


# --- masks of other forms --------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mask_over_pairs(attention: str) -> None:
    """Two packed sequences, told apart by a mask that the user made."""
    model, ids = attention_model("llama", attention), some_input("llama", 2, 7)
    inside = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).tril().bool()
    pairs: Tensor = inside.expand(2, 1, 7, 7)
    if attention == "eager":
        pairs = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    for layer in record(model, ids, attention_mask=pairs):
        contract.check(layer)
        assert layer.linear.mask is None
        assert not matrices(layer)[:, :, ~inside].any()


def test_holes_in_the_mask() -> None:
    model, ids = attention_model("bert"), some_input("bert", 2, 6)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]])
    for layer in record(model, ids, attention_mask=mask):
        contract.check(layer)
        assert layer.linear.mask is not None and torch.equal(layer.linear.mask, mask.bool())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_flash_attention(family: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function given what flash attention is: a mask of tokens, and causality by itself."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
               scaling: float, sliding_window: int | None = None, **_: Any) -> Any:  # fmt: skip
        assert attention_mask is None or attention_mask.dim() == 2
        out = torch.zeros_like(query)
        groups = query.shape[1] // key.shape[1]
        for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
            if attention_mask is not None and not attention_mask[b, i]:
                continue
            read = [
                j
                for j in range(key.shape[2])
                if (j <= i or not module.is_causal)
                and (sliding_window is None or i - j < sliding_window)
                and (attention_mask is None or attention_mask[b, j])
            ]
            weights = (key[b, h // groups, read] @ query[b, h, i] * scaling).softmax(0)
            out[b, h, i] = weights @ value[b, h // groups, read]
        return out.transpose(1, 2), None

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    flash_mask = ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "flash_in_loops", flash_mask)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_in_loops", attend)
    model = attention_model(family)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_in_loops"
    ids = some_input(family)
    mask = padding(family, [9, 5]) if padded else None
    for layer in record(model, ids, attention_mask=mask):
        contract.check(layer)
        assert (layer.linear.mask is not None) == padded
        if mask is not None:
            assert torch.equal(layer.linear.mask, mask.bool())


@pytest.mark.parametrize("window", [None, 1, 3, 5])
def test_pairs_seen_without_a_mask(window: int | None) -> None:
    for tokens, causal in itertools.product((1, 4), (True, False)):
        found = seen_pairs(tokens, torch.device("cpu"), causal=causal, window=window)
        wanted = [
            [(j <= i or not causal) and (not window or abs(i - j) < window) for j in range(tokens)]
            for i in range(tokens)
        ]
        assert (found is None) == all(map(all, wanted))
        assert found is None or found.tolist() == [[wanted]]


def test_flex_attention_mask() -> None:
    """Flex attention's description of a mask gives the matrices of sdpa's mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    model, ids = attention_model("llama"), some_input("llama")
    mask = padding("llama", [9, 5])

    def causal_and_real(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & mask.bool()[b, j]

    described = create_block_mask(causal_and_real, 2, None, 9, 9, device="cpu")
    for layer in record(model, ids, attention_mask=mask):
        wanted = matrices(layer)
        object.__setattr__(layer.call, "kwargs", {**layer.call.kwargs, "attention_mask": described})
        again = layer.mixer.linearize(layer.mixer.module, layer.call)
        assert torch.equal(again.operator.dense("heads"), wanted)
        assert again.mask is not None and torch.equal(again.mask, mask.bool())


# --- the module is left alone ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_forward_put_before_the_classs_own_is_not_run_again(family: str) -> None:
    """As packages put one, for offloading say."""
    model, calls = attention_model(family), list[None]()
    names = attention_names(model)
    for module in map(model.get_submodule, names):

        def wrapped(*args: Any, original: Any = module.forward, **kwargs: Any) -> Any:
            calls.append(None)
            return original(*args, **kwargs)

        module.forward = wrapped
    for layer in record(model, some_input(family)):
        contract.check(layer)
    assert len(calls) == len(names)


def test_training_mode_draws_no_dropout() -> None:
    model, ids = attention_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5), some_input("gpt2")
    wanted = record(model, ids)[0].operator.dense("heads")
    model.train()
    model.transformer.drop.p = 0.0
    layer = record(model, ids)[0]
    state = torch.random.get_rng_state()
    assert torch.equal(layer.operator.dense("heads"), wanted)
    assert torch.equal(torch.random.get_rng_state(), state)


# --- gates and scales ------------------------------------------------------------------------


def test_output_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next: half of q_proj gates attention's output."""
    model, ids = Family("qwen3_next", monkeypatch).model(), torch.randint(3, 19, (2, 9))
    layers = record(model, ids)
    for layer, probabilities in zip(layers, eager_probabilities(model, layers, ids), strict=True):
        module, hidden = layer.mixer.module, layer.call.hidden_states
        with torch.no_grad():
            halves = module.q_proj(hidden).view(2, 9, 2, 2, 8)
            gate = torch.sigmoid(halves[:, :, :, 1])  # (B, L, H, P)
        wanted = torch.einsum("bihp,bhij->bhpij", gate, probabilities).flatten(1, 2)
        assert relative_error(layer.operator.dense(None), wanted) <= 1e-5
        assert {leaf.component for leaf in layer.operator.leaves()} == {"gate", "scan"}


def test_cross_attention_is_refused() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = transformers.GPT2Config(n_embd=16, n_head=4)
    config._attn_implementation = "sdpa"
    module = GPT2Attention(config, is_cross_attention=True, layer_idx=0).eval()
    hidden, other = torch.randn(1, 4, 16), torch.randn(1, 6, 16)
    with torch.no_grad(), trace(module, operators=False) as t:
        module(hidden, encoder_hidden_states=other)
    with pytest.raises(UnsupportedMixerError, match="4 queries attend to 6 keys"):
        _ = t.layers[0].operator


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "softcap"), ("llama", "head_mask"), ("vit", "head_mask")]
)
def test_unknown_score_functions_are_refused(family: str, name: str) -> None:
    (layer, _) = record(attention_model(family, "eager"), some_input(family))
    object.__setattr__(layer.call, "kwargs", {**layer.call.kwargs, name: torch.ones(1, 4, 1, 1)})
    with pytest.raises(UnsupportedMixerError, match=name):
        layer.mixer.linearize(layer.mixer.module, layer.call)


def test_gpt2s_own_eager_attention_is_refused() -> None:
    model = attention_model("gpt2")
    model.config._attn_implementation = "eager"
    layer, *_ = record(model, torch.randint(19, (1, 5)))
    vars(layer.mixer.module).pop("scaling", None)  # as in version 4
    with pytest.raises(UnsupportedMixerError, match="GPT2Attention with attn_implementation"):
        _ = layer.linear


def test_a_class_that_calls_torchs_attention() -> None:
    """As classes of version 4 do, which know no interface to attention functions."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    class TorchsAttention(LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            shape = (*hidden_states.shape[:2], -1, self.head_dim)
            query, key, value = (
                projection(hidden_states).view(shape).transpose(1, 2)
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            return self.o_proj(mixed.transpose(1, 2).flatten(2)), None

    model = attention_model("llama")
    for block in model.model.layers:
        block.self_attn.__class__ = TorchsAttention
    layers = record(model, torch.randint(19, (2, 7)))
    assert len(layers) == 2
    for layer in layers:
        contract.check(layer)
        assert not layer.operator.dense(None).triu(1).any()
