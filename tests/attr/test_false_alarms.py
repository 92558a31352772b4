"""Sound models are not accused: default calls over kinds of mixers, widths, lengths and dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import transformers
from zoo import networks
from zoo.architectures import Case

from captum_ssm.attr.catalogue import METHODS
from captum_ssm.errors import NotLinearError, ReconstructionError

pytestmark = pytest.mark.slow

#: How many default calls there are in all, and the share of those of small models.
CALLS, SMALL = 30, 0.9
#: More tokens than these are left to methods whose cost grows with their number alone.
LINEAR_FROM = 300
#: Width and tokens of models that are as their packages initialise them: few are wide and long.
SIZES = (
    *((64, 16), (64, 300), (128, 1024), (256, 128), (256, 512), (256, 1024), (64, 2048)) * 2,
    *((768, 64), (768, 256), (768, 1024)),
)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
VOCABULARY = 64


def mamba(width: int) -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**_of(width)))


def falcon_mamba(width: int) -> Any:
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**_of(width)))


def mamba2(width: int) -> Any:
    sizes = {"num_heads": 2 * width // 64, "head_dim": 64, "state_size": 128, "n_groups": 1}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**_of(width), **sizes))


def rwkv(width: int) -> Any:
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**_of(width)))


def griffin(width: int) -> Any:
    sizes = {"num_attention_heads": 4, "head_dim": width // 4, "intermediate_size": 2 * width}
    config = transformers.RecurrentGemmaConfig(**_of(width) | {"num_hidden_layers": 3}, **sizes)
    return transformers.RecurrentGemmaForCausalLM(config)


def llama(width: int) -> Any:
    sizes = {"num_attention_heads": 4, "intermediate_size": 2 * width}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_of(width), **sizes))


def _of(width: int) -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": 2}


KINDS: tuple[Callable[[int], Any], ...] = (mamba, falcon_mamba, mamba2, rwkv, griffin, llama)


def of_the_zoo(patch: pytest.MonkeyPatch) -> Iterator[tuple[str, Case]]:
    """Small models of every architecture."""
    while True:
        for name in networks.NETWORKS:
            yield name, networks.make(name, patch)


def as_initialised(random: Random) -> Iterator[tuple[str, Case]]:
    """Models of every size."""
    while True:
        for width, tokens in SIZES:
            kind, ids = random.choice(KINDS), torch.randint(VOCABULARY, (1, tokens))
            yield f"{kind.__name__} of {width}", Case(kind(width).eval(), ids)


def test_none_of_many_calls_raises_an_alarm(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random, made, alarms = Random(seed), Counter[str](), []
    small, others = of_the_zoo(monkeypatch), as_initialised(random)
    while made.total() < CALLS:
        name, case = next(small if random.random() < SMALL else others)
        dtype, tokens = random.choice(DTYPES), case.inputs.shape[1]
        methods = [m for m in METHODS if m.cost.linear or tokens <= LINEAR_FROM]
        method = random.choice(methods).method
        case.model.to(dtype)
        if case.inputs.is_floating_point():
            case.inputs = case.inputs.to(dtype)
        try:
            output = networks.own_output(case)
        except (RuntimeError, TypeError):  # what computes in one dtype alone
            continue
        if not bool(torch.isfinite(output).all()):
            continue
        try:
            method(case.model).attribute(case.inputs, networks.targets(output)[0])
        except (ReconstructionError, NotLinearError) as error:
            alarms.append(f"{method.__name__} on {name}, {tokens} tokens, {dtype}: {error}")
        made[str(dtype)] += 1
    print(f"{len(alarms)} alarms in {made.total()} calls: {dict(made)}")
    assert not alarms, "\n".join(alarms)
