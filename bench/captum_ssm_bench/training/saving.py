"""Write small models to folders that :mod:`captum_ssm.models.folders` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from captum_ssm._files import make_folder, write_whole, writing
from captum_ssm._optional import optional
from captum_ssm.models.folders import CONFIG, WEIGHTS, read_config


def save_plain(model: nn.Module, settings: dict[str, Any], folder: Path) -> None:
    """Write the weights and the configuration of a model of this package.

    Args:
        model: the model.
        settings: the arguments of its class, and its classes as ``id2label``.
        folder: the folder of the files; created if missing.
    """
    make_folder(folder)
    weights = {name: value.contiguous() for name, value in _stored_once(model).items()}
    write_whole(folder / WEIGHTS, _safetensors("Saving a bundled model").save(weights))
    write_config({"architectures": [type(model).__name__], **settings}, folder)


def save_of_transformers(model: Any, folder: Path) -> None:
    """Write the weights and configuration of a model of transformers."""
    safetensors = optional("safetensors", '"captum-ssm[hf]"', "Saving a bundled model")
    with writing(folder):
        try:
            model.save_pretrained(folder, state_dict=_stored_once(model))
        except safetensors.SafetensorError as error:  # its error for a disk's error
            raise OSError(str(error)) from error
    _readable(folder / WEIGHTS)
    settings = read_config(folder)
    # The default, whose infinity is written in a way that not all versions read.
    settings.pop("time_step_limit", None)
    write_config(settings, folder)
    # Decoding settings that a model with a single next word does not need.
    (folder / "generation_config.json").unlink(missing_ok=True)


def _stored_once(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, tied ones once: transformers 4 does not list all ties."""
    first: dict[int, str] = {}
    weights: dict[str, Tensor] = model.state_dict()
    return {k: w for k, w in weights.items() if first.setdefault(w.data_ptr(), k) == k}


def write_config(settings: dict[str, Any], folder: Path) -> None:
    """Write the settings of a model."""
    write_whole(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def _safetensors(need: str) -> Any:
    return optional("safetensors.torch", '"captum-ssm[hf]"', need)


def _readable(path: Path) -> None:
    """Make a file readable by all: it is created readable by its owner alone."""
    path.chmod(0o644)
