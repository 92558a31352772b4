"""Single mixers of transformers with random parameters, and what their options are drawn from."""

from __future__ import annotations

import importlib
from typing import Any

from helpers.versions import VERSION_4, named, recurrent_gemma_block, renamed
from hypothesis import strategies as st
from torch import Tensor
from zoo.mamba import randomise

#: Added to mean squares, so that norms of few features do not blow rounding errors up.
EPS = 0.05
BOOL, FEW = st.booleans(), st.integers(1, 4)
KERNEL = st.integers(1, 5)
ACTIVATION = st.sampled_from(["silu", "silu", "gelu", "relu", "tanh"])


def mixer(path: str, config: str, options: dict[str, Any], **fixed: Any) -> Any:
    """A mixer by ``"model.Class"``, with random parameters."""
    model, name = path.split(".")
    settings = named(config)(**renamed(model, fixed | options))
    if model == "recurrent_gemma":
        return randomise(recurrent_gemma_block(settings))
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    # what this one does first by itself works for another class alone
    by_itself = model == "falcon_mamba" and not VERSION_4
    bare = {"initialize_mixer_weights": False} if by_itself else {}
    return randomise(getattr(modeling, name)(settings, layer_idx=0, **bare))


def told(_: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """The arguments of a mixer that is told of padding."""
    return {"attention_mask": mask}


def sides(bias: bool, kernel: int) -> tuple[str, ...]:
    """Padding on the left leaks a bias of the input projection through the convolution."""
    return ("right",) if bias and kernel > 1 else ("left", "right")
