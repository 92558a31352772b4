"""Loading of the small trained model that ships with the package, and of its dictionary."""

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
#: The suffix of a dictionary's folder, behind the name of its model.
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
        name: the model's name; only ``"recall-mamba"`` ships.  It is a ``MambaForCausalLM`` of
            transformers, and answers the prompts of :mod:`captum_ssm.models.recall`.
            Default: ``"recall-mamba"``.
        folder: a folder of a model of this name by ``captum-ssm-bench train``. Default: None, the
            package's.

    Returns:
        The model in evaluation mode on the CPU, and its :class:`~captum_ssm.models.WordVocabulary`.

    Raises:
        OptionError: when there is no such model.
        CheckpointError: when the folder holds no model.
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
        name: of the bundled model; only ``"recall-mamba"`` has one. Default: ``"recall-mamba"``.
        folder: a folder of ``captum-ssm-bench train recall-mamba-dictionary``. Default: None, the
            folder in the package.

    Returns:
        The dictionary on the CPU; ``layer`` names the module whose output is encoded.

    Raises:
        OptionError: when no dictionary ships for the model.
        CheckpointError: when the folder holds no dictionary.
        ImportError: when safetensors is not installed.

    Example:
        >>> from captum_ssm.models import load_dictionary
        >>> load_dictionary("recall-mamba")
        SparseAutoencoder(width=64, features=256, topk, k=3, of backbone.layers.0)
    """
    if name not in _DICTIONARIES:
        raise OptionError(
            f"name={name!r}: no dictionary ships for it. Use one of {tuple(_DICTIONARIES)}."
        )
    return SparseAutoencoder.load(_DICTIONARIES[name] if folder is None else folder)


def weights_of(name: str) -> Path:
    """Return the file of a bundled model's weights, beside its configuration, key and card.

    Example:
        >>> from captum_ssm.models.bundled import weights_of
        >>> sorted(path.name for path in weights_of("recall-mamba").parent.iterdir())
        ['README.md', 'config.json', 'model.safetensors', 'vocab.json']
    """
    if name not in _FOLDERS:
        raise OptionError(
            f"name={name!r}: no such bundled model. Use one of {BUNDLED}, "
            "or load_bundled of captum_ssm_bench."
        )
    return _FOLDERS[name] / WEIGHTS
