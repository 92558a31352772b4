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
from ..call.target_errors import shown

#: The baseline of one input: None, a scalar, ``"mean"``, embeddings or ids.
Baseline = None | float | Literal["mean"] | Tensor
#: One baseline, or a tuple with one baseline for each of several inputs.
Baselines = Baseline | tuple[Baseline, ...]


def out_of_tuple(baselines: Baselines) -> Baselines:
    """Unwrap a tuple with one baseline; return all other values unchanged."""
    if isinstance(baselines, tuple) and len(baselines) == 1:
        return baselines[0]
    return baselines


def one_each(baselines: Baselines, inputs: int) -> Sequence[Any]:
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
        None if each is None else _expanded(each, other.detach(), f"inputs[{number}]", "None")
        for number, (each, other) in enumerate(zip(baselines, network.mode.others, strict=True), 1)
    ]


def baselines_of(network: Network, baselines: Baselines) -> list[Tensor]:
    """Return a baseline per root, a tensor where the linear network begins; no baseline means 0."""
    roots = [x.detach() for x in network.roots]
    if baselines is None:
        return []
    inner = network.begins is not None
    if isinstance(baselines, str):
        checks.choice("baselines", baselines, ("mean",))
        return [_mean(network, root) for root in roots]
    looked_up = isinstance(baselines, Tensor) and not baselines.is_floating_point()
    if isinstance(baselines, Tensor) and looked_up and baselines.dim() > 1 and not inner:
        return network.mode.looked_up(baselines)
    if len(roots) > 1:
        raise OptionError(
            f"baselines must be 'mean' or token ids, because the model looks up the token ids in "
            f"{len(roots)} embedding tables (such as an adapter's). Got {shown(baselines)}. Pass "
            "baselines='mean', or token ids."
        )
    what, words, ids = "a layer", "None, 'mean'", ""
    if not inner:
        what, ids = "embeddings", ", token ids (if inputs are ids)"
    return [_expanded(baselines, roots[0], what, words, ids)]


def _expanded(found: Any, start: Tensor, what: str, words: str, ids: str = "") -> Tensor:
    """Expand a scalar or a tensor to a baseline in the shape of the input ``start``.

    In the error, ``what`` names the input; ``words`` and ``ids`` are further accepted forms.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        baseline = torch.as_tensor(found).to(start).expand_as(start)
        if not isinstance(found, bool) and bool(baseline.isfinite().all()):
            return baseline
    got = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise OptionError(
        f"baselines={got} cannot replace {what} of shape {tuple(start.shape)}. Pass {words}, "
        f"a finite number{ids}, or a tensor of that shape."
    )


def _mean(network: Network, root: Tensor) -> Tensor:
    """Return each example's mean, repeated to the shape of ``root``.

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
        first = 1 if root.dim() < 4 else 2  # an image keeps its channels
        return root.mean(tuple(range(first, root.dim())), keepdim=True).expand_as(root)
    keep = root.new_ones(root.shape[:2])
    if mask is not None and mask.shape == root.shape[:2]:
        keep = mask.to(root)
    each = root.flatten(2)
    total = keep.sum(1).clamp_min(1)[:, None, None]
    mean = (each * keep[..., None]).sum(1, keepdim=True) / total
    return mean.expand_as(each).view_as(root)
