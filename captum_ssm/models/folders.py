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
from .checkpoints import check_counts, check_fit, naming, tied_names
from .vocabulary import WordVocabulary

WEIGHTS, CONFIG, VOCABULARY = "model.safetensors", "config.json", "vocab.json"

#: The model classes that transformers does not have.
PLAIN = ("VisionMamba", "VMamba", "Caduceus", "HyenaDNA")
#: Classes whose weights transformers saves under parameter names of its earlier versions.
_RENAMED = {"ViTForImageClassification"}


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
        model = _model(folder, settings)
    words, classes = folder / VOCABULARY, settings.get("id2label")
    if words.is_file():
        return model, WordVocabulary.from_json(words)
    if not isinstance(classes, dict):
        raise CheckpointError(
            f"{folder} has neither a vocabulary nor class names. Add {VOCABULARY} for a model of "
            f"texts, or id2label in {CONFIG} for an image or DNA classifier."
        )
    return model, tuple(classes.values())


def _model(folder: Path, settings: dict[str, Any]) -> nn.Module:
    named = settings.get("architectures")
    plain = next((name for name in PLAIN if named == [name]), None)
    if plain is not None:
        own = {k: v for k, v in settings.items() if k not in ("architectures", "id2label")}
        make = getattr(import_module(__package__), plain)
        return _filled(lambda: make(**own), folder)
    model_class = _class_of_transformers(folder, named)
    if model_class.__name__ in _RENAMED:
        return _renamed(folder, model_class)
    return _filled(lambda: model_of(model_class.__name__, settings), folder)


def _class_of_transformers(folder: Path, named: object) -> Any:
    transformers = optional("transformers", '"captum-ssm[hf]"', "A bundled model")
    name = named[0] if isinstance(named, list) and named else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{folder / CONFIG} has architectures = {named!r}. Use a list with the name of one "
            "transformers model class, such as ['MambaForCausalLM']."
        )
    return found


def _filled(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Return the model with its weights, after checking that the weights fit the model."""
    weights = read_safetensors(folder / WEIGHTS, "A bundled model")
    with naming(f"no model can be built from {folder / CONFIG}"), torch.device("meta"):
        wanted = make()
    for name, stored in tied_names(wanted, weights).items():
        weights[name] = weights[stored]
    try:
        check_fit(wanted.state_dict(), weights)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {CONFIG}: {error}") from None
    model = make()
    model.load_state_dict(weights, strict=True)
    return model.eval()


def _renamed(folder: Path, model_class: Any) -> nn.Module:
    """Load a model whose weights transformers saves and loads under different names."""
    with naming(f"{folder} does not contain a usable {model_class.__name__}"):
        loaded, found = model_class.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
    odd = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys") if found[kind]}
    if odd:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit {model_class.__name__}: {odd}. Save the model again."
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
