"""Loading of the small trained models that experiments measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from captum_ssm.errors import OptionError
from captum_ssm.models import bundled as core
from captum_ssm.models.folders import WEIGHTS, load_folder

_HERE = Path(__file__).parent / "weights"
#: By the name of each model, which is that of its task and of its architecture, its weights.
_WEIGHTS = {
    **{name: core.weights_of(name) for name in core.BUNDLED},
    **{weights.parent.name: weights for weights in sorted(_HERE.glob(f"*/{WEIGHTS}"))},
}

#: The names of the models, the one that ships with captum_ssm first.
BUNDLED = tuple(_WEIGHTS)


def load_bundled(
    name: str = "recall-mamba", folder: str | Path | None = None
) -> tuple[torch.nn.Module, Any]:
    """Loads a bundled model with the key to what it reads or answers; nothing is downloaded.

    Args:
        name: a task and the architecture that learned it.  Of the language models, each of a class
            of transformers, such as ``MambaForCausalLM``, ``"recall-mamba"`` answers the prompts of
            :class:`~captum_ssm_bench.tasks.RecallTask`; ``"copying-mamba"`` and
            ``"copying-mamba2"`` copy the strings of ``SHORT_COPIES`` and ``LONG_COPIES``;
            ``"translation-mamba"`` and ``"translation-mamba2"`` translate ``NUMBER_WORDS``;
            ``"passkey-"``, ``"two-passkeys-"`` and ``"frequent-word-"``, each with ``"mamba"`` and
            ``"mamba2"``, answer the questions of ``ONE_PASSKEY``, ``TWO_PASSKEYS`` and
            ``FREQUENT_WORD``, all of :mod:`captum_ssm_bench.tasks`.
            Of further architectures, see :class:`~captum_ssm.models.small.ModelSize`,
            ``"copying-bamba"``, ``"translation-gated-deltanet"`` and ``"translation-rwkv"`` have
            learned the same;
            ``"pairs-"`` with ``"mamba"``, ``"mamba2"``, ``"gated-deltanet"`` and ``"bamba"``
            answer with the value of a key in ``PAIRS``, with ``"rwkv"`` and ``"griffin"`` in
            ``FEW_PAIRS``; ``"chains-mamba"`` and ``"chains-mamba2"`` write the chains of
            ``CHAINS``.  Of the image classifiers, ``"scenes-vim"`` and ``"scenes-vim-first"``,
            each a :class:`~captum_ssm.models.VisionMamba`, with the cls token in the middle and in
            front, ``"scenes-vmamba"``, a :class:`~captum_ssm.models.VMamba`, and
            ``"scenes-vit"``, a ``ViTForImageClassification`` of transformers, tell the shapes of
            ``SCENES``.
            ``"motifs-caduceus"`` and ``"motifs-hyenadna"`` tell which motifs of
            :class:`~captum_ssm_bench.tasks.MotifTask` a sequence of DNA holds.
            ``"valence-mamba"``, ``"valence-rwkv"`` and ``"valence-bert"`` tell negative from
            positive sentences, see :class:`~captum_ssm.models.TextReader`.
            Default: ``"recall-mamba"``.
        folder: where ``captum-ssm-bench train`` has written a model of this name.
            Default: None, the one that ships.

    Returns:
        The model in evaluation mode on the CPU, and its key: the vocabulary
        (:class:`~captum_ssm.models.WordVocabulary`) of what a language model or a classifier of
        sentences reads, or the names of the classes of images or DNA, in order.

    Raises:
        OptionError: when there is no such model.
        CheckpointError: when the folder holds no model.
        ImportError: when transformers or safetensors is not installed.

    Example:
        >>> from captum_ssm_bench import load_bundled
        >>> _, classes = load_bundled("scenes-vim")
        >>> classes
        ('disc', 'ring', 'bar', 'cross', 'triangle', 'star')
    """
    shipped = weights_of(name).parent
    return load_folder(shipped if folder is None else Path(folder))


def weights_of(name: str) -> Path:
    """The file of a bundled model's weights, beside its configuration, key and card.

    Args:
        name: of the model.

    Returns:
        Where the file is.

    Raises:
        OptionError: when there is no such model.

    Example:
        >>> from captum_ssm_bench.bundled import weights_of
        >>> sorted(path.name for path in weights_of("scenes-vim").parent.iterdir())
        ['README.md', 'config.json', 'model.safetensors']
    """
    if name not in _WEIGHTS:
        raise OptionError(f"name={name!r}: no such bundled model. Use one of {BUNDLED}.")
    return _WEIGHTS[name]
