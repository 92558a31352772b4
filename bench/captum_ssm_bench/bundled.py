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
    """Loads a bundled model with the key to its inputs or answers; nothing is downloaded.

    A name is a task and the architecture that learned it: ``captum_ssm_bench.bundled.BUNDLED`` has
    all, :mod:`captum_ssm_bench.tasks` the tasks.  Language models are of classes of transformers;
    scenes are told by :class:`~captum_ssm.models.VisionMamba`,
    :class:`~captum_ssm.models.VMamba` and a ``ViTForImageClassification``, negative and positive
    sentences by classifiers that :class:`~captum_ssm.models.TextReader` reads.

    Args:
        name: of the model. Default: ``"recall-mamba"``.
        folder: where ``captum-ssm-bench train`` has written a model of this name.
            Default: None, the one that ships.

    Returns:
        The model in evaluation mode on the CPU, and its key: the vocabulary
        (:class:`~captum_ssm.models.WordVocabulary`) of a model of texts, or the names of the
        classes of images, in order.

    Raises:
        OptionError: when there is no such model.
        CheckpointError: when the folder holds no model.
        ImportError: when transformers or safetensors is not installed.
    """
    shipped = weights_of(name).parent
    return load_folder(shipped if folder is None else Path(folder))


def weights_of(name: str) -> Path:
    """The file of a bundled model's weights, beside its configuration, key and card.

    Raises:
        OptionError: when there is no such model.
    """
    if name not in _WEIGHTS:
        raise OptionError(f"name={name!r}: no such bundled model. Use one of {BUNDLED}.")
    return _WEIGHTS[name]
