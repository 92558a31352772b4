"""Read and check untrusted model files before memory is allocated for a model."""

from __future__ import annotations

import argparse
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._files import read_safetensors
from ..errors import CaptumSSMError, CheckpointError, OptionError

Weights = Mapping[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)

#: Largest accepted numbers of modules: building them takes memory, before weights are checked.
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 65_536),
    "num_labels": 1_000_000,
}
#: The largest number of keys that an error lists.
_MOST_LISTED = 8


def check_counts(settings: object, where: str) -> dict[str, Any]:
    """Return the settings; raise if a number of layers, experts or classes is implausibly large.

    Args:
        settings: a configuration's settings; nested dicts are checked too.
        where: name of the configuration in errors.

    Raises:
        CheckpointError: when the settings are not a dict, or such a number is too large.
    """
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{where} contains a {type(settings).__name__}; pass a JSON object of settings."
        )
    for name, value in settings.items():
        if isinstance(value, dict):
            check_counts(value, where)
        elif name in _LIMITS and isinstance(value, int | float) and not value <= _LIMITS[name]:
            raise CheckpointError(
                f"{where} has {name} = {value}; at most {_LIMITS[name]} are accepted. Correct the "
                "number, or download the file again."
            )
    return settings


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, without running any code in it.

    Args:
        path: a ``.safetensors`` file, or a torch file with the weights by name, or with a dict that
            has the weights as ``"model"`` or ``"state_dict"``.

    Returns:
        Tensors on the CPU, by name.

    Raises:
        CheckpointError: when the file is damaged, would run code, or has no weights.
    """
    content: Any
    if path.suffix == ".safetensors":
        content = read_safetensors(path, str(path))
    else:
        # published training scripts save their command line or plain bytes with the weights
        safe_globals = getattr(torch.serialization, "safe_globals", None)  # not in torch 2.4
        harmless: list[Any] = [argparse.Namespace, io.BytesIO]
        with nullcontext() if safe_globals is None else safe_globals(harmless):
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise CheckpointError(
                    f"{path} cannot be read without running code in it, which is refused. If you "
                    'trust it, save only its weights: torch.save({"model": weights}, path).'
                ) from error
            except (EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path} is not a complete torch file: {type(error).__name__}: {error}. "
                    "Download or save it again."
                ) from error
    for name in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if isinstance(content, dict):  # settings of 8-bit kernels, which are not weights
        content = {k: w for k, w in content.items() if not str(k).endswith("._extra_state")}
    if not isinstance(content, dict) or not all(isinstance(w, Tensor) for w in content.values()):
        raise CheckpointError(
            f"{path} does not contain a dict of tensors, or such a dict as "
            '"model" or "state_dict". Save the weights with torch.save(model.state_dict(), path).'
        )
    for key, weight in content.items():
        if weight.nbytes > weight.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {key!r} has shape {tuple(weight.shape)}, but the file contains fewer "
                "numbers, as of an expanded tensor. Save weight.contiguous() instead."
            )
    return content


def tied_names(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map names that ``weights`` lacks to the stored names of the same shared parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored_names = {id(parameters[name]): name for name in weights if name in parameters}
    return {
        name: stored_names[id(parameter)]
        for name, parameter in parameters.items()
        if name not in weights and id(parameter) in stored_names
    }


def build_model(
    path: str | Path, kind: str, build: Callable[[], Model], weights: dict[str, Tensor]
) -> Model:
    """Build a model from its weights, load them, and return it in evaluation mode.

    Args:
        path: path of the weights file, for errors.
        kind: the kind of model with an article, for errors, such as ``"a Caduceus"``.
        make: function that builds the model, with sizes inferred from the weights.
        weights: the weights by name; missing names of shared parameters are added.

    Raises:
        CheckpointError: when the weights do not fit the model; the message names the keys.
    """
    try:
        with torch.device("meta"):  # the weights come from the file
            model = build()
        for name, stored in tied_names(model, weights).items():
            weights[name] = weights[stored]
        check_fit(model.state_dict(), weights)
        _check_tied(model, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not fit {kind}: {error}") from None
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def _check_tied(model: nn.Module, weights: Weights) -> None:
    """Raise if the file has two different weights for one shared parameter."""
    name_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = name_of.setdefault(id(parameter), name)
        if first != name and not torch.equal(weights[first], weights[name]):
            raise CheckpointError(
                f"{first!r} and {name!r} are different, but this model class shares one parameter "
                "for both. Save the model with shared weights."
            )


def check_fit(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise if weights ``expected`` by a model and ``stored`` in a file differ in name or shape."""
    complaints = [
        _listed("it lacks", [repr(k) for k in expected if k not in stored]),
        _listed("it has the unknown weights", [repr(k) for k in stored if k not in expected]),
        _listed(
            "shapes differ in",
            [
                f"{k!r} ({tuple(stored[k].shape)} instead of {tuple(w.shape)})"
                for k, w in expected.items()
                if k in stored and stored[k].shape != w.shape
            ],
        ),
    ]
    if any(complaints):
        message = "; ".join(c for c in complaints if c)
        raise CheckpointError(f"{message}. Pass weights that were saved from such a model.")


