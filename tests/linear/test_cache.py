"""A call that continues from a cache: its tokens, the cache's share and constants add up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.marks import slow_but
from helpers.versions import transformers5
from oracles import relative_error
from torch import Tensor
from zoo import networks
from zoo.attention import attention_model
from zoo.mamba import transformers_model

from captum_ssm import (
    EdgeEffects,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    SSMLLMAttribution,
)
from captum_ssm.errors import CachedStateError, OptionError
from captum_ssm.linear import Rule
from captum_ssm.models import load_bundled
from captum_ssm.tracing.caches import copied

pytestmark = transformers5
MODELS = (
    *("mamba", "mamba2", "qwen3_next", "llama with attention", "jamba", "falcon_h1"),
    *("nemotron_h", "zamba with attention", "zamba2", "bamba", "granitemoehybrid"),
    *("olmo_hybrid", "kimi_linear", "lfm2"),
)
QUICK = ("mamba", "llama with attention")
NO_SOFTMAX = ("mamba", "mamba2")
RULES: tuple[Rule, ...] = ("frozen", "half", "centered", "balanced")
TOKENS, TARGET = 9, (-1, 3)


def name_of(model: Any) -> str:
    return "cache_params" if type(model).__name__.startswith("Mamba") else "past_key_values"


def read(model: Any, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return getattr(model(ids, use_cache=True, **options), name_of(model))


def behind(model: Any, cache: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        given = {"inputs_embeds": x} if x.is_floating_point() else {"input_ids": x}
        logits: Tensor = model(**given, **{name_of(model): cache}, **options).logits
        return logits

    return function


def tensors(cache: Any) -> list[Tensor]:
    found: list[Tensor] = []
    copied(cache, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def own(model: Any, cache: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return behind(model, copied(cache, lambda x: x.clone()))(ids)[:, -1, 3]


@pytest.mark.parametrize("count", slow_but((1,), (1, 4)))
@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_parts_add_up(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = networks.make(name, monkeypatch).model
    ids = torch.randint(1, 15, (2, TOKENS))
    cache, given = read(model, ids[:, :-count]), ids[:, -count:]
    before = [x.clone() for x in tensors(cache)]
    number = own(model, cache, given)
    with torch.no_grad():
        whole = model(ids).logits[:, -1, 3]
    for rule in RULES:
        # by role, but for one
        how = LatimFlow(behind(model, cache), model, rule=rule)
        found = how.decompose(given, TARGET, roles=rule != "half")
        total = found.tokens.sum(1) + found.cached + (found.bias - found.cached)
        assert (total - number).abs().max() <= 1e-5
        assert found.tokens.shape == given.shape and found.cached.abs().min() > 1e-5
        if found.roles is not None:
            assert (sum(found.roles.values()) - found.tokens).abs().max() <= 1e-5
        # frozen or local coefficients are those of the whole sequence, means of queries are not
        local = ("frozen", "half", "balanced") if name in NO_SOFTMAX else ("frozen", "half")
        if rule in local and (whole - number).abs().max() <= 1e-5:
            expected = LatimFlow(model, rule=rule).attribute(ids, TARGET, baselines=0)
            assert (found.tokens - expected[:, -count:]).abs().max() <= 1e-5, rule
    after = tensors(cache)
    assert len(after) == len(before) and all(map(torch.equal, after, before))


def test_padding_is_not_in_the_share() -> None:
    model = attention_model("llama")
    ids, mask = torch.randint(1, 15, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :2] = 0
    cache = read(model, ids[:, :5], attention_mask=mask[:, :5])
    for rule in ("frozen", "half"):
        arguments: Any = mask, None, cache
        found = LatimFlow(model, rule=rule).attribute(ids[:, 5:], TARGET, arguments)
        whole = LatimFlow(model, rule=rule).attribute(ids, TARGET, mask, baselines=0)
        assert (found - whole[:, 5:]).abs().max() <= 1e-5
    # the average that keys are compared with is of real tokens
    other = torch.where(mask > 0, ids, 7)
    caches = [read(model, x[:, :5], attention_mask=mask[:, :5]) for x in (ids, other)]
    one, two = (
        LatimFlow(behind(model, x, attention_mask=mask), model, rule="centered").attribute(
            ids[:, 5:], TARGET
        )
        for x in caches
    )
    assert relative_error(one, two) <= 1e-5


@pytest.mark.parametrize("rule", ["centered", "balanced"])
def test_one_query_of_groups_is_one_token(rule: Rule) -> None:
    """Of a model whose heads share keys, and of its twin where each head has a copy of them."""
    grouped = attention_model("llama").double()
    config = copy.deepcopy(grouped.config)
    config.num_key_value_heads = heads = config.num_attention_heads
    twin = type(grouped)(config).eval().double()
    weights = grouped.state_dict()
    for name, x in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            weights[name] = x.unflatten(0, (2, -1)).repeat_interleave(heads // 2, 0).flatten(0, 1)
    twin.load_state_dict(weights)
    ids, mask = torch.randint(1, 15, (2, TOKENS)), torch.ones(2, TOKENS).long()
    mask[0, :3] = 0  # so that transformers packs the heads of a group as if they were tokens
    one, two = (
        LatimFlow(
            behind(
                model, read(model, ids[:, :-1], attention_mask=mask[:, :-1]), attention_mask=mask
            ),
            model,
            layers=[f"model.layers.{i}.self_attn" for i in range(2)],
            rule=rule,
        ).attribute(ids[:, -1:], TARGET)
        for model in (grouped, twin)
    )
    assert relative_error(one, two) <= 1e-11


def test_embeddings_and_caches_of_inference_mode() -> None:
    model = transformers_model("mamba")
    ids = torch.randint(1, 15, (1, TOKENS))
    with torch.inference_mode():
        cache = read(model, ids[:, :8])
    embeddings = model.get_input_embeddings()(ids[:, 8:]).detach()
    one, two = (
        LatimFlow(behind(model, cache), model).attribute(x, TARGET, per_token=True)
        for x in (ids[:, 8:], embeddings)
    )
    assert relative_error(one, two) <= 1e-6


def test_an_empty_cache_is_none() -> None:
    from transformers import DynamicCache

    model = attention_model("llama")
    ids = torch.randint(1, 15, (1, TOKENS))
    found = LatimFlow(behind(model, DynamicCache(config=model.config)), model)
    expected = LatimFlow(model).attribute(ids, TARGET)
    assert relative_error(found.attribute(ids, TARGET), expected) <= 1e-6
    assert not found.decompose(ids, TARGET).cached.any()


def test_answers_behind_a_cache() -> None:
    """Of one prompt, as a text writer continues it; the state that Mamba-1 forgets is short."""
    model, vocabulary = load_bundled()
    prefix = torch.tensor([vocabulary.encode("anna owns the lamp . bob owns the kite . ?")])
    cache = read(model, prefix)
    function = behind(model, cache)
    found = SSMLLMAttribution(LatimFlow(function, model), vocabulary).attribute(
        "anna owns", " the lamp", spans="all"
    )
    ids = torch.tensor([vocabulary.encode("anna owns the lamp")])
    whole = own_logits(function, ids[:, :-1])
    expected = sum(float(whole[i, token]) for i, token in ((-2, ids[0, -2]), (-1, ids[0, -1])))
    assert found.spans is not None
    assert abs(float(found.spans.outputs[0]) - expected) <= 1e-4
    assert abs(float(found.spans.delta[0])) <= 1e-4


def own_logits(function: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    from captum_ssm.tracing.caches import sparing_caches

    owner = function.__closure__[1].cell_contents  # type: ignore[index]
    with torch.no_grad(), sparing_caches(owner):
        return function(ids)[0]


def refused() -> Iterator[tuple[str, type[Exception], Callable[[], object]]]:
    model: Any = attention_model("llama")
    ids = torch.randint(1, 15, (1, TOKENS))
    cache, given = read(model, ids[:, :5]), ids[:, 5:]
    function = behind(model, cache)
    for method in (LatimLogit, LatimNorm, LatimALTI, ImplicitAttentionRollout, EdgeEffects):
        explain = method(function, model)
        yield (
            "past_key_values=DynamicCache",
            CachedStateError,
            lambda e=explain: e.attribute(given, target=TARGET),
        )
    yield (
        "runs blocks twice",
        OptionError,
        lambda: LatimFlow(function, model, recompute=True).attribute(given, TARGET),
    )
    yield (
        "roles=False",
        CachedStateError,
        lambda: LatimFlow(function, model, rule="half").decompose(given, TARGET),
    )
    yield (
        "calls LlamaForCausalLM again",
        CachedStateError,
        lambda: LatimFlow(lambda x: function(x) + function(x), model).attribute(given, TARGET),
    )

    with pytest.MonkeyPatch.context() as patch:
        other = networks.make("minimax", patch).model
    states = read(other, ids[:, :5])
    yield (
        "past_key_values",
        CachedStateError,
        lambda: LatimFlow(behind(other, states), other).attribute(given, TARGET),
    )

    from transformers import StaticCache

    static = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=static)
    yield (
        "StaticLayer.*DynamicCache",
        CachedStateError,
        lambda: LatimFlow(behind(model, static), model).attribute(given, TARGET),
    )


def test_refusals_by_name() -> None:
    for complaint, error, call in refused():
        with pytest.raises(error, match=complaint):
            call()


def test_states_of_mamba_ssm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = networks.make("mamba_ssm", monkeypatch)
    states: dict[int, tuple[Tensor, ...]] = {}
    for i, layer in enumerate(case.model.backbone.layers):
        states[i] = layer.mixer.allocate_inference_cache(len(case.inputs), TOKENS)
    for state in states.values():
        for x in state:
            x.fill_(0.5)
    given = SimpleNamespace(
        key_value_memory_dict=states, seqlen_offset=0, lengths_per_sample=None, max_seqlen=TOKENS
    )
    with pytest.raises(CachedStateError, match="inference_params"):
        LatimFlow(lambda x: case.model(x, inference_params=given).logits, case.model).attribute(
            case.inputs, TARGET
        )
