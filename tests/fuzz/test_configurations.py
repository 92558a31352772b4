"""Real models with random options, of which no result is known.

What must agree: mixers read by their own kernels and by their adapters, an example in a batch and
alone, and runs that keep all of the graph and one block's at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from helpers import own_code
from helpers.widened import InFloat64
from hypothesis import settings
from oracles import relative_error
from torch import Tensor
from zoo import attention, delta, fla_cpu, fla_references, mamba, mamba2, mamba_ssm_cpu

from captum_ssm import LatimFlow
from captum_ssm.errors import CaptumSSMError

pytestmark = pytest.mark.slow

PARTS = 4
RULES: tuple[Any, ...] = ("frozen", "half", "centered", "balanced")
#: Values of options by their names; every option that is True or False may be the other.
VALUES: dict[str, tuple[Any, ...]] = {
    "conv_kernel|d_conv|conv_size": (2, 3, 4), "state_size|d_state|dt_rank|step_rank": (1, 3, 6),
    "window": (2, 5, 50), "chunk_size": (4, 64), "groups|key_value_heads|num_kv_heads": (1, 2),
    "eps": (0.01, 0.1), "soft_?cap": (1.0, 10.0), "clamp_min": (-0.05, -0.5), "expand_[kv]": (0.5,),
    "time_step_limit|dt_limit": ((0.0, 0.5), (0.1, 1.0)), "feature_map": ("elu", "relu"),
    "_act": ("silu", "gelu", "relu", "tanh"), "multiplier|residual_scale": (0.5, 1.5),
}  # fmt: skip
#: Options that are not the model's, or that no run shows.
LEFT_OUT = "cache|return|output_|decoder|attention_type|mambapy|mamba_kernels|router|init|tie_enc"


def draw(random: Random, known: dict[str, Any]) -> dict[str, Any]:
    """Other values of some of a configuration's options."""
    drawn = {}
    for name, value in known.items():
        if re.search(LEFT_OUT, name) or name.startswith("_") or random.random() < 0.7:
            continue
        values = next((v for key, v in VALUES.items() if re.search(key, name)), None)
        if isinstance(value, bool):
            drawn[name] = not value
        elif values is not None and (value is None or type(value) in (type(values[0]), list)):
            drawn[name] = random.choice(values)
    return drawn


def of_mamba_ssm(patch: pytest.MonkeyPatch, fused: bool, **options: Any) -> Any:
    package = mamba_ssm_cpu.install(patch, causal_conv1d=fused)
    return mamba.randomise(
        package.make_lm(d_model=16, fused=fused, ssm_cfg={"layer": "Mamba2", **options})
    )


def of_fla(patch: pytest.MonkeyPatch, family: str, **options: Any) -> Any:
    small = {"norm_eps": 0.05, **fla_references.MODELS.get(family, {})}
    return fla_cpu.install(patch).model(family, **small | options)


#: Options of mamba_ssm's Mamba-2, whose configuration holds none of them.
OF_MAMBA2 = {
    "d_conv": 4, "ngroups": 1, "rmsnorm": True, "norm_before_gate": False,
    "D_has_hdim": False, "bias": False, "conv_bias": True, "dt_limit": None, "chunk_size": 8,
}  # fmt: skip
OF_FLA = {**fla_cpu.MODELS, **fla_references.MODELS}
FAMILIES: dict[str, Callable[..., Any]] = {
    **{n: lambda _, n=n, **o: mamba.transformers_model(n, **o) for n in ("mamba", "falcon_mamba")},
    **{n: lambda _, n=n, **o: mamba2.make_model(n, **o) for n in mamba2.FAMILIES},
    **{n: lambda p, n=n, **o: delta.Family(n, p).model(**o) for n in delta.FAMILIES},
    **{
        f"{n} of attention": lambda _, n=n, **o: attention.attention_model(n, **o)
        for n in attention.FAMILIES
        if n not in (*attention.IMAGES, "bert")
    },
    **{f"{n} of fla": partial(of_fla, family=n) for n in OF_FLA},
    **{f"mamba_ssm {fused}": partial(of_mamba_ssm, fused=fused) for fused in (False, True)},
}  # fmt: skip


def options_of(family: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    if family.startswith("mamba_ssm"):
        return OF_MAMBA2
    config = FAMILIES[family](patch).config
    return {**config.to_dict(), "clamp_min": None} if " of fla" in family else config.to_dict()


def check(model: Any) -> int:
    """Compare results that must agree; the number of rules that the package explains."""
    ids, explained = torch.randint(13, (2, 9)), 0

    def relevance(ids: Tensor, rule: Any, **options: Any) -> Tensor:
        found: Tensor = LatimFlow(model, rule=rule, **options).attribute(ids, target=(-1, 3))
        return found

    for rule in RULES:
        try:
            found = relevance(ids, rule)
            with own_code.by_adapters():
                assert relative_error(found, relevance(ids, rule)) < 1e-7, f"{rule}: adapters"
        except CaptumSSMError:
            continue
        assert relative_error(relevance(ids[:1], rule), found[:1]) < 1e-7, f"{rule}: alone"
        assert relative_error(relevance(ids, rule, recompute=True), found) < 1e-9, f"{rule}: again"
        explained += 1
    return explained


@pytest.mark.parametrize("part", range(PARTS))
def test_options_of_real_models(part: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    many = settings.get_current_profile_name() == "long"  # by --hypothesis-profile=long
    random, count = Random(f"{seed} {part}"), 100 if many else 3
    own_code.even_if_slow(monkeypatch)
    built = explained = tries = 0
    while built < count:
        tries += 1
        assert tries <= 5 * count, "options that hardly ever go together"
        family = random.choice(sorted(FAMILIES))
        with monkeypatch.context() as patch:
            options = draw(random, options_of(family, patch))
            try:
                model = FAMILIES[family](patch, **options).double().eval()
                model(torch.randint(13, (2, 9)))
            except Exception:  # options that do not go together, by many kinds of errors
                continue
            built += 1
            try:
                with InFloat64():
                    explained += check(model)
            except AssertionError as error:
                raise AssertionError(f"{family} with {options}: {error}") from error
    assert explained >= 3 * built
