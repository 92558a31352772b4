"""Small language models of transformers, freshly initialised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from .vocabulary import WordVocabulary

#: By architecture, the class of transformers.
MODELS = {"mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM"}


@dataclass(frozen=True)
class ModelSize:
    """The architecture and size of the model to train.

    Attributes:
        architecture: ``"mamba"`` or ``"mamba2"``. Default: ``"mamba"``.
        layers: number of blocks. Default: 2.
        hidden: width of the residual stream. Default: 64.
        state: states per channel. Default: 16.
        conv_kernel: taps of the short convolution. Default: 4.
        head_dim: channels per head of a Mamba-2. Default: 16.
    """

    architecture: str = "mamba"
    layers: int = 2
    hidden: int = 64
    state: int = 16
    conv_kernel: int = 4
    head_dim: int = 16

    def __post_init__(self) -> None:
        if self.architecture not in MODELS:
            raise OptionError(
                f"architecture={self.architecture!r} is not known. Use one of {tuple(MODELS)}."
            )


def model_of(class_name: str, settings: dict[str, Any]) -> Any:
    """A model of a class of transformers, asked for by name.

    Other packages exchange what the Auto classes of transformers return.
    """
    import transformers

    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class.from_dict(settings))


def new_model(size: ModelSize, vocabulary: WordVocabulary, *, lasting_from: int = 0) -> nn.Module:
    """A freshly initialised causal language model of transformers.

    In lasting layers the decays start near one (``A_log = -8``) and the step sizes near one: the
    state then keeps what it has seen over the whole prompt from the first training step on, which
    makes recall much quicker to learn than from the usual start (after Trockman et al. 2024).

    Args:
        size: its architecture and size.
        vocabulary: the words it reads and writes.
        lasting_from: the first of the lasting layers, negative to count from the end; those
            before it start as transformers has it. Default: 0, all are lasting.
    """
    model = model_of(MODELS[size.architecture], _settings(size, vocabulary))
    with torch.no_grad():
        for block in model.backbone.layers[lasting_from:]:
            mixer = block.mixer
            mixer.A_log.fill_(-8.0)
            step_bias = mixer.dt_proj.bias if size.architecture == "mamba" else mixer.dt_bias
            step_bias.fill_(math.log(math.e - 1))  # softplus of it is 1
    fresh: nn.Module = model
    return fresh


def _settings(size: ModelSize, vocabulary: WordVocabulary) -> dict[str, Any]:
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": size.hidden,
        "state_size": size.state,
        "num_hidden_layers": size.layers,
        "conv_kernel": size.conv_kernel,
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    if size.architecture == "mamba":
        return settings
    return settings | {
        "head_dim": size.head_dim,
        "num_heads": 2 * size.hidden // size.head_dim,
        "n_groups": 1,
        "chunk_size": 32,  # sequences are short, and are padded to whole chunks
    }
