"""The folders that bundled models are kept in: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._files import make_folder, optional, write_whole, writing
from ..errors import CheckpointError
from .checks import check_counts, check_fit, naming, read_json, read_safetensors
from .small import model_of

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_plain(model: nn.Module, settings: dict[str, Any], folder: Path) -> None:
    """Writes the weights of a model of plain torch, and what it is made of."""
    make_folder(folder)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    write_whole(folder / WEIGHTS, _safetensors("Saving a bundled model").save(weights))
    write_config(settings, folder)


def load_plain(
    model_class: Callable[..., nn.Module], settings: dict[str, Any], folder: Path
) -> nn.Module:
    """A model of plain torch in evaluation mode.

    Args:
        model_class: makes it.
        settings: what it is made of.
        folder: what :func:`save_plain` has written to.

    Raises:
        CheckpointError: when the settings make no model, or the weights are not its.
    """
    return _filled(lambda: model_class(**settings), read_weights(folder), folder)


def save_of_transformers(model: Any, folder: Path) -> None:
    """Writes the weights and configuration of a model of transformers."""
    safetensors = optional("safetensors", '"captum-ssm[hf]"', "Saving a bundled model")
    with writing(folder):
        try:
            model.save_pretrained(folder, state_dict=_stored_once(model))
        except safetensors.SafetensorError as error:  # what it makes of an error of the disk
            raise OSError(str(error)) from error
    _readable(folder / WEIGHTS)
    settings = read_config(folder)
    # The default, whose infinity is written in a way that not all versions read.
    settings.pop("time_step_limit", None)
    write_config(settings, folder)
    # Decoding settings that a model with a single next word does not need.
    (folder / "generation_config.json").unlink(missing_ok=True)


def _stored_once(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, tied ones by their first: transformers 4 does not know all it ties."""
    first: dict[int, str] = {}
    weights: dict[str, Tensor] = model.state_dict()
    return {k: w for k, w in weights.items() if first.setdefault(w.data_ptr(), k) == k}


def load_of_transformers(folder: Path, tied: dict[str, str] | None = None) -> nn.Module:
    """A model of transformers in evaluation mode, of the class that its configuration names.

    Args:
        folder: what :func:`save_of_transformers` has written to.
        tied: names of weights that are stored once, each with the name it is stored under.
            Default: None, there are none.

    Raises:
        CheckpointError: when the configuration makes no model, or the weights are not its.
    """
    model_class, settings = _class_of(folder)
    weights = read_weights(folder)
    for name, stored in (tied or {}).items():
        if stored in weights:
            weights.setdefault(name, weights[stored])
    return _filled(lambda: model_of(model_class.__name__, settings), weights, folder)


def load_renamed(folder: Path) -> nn.Module:
    """A model of transformers whose weights are saved under other names than the model has.

    Of some classes, transformers saves the weights under their names of earlier versions.

    Args:
        folder: what :func:`save_of_transformers` has written to.

    Raises:
        CheckpointError: when the configuration makes no model, weights are missing, or there are
            others.
    """
    model_class, _ = _class_of(folder)
    with naming(f"{folder} holds no {model_class.__name__}"):
        loaded, found = model_class.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
    odd = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys") if found[kind]}
    if odd:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {model_class.__name__}: {odd}.")
    model: nn.Module = loaded
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a saved model."""
    return check_counts(read_json(folder / CONFIG), str(folder / CONFIG))


def write_config(settings: dict[str, Any], folder: Path) -> None:
    """Writes the settings of a model."""
    write_whole(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a saved model, by name."""
    return read_safetensors(folder / WEIGHTS, "A bundled model")


def _filled(make: Callable[[], nn.Module], weights: dict[str, Tensor], folder: Path) -> nn.Module:
    """The model with its weights, made once they are known to be its."""
    with naming(f"{folder / CONFIG} makes no model"), torch.device("meta"):
        wanted = make().state_dict()
    try:
        check_fit(wanted, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {CONFIG}: {error}") from None
    model = make()
    model.load_state_dict(weights, strict=True)
    return model.eval()


def _class_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The class of transformers that a configuration names, and its settings."""
    transformers = optional("transformers", '"captum-ssm[hf]"', "A bundled model")
    settings = read_config(folder)
    named = settings.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{folder / CONFIG} has architectures = {named!r}, not the name of a model of "
            "transformers."
        )
    return found, settings


def _safetensors(need: str) -> Any:
    return optional("safetensors.torch", '"captum-ssm[hf]"', need)


def _readable(path: Path) -> None:
    """It comes readable by its owner alone, and would be so in a package as well."""
    path.chmod(0o644)
