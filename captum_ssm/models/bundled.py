"""Loading of the small trained models that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..bench.training.recipes import RECIPES, recipe_of
from ..errors import OptionError
from .folders import WEIGHTS

_HERE = Path(__file__).parent
_OF_BENCH = _HERE.parent / "bench" / "weights"

#: The names of the bundled models; each is that of its task and of its architecture.  A recipe
#: whose weights do not ship can be trained, and loaded from a folder.
BUNDLED = tuple(
    name
    for name in RECIPES
    if any((place / name / WEIGHTS).is_file() for place in (_HERE, _OF_BENCH))
)


def load_bundled(
    name: str = "recall-mamba", folder: str | Path | None = None
) -> tuple[torch.nn.Module, Any]:
    """Loads a bundled model with the key to what it reads or answers; nothing is downloaded.

    Args:
        name: a task and the architecture that learned it.  Of the language models, each a
            ``MambaForCausalLM`` or a ``Mamba2ForCausalLM`` of transformers,
            ``"recall-mamba"`` answers the prompts of :mod:`captum_ssm.bench.tasks.recall`;
            ``"copying-mamba"`` and ``"copying-mamba2"`` copy the strings of ``SHORT_COPIES`` and
            ``LONG_COPIES``; ``"translation-mamba"`` and ``"translation-mamba2"`` translate
            ``NUMBER_WORDS``; ``"passkey-"``, ``"two-passkeys-"`` and ``"frequent-word-"``, each
            with ``"mamba"`` and ``"mamba2"``, answer the questions of ``ONE_PASSKEY``,
            ``TWO_PASSKEYS`` and ``FREQUENT_WORD``, all of :mod:`captum_ssm.bench.tasks`.  Of the
            image classifiers, ``"scenes-vim"`` and ``"scenes-vim-first"``, each a
            :class:`~captum_ssm.models.VisionMamba`, with the cls token in the middle and in front,
            and ``"scenes-vit"``, a ``ViTForImageClassification`` of transformers, tell the shapes
            of ``SCENES``.
            ``"valence-mamba"``, ``"valence-rwkv"`` and ``"valence-bert"`` tell negative from
            positive sentences, see :class:`~captum_ssm.bench.tasks.TextReader`.
            Default: ``"recall-mamba"``.
        folder: where ``captum-ssm train`` has written a model of this name.
            Default: None, the one that ships with the package.

    Returns:
        The model in evaluation mode on the CPU, and its key: the vocabulary
        (:class:`~captum_ssm.models.vocabulary.WordVocabulary`) of what a language model or a
        classifier of sentences reads, or the names of an image classifier's classes, in order.

    Raises:
        OptionError: when there is no such model, or its weights do not ship.
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
    recipe = recipe_of(name)
    if folder is None and name not in BUNDLED:
        raise OptionError(
            f"name={name!r}: its weights do not ship. Make them with captum-ssm train {name} "
            "--out FOLDER, and load_bundled(name, FOLDER)."
        )
    where = weights_of(name).parent if folder is None else Path(folder)
    # The initial weights are drawn and thrown away: the caller's random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        return recipe.load(where)


def weights_of(name: str) -> Path:
    """The file of a bundled model's weights, beside its configuration, key and card.

    Args:
        name: of the model.

    Returns:
        Where the file is, or would be if the weights do not ship.

    Raises:
        OptionError: when there is no such model.

    Example:
        >>> from captum_ssm.models.bundled import weights_of
        >>> sorted(path.name for path in weights_of("recall-mamba").parent.iterdir())
        ['README.md', 'config.json', 'model.safetensors', 'vocab.json']
    """
    recipe_of(name)
    place = _HERE if (_HERE / name).is_dir() else _OF_BENCH
    return place / name / WEIGHTS
