"""What tests need to know of the version of transformers that they run with."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

VERSION_4 = transformers.__version__.startswith("4.")

#: Marks a test of code that version 4 has not, or that is otherwise there.
transformers5 = pytest.mark.skipif(
    VERSION_4, reason=f"not for transformers {transformers.__version__}, see CONTRIBUTING.md"
)


def named(name: str) -> Any:
    """A class of transformers; without it the test is skipped."""
    found = getattr(transformers, name, None)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}, see CONTRIBUTING.md")
    return found


def not_in_4(family: str, *families: str) -> None:
    """Skip the test for families that version 4 computes wrongly on a CPU, or that are refused."""
    if VERSION_4 and family in families:
        pytest.skip(f"{family} of transformers {transformers.__version__}, see CONTRIBUTING.md")


def renamed(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a configuration; version 4 asks for kernels, and has other names for layers."""
    if not VERSION_4:
        return options
    if family in ("jamba", "zamba"):
        options = {"use_mamba_kernels": False} | options
    if family == "zamba2":  # on a CPU version 4 mixes up the chunks
        options = options | {"chunk_size": 512}
    if family == "recurrent_gemma":  # refused beyond its window
        options = options | {"attention_window_size": 512}
    if family == "gpt2":  # which all but its eager attention pass over
        options = options | {"scale_attn_by_inverse_layer_idx": False}
    if family == "qwen3_next":  # whose cache wants a recurrent layer
        options = options | {"use_cache": False}
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    lists = ("layer_types", "layers_block_type")
    if family not in ("granitemoehybrid", "zamba", "zamba2"):
        return options
    return {
        name: [old.get(kind, kind) for kind in value] if name in lists else value
        for name, value in options.items()
    }
