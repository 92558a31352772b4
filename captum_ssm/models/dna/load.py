"""Load checkpoints of DNA models; all sizes are inferred from the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import build_model, layer_count, read_checkpoint, shape_of
from .caduceus import Caduceus
from .hyena import HyenaDNA
from .striped_hyena import LONG, StripedHyena

Weights = dict[str, Tensor]


def load_caduceus(path: str | Path, **options: Any) -> Caduceus:
    """Load a Caduceus checkpoint, Ph or PS, such as the official ones; nothing is downloaded.

    All sizes, ``rcps`` and ``fused`` are inferred from the weights. Set ``norm_epsilon``, and
    ``pool`` of a classifier, if they are not the defaults. The outputs of both reading directions
    are added, as in all released models.

    Args:
        path: a ``.safetensors`` file, or a torch file, whose code is not run.
        **options: arguments of :class:`~captum_ssm.models.Caduceus` that replace inferred values.

    Returns:
        The model in evaluation mode on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: when the weights do not fit a Caduceus; the message names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import Caduceus, load_caduceus
        >>> trained = Caduceus(d_model=16, n_layer=2).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(trained.state_dict(), Path(folder, "caduceus.pt"))
        ...     model = load_caduceus(Path(folder, "caduceus.pt"))
        >>> ids = torch.tensor([[7, 8, 9, 10]])
        >>> torch.equal(model(ids), trained(ids))
        True
    """
    weights = _with_prefix("caduceus.", read_checkpoint(Path(path)))
    return build_model(
        path, "a Caduceus", lambda: Caduceus(**(_caduceus_arguments(weights) | options)), weights
    )


def load_hyenadna(path: str | Path, **options: Any) -> HyenaDNA:
    """Load a HyenaDNA checkpoint, such as the official ones; nothing is downloaded.

    All sizes are inferred from the weights. The names of weights on the Hugging Face hub and in the
    first release are accepted. Set ``norm_epsilon``, and ``pool`` of a classifier, if they are not
    the defaults.

    Args:
        path: a ``.safetensors`` file, or a torch file, whose code is not run.
        **options: arguments of :class:`~captum_ssm.models.HyenaDNA` that replace inferred values.

    Returns:
        The model in evaluation mode on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: when the weights do not fit a HyenaDNA; the message names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import HyenaDNA, load_hyenadna
        >>> trained = HyenaDNA(d_model=16, l_max=32).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(trained.state_dict(), Path(folder, "hyenadna.pt"))
        ...     model = load_hyenadna(Path(folder, "hyenadna.pt"))
        >>> ids = torch.tensor([[7, 8, 9, 10]])
        >>> torch.equal(model(ids), trained(ids))
        True
    """
    weights = {_hub_name(key): w for key, w in read_checkpoint(Path(path)).items()}
    weights = _with_prefix("hyena.", weights)
    return build_model(
        path, "a HyenaDNA", lambda: HyenaDNA(**(_hyenadna_arguments(weights) | options)), weights
    )


def load_striped_hyena(path: str | Path, **options: Any) -> StripedHyena:
    """Load a StripedHyena 2 checkpoint, such as Evo 2; nothing is downloaded.

    All sizes are inferred from the weights. Set ``eps`` if it is not the default, and
    ``rotary_scaling``, the divisor of positions, for models of the longest sequences.

    Args:
        path: a ``.safetensors`` file, or a torch file, whose code is not run.
        **options: arguments of :class:`~captum_ssm.models.StripedHyena` that replace inferred ones.

    Returns:
        The model in evaluation mode on the CPU, in the dtypes of the file.

    Raises:
        CheckpointError: when the weights do not fit a StripedHyena 2; the message names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import StripedHyena, load_striped_hyena
        >>> trained = StripedHyena(("se", "li"), 16, heads=2, inner_mlp_size=24, se_groups=4,
        ...                        mr_groups=4).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(trained.state_dict(), Path(folder, "evo2.pt"))
        ...     model = load_striped_hyena(Path(folder, "evo2.pt"))
        >>> ids = torch.tensor([list(b"ACGT")])
        >>> torch.equal(model(ids), trained(ids))
        True
    """
    weights = read_checkpoint(Path(path))
    return build_model(
        path,
        "a StripedHyena",
        lambda: StripedHyena(**(_striped_arguments(weights) | options)),
        weights,
    )


def _with_prefix(prefix: str, weights: Weights) -> Weights:
    """Add a prefix to names that start with ``backbone.``, as in a model with a head."""
    return {prefix + key if key.startswith("backbone.") else key: w for key, w in weights.items()}


def _hub_name(key: str) -> str:
    """Convert a weight's name in the first release to the name on the Hugging Face hub."""
    key = key.removeprefix("model.")
    return key.replace(".mixer.layer.", ".mixer.").replace(".mlp.layer.", ".mlp.")


