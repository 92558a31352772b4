"""Small real models of every architecture, by name, for tests of whole networks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracles import rwkv7 as rwkv7_oracle
from oracles import vmamba as vmamba_oracle
from torch import Tensor, nn

from captum_ssm.models import RWKV7, VMamba
from zoo import architectures, attention, delta, fla_cpu, mamba2
from zoo.mamba import randomise

#: Families that hold attention, but for those of the zoo.
_ATTENTION = [family for family in attention.FAMILIES if family not in architectures.ZOO]
#: Families of flash-linear-attention, but for those of the zoo.
_FLA = ("RetNet", "HGRN", "HGRN2", "RWKV6", "RWKV7", "DeltaNet", "GatedDeltaNet")
_VIM: dict[str, dict[str, Any]] = {
    "two cls": {"cls_token": "double"},
    "no cls": {"cls_token": "none", "final_pool_type": "mean"},
    "one direction": {"bimamba_type": "none"},
    "shared directions": {"bimamba_type": "v1", "rms_norm": False},
}


#: Stages of 4 x 6 and 2 x 3 tokens, and of 4 x 5 and 2 x 3.
_VMAMBA: dict[str, dict[str, Any]] = {
    "without gate": {"depths": (1, 2), "mlp_ratio": 2.0, "conv_bias": False, "downsample": "v3"},
    "with gate": {
        "depths": (1, 1), "forward_type": "v0", "patch_embed": "v1", "downsample": "v1",
        "mlp_ratio": 0.0,
    },
}  # fmt: skip


def vmamba(patch: pytest.MonkeyPatch, **options: Any) -> architectures.Case:
    model = VMamba(**{"dims": 6, "num_classes": 5, "d_state": 2} | options)
    size = (16, 24)
    return architectures.pictures(vmamba_oracle.randomise(model), size)


def fla(patch: pytest.MonkeyPatch, family: str) -> architectures.Case:
    package = fla_cpu.install(patch)
    return architectures.language(package.model(family, norm_eps=0.05))


def mamba2_family(patch: pytest.MonkeyPatch, family: str, **options: Any) -> architectures.Case:
    return architectures.language(mamba2.make_model(family, **options))


def transformer(patch: pytest.MonkeyPatch, family: str) -> architectures.Case:
    model = attention.attention_model(family)
    if family in attention.IMAGES:
        return architectures.pictures(model, (12, 12))
    return architectures.language(model)


def rwkv7(patch: pytest.MonkeyPatch) -> architectures.Case:
    ranks = {"decay_rank": 4, "step_rank": 4, "value_rank": 3, "gate_rank": 5}
    return architectures.language(rwkv7_oracle.randomise(RWKV7(19, 16, 2, 8, 24, **ranks)))


def xlstm(patch: pytest.MonkeyPatch) -> architectures.Case:
    from transformers import xLSTMConfig, xLSTMForCausalLM

    config = xLSTMConfig(
        vocab_size=19, hidden_size=16, num_heads=2, num_hidden_layers=2, norm_eps=0.05
    )
    return architectures.language(randomise(xLSTMForCausalLM(config)))


def of_delta(patch: pytest.MonkeyPatch, family: str, **options: Any) -> architectures.Case:
    return architectures.language(delta.Family(family, patch).model(**options))


Make = Callable[[pytest.MonkeyPatch], architectures.Case]
NETWORKS: dict[str, Make] = (
    dict(architectures.ZOO)
    | {family: partial(mamba2_family, family=family) for family in mamba2.FAMILIES}
    | {f"{f} with attention": partial(transformer, family=f) for f in _ATTENTION}
    | {f"fla {family}": partial(fla, family=family) for family in _FLA}
    | {f"vim, {form}": partial(architectures.vim, **options) for form, options in _VIM.items()}
    | {f"vmamba {form}": partial(vmamba, **options) for form, options in _VMAMBA.items()}
    | {family: partial(of_delta, family=family) for family in ("olmo_hybrid", "kimi_linear")}
    | {"rwkv7": rwkv7, "xlstm": xlstm}
)

#: Models whose embeddings enter the first block as they are, or scaled.
STRAIGHT_IN = (
    *("mamba", "falcon_mamba", "mamba2", "jamba", "bamba", "recurrent_gemma", "qwen3_next"),
    *("minimax", "lfm2", "gpt_neox", "mamba_ssm", "mamba2_ssm", "gla", "llama with attention"),
    *("falcon_h1", "granitemoehybrid", "nemotron_h", "xlstm", "olmo_hybrid", "kimi_linear"),
    *("fla RetNet", "fla HGRN", "fla HGRN2", "fla DeltaNet", "fla GatedDeltaNet"),
)


def make(
    name: str, patch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32
) -> architectures.Case:
    """A model and three examples for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = NETWORKS[name](patch)
    inputs = case.inputs[[0, 1, 0]].clone()
    inputs[2] = inputs[2].flip(0)  # another example
    case.model.to(dtype)
    case.inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return case


@torch.no_grad()
def own_output(case: architectures.Case) -> Tensor:
    """What the model returns by itself."""
    takes_cache = "use_cache" in inspect.signature(case.model.forward).parameters
    options = {"use_cache": False} if takes_cache else {}
    output = case.model(case.inputs, **options)
    return output if isinstance(output, Tensor) else output.logits


def targets(output: Tensor) -> list[Any]:
    """Three targets for the whole batch, the last of them with one for each example."""
    if output.dim() == 2:
        return [1, 0, [2, 0, 1]]
    last = output.shape[1] - 1
    return [(-1, 3), (last // 2, 2), [(last, 1), (0, 2), (1, 3)]]


def embedding(model: Any) -> Any:
    """The layer that looks up token ids."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    return next(module for module in model.modules() if isinstance(module, nn.Embedding))
