"""Baselines: the reference inputs that are subtracted from the inputs, in all accepted forms."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import OptionError
from ...linear import Network
from ..call import checks
from ..call.target_errors import format_target

#: The baseline of one input: None, a scalar, ``"mean"``, embeddings or ids.
Baseline = None | float | Literal["mean"] | Tensor
#: One baseline, or a tuple with one baseline for each of several inputs.
Baselines = Baseline | tuple[Baseline, ...]


def out_of_tuple(baselines: Baselines) -> Baselines:
    """Unwrap a tuple with one baseline; return all other values unchanged."""
    if isinstance(baselines, tuple) and len(baselines) == 1:
        return baselines[0]
    return baselines


def one_per_input(baselines: Baselines, inputs: int) -> Sequence[Any]:
    """Return a list with one baseline per input; raise if the user passed fewer or more."""
    if inputs == 1 or baselines is None:
        return [baselines, *[None] * (inputs - 1)]
    if not isinstance(baselines, tuple) or len(baselines) != inputs:
        got = f"holds {len(baselines)}" if isinstance(baselines, tuple) else f"is {baselines!r}"
        raise OptionError(
            f"baselines {got}, but inputs holds {inputs} tensors. Pass a tuple of {inputs} "
            "baselines, with None for each default."
        )
    return baselines


def baselines_of_others(network: Network, baselines: Sequence[Baseline]) -> list[Tensor | None]:
    """Return the baseline of each input after the first, in that input's shape; None for 0."""
    return [
        None if baseline is None else _expanded(baseline, x.detach(), f"inputs[{i}]", "None")
        for i, (baseline, x) in enumerate(zip(baselines, network.mode.others, strict=True), 1)
    ]


def baselines_of(network: Network, baselines: Baselines) -> list[Tensor]:
    """Return one baseline per root, in the root's shape; an empty list means 0 everywhere."""
    roots = [x.detach() for x in network.roots]
    if baselines is None:
        return []
    starts_at_layer = network.begins is not None
    if isinstance(baselines, str):
        checks.choice("baselines", baselines, ("mean",))
        return [_mean(network, root) for root in roots]
    is_integer = isinstance(baselines, Tensor) and not baselines.is_floating_point()
    if isinstance(baselines, Tensor) and is_integer and baselines.dim() > 1 and not starts_at_layer:
        return network.mode.looked_up(baselines)  # token ids: their embeddings in every table
    if len(roots) > 1:  # a number or embeddings would not fit every table
        raise OptionError(
            f"baselines must be 'mean' or token ids, because the model looks up the token ids in "
            f"{len(roots)} embedding tables (such as an adapter's). Got "
            f"{format_target(baselines)}. Pass baselines='mean', or token ids."
        )
    name, accepted, ids = "a layer", "None, 'mean'", ""
    if not starts_at_layer:
        name, ids = "embeddings", ", token ids (if inputs are ids)"
    return [_expanded(baselines, roots[0], name, accepted, ids)]


def _expanded(baseline: Any, like: Tensor, name: str, accepted: str, ids: str = "") -> Tensor:
    """Expand a baseline (a scalar or tensor) to the shape of the tensor that it replaces, ``like``.

    In the error, ``name`` is that tensor; ``accepted`` and ``ids`` are further accepted forms.
    """
    # a value that cannot be converted is refused below, like one that is not finite
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        expanded = torch.as_tensor(baseline).to(like).expand_as(like)
        # torch converts True to 1, but a flag was surely not meant as a baseline
        if not isinstance(baseline, bool) and bool(expanded.isfinite().all()):
            return expanded
    got = f"a tensor {tuple(baseline.shape)}" if isinstance(baseline, Tensor) else repr(baseline)
    raise OptionError(
        f"baselines={got} cannot replace {name} of shape {tuple(like.shape)}. Pass {accepted}, "
        f"a finite number{ids}, or a tensor of that shape."
    )


def _mean(network: Network, root: Tensor) -> Tensor:
    """Return each example's mean, expanded to the shape of ``root``.

    It is the mean over unpadded tokens for (B, L, E), or (B, L, H, P) of heads; over pixels for
    (B, C, H, W); over all values for (B, F).
    """
    site, mask = network.begins, network.mask
    in_heads = site is not None and site.at == "heads"
    if root.dim() != 3 and not in_heads:
        if site is not None:
            raise OptionError(
                "baselines='mean', the default of some rules, is a mean over tokens and needs a "
                f"layer of shape (B, L, E), but layer {site.name!r} has shape "
                f"{tuple(root.shape)}. Pass a number, or a tensor of that shape."
            )
        first_dim = 1 if root.dim() < 4 else 2  # an image keeps its channels
        return root.mean(tuple(range(first_dim, root.dim())), keepdim=True).expand_as(root)
    keep = root.new_ones(root.shape[:2])  # the weight of each token in the mean, 0 for padding
    if mask is not None and mask.shape == root.shape[:2]:
        keep = mask.to(root)
    features = root.flatten(2)
    count = keep.sum(1).clamp_min(1)[:, None, None]
    mean = (features * keep[..., None]).sum(1, keepdim=True) / count
    return mean.expand_as(features).view_as(root)