def _caduceus_arguments(weights: Weights) -> dict[str, Any]:
    """Infer the arguments of Caduceus from the names and shapes of weights."""

    def any_name_has(name: str) -> bool:
        return any(name in key for key in weights)

    embeddings = "caduceus.backbone.embeddings.word_embeddings."
    rcps = any_name_has(".mixer.submodule.")
    vocab, width = shape_of(weights, f"{embeddings}{'embedding.' if rcps else ''}weight", 2)
    mixer = f"caduceus.backbone.layers.0.mixer.{'submodule.' if rcps else ''}mamba_fwd."
    inner, state = shape_of(weights, f"{mixer}A_log", 2)
    arguments: dict[str, Any] = {
        "d_model": width,
        "n_layer": layer_count(weights, "caduceus.backbone.layers."),
        "vocab_size": vocab,
        "rcps": rcps,
        "num_classes": _class_count(weights),
        "fused": not any_name_has(".norm.submodule."),
        "rms_norm": not any_name_has("norm_f.bias") and not any_name_has("norm_f.submodule.bias"),
        "d_inner": inner,
        "d_state": state,
        "d_conv": shape_of(weights, f"{mixer}conv1d.weight", 3)[2],
        "dt_rank": shape_of(weights, f"{mixer}dt_proj.weight", 2)[1],
        "bias": any_name_has("in_proj.bias"),
        "conv_bias": any_name_has("conv1d.bias"),
    }
    if rcps:
        shape_of(weights, f"{embeddings}complement_map", 1)
        arguments["complements"] = weights[f"{embeddings}complement_map"].tolist()
    return arguments


def _hyenadna_arguments(weights: Weights) -> dict[str, Any]:
    """Infer the arguments of HyenaDNA from the names and shapes of weights."""
    embeddings = "hyena.backbone.embeddings.word_embeddings.weight"
    block = "hyena.backbone.layers.0."
    vocab, width = shape_of(weights, embeddings, 2)
    mixer, filters = f"{block}mixer.", f"{block}mixer.filter_fn."
    filter_weights = [key for key in weights if key.startswith(f"{filters}implicit_filter.")]
    linear_layers = sum(key.endswith(".weight") for key in filter_weights)
    head = weights.get("lm_head.weight")
    _, l_max, features = shape_of(weights, f"{filters}pos_emb.z", 3)
    return {
        "d_model": width,
        "n_layer": layer_count(weights, "hyena.backbone.layers."),
        "d_inner": shape_of(weights, f"{block}mlp.fc1.weight", 2)[0],
        "vocab_size": vocab,
        "l_max": l_max,
        "num_classes": _class_count(weights),
        "tie_embeddings": head is None or torch.equal(head, weights[embeddings]),
        # in_proj has order + 1 parts; an empty width is refused later
        "order": shape_of(weights, f"{mixer}in_proj.weight", 2)[0] // max(1, width) - 1,
        "short_filter_order": shape_of(weights, f"{mixer}short_filter.weight", 3)[2],
        "features": features,
        "filter_order": shape_of(weights, f"{filters}implicit_filter.0.weight", 2)[0],
        "inner": max(0, linear_layers - 2),  # without the first and the last
    }


def _striped_arguments(weights: Weights) -> dict[str, Any]:
    """Infer the arguments of StripedHyena from the names and shapes of weights."""
    vocab, width = shape_of(weights, "embedding_layer.weight", 2)
    arguments: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": vocab,
        "inner_mlp_size": shape_of(weights, "blocks.0.mlp.l1.weight", 2)[0],
        "heads": 1,
        "se_groups": 1,
        "mr_groups": 1,
    }
    layout = []
    for i in range(layer_count(weights, "blocks.")):
        block = f"blocks.{i}."
        if f"{block}inner_mha_cls.Wqkv.weight" in weights:
            layout.append("attention")
            frequencies = shape_of(weights, f"{block}inner_mha_cls.rotary_emb.inv_freq", 1)
            # a head has two channels per frequency
            arguments["heads"] = max(1, width // max(1, 2 * frequencies[0]))
            continue
        short_filter = shape_of(weights, f"{block}filter.short_filter_weight", 3)
        arguments["short_filter_length"] = short_filter[2]
        if f"{block}filter.h" in weights:
            groups, _, length = shape_of(weights, f"{block}filter.h", 3)
            kind = "mr" if length >= LONG else "se"
            arguments |= {f"{kind}_length": length, f"{kind}_groups": groups}
        else:
            kind = "li"
            arguments["state_size"] = shape_of(weights, f"{block}filter.residues", 2)[1]
        layout.append(kind)
    return {"layout": layout, **arguments}


def _class_count(weights: Weights) -> int | None:
    """Return the number of a classifier's classes; None for a language model."""
    return shape_of(weights, "score.weight", 2)[0] if "score.weight" in weights else None
