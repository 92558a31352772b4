"""Loading of the small trained model that ships with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from captum_ssm.tasks.vocabulary import WordVocabulary

BUNDLED = ("recall-mamba",)


def load_bundled(name: str = "recall-mamba") -> tuple[torch.nn.Module, WordVocabulary]:
    """Loads a bundled model with its vocabulary; nothing is downloaded.

    Args:
        name: the only one there is, ``"recall-mamba"``: a ``MambaForCausalLM`` of transformers
            that answers the prompts of :mod:`captum_ssm.tasks.recall`.

    Returns:
        The model in evaluation mode on the CPU, and the vocabulary that encodes its prompts.

    Raises:
        ValueError: when there is no such model.
        ImportError: when transformers or safetensors is not installed.
    """
    if name not in BUNDLED:
        raise ValueError(f"no bundled model {name!r}; there is: {', '.join(BUNDLED)}")
    return load_folder(Path(__file__).parent / name)


def load_folder(folder: str | Path) -> tuple[torch.nn.Module, WordVocabulary]:
    """Loads a model from a folder with config.json, model.safetensors and vocab.json."""
    try:
        from safetensors.torch import load_file
        from transformers import MambaConfig, MambaForCausalLM
    except ImportError as error:
        raise ImportError(
            'the bundled model needs transformers: pip install "captum-ssm[hf]"'
        ) from error

    folder = Path(folder)
    vocabulary = WordVocabulary.from_json(folder / "vocab.json")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # The initial weights are drawn and thrown away: the caller's random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        model: Any = MambaForCausalLM(MambaConfig.from_dict(settings))
    weights = load_file(folder / "model.safetensors")
    # The head shares the embedding, and a shared tensor is stored once.
    weights.setdefault("lm_head.weight", weights["backbone.embeddings.weight"])
    model.load_state_dict(weights, strict=True)
    loaded: torch.nn.Module = model.eval()
    return loaded, vocabulary
