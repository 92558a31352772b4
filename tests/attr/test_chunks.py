"""Long sequences in chunks: the results of one run, in the memory of one chunk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.marks import slow_but
from helpers.versions import transformers5
from helpers.widened import InFloat64
from oracles import relative_error
from torch import Tensor
from zoo import delta, networks, short_conv
from zoo.attention import attention_model
from zoo.mamba import transformers_model
from zoo.mamba2 import make_model

from captum_ssm import LatimFlow, MambaLRP, SSMLLMAttribution
from captum_ssm.attr.call.targets import Each, SumTarget
from captum_ssm.errors import InputError, OptionError, ReconstructionError, TargetError
from captum_ssm.explain.estimate import Live
from captum_ssm.linear import FAMILY, Rule
from captum_ssm.models import load_bundled

pytestmark = transformers5
MODELS = (
    *("mamba", "mamba2", "qwen3_next", "jamba", "falcon_mamba", "gpt_neox", "falcon_h1"),
    *("llama with attention", "mistral with attention", "gpt2 with attention", "zamba2", "bamba"),
    *("zamba with attention", "qwen3_5_moe with attention", "nemotron_h", "granitemoehybrid"),
    *("olmo_hybrid", "kimi_linear", "lfm2"),
)
QUICK = ("mamba", "jamba", "qwen3_next", "mistral with attention")
TOKENS, CHUNK, TARGET = 23, 6, (-1, 3)


def some(*size: int) -> Tensor:
    return torch.randint(1, 15, size or (2, TOKENS))


@pytest.mark.parametrize("rule", FAMILY)
@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_the_parts_of_one_run(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    # kernels of transformers compute in float32 inside
    model = networks.make(name, monkeypatch, torch.float64).model
    ids, roles = some(), rule != "half"
    one = LatimFlow(model, rule=rule).decompose(ids, TARGET, roles=roles)
    found = LatimFlow(model, rule=rule, chunk_tokens=CHUNK).decompose(ids, TARGET, roles=roles)
    assert relative_error(found.inputs, one.inputs) <= 1e-5
    for part, whole in zip(
        (*found.streams, *found.mixers), (*one.streams, *one.mixers), strict=True
    ):
        assert relative_error(part, whole) <= 3e-4
    assert (found.bias - one.bias).abs().max() <= 1e-5 >= found.delta.abs().max()
    size = float(one.tokens.abs().max())
    for role, relevance in (one.roles or {}).items():
        assert found.roles is not None
        assert (found.roles[role] - relevance).abs().max() <= 1e-5 * size, role


@pytest.mark.parametrize("name", slow_but(("mamba", "lfm2"), ("mamba", *short_conv.FAMILIES)))
def test_double_precision_is_that_of_one_run(name: str) -> None:
    from transformers import DynamicCache

    is_mamba, ids = name == "mamba", some()
    model = transformers_model(name) if is_mamba else short_conv.make_model(name, conv_bias=True)
    model, cache = model.double(), "cache_params" if is_mamba else "past_key_values"

    def from_empty(x: Tensor) -> Tensor:  # the same code: kernels, and no operators
        logits: Tensor = model(x, **{cache: DynamicCache(config=model.config)}).logits
        return logits

    for rule in FAMILY:
        start = None if rule in ("frozen", "half") else "mean"
        with InFloat64():
            one = LatimFlow(from_empty, model, rule=rule).attribute(ids, TARGET, baselines=start)
            found = LatimFlow(model, rule=rule, chunk_tokens=CHUNK).attribute(ids, TARGET)
        assert relative_error(found, one) <= 1e-12


def test_every_kind_of_input_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = networks.make("jamba", monkeypatch).model, some()
    chunked, one = LatimFlow(model, chunk_tokens=CHUNK), LatimFlow(model)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[1, :9], right[1, 17:] = 0, 0
    embeddings = model.get_input_embeddings()(ids).detach()
    several = SumTarget([-1, -9, 3], torch.tensor([1, 2, 3]))
    for given, options in (
        ((ids, [(-1, 3), (16, 3)], left), {}),
        ((ids, [(-1, 3), (16, 3)], right), {}),
        ((ids, (12, 3)), {"contrast": "all"}),
        ((ids, [(-1, 3), (5, 2)]), {"contrast": (3, 4)}),
        ((ids, Each([(-1, 3), (10, 2), (7, 1)])), {}),
        ((ids, several), {}),
        ((embeddings, TARGET), {"per_token": True}),
        *(((ids, TARGET), {"baselines": x}) for x in (0.1, "mean", some(), embeddings.flip(1))),
    ):
        expected = one.attribute(*given, **options)
        assert relative_error(chunked.attribute(*given, **options), expected) <= 1e-5, options
    # of several targets, paths by role that reach only some chunks
    pairs = zip(
        *(x.decompose_each(ids, [(-1, 3), (10, 2)], features=True) for x in (chunked, one)),
        strict=True,
    )
    for found, expected in pairs:
        assert found.roles is not None and expected.roles is not None
        for role, relevance in expected.roles.items():
            assert (found.roles[role] - relevance).abs().max() <= 1e-5, role


def test_answers_and_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, vocabulary = load_bundled()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["in_proj"])).base_model.model
    for module in model.modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.normal_(module.lora_B["default"].weight)
    one, found = (
        SSMLLMAttribution(x, vocabulary).attribute("anna owns the lamp . ?", " anna owns")
        for x in (LatimFlow(model), LatimFlow(model, chunk_tokens=3))
    )
    assert relative_error(found.token_attr, one.token_attr) <= 1e-4


def test_memory_is_that_of_a_chunk() -> None:
    model = make_model("mamba2")
    peaks = []
    for tokens in (64, 128, 256):
        with Live() as live:
            LatimFlow(model, chunk_tokens=32).attribute(some(1, tokens), TARGET)
        peaks.append(live.peak)
    with Live() as live:
        LatimFlow(model).attribute(some(1, 256), TARGET)
    assert peaks[2] <= 1.3 * peaks[0] and live.peak >= 5 * peaks[2], (peaks, live.peak)


@pytest.mark.parametrize("rule", ["frozen", "balanced"])
def test_keys_and_values_of_a_group_are_kept_once(rule: Rule) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "head_dim": 32}
    layers, peaks = [f"model.layers.{i}.self_attn" for i in range(8)], {}
    for heads in (2, 16):
        groups = {"num_attention_heads": 16, "num_key_value_heads": heads}
        config = LlamaConfig(**sizes, **groups, num_hidden_layers=len(layers))
        explain = LatimFlow(
            LlamaForCausalLM(config).eval(), layers=layers, rule=rule, chunk_tokens=16
        )
        with Live() as live:
            explain.attribute(some(1, 256), TARGET)
        peaks[heads] = live.peak
    assert peaks[2] <= peaks[16] / 3, peaks


@pytest.mark.parametrize("room", [300, 0])
def test_where_memory_runs_out_the_sequence_runs_in_chunks(room: int) -> None:
    model, ids = make_model("mamba2"), some(1, 1100)

    def fill(module: Any, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[1] > room and torch.is_grad_enabled():
            raise torch.cuda.OutOfMemoryError("no room")

    wanted = LatimFlow(model, chunk_tokens=275).attribute(ids, TARGET)
    model.backbone.layers[0].register_forward_pre_hook(fill)
    explain = partial(LatimFlow(model).attribute, ids, TARGET)
    if room:
        with pytest.warns(UserWarning, match="chunk_tokens=275") as said:
            assert torch.equal(explain(), wanted)
        assert len(said) == 1  # not of the way that failed
    else:
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"no room\n.*captum-ssm estim"):
            explain()


@pytest.mark.parametrize("rule", FAMILY)
def test_no_cycle_keeps_a_run(rule: Rule) -> None:
    model, ids = load_bundled()[0], some(1, 12)
    for method in (LatimFlow(model, rule=rule), LatimFlow(model, rule=rule, chunk_tokens=6)):
        method.attribute(ids, TARGET)
        gc.collect()
        gc.disable()
        try:
            method.attribute(ids, TARGET)
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_a_cache_that_forgets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import LinearAttentionLayer

    def forget(self: Any, states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.conv_states[0], self.has_previous_state[0] = states[..., -3:], True
        return states

    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", forget)
    model, ids = make_model("mamba2"), some()
    with pytest.raises(ReconstructionError, match="in two chunks"):
        LatimFlow(model, chunk_tokens=CHUNK).attribute(ids, TARGET)
    LatimFlow(model, chunk_tokens=CHUNK).attribute(ids, TARGET, verify=False)


def refused() -> Iterator[tuple[str, type[Exception], Callable[[], object]]]:
    model, ids = attention_model("llama"), some()

    def explain(model: Any, target: Any = TARGET, *given: Any, **options: Any) -> object:
        named = {name: options.pop(name) for name in ("rule", "recompute") if name in options}
        return LatimFlow(model, chunk_tokens=4, **named).attribute(ids, target, *given, **options)

    holes = torch.ones_like(ids)
    holes[:, 4] = 0
    left = torch.ones_like(ids)
    left[1, :5] = 0
    yield "chunk_tokens=0 is below 1", OptionError, lambda: LatimFlow(model, chunk_tokens=0)
    yield "chunk_tokens=2 is below 3", OptionError, lambda: LatimFlow(model, chunk_tokens=2)
    yield (
        "the model itself",
        OptionError,
        lambda: LatimFlow(lambda x: model(x).logits, model, chunk_tokens=4).attribute(ids, TARGET),
    )
    yield "zero_bias=True", OptionError, lambda: explain(model, rule="frozen", zero_bias=True)
    yield "recompute=True", OptionError, lambda: explain(model, recompute=True)
    yield "between unmasked ones", InputError, lambda: explain(model, TARGET, holes)
    yield "entry for each token", InputError, lambda: explain(model, TARGET, holes[:, :4])
    yield "position_ids was passed", OptionError, lambda: explain(model, TARGET, (None, ids))
    yield "padd", TargetError, lambda: explain(model, (2, 3), left)
    for name in ("rwkv", "minimax", "mamba_ssm", "gla", "recurrent_gemma"):
        with pytest.MonkeyPatch.context() as patch:
            other = networks.make(name, patch).model
            yield "chunk_tokens cannot be used", OptionError, lambda other=other: explain(other)
    with pytest.MonkeyPatch.context() as patch:  # with few tokens it attends to all
        indexed = delta.Family("glm5_next", patch).model()
        yield "an indexer picks", OptionError, lambda: explain(indexed)


def test_refused_by_name() -> None:
    for message, error, call in refused():
        with pytest.raises(error, match=message):
            call()


def test_short_inputs_are_one_run() -> None:
    model, ids = load_bundled()[0], torch.randint(1, 15, (2, 7))
    method = MambaLRP(model, chunk_tokens=7)
    assert torch.equal(method.attribute(ids, TARGET), MambaLRP(model).attribute(ids, TARGET))
    assert "chunk_tokens=7" in repr(method)
