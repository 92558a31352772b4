"""A small real model of every kind of architecture, with random parameters, and an input to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import oracles
import pytest
import torch
import transformers
from oracles import vim as vim_oracle
from torch import Tensor, nn

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution
from captum_ssm.models import VisionMamba
from zoo import attention, delta, fla_cpu, mamba_ssm_cpu, recurrent, short_conv
from zoo import mamba2 as mamba2_models
from zoo.mamba import randomise, transformers_model


@dataclass
class Case:
    """A model and an input to it.

    All that reads the residual stream of a silent model is LayerNorm, so that no mean gradient
    reaches a mixer and the attribution is the query's own entry alone.
    """

    model: Any
    inputs: Tensor
    silent: bool = False

    @property
    def target(self) -> dict[str, Any]:
        return {"target": 1 if self.inputs.dim() == 4 else (-1, 3)}


def language(model: Any, silent: bool = False) -> Case:
    return Case(model, torch.randint(15, (2, 9)), silent)


def pictures(model: Any, size: tuple[int, int], silent: bool = False) -> Case:
    return Case(model, torch.randn(2, 3, *size), silent)


# --- one function per architecture -------------------------------------------------------------


def mamba(_: pytest.MonkeyPatch) -> Case:
    return language(transformers_model("mamba"))


def mamba2(_: pytest.MonkeyPatch) -> Case:
    return language(mamba2_models.make_model("mamba2"))


def jamba(_: pytest.MonkeyPatch) -> Case:
    # it enlarges the rounding of float32, where other kernels run if no graph is recorded
    return language(attention.attention_model("jamba").double())


def recurrent_gemma(_: pytest.MonkeyPatch) -> Case:
    model = transformers.RecurrentGemmaForCausalLM(recurrent.griffin_config())
    return language(randomise(model))


def rwkv(_: pytest.MonkeyPatch) -> Case:
    config = transformers.RwkvConfig(vocab_size=19, hidden_size=7, num_hidden_layers=2)
    return language(randomise(transformers.RwkvForCausalLM(config)), silent=True)


def qwen3_next(monkeypatch: pytest.MonkeyPatch) -> Case:
    return language(delta.Family("qwen3_next", monkeypatch).model())


def minimax(_: pytest.MonkeyPatch) -> Case:
    model = recurrent.minimax_model(hidden_size=12, num_attention_heads=2)
    for layer in model.model.layers[::2]:  # a small output would be enlarged, with its rounding
        layer.self_attn.norm.variance_epsilon = 1e-2
    return language(model)


def vit(_: pytest.MonkeyPatch) -> Case:
    return pictures(attention.attention_model("vit"), (12, 12), silent=True)


def vim(_: pytest.MonkeyPatch, **options: Any) -> Case:
    small = {
        "img_size": (12, 20), "patch_size": 4, "depth": 2, "embed_dim": 6, "num_classes": 5,
        "d_state": 3,
    }  # fmt: skip
    return pictures(vim_oracle.randomise(VisionMamba(**small | options)), (12, 20))


def mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> Case:
    package = mamba_ssm_cpu.install(monkeypatch, causal_conv1d=False)
    return language(randomise(package.make_lm(6)))


def of_mamba_ssm(monkeypatch: pytest.MonkeyPatch, width: int, **options: Any) -> Case:
    package = mamba_ssm_cpu.install(monkeypatch, causal_conv1d=True)
    return language(randomise(package.make_lm(width, **options)))


Make = Callable[[pytest.MonkeyPatch], Case]

TRANSFORMERS: dict[str, Make] = {
    **{
        make.__name__: make
        for make in (mamba, mamba2, jamba, recurrent_gemma, rwkv, qwen3_next, minimax, vit)
    },
    "falcon_mamba": lambda _: language(transformers_model("falcon_mamba")),
    "bamba": lambda _: language(mamba2_models.make_model("bamba")),
    "lfm2": lambda _: language(short_conv.make_model("lfm2", num_key_value_heads=1)),
    "gpt_neox": lambda _: language(attention.attention_model("gpt_neox"), silent=True),
}
ZOO: dict[str, Make] = {
    **TRANSFORMERS,
    "vim": vim,
    "mamba_ssm": mamba_ssm,
    "mamba_ssm_fused": lambda patch: of_mamba_ssm(patch, 6),
    "mamba2_ssm": lambda patch: of_mamba_ssm(patch, 8, ssm_cfg={"layer": "Mamba2"}),
    "gla": lambda patch: language(fla_cpu.install(patch).model("GLA", num_heads=2, norm_eps=0.05)),
}


#: Those that read images, of which they make tokens themselves.
IMAGES = ("vit", "vim")
#: What quick tests run on: one of transformers, one that keeps a state, one of images.
QUICK = ("mamba2", "recurrent_gemma", "vim")


def every(
    names: Iterable[str] = ZOO, quick: Collection[str] = QUICK, mark: Any = pytest.mark.slow
) -> Any:
    """Parametrize a test over architectures; those that are not ``quick`` get the mark."""
    rows = [name if name in quick else pytest.param(name, marks=mark) for name in names]
    return pytest.mark.parametrize("case", rows, indirect=True)


def hook_count(model: nn.Module) -> int:
    """Hooks of all kinds on all modules."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    assert len(kinds) > 5
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@dataclass
class Explained:
    """What the three methods say of a model."""

    matrices: list[Tensor]
    rollout: Tensor
    attribution: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All results."""
        found = [*self.matrices, self.rollout]
        return found if self.attribution is None else [*found, self.attribution]

    def difference(self, other: Explained) -> float:
        """The largest max|a - b| / max|b| of all results."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return max(oracles.relative_error(*pair) for pair in pairs)


def explain(
    model: nn.Module, case: Case, *, gradients: bool = True, query: Any = "last"
) -> Explained:
    """The three methods on ``model``, with the input and the target of the case.

    The attribution is that to the last token, whose own entry hides the others and is left out
    where there are others.
    """
    options: dict[str, Any] = {"query": query, "per_token": True}
    found = Explained(
        ImplicitAttention(model).matrices(case.inputs, components="exact"),
        ImplicitAttentionRollout(model).attribute(case.inputs, **options),
    )
    if gradients:
        whole = MambaAttribution(model).attribute(
            case.inputs, clamp="none", **case.target, **options
        )
        found.attribution = whole.flatten(1)[:, : None if case.silent else -1]
    return found
