"""The folders that bundled models are kept in: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from captum_ssm.errors import CheckpointError
from captum_ssm.models.small import model_of
from captum_ssm.tasks.files import optional

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_plain(model: nn.Module, settings: dict[str, Any], folder: Path) -> None:
    """Writes the weights of a model of plain torch, and what it is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    _safetensors("Saving a bundled model").save_file(weights, folder / WEIGHTS)
    _readable(folder / WEIGHTS)
    write_config(settings, folder)


def load_plain(
    model_class: Callable[..., nn.Module], settings: dict[str, Any], folder: Path
) -> nn.Module:
    """A model of plain torch in evaluation mode.

    Args:
        model_class: makes it.
        settings: what it is made of.
        folder: what :func:`save_plain` has written to.
    """
    model = model_class(**settings)
    model.load_state_dict(read_weights(folder), strict=True)
    return model.eval()


def save_of_transformers(model: Any, folder: Path) -> None:
    """Writes the weights and configuration of a model of transformers."""
    model.save_pretrained(folder)
    _readable(folder / WEIGHTS)
    settings = read_config(folder)
    # The default, whose infinity is written in a way that not all versions read.
    settings.pop("time_step_limit", None)
    write_config(settings, folder)
    # Decoding settings that a model with a single next word does not need.
    (folder / "generation_config.json").unlink(missing_ok=True)


def load_of_transformers(folder: Path, tied: dict[str, str] | None = None) -> nn.Module:
    """A model of transformers in evaluation mode, of the class that its configuration names.

    Args:
        folder: what :func:`save_of_transformers` has written to.
        tied: names of weights that are stored once, each with the name it is stored under.
            Default: None, there are none.
    """
    optional("transformers", '"captum-ssm[hf]"', "A bundled model")
    settings = read_config(folder)
    model: nn.Module = model_of(settings["architectures"][0], settings)
    weights = read_weights(folder)
    for name, stored in (tied or {}).items():
        weights.setdefault(name, weights[stored])
    model.load_state_dict(weights, strict=True)
    return model.eval()


def load_renamed(folder: Path) -> nn.Module:
    """A model of transformers whose weights are saved under other names than the model has.

    Of some classes, transformers saves the weights under their names of earlier versions.

    Args:
        folder: what :func:`save_of_transformers` has written to.

    Raises:
        CheckpointError: when weights are missing, or there are others.
    """
    transformers = optional("transformers", '"captum-ssm[hf]"', "A bundled model")
    model_class = getattr(transformers, read_config(folder)["architectures"][0])
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
    settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return settings


def write_config(settings: dict[str, Any], folder: Path) -> None:
    """Writes the settings of a model."""
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a saved model, by name."""
    weights: dict[str, Tensor] = _safetensors("A bundled model").load_file(folder / WEIGHTS)
    return weights


def _safetensors(need: str) -> Any:
    return optional("safetensors.torch", '"captum-ssm[hf]"', need)


def _readable(path: Path) -> None:
    """It comes readable by its owner alone, and would be so in a package as well."""
    path.chmod(0o644)
