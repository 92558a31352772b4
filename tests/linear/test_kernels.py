"""Mixers that are read as they run, held to their operators in float64."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import own_code
from helpers.marks import slow_but
from helpers.widened import InFloat64
from oracles import relative_error
from torch import Tensor
from zoo import (
    attention,
    delta,
    fla_cpu,
    fla_references,
    mamba2,
    mamba_ssm_cpu,
    recurrent,
    short_conv,
    xlstm_cpu,
)
from zoo.mamba import randomise, transformers_model
from zoo.recurrent import named

from captum_ssm import LatimFlow
from captum_ssm.linear import kernels
from captum_ssm.linear.blocks import Blocks
from captum_ssm.linear.divided import Core
from captum_ssm.linear.network import Network
from captum_ssm.linear.reading import Reading

Make = Callable[[pytest.MonkeyPatch], Any]
RULES = ("frozen", "half", "centered", "balanced")


def of_mamba_ssm(fused: bool, **options: Any) -> Make:
    def make(patch: pytest.MonkeyPatch) -> Any:
        package = mamba_ssm_cpu.install(patch, causal_conv1d=fused)
        return package.make_lm(d_model=16, fused=fused, **options)

    return make


def mamba2_of_package(fused: bool, **options: Any) -> Make:
    return of_mamba_ssm(fused, ssm_cfg={"layer": "Mamba2", **options})


#: Models whose mixers are read: of transformers, and of mamba_ssm.
TRANSFORMERS: dict[str, Make] = {
    **{name: lambda _, n=name: transformers_model(n) for name in ("mamba", "falcon_mamba")},
    **{name: lambda _, n=name: mamba2.make_model(n) for name in mamba2.FAMILIES},
    **{name: lambda patch, n=name: delta.Family(n, patch).model() for name in delta.FAMILIES},
    **{
        name: lambda _, n=name: attention.attention_model(n)
        for name in attention.FAMILIES
        if name not in (*mamba2.FAMILIES, *delta.FAMILIES)
    },
    **{name: lambda _, n=name: short_conv.make_model(n) for name in short_conv.FAMILIES},
    "lfm2 with biases": lambda _: short_conv.make_model("lfm2", conv_bias=True),
}
PACKAGE: dict[str, Make] = {
    "Mamba": of_mamba_ssm(False),
    "Mamba, fused": of_mamba_ssm(True),
    "Mamba-2": mamba2_of_package(False),
    "Mamba-2, fused": mamba2_of_package(True, ngroups=2),
    "norm before gate": mamba2_of_package(True, norm_before_gate=True, dt_limit=(0.0, 0.5)),
    "without a norm": mamba2_of_package(True, rmsnorm=False, D_has_hdim=True),
    "beside an MLP": mamba2_of_package(False, d_ssm=16),
}
#: Families of flash-linear-attention, by the entries of its references, and how much they round.
FLA: dict[str, float] = {
    **dict.fromkeys(("GLA", "HGRN2", "DeltaNet", "GatedDeltaNet", "KDA", "Comba"), 1e-12),
    **dict.fromkeys(("RWKV6", "RWKV7", "RWKV7 fuse_norm"), 1e-12),
    **dict.fromkeys(("LinearAttention", "ForgettingTransformer", "Transformer"), 1e-12),
    "RetNet": 1e-7,  # whose angles are float32
}
#: xLSTM in transformers, and by the package xlstm.
XLSTM: dict[str, Callable[[], Any]] = {
    "xLSTM": lambda: named("xLSTMForCausalLM")(recurrent.xlstm_mixer(use_cache=False).config),
    "xLSTM of the package": lambda: xlstm_cpu.of_transformers(use_cache=False),
}
#: Those whose factors' roles are other functions of a kernel's arguments.
FOR_CONTENT = ("HGRN", "LightNet", "GSA", "MesaNet", "LinearAttention norm_feature_map", *XLSTM)
#: A mask of 2 examples, the first of which is padded.
MASK = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])


class Explained:
    """A model in float64, explained with its mixers read, and by their operators.

    Args:
        model: the model.
        patch: for the time of the test.
    """

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self._model = model.double().eval().requires_grad_(False)
        self.read = own_code.recorded(patch)
        own_code.even_if_slow(patch)

    def __call__(self, rule: str, mask: Tensor | None = None) -> Tensor:
        images = "pixel_values" in getattr(self._model, "main_input_name", "")
        torch.manual_seed(1)
        inputs = torch.randn(2, 3, 12, 12).double() if images else torch.randint(13, (2, 9))
        of_class = images or "SequenceClassification" in type(self._model).__name__
        target = 1 if of_class else (-1, 3)

        def logits(x: Tensor) -> Tensor:
            out = self._model(x) if mask is None else self._model(x, attention_mask=mask)
            return out.logits

        with InFloat64(), torch.enable_grad():
            found = LatimFlow(logits, self._model, rule=rule).attribute(inputs, target=target)
        assert isinstance(found, Tensor)
        return found

    def by_operators(self, rule: str, mask: Tensor | None = None) -> Tensor:
        with own_code.by_adapters():
            return self(rule, mask)


def of_fla(name: str, patch: pytest.MonkeyPatch) -> Any:
    if name in XLSTM:
        return randomise(XLSTM[name]())
    family, *fused = name.split()
    how = {"norm_eps": 0.05, **fla_references.MODELS.get(family, {})}
    return fla_cpu.install(patch).model(family, **how | dict.fromkeys(fused, True))


MODELS = {
    **TRANSFORMERS,
    **PACKAGE,
    **{name: functools.partial(of_fla, name) for name in (*FLA, *FOR_CONTENT)},
}
#: Models that are given a mask; GLA, as most of fla, packs sequences, for which it has an adapter.
MASKED = {"GLA", *TRANSFORMERS, *(name for name in FLA if "RWKV" in name)} - set(attention.IMAGES)


@pytest.mark.parametrize("name", slow_but(("mamba", "GLA"), MODELS))
def test_read_as_by_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explained = Explained(MODELS[name](monkeypatch), monkeypatch)
    for rule in RULES:
        for mask in (None, MASK) if name in MASKED else (None,):
            explained.read.clear()
            found = explained(rule, mask)
            is_read = name not in FOR_CONTENT or rule in ("frozen", "half")
            is_read &= name != "GLA" or mask is None
            read = set(explained.read) or {name not in XLSTM}
            assert read == {is_read} or name == "qwen4_exp", "an adapter was asked, or was not"
            assert is_read in read
            assert relative_error(found, explained.by_operators(rule, mask)) < FLA.get(name, 1e-12)


def test_a_first_state_without_a_cache_is_left_to_the_adapter() -> None:
    run = SimpleNamespace(continues=False, given_up=False, give_up=lambda *_, **given: given)
    token = kernels.current_reading.set(run)  # type: ignore[arg-type]
    try:
        call = kernels._decorator(kernels._call_by_names)(lambda **given: given)
        assert call(initial_states=1) == {"initial_states": 1}
    finally:
        kernels.current_reading.reset(token)


def test_weights_that_ask_for_gradients_are_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = Explained(transformers_model("mamba"), monkeypatch)
    before = explained("centered")
    explained._model.requires_grad_(True)
    assert torch.equal(explained("centered"), before)


@pytest.mark.parametrize("attend", ["eager", "sdpa"])
def test_eager_attention_is_left_to_the_adapter(
    attend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained = Explained(attention.attention_model("llama", attend), monkeypatch)
    found = explained("centered", MASK)
    assert set(explained.read) == {attend == "sdpa"}
    assert relative_error(found, explained.by_operators("centered", MASK)) < 1e-12


class Foreign(torch.autograd.Function):
    """A kernel without an entry: the identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_a_kernel_without_an_entry_is_left_to_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers_model("mamba")
    explained = Explained(model, monkeypatch)
    before = explained.by_operators("frozen")
    change_forward(monkeypatch, model, lambda own, *args: Foreign.apply(own(*args)))
    assert relative_error(explained("frozen"), before) < 1e-12
    assert explained.read == [False, False]