def shape_of(weights: Weights, key: str, dims: int) -> torch.Size:
    """Return a weight's shape; raise unless the weight exists and has ``dims`` dimensions."""
    if key not in weights:
        raise CheckpointError(f"its weights lack {key!r}. Pass all weights of such a model.")
    shape = weights[key].shape
    if len(shape) != dims:
        raise CheckpointError(
            f"{key!r} has shape {tuple(shape)}, not {dims} dimensions. Pass weights of such a "
            "model."
        )
    return shape


def layer_count(weights: Weights, prefix: str) -> int:
    """Return the number of layers: 1 plus the largest index that follows the prefix in names."""
    indices = [key.removeprefix(prefix).split(".")[0] for key in weights if key.startswith(prefix)]
    return 1 + max((int(n) for n in indices if n.isdigit()), default=0)


def check_sizes(**sizes: int) -> None:
    """Raise OptionError unless all sizes of a model are 1 or more."""
    for name, size in sizes.items():
        if size < 1:
            raise OptionError(f"{name}={size}: use 1 or more.")


def check_complete(model: nn.Module, loading_info: Mapping[str, Any], where: str) -> None:
    """Raise if a checkpoint lacks weights, which transformers would initialize randomly.

    Args:
        model: the model that was loaded.
        loading_info: the transformers report from ``output_loading_info=True``; tied weights do
            not count as missing.
        where: the checkpoint's name, for the error.
    """
    saved = model.state_dict().keys()  # buffers that are never saved cannot be missed
    complaints = [
        _listed("they lack", [repr(k) for k in sorted(loading_info["missing_keys"]) if k in saved]),
        _listed("shapes differ in", _misshapen(model, loading_info.get("mismatched_keys", ()))),
    ]
    if any(complaints):
        raise CheckpointError(
            f"{where}: its weights do not fill its {type(model).__name__}, and the rest would be "
            f"random: {'; '.join(c for c in complaints if c)}. Save the whole model with its head, "
            "and name the class that was saved in config.json."
        )


def _misshapen(model: nn.Module, mismatched: Iterable[Any]) -> list[str]:
    """Describe wrong shapes, from names (transformers 4) or tuples (name, stored shape, shape)."""
    pairs = [(x, "another") if isinstance(x, str) else (x[0], tuple(x[1])) for x in mismatched]
    own = model.state_dict()
    return [f"{k!r} ({shape} instead of {tuple(own[k].shape)})" for k, shape in sorted(pairs)]


@contextmanager
def as_checkpoint_error(message: str) -> Iterator[None]:
    """Convert errors of other packages inside the ``with`` to a CheckpointError.

    Raises:
        CheckpointError: with ``message`` before the original one. Errors of this package, and of
            imports, the system and memory are raised unchanged.
    """
    try:
        yield
    except (CaptumSSMError, ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        original = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{message} ({original}). Correct or replace its files.") from error


def _listed(intro: str, items: list[str]) -> str:
    """Return ``intro``, the first items and the number of the others; "" without items."""
    if not items:
        return ""
    rest = f" and {len(items) - _MOST_LISTED} more" if len(items) > _MOST_LISTED else ""
    return f"{intro} {', '.join(items[:_MOST_LISTED])}{rest}"
