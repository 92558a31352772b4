"""The xlstm package on the CPU, where its own torch functions stand in for its kernels.

transformers takes the package's layers in place of its own wherever the package is installed. Tests
of transformers' own layers and tests of the package's run in one process: what transformers has is
imported once without the package and once with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from zoo.mamba import randomise

SKIP_REASON = "the package xlstm is not installed, see CONTRIBUTING.md"
_CONFIGURATION = "transformers.models.xlstm.configuration_xlstm"
_MODELING = "transformers.models.xlstm.modeling_xlstm"
#: Of small models, whose kernels are torch functions.
_SMALL = {
    "vocab_size": 19, "num_heads": 2, "ffn_round_up_to_multiple_of": 8, "norm_eps": 0.05,
    "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native",
    "step_kernel": "native", "mode": "inference", "chunk_size": 16,
}  # fmt: skip


def is_installed() -> bool:
    return importlib.util.find_spec("xlstm") is not None


def package() -> ModuleType:
    if not is_installed():
        pytest.skip(SKIP_REASON)
    return importlib.import_module("xlstm")


def import_transformers_own() -> None:
    """Have transformers' own layers be what tests find in it."""
    import transformers.utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.utils, "is_xlstm_available", lambda: False)
        importlib.import_module(_MODELING)


@cache
def transformers_module() -> ModuleType:
    """transformers' model of the package's layers, which nobody else finds there."""
    package()
    own = importlib.import_module(_MODELING)
    around = sys.modules[own.__package__ or ""]
    before = dict(vars(around))
    with pytest.MonkeyPatch.context() as patch:
        for name in (_CONFIGURATION, _MODELING):
            patch.delitem(sys.modules, name)
        found = importlib.import_module(_MODELING)
    vars(around).clear()
    vars(around).update(before)
    assert found.external_xlstm and not own.external_xlstm
    return found


def of_transformers(**options: Any) -> Any:
    """transformers' language model of the package's layers."""
    module = transformers_module()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2}
    config = module.xLSTMConfig(**_SMALL | sizes | options)
    return randomise(module.xLSTMForCausalLM(config))


def large(**options: Any) -> Any:
    """xLSTMLarge."""
    package()
    model = importlib.import_module("xlstm.xlstm_large")
    sizes = {"embedding_dim": 16, "num_blocks": 2}
    return randomise(model.xLSTMLarge(model.xLSTMLargeConfig(**_SMALL | sizes | options)))


def blocks(slstm_at: tuple[int, ...] = (1,), bias: bool = False, **options: Any) -> Any:
    """xLSTMLMModel of three blocks; ``options`` are those of the layers of sLSTM."""
    p = package()
    small = {"backend": "vanilla", "num_heads": 2, "conv1d_kernel_size": 3}
    config = p.xLSTMLMModelConfig(
        mlstm_block=p.mLSTMBlockConfig(mlstm=p.mLSTMLayerConfig(num_heads=2)),
        slstm_block=p.sLSTMBlockConfig(
            slstm=p.sLSTMLayerConfig(**small | options),
            feedforward=p.FeedForwardConfig(proj_factor=1.3),
        ),
        context_length=64,
        num_blocks=3,
        embedding_dim=16,
        slstm_at=list(slstm_at),
        vocab_size=19,
        bias=bias,
    )
    model = randomise(p.xLSTMLMModel(config))
    for module in model.modules():  # norms of few features that do not blow rounding errors up
        if type(module).__name__ == "MultiHeadLayerNorm":
            module.eps = 0.05
    return model
