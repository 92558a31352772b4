"""Dictionaries of features, whose sums approximate a layer's output.

Any class with the two functions of :class:`~captum_ssm.inside.Dictionary` will do.
:class:`SparseAutoencoder` is one, and reads and writes the folders of SAELens.
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

#: The kinds of encoders: which of the features are written down, and how large.
ARCHITECTURES = ("standard", "topk", "jumprelu", "gated")

#: The files of a folder.
CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
#: From this version on, facts about the model have their own section.
_NESTED_FROM = "6.0.0"


class SparseAutoencoder(nn.Module):
    """Features as rows of a matrix, few of them active at once.

    ====================  =====================================================================
    ``"standard"``        ``relu(b)``, where ``b = (x - b_dec) @ W_enc + b_enc``
    ``"topk"``            ``relu(b)`` of the ``k`` largest, 0 of all others
    ``"jumprelu"``        ``relu(b)`` where ``b > threshold``, 0 elsewhere
    ``"gated"``           ``relu(p * exp(r_mag) + b_mag)`` where ``p + b_gate > 0``, 0 elsewhere,
                          with ``p = (x - b_dec) @ W_enc``
    ====================  =====================================================================

    and decoded they are ``f @ W_dec + b_dec``.

    Args:
        width: E, of the vectors.
        features: F, their number.
        architecture: one of the above. Default: ``"standard"``.
        k: the most active features, for ``"topk"`` only. Default: None.
        layer: name of the module whose output has these features. Default: ``""``, not known.
        apply_b_dec_to_input: whether ``b_dec`` is subtracted from ``x``, as above. Default: True.
        rescale_acts_by_decoder_norm: for ``"topk"`` only, measure each feature as if its row of
            ``W_dec`` had norm one. Default: False.
        metadata: further facts about their origin, saved with them. Default: None, nothing.

    Raises:
        OptionError: when the arguments do not fit each other.

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
    b_enc: Tensor  # (F,), of all but "gated"
    threshold: Tensor  # (F,), of "jumprelu"
    b_gate: Tensor  # (F,), of "gated", as are the next
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
            raise OptionError(f"k={k}: of {features} features, 1 to {features} can be active.")
        if not of_topk and (k is not None or rescale_acts_by_decoder_norm):
            raise OptionError(
                f"architecture={architecture!r} has k={k}, rescale_acts_by_decoder_norm="
                f"{rescale_acts_by_decoder_norm}: these are of 'topk' alone. Leave them out."
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
        """E, of the vectors."""
        return self.W_dec.shape[1]

    @property
    def features(self) -> int:
        """F, how many there are."""
        return self.W_dec.shape[0]

    def encode(self, x: Tensor) -> Tensor:
        """Return the features (..., F), none of them negative, of vectors ``x`` (..., E)."""
        x = x.to(self.W_enc.dtype)
        projected = (x - self.b_dec if self.apply_b_dec_to_input else x) @ self.W_enc
        if self.architecture == "gated":
            active = projected + self.b_gate > 0
            return (projected * self.r_mag.exp() + self.b_mag).relu() * active
        before = projected + self.b_enc  # (..., F)
        if self.architecture == "jumprelu":
            return before.relu() * (before > self.threshold)
        if self.k is None:
            return before.relu()
        if self.rescale_acts_by_decoder_norm:
            before = before * self.W_dec.norm(dim=-1)
        largest = before.topk(self.k, dim=-1).indices
        return before.relu() * torch.zeros_like(before).scatter(-1, largest, 1)

    def decode(self, features: Tensor) -> Tensor:
        """Return the vectors (..., E) that ``features`` (..., F) stand for."""
        if self.rescale_acts_by_decoder_norm:
            features = features / self.W_dec.norm(dim=-1)
        return features @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Encode ``x`` and decode it again, (..., E)."""
        return self.decode(self.encode(x))

    def extra_repr(self) -> str:
        k = "" if self.k is None else f", k={self.k}"
        of = f", of {self.layer}" if self.layer else ""
        return f"width={self.width}, features={self.features}, {self.architecture}{k}{of}"

    def save(self, folder: str | Path) -> None:
        """Write a folder that :meth:`load` and SAELens read.

        Args:
            folder: the folder of ``cfg.json`` and ``sae_weights.safetensors``; created if missing.

        Raises:
            WriteError: when it cannot be written; old files are then unchanged.
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
        named = "hf_hook_name" if self.metadata.get("hf_hook_name") else "hook_name"
        settings["metadata"] = {
            "sae_lens_version": _NESTED_FROM,  # without it the metadata are not read
            **self.metadata,
            named: self.layer,
        }
        with filling(Path(folder)) as beside:
            write_whole(beside / WEIGHTS, safetensors.save(weights))
            write_whole(beside / CONFIG, json.dumps(settings, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, layer: str | None = None) -> SparseAutoencoder:
        """Read a folder of SAELens, of any version.

        Args:
            folder: holds ``cfg.json`` and ``sae_weights.safetensors``.
            layer: name of the module whose output has these features, such as
                ``"backbone.layers.0"``. Default: None, the folder's name, which may be a name of
                TransformerLens.

        Returns:
            The dictionary, on the CPU.

        Raises:
            DataNotFoundError: when a file is missing.
            CheckpointError: when the kind is unknown, the folder does not define how vectors are
                changed before encoding, or weights do not fit.
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
        settings = _flat(read_json(path), path)
        _refuse_unknown(settings, path)
        dtype = _DTYPES.get(str(settings.get("dtype", "float32")).removeprefix("torch."))
        if dtype is None:
            raise _refusal(path, "dtype", settings["dtype"], f"one of {tuple(_DTYPES)} is")
        try:
            with torch.device("meta"):
                made = cls(
                    _count(settings, "d_in", path),
                    _count(settings, "d_sae", path),
                    settings["architecture"],
                    k=_count(settings, "k", path) if settings["architecture"] == "topk" else None,
                    layer=layer or settings.get("hf_hook_name") or settings.get("hook_name") or "",
                    apply_b_dec_to_input=bool(settings.get("apply_b_dec_to_input", True)),
                    rescale_acts_by_decoder_norm=bool(
                        settings.get("rescale_acts_by_decoder_norm", False)
                    ),
                    metadata=settings["metadata"],
                )
        except OptionError as error:
            raise CheckpointError(f"{path} makes no dictionary: {error}") from None
        weights = read_safetensors(Path(folder) / WEIGHTS, "Loading a dictionary")
        try:
            made.load_state_dict(_renamed(weights), strict=True, assign=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{Path(folder) / WEIGHTS} does not fit {CONFIG}: {error}"
            ) from None
        return made.to(dtype).eval()


#: The parameters that have one number per feature, by architecture.
_BIASES = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
}

#: Names of earlier versions, with the present ones.
_EARLIER = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}

#: Settings that change the computation, with the supported values.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "architecture": ARCHITECTURES,
    "activation_fn": ("relu",),
    "normalize_activations": ("none", None, False),
    "reshape_activations": ("none", None),
    "finetuning_scaling_factor": (False, None),
    "hook_head_index": (None,),
}
#: Advice for some unsupported values.
_ADVICE = {
    "normalize_activations": " Fold the scale into the weights, and save them again.",
    "hook_head_index": " Features of single heads are not those of a module's output.",
}


def _flat(found: object, path: Path) -> dict[str, Any]:
    """Return the settings of any version by present names, the metadata among them and apart."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not settings by name.")
    named = {_EARLIER.get(name, name): value for name, value in found.items()}
    metadata = named.pop("metadata", None)
    if metadata is None:  # earlier versions have a single list, the training's settings included
        metadata = {name: named[name] for name in ("model_name", "hook_name") if name in named}
    settings = {**metadata, "architecture": "standard", **named, "metadata": metadata}
    if settings.get("activation_fn") == "topk":
        kwargs = settings.get("activation_fn_kwargs") or {}
        settings |= {"architecture": "topk", "activation_fn": "relu", "k": kwargs.get("k")}
    if "reshape_activations" not in settings and "hook_z" in str(settings.get("hook_name")):
        settings["reshape_activations"] = "hook_z"
    return settings


def _refuse_unknown(settings: Mapping[str, Any], path: Path) -> None:
    for name, supported in _SUPPORTED.items():
        if name in settings and settings[name] not in supported:
            accepted = f"one of {supported} is" if len(supported) > 1 else f"{supported[0]!r} is"
            raise _refusal(path, name, settings[name], accepted, _ADVICE.get(name, ""))


def _refusal(
    path: Path, name: str, value: object, accepted: str, advice: str = ""
) -> CheckpointError:
    return CheckpointError(f"{path} has {name} = {value!r}; {accepted} accepted.{advice}")


def _count(settings: Mapping[str, Any], name: str, path: Path) -> int:
    found = settings.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _refusal(path, name, found, "a number of 1 or more is")
    return found


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by their present names."""
    weights = dict(weights)
    if "log_threshold" in weights:
        weights["threshold"] = weights.pop("log_threshold").exp()
    # For a while it was written without being used.
    if "scaling_factor" in weights and bool((weights["scaling_factor"] == 1).all()):
        del weights["scaling_factor"]
    return weights
