"""Folders of small classifiers with random weights, as ``captum-ssm-bench train`` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from oracles import vim as vim_oracle
from torch import nn

from captum_ssm.models import VisionMamba, WordVocabulary, class_vocabulary
from captum_ssm.models.folders import VOCABULARY, save_of_transformers, save_plain
from captum_ssm.models.small import ModelSize, model_of, new_model

SHAPES = ("disc", "ring", "bar", "cross", "triangle", "star")
WORDS = ("a", "dull", "film", "good", "plot", "stupid", "truly", "wonderful")


def shapes(folder: Path) -> Path:
    """A Vision Mamba that tells shapes in images of 32 x 32 pixels, in 8 x 8 patches."""
    settings: dict[str, Any] = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 10}
    settings |= {"num_classes": len(SHAPES), "d_state": 3}
    model = vim_oracle.randomise(VisionMamba(**settings))
    save_plain(model, {"id2label": dict(enumerate(SHAPES))} | settings, folder)
    return folder


def sentences(folder: Path, architecture: str = "mamba") -> Path:
    """A classifier of sentences: a language model that tells the class, or BERT with a head."""
    vocabulary = class_vocabulary([WORDS])
    if architecture == "bert":
        sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
        sizes |= {"intermediate_size": 16, "vocab_size": len(vocabulary), "pad_token_id": 0}
        model = model_of("BertForSequenceClassification", sizes)
    else:
        model = new_model(ModelSize(architecture, hidden=12, state=4), vocabulary)
    return _saved(model, vocabulary, folder)


def letters(folder: Path) -> Path:
    """A language model of a few letters."""
    vocabulary = WordVocabulary(["<pad>", *"abc"])
    return _saved(new_model(ModelSize(hidden=12, state=4), vocabulary), vocabulary, folder)


def _saved(model: nn.Module, vocabulary: WordVocabulary, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_of_transformers(model, folder)
    vocabulary.to_json(folder / VOCABULARY)
    return folder
