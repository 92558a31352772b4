"""Dictionaries of features, whose sums approximate a layer's output.

A dictionary is any object with the two functions of :class:`~captum_ssm.inside.Dictionary`.
:class:`SparseAutoencoder` is a dictionary that reads and writes folders of SAELens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._files import filling, read_json, read_safetensors, write_whole
from .._optional import optional
from ..errors import CheckpointError, OptionError

#: The types of encoders, which differ in how they compute the features' activations.
ARCHITECTURES = ("standard", "topk", "jumprelu", "gated")

#: The names of the files in a SAELens folder.
CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
#: The first version of SAELens whose settings have a separate section for metadata.
_NESTED_FROM = "6.0.0"


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder: a dictionary of features, few of which are active at a time.

    Vectors ``x`` are encoded to activations ``f``, which depend on the architecture:

    ====================  =====================================================================
    ``"standard"``        ``relu(b)``, where ``b = (x - b_dec) @ W_enc + b_enc``
    ``"topk"``            ``relu(b)`` of the ``k`` largest, 0 of all others
    ``"jumprelu"``        ``relu(b)`` where ``b > threshold``, 0 elsewhere
    ``"gated"``           ``relu(p * exp(r_mag) + b_mag)`` where ``p + b_gate > 0``, 0 elsewhere,
                          with ``p = (x - b_dec) @ W_enc``
    ====================  =====================================================================

    Activations are decoded to ``f @ W_dec + b_dec``.

    Args:
        width: the size E of the vectors.
        features: the number F of features.
        architecture: one of the kinds in the table. Default: ``"standard"``.
        k: the largest number of active features, for ``"topk"`` only. Default: None.
        layer: name of the module whose output has these features. Default: ``""``, unknown.
        apply_b_dec_to_input: subtract ``b_dec`` from ``x`` before encoding. Default: True.
        rescale_acts_by_decoder_norm: for ``"topk"`` only, measure each feature as if its row of
            ``W_dec`` had norm one. Default: False.
        metadata: facts about the features' origin, saved with the weights. Default: None.

    Raises:
        OptionError: when the arguments do not fit together.

    Example:
        >>> import torch
        >>> from captum_ssm.inside.dictionary import SparseAutoencoder
        >>> found = SparseAutoencoder(width=4, features=8, architecture="topk", k=2)
        >>> active = found.encode(torch.randn(3, 5, 4))
        >>> active.shape, found.decode(active).shape, int((active > 0).sum(-1).max())
        (torch.Size([3, 5, 8]), torch.Size([3, 5, 4]), 2)
    """

    W_enc: Tensor  # (E, F)
    W_dec: Tensor  # (F, E)
    b_dec: Tensor  # (E,)
    b_enc: Tensor  # (F,), of all architectures except "gated"
    threshold: Tensor  # (F,), of "jumprelu"
    b_gate: Tensor  # (F,), of "gated", as are r_mag and b_mag
    r_mag: Tensor
    b_mag: Tensor

    def __init__(
        self,
        width: int,
        features: int,
        architecture: str = "standard",
        *,
        k: int | None = None,
        layer: str = "",
        apply_b_dec_to_input: bool = True,
        rescale_acts_by_decoder_norm: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if architecture not in ARCHITECTURES:
            raise OptionError(
                f"architecture={architecture!r} is not known. Use one of {ARCHITECTURES}."
            )
        of_topk = architecture == "topk"
        if of_topk and (k is None or not 1 <= k <= features):
            raise OptionError(
                f"k={k} is not accepted with {features} features. Pass k from 1 to {features}."
            )
        if not of_topk and (k is not None or rescale_acts_by_decoder_norm):
            raise OptionError(
                f"k={k}, rescale_acts_by_decoder_norm={rescale_acts_by_decoder_norm}: "
                f"architecture={architecture!r} has no such options. Leave them out, or pass "
                "architecture='topk'."
            )
        self.architecture, self.k, self.layer = architecture, k, layer
        self.apply_b_dec_to_input = apply_b_dec_to_input
        self.rescale_acts_by_decoder_norm = rescale_acts_by_decoder_norm
        self.metadata = dict(metadata or {})

        rows = F.normalize(torch.randn(features, width), dim=-1)
        self.W_enc, self.W_dec = nn.Parameter(rows.T.clone()), nn.Parameter(rows)
        self.b_dec = nn.Parameter(torch.zeros(width))
        for name in _BIASES[architecture]:
            setattr(self, name, nn.Parameter(torch.zeros(features)))

    @property
    def width(self) -> int:
        """The size E of the vectors."""
        return self.W_dec.shape[1]

    @property
    def features(self) -> int:
        """The number F of features."""
        return self.W_dec.shape[0]

    def encode(self, x: Tensor) -> Tensor:
        """Return the features' activations (..., F), at least 0, for vectors ``x`` (..., E)."""
        x = x.to(self.W_enc.dtype)
        projected = (x - self.b_dec if self.apply_b_dec_to_input else x) @ self.W_enc
        if self.architecture == "gated":
            active = projected + self.b_gate > 0
            return (projected * self.r_mag.exp() + self.b_mag).relu() * active
        preactivations = projected + self.b_enc  # (..., F)
        if self.architecture == "jumprelu":
            return preactivations.relu() * (preactivations > self.threshold)
        if self.k is None:
            return preactivations.relu()
        if self.rescale_acts_by_decoder_norm:
            preactivations = preactivations * self.W_dec.norm(dim=-1)
        largest = preactivations.topk(self.k, dim=-1).indices
        return preactivations.relu() * torch.zeros_like(preactivations).scatter(-1, largest, 1)

    def decode(self, features: Tensor) -> Tensor:
        """Return the vectors (..., E) for the activations ``features`` (..., F)."""
        if self.rescale_acts_by_decoder_norm:
            features = features / self.W_dec.norm(dim=-1)
        return features @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Encode and decode ``x``, (..., E)."""
        return self.decode(self.encode(x))

    def extra_repr(self) -> str:
        k = "" if self.k is None else f", k={self.k}"
        of = f", of {self.layer}" if self.layer else ""
        return f"width={self.width}, features={self.features}, {self.architecture}{k}{of}"

    def save(self, folder: str | Path) -> None:
        """Write a folder that :meth:`load` and SAELens can read.

        Args:
            folder: the folder for ``cfg.json`` and ``sae_weights.safetensors``; created if missing.

        Raises:
            WriteError: when the folder cannot be written; existing files are then unchanged.
            ImportError: when safetensors is not installed.
        """
        safetensors = optional("safetensors.torch", '"captum-ssm[hf]"', "Saving a dictionary")
        weights = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
        settings: dict[str, Any] = {
            "architecture": self.architecture,
            "d_in": self.width,
            "d_sae": self.features,
            "dtype": str(self.W_enc.dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": self.apply_b_dec_to_input,
            "normalize_activations": "none",
            "reshape_activations": "none",
        }
        if self.k is not None:
            settings["k"] = self.k
            settings["rescale_acts_by_decoder_norm"] = self.rescale_acts_by_decoder_norm
        layer_key = "hf_hook_name" if self.metadata.get("hf_hook_name") else "hook_name"
        settings["metadata"] = {
            "sae_lens_version": _NESTED_FROM,  # without it the metadata are not read
            **self.metadata,
            layer_key: self.layer,
        }
        with filling(Path(folder)) as beside:
            write_whole(beside / WEIGHTS, safetensors.save(weights))
            write_whole(beside / CONFIG, json.dumps(settings, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, layer: str | None = None) -> SparseAutoencoder:
        """Load a dictionary from a folder of any version of SAELens.

        Args:
            folder: a folder with ``cfg.json`` and ``sae_weights.safetensors``.
            layer: name of the module whose output has these features, such as
                ``"backbone.layers.0"``. Default: None, the name in ``cfg.json``, which may be a
                name of TransformerLens.

        Returns:
            The dictionary, on the CPU.

        Raises:
            DataNotFoundError: when a file is missing.
            CheckpointError: when the architecture is unknown, a setting is not supported, or the
                weights do not fit the settings.
            ImportError: when safetensors is not installed.

        Example:
            >>> import tempfile
            >>> from captum_ssm.inside.dictionary import SparseAutoencoder
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     SparseAutoencoder(4, 8, "jumprelu", layer="backbone.layers.0").save(folder)
            ...     SparseAutoencoder.load(folder)
            SparseAutoencoder(width=4, features=8, jumprelu, of backbone.layers.0)
        """
        path = Path(folder) / CONFIG
        settings = _current_settings(read_json(path), path)
        _refuse_unknown(settings, path)
        dtype = _DTYPES.get(str(settings.get("dtype", "float32")).removeprefix("torch."))
        if dtype is None:
            raise _refusal(path, "dtype", settings["dtype"], f"one of {tuple(_DTYPES)} is")
        of_topk = settings["architecture"] == "topk"
        k = _positive_integer(settings, "k", path) if of_topk else None
        try:
            with torch.device("meta"):  # assign=True below replaces all parameters
                dictionary = cls(
                    _positive_integer(settings, "d_in", path),
                    _positive_integer(settings, "d_sae", path),
                    settings["architecture"],
                    k=k,
                    layer=layer or settings.get("hf_hook_name") or settings.get("hook_name") or "",
                    apply_b_dec_to_input=bool(settings.get("apply_b_dec_to_input", True)),
                    rescale_acts_by_decoder_norm=bool(
                        settings.get("rescale_acts_by_decoder_norm", False)
                    ),
                    metadata=settings["metadata"],
                )
        except OptionError as error:
            raise CheckpointError(f"{path} has settings that fit no dictionary: {error}") from None
        weights = read_safetensors(Path(folder) / WEIGHTS, "Loading a dictionary")
        try:
            dictionary.load_state_dict(_with_present_names(weights), strict=True, assign=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{Path(folder) / WEIGHTS} does not fit {CONFIG}: {error}. Save both files again."
            ) from None
        return dictionary.to(dtype).eval()


#: For each architecture, the names of the parameters with one scalar per feature.
_BIASES = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
}

#: Names of settings in earlier versions of SAELens, and the present names.
_EARLIER = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}

#: Settings that change the computation, and the values of each that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "architecture": ARCHITECTURES,
    "activation_fn": ("relu",),
    "normalize_activations": ("none", None, False),
    "reshape_activations": ("none", None),
    "finetuning_scaling_factor": (False, None),
    "hook_head_index": (None,),
}
#: Sentences that are added to the error for an unsupported setting.
_ADVICE = {
    "normalize_activations": " Multiply the weights by the scale, and save them again.",
    "hook_head_index": " Features of a single head cannot be used for a module's output.",
}


def _current_settings(content: object, path: Path) -> dict[str, Any]:
    """Return settings by their names in current SAELens, and ``"metadata"`` as one entry."""
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} contains a {type(content).__name__}. Pass a folder with settings in {CONFIG}."
        )
    present = {_EARLIER.get(name, name): value for name, value in content.items()}
    metadata = present.pop("metadata", None)
    if metadata is None:  # earlier versions have no section for metadata
        metadata = {name: present[name] for name in ("model_name", "hook_name") if name in present}
    settings = {**metadata, "architecture": "standard", **present, "metadata": metadata}
    if settings.get("activation_fn") == "topk":
        kwargs = settings.get("activation_fn_kwargs") or {}
        settings |= {"architecture": "topk", "activation_fn": "relu", "k": kwargs.get("k")}
    # without this setting, the hook's name decides
    if "reshape_activations" not in settings and "hook_z" in str(settings.get("hook_name")):
        settings["reshape_activations"] = "hook_z"
    return settings


def _refuse_unknown(settings: Mapping[str, Any], path: Path) -> None:
    """Raise if a setting has a value that changes the computation in an unsupported way."""
    for name, supported in _SUPPORTED.items():
        if name in settings and settings[name] not in supported:
            accepted = f"one of {supported} is" if len(supported) > 1 else f"{supported[0]!r} is"
            raise _refusal(path, name, settings[name], accepted, _ADVICE.get(name, ""))


def _refusal(
    path: Path, name: str, value: object, accepted: str, advice: str = ""
) -> CheckpointError:
    advice = advice or " Pass a folder with an accepted value."
    return CheckpointError(f"{path} has {name} = {value!r}; {accepted} accepted.{advice}")


def _positive_integer(settings: Mapping[str, Any], name: str, path: Path) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(path, name, value, "a number of 1 or more is")
    return value


def _with_present_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights from earlier versions of SAELens to the names of the parameters."""
    weights = dict(weights)
    if "log_threshold" in weights:
        weights["threshold"] = weights.pop("log_threshold").exp()
    # Some versions of SAELens write a scaling factor of 1 without using it.
    if "scaling_factor" in weights and bool((weights["scaling_factor"] == 1).all()):
        del weights["scaling_factor"]
    return weights