def change_forward(patch: pytest.MonkeyPatch, model: Any, change: Callable[..., Tensor]) -> None:
    """Let the model's mixers run ``change(their own forward, mixer, hidden states)``."""
    kind = type(model.backbone.layers[0].mixer)
    own = kind.forward

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return change(lambda self, x: own(self, x, *args, **kwargs), self, hidden)

    patch.setattr(kind, "forward", forward)


def test_a_product_that_is_no_gates_is_left_to_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers_model("mamba")
    explained = Explained(model, monkeypatch)
    before = explained.by_operators("half")

    def change(own: Any, mixer: Any, hidden: Tensor) -> Tensor:
        _ = mixer.in_proj(hidden) * mixer.in_proj(hidden)
        out: Tensor = own(mixer, hidden)
        return out

    change_forward(monkeypatch, model, change)
    assert relative_error(explained("half"), before) < 1e-12
    assert explained.read == [False, False]


@pytest.mark.parametrize("name", ["mamba", "lfm2 with biases", "RWKV6", "RWKV7"])
def test_roles_follow_paths_through_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name](monkeypatch).double()
    own_code.even_if_slow(monkeypatch)
    ids = torch.randint(13, (2, 9))
    asked = {"target": (-1, 3), "rule": "centered", "roles": True}
    with InFloat64():
        found = LatimFlow(model).decompose(ids, **asked)
        with own_code.by_adapters():
            wanted = LatimFlow(model).decompose(ids, **asked)
    assert found.roles is not None and wanted.roles is not None
    assert {"key", "query", "gate", "step", "content"} == set(found.roles)
    for role, relevance in wanted.roles.items():
        assert relative_error(found.roles[role], relevance) < 1e-10, role


def held() -> int:
    """Count what a call makes: no other call has to be collected for it to go."""
    return sum(type(x) in (Core, Reading, Blocks, Network) for x in gc.get_objects())


@pytest.mark.parametrize("again", slow_but((False,), (False, True)))
def test_nothing_is_left_of_a_call(again: bool) -> None:
    model = attention.attention_model("gpt_neox")
    explain = LatimFlow(model, rule="centered", recompute=again)
    gc.collect()
    gc.disable()
    try:
        before = held()
        explain.attribute(torch.randint(13, (1, 9)), target=(-1, 3))
        assert held() == before
    finally:
        gc.enable()
