"""Load a small model from a folder with its configuration, weights and vocabulary.

``config.json`` has the model's class and arguments, and for image and DNA classifiers the names of
the classes. ``model.safetensors`` has the weights. ``vocab.json`` has the words of a text model.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._files import read_json, read_safetensors
from .._optional import optional
from ..errors import CheckpointError
from .checkpoints import as_checkpoint_error, check_counts, check_fit, tied_names
from .vocabulary import WordVocabulary

WEIGHTS, CONFIG, VOCABULARY = "model.safetensors", "config.json", "vocab.json"

#: The model classes that transformers does not have.
PLAIN = ("VisionMamba", "VMamba", "Caduceus", "HyenaDNA")
#: Classes whose weights transformers saves under parameter names of its earlier versions.
_SAVED_WITH_EARLIER_NAMES = {"ViTForImageClassification"}


def load_folder(folder: Path) -> tuple[nn.Module, WordVocabulary | tuple[str, ...]]:
    """Load a model in evaluation mode on the CPU, and its vocabulary or ordered class names.

    Raises:
        DataNotFoundError: when a file is missing.
        CheckpointError: when the configuration is wrong, the weights do not fit, or neither a
            vocabulary nor class names are found.
        InputError: when the vocabulary is not a list of words.
        ImportError: when transformers or safetensors is not installed.
    """
    settings = read_config(folder)
    # the caller's random state is unchanged, although initial weights are drawn and discarded
    with torch.random.fork_rng(devices=[]):
        model = _load_model(folder, settings)
    vocabulary_file, class_names = folder / VOCABULARY, settings.get("id2label")
    if vocabulary_file.is_file():
        return model, WordVocabulary.from_json(vocabulary_file)
    if not isinstance(class_names, dict):
        raise CheckpointError(
            f"{folder} has neither a vocabulary nor class names. Add {VOCABULARY} for a model of "
            f"texts, or id2label in {CONFIG} for an image or DNA classifier."
        )
    return model, tuple(class_names.values())


def _load_model(folder: Path, settings: dict[str, Any]) -> nn.Module:
    """Build the model that ``architectures`` in the settings names, and load its weights."""
    class_names = settings.get("architectures")
    plain_name = next((name for name in PLAIN if class_names == [name]), None)
    if plain_name is not None:
        arguments = {k: v for k, v in settings.items() if k not in ("architectures", "id2label")}
        plain_class = getattr(import_module(__package__), plain_name)
        return _build_with_weights(lambda: plain_class(**arguments), folder)
    model_class = _transformers_class(folder, class_names)
    if model_class.__name__ in _SAVED_WITH_EARLIER_NAMES:
        return _load_pretrained(folder, model_class)
    return _build_with_weights(lambda: model_of(model_class.__name__, settings), folder)


def _transformers_class(folder: Path, named: object) -> Any:
    """Return the transformers class that the list ``named`` from the folder's config names."""
    transformers = optional("transformers", '"captum-ssm[hf]"', "A bundled model")
    name = named[0] if isinstance(named, list) and named else None
    model_cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(model_cls, type) and issubclass(model_cls, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{folder / CONFIG} has architectures = {named!r}. Use a list with the name of one "
            "transformers model class, such as ['MambaForCausalLM']."
        )
    return model_cls


def _build_with_weights(build: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Return a model with its weights; a model on the meta device shows first if they fit."""
    weights = read_safetensors(folder / WEIGHTS, "A bundled model")
    with as_checkpoint_error(f"no model can be built from {folder / CONFIG}"), torch.device("meta"):
        on_meta = build()
    for name, stored in tied_names(on_meta, weights).items():
        weights[name] = weights[stored]
    try:
        check_fit(on_meta.state_dict(), weights)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {CONFIG}: {error}") from None
    model = build()
    model.load_state_dict(weights, strict=True)
    return model.eval()


def _load_pretrained(folder: Path, model_class: Any) -> nn.Module:
    """Load with transformers, which converts between the saved and the present weight names."""
    with as_checkpoint_error(f"{folder} does not contain a usable {model_class.__name__}"):
        loaded, info = model_class.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
    bad = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
    if bad:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit {model_class.__name__}: {bad}. Save the model again."
        )
    model: nn.Module = loaded
    return model.eval()


def model_of(class_name: str, settings: dict[str, Any]) -> Any:
    """Return a new model of a transformers class, with random weights.

    Auto classes are not used, because other packages replace their entries.
    """
    import transformers

    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class.from_dict(settings))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in a saved model's ``config.json``, after checks of their sizes."""
    return check_counts(read_json(folder / CONFIG), str(folder / CONFIG))
