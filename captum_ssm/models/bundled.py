"""Load the small trained model that ships with the package, and its dictionary of features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError
from ..inside.dictionary import WEIGHTS as DICTIONARY_WEIGHTS
from ..inside.dictionary import SparseAutoencoder
from .folders import WEIGHTS, load_folder

_HERE = Path(__file__).parent
#: Folders of the bundled models, by name (task and architecture).
_FOLDERS = {weights.parent.name: weights.parent for weights in sorted(_HERE.glob(f"*/{WEIGHTS}"))}

#: The names of the bundled models.
BUNDLED = tuple(_FOLDERS)
#: Suffix of a dictionary's folder name, after the name of the bundled model.
_DICTIONARY = "-dictionary"
#: The folder of each dictionary, by the name of its bundled model.
_DICTIONARIES = {
    weights.parent.name.removesuffix(_DICTIONARY): weights.parent
    for weights in sorted(_HERE.glob(f"*{_DICTIONARY}/{DICTIONARY_WEIGHTS}"))
}


def load_bundled(
    name: str = "recall-mamba", folder: str | Path | None = None
) -> tuple[torch.nn.Module, Any]:
    """Load a bundled model and its vocabulary; nothing is downloaded.

    Args:
        name: the model's name; only ``"recall-mamba"`` ships. This transformers
            ``MambaForCausalLM`` was trained on the prompts of :mod:`captum_ssm.models.recall`.
            Default: ``"recall-mamba"``.
        folder: a folder that ``captum-ssm-bench train`` wrote for this model. Default: None, the
            folder in the package.

    Returns:
        The model in evaluation mode on the CPU, and its :class:`~captum_ssm.models.WordVocabulary`.

    Raises:
        OptionError: when there is no such model.
        CheckpointError: when the folder does not contain a complete model.
        ImportError: when transformers or safetensors is not installed.

    Example:
        >>> import torch
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled("recall-mamba")
        >>> prompt = "anna owns the lamp . bob owns the kite . ? bob owns the"
        >>> logits = model(torch.tensor([vocabulary.encode(prompt)])).logits  # (1, L, words)
        >>> vocabulary.decode(logits[:, -1].argmax(-1))
        'kite'
    """
    shipped = weights_of(name).parent
    return load_folder(shipped if folder is None else Path(folder))


def load_dictionary(
    name: str = "recall-mamba", folder: str | Path | None = None
) -> SparseAutoencoder:
    """Load the dictionary of features that ships for a bundled model; nothing is downloaded.

    Args:
        name: the bundled model's name; only ``"recall-mamba"`` has a dictionary. Default:
            ``"recall-mamba"``.
        folder: a folder that ``captum-ssm-bench train recall-mamba-dictionary`` wrote. Default:
            None, the folder in the package.

    Returns:
        The dictionary on the CPU; ``layer`` names the module whose output is encoded.

    Raises:
        OptionError: when no dictionary ships for the model.
        CheckpointError: when the folder does not contain a dictionary.
        ImportError: when safetensors is not installed.

    Example:
        >>> from captum_ssm.models import load_dictionary
        >>> load_dictionary("recall-mamba")
        SparseAutoencoder(width=64, features=256, topk, k=3, of backbone.layers.0)
    """
    if name not in _DICTIONARIES:
        raise OptionError(
            f"name={name!r}: no dictionary ships for such a model. Use one of "
            f"{tuple(_DICTIONARIES)}."
        )
    return SparseAutoencoder.load(_DICTIONARIES[name] if folder is None else folder)


def weights_of(name: str) -> Path:
    """Return the path of a bundled model's weights file.

    Example:
        >>> from captum_ssm.models.bundled import weights_of
        >>> sorted(path.name for path in weights_of("recall-mamba").parent.iterdir())
        ['README.md', 'config.json', 'model.safetensors', 'vocab.json']
    """
    if name not in _FOLDERS:
        raise OptionError(
            f"name={name!r}: no such bundled model. Use one of {BUNDLED}, or call "
            "captum_ssm_bench.bundled.load_bundled, which has more models."
        )
    return _FOLDERS[name] / WEIGHTS
