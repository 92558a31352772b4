"""The methods as dense float64 matrices, one example at a time, straight from the papers.

Nothing here comes from the package: mixer inputs are caught by hooks of our own, every matrix is
formed entry by entry, gradients are those of a plain backward pass through a float64 copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.mamba import modeling_mamba
from zoo.small import mixers_of

import oracles

S6 = {"scan"}
UNIFIED = {"conv", "activation", "scan", "gate", "norm"}
EXACT = UNIFIED | {"skip"}


def double(model: nn.Module) -> Any:
    return copy.deepcopy(model).double().eval()


@contextmanager
def scans_in_double() -> Iterator[None]:
    """Transformers' scan rounds some of its float64 terms to float32; this one does not."""

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Any:
        dt = F.softplus(dt + options["delta_bias"].to(dt)[:, None])
        state, out = torch.zeros(len(x), *a.shape).to(x), []
        for t in range(x.shape[-1]):
            step = dt[:, :, t, None]
            state = (step * a).exp() * state + step * b[:, None, :, t] * x[:, :, t, None]
            out.append((state * c[:, None, :, t]).sum(-1))
        y = torch.stack(out, dim=-1) + options["D"].to(x)[:, None] * x
        y = y * F.silu(options["z"])
        return (y, state) if options["return_last_state"] else y

    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_mamba, modeling_falcon_mamba):
            patch.setattr(module, "mamba_selective_scan", scan)
        yield


class Run:
    """One forward run: mixer inputs, mixer outputs, block inputs and the model's output.

    With ``select`` (output to one number per example) also its gradients with respect to
    mixer outputs and block inputs.
    """

    def __init__(
        self, model: nn.Module, *args: Any, select: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.model = model
        self.mixers = mixers_of(model)
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.streams: list[Tensor] = []
        handles = []
        for block in [m for m in model.modules() if any(c in self.mixers for c in m.children())]:
            handles.append(block.register_forward_pre_hook(self._keep_stream, with_kwargs=True))
        for mixer in self.mixers:
            handles.append(mixer.register_forward_hook(self._keep, with_kwargs=True))
        in_double = next(model.parameters()).dtype == torch.float64
        try:
            with torch.enable_grad(), scans_in_double() if in_double else nullcontext():
                output = model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self.output = getattr(output, "logits", output)
        if select is not None:
            wanted = [*self.outputs, *self.streams]
            with torch.enable_grad():
                found = torch.autograd.grad(select(self.output).sum(), wanted)
            self.output_gradients = [g.double() for g in found[: len(self.outputs)]]
            self.stream_gradients = [g.double() for g in found[len(self.outputs) :]]

    def _keep_stream(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        if not stream.requires_grad:
            stream.requires_grad_()
        self.streams.append(stream)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.inputs.append((args[0] if args else kwargs["hidden_states"]).detach())
        self.outputs.append(output)

    def alphas(
        self,
        components: Collection[str] = UNIFIED,
        mask: Tensor | None = None,
        reduce: Callable[[Tensor], Tensor] = lambda alpha: alpha.mean(1),
        heads: list[int] | None = None,
    ) -> list[Tensor]:
        """One matrix (B, L, L) per layer: the channels (dimension 1) reduced by ``reduce``."""
        found = []
        for mixer, hidden in zip(self.mixers, self.inputs, strict=True):
            alpha = channel_matrices(mixer, hidden, components, mask)
            found.append(reduce(alpha if heads is None else alpha[:, heads]))
        return found


def channel_matrices(
    mixer: Any, hidden: Tensor, components: Collection[str], mask: Tensor | None = None
) -> Tensor:
    """alpha of every channel, (B, C, L, L): gate . (scan + skip) . mask . act . conv . mask."""
    return oracles.alpha(oracles.mamba1_parts(mixer, hidden, mask), components)


def rollout(matrices: list[Tensor]) -> Tensor:
    """The product of (B, L, L) matrices, later layers on the left."""
    product = torch.eye(matrices[0].shape[-1]).double().expand_as(matrices[0])
    for matrix in matrices:
        product = matrix @ product
    return product


def add_identity(alpha: Tensor, normalize_rows: bool = False) -> Tensor:
    total = torch.eye(alpha.shape[-1]).double() + alpha
    return total / total.sum(-1, keepdim=True) if normalize_rows else total


def query_row(matrix: Tensor, query: Tensor | int) -> Tensor:
    """Row ``query`` (an int, or one per example) of (B, L, L)."""
    query = torch.as_tensor(query).expand(len(matrix))
    return torch.stack([matrix[b, q] for b, q in enumerate(query)])


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda alpha: alpha.sum(1) / alpha.shape[1],
    "max": lambda alpha: alpha.max(1).values,
    "min": lambda alpha: alpha.min(1).values,
    "product": lambda alpha: alpha.cumprod(1)[:, -1],
}


def mean_of_largest(alpha: Tensor, dropped: int) -> Tensor:
    """The mean over channels after dropping so many of the smallest, entry by entry."""
    return alpha.sort(1).values[:, dropped:].mean(1)


def min_max(x: Tensor) -> Tensor:
    """(x - min) / (max - min) over all entries; zero where all are equal."""
    span = x.max() - x.min()
    return (x - x.min()) / span if span > 0 else torch.zeros_like(x)


def error(found: Tensor, expected: Tensor) -> float:
    """max|a - b| / max|b|; 0 for zeros that are found to be zeros."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double(), expected.detach().double()
    size = expected.abs().max()
    return float((found - expected).abs().max() / size.where(size > 0, 1))
