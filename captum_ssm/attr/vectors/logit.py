"""Contributions along direct paths, which bypass all later mixers, traced to input tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InputError
from ...linear import Local
from ...operators.kernels.truths import are_noted, may_hold_any, nonzero_range
from ...tracing import Layer
from ..call.progress import shown
from ..engine.decompose import account
from ..engine.fold import stages
from ..engine.result import NamedTokens, Names
from ..engine.run import Question, Run
from .contributions import Contributions
from .shares import AltiShares, ProjectionShares


class TokenShares(Protocol):
    """The mixing matrix of one or more parallel layers: each input token's share in each output."""

    def rmatvec(self, row: Tensor, within: range | None = None) -> Tensor:
        """Return rows (..., B, L) times the mixing matrix, in which each row sums to 1.

        Args:
            row: the rows, with one weight per output token.
            within: a range of tokens that includes all nonzero entries. Default: None, not known.
        """


MakeShares = Callable[[Sequence[Layer], Run, str], TokenShares]

#: Functions that return a mixing matrix for parallel layers, a run and an activation rule.
MIXINGS: dict[str, MakeShares] = {
    "alti": lambda stage, run, activation: AltiShares(
        stage, run.streams, activation=activation, mask=run.mask
    ),
    "projection": lambda stage, run, activation: ProjectionShares(
        stage, run.streams, activation=activation
    ),
}


@dataclass(frozen=True, eq=False)
class LogitContributions(NamedTokens):
    """Contributions of input tokens to one scalar of the output, by layer.

    Attributes:
        layers: contributions through each of the Λ mixers (Λ, B, L); with ``by_layer=False`` the
            sum over all layers (1, B, L).
        locals: contributions through each of the M modules that act within tokens, such as an MLP,
            (M, B, L); with ``by_layer=False`` (0, B, L), because ``layers`` includes them.
        embedding: contributions of the embeddings without any layer (B, L).
        biases: contributions of biases and other constants (B,), by the module that adds them.
        output: the explained value (B,).
        names: names of each example's tokens, shown in the HTML page. Default: None, positions.
    """

    layers: Tensor
    locals: Tensor
    embedding: Tensor
    biases: dict[str, Tensor]
    output: Tensor
    names: Names | None = None

    @property
    def tokens(self) -> Tensor:
        """Contribution of each token (B, L), the sum over layers, local modules and embedding."""
        return self.layers.sum(0) + self.locals.sum(0) + self.embedding

    @property
    def bias(self) -> Tensor:
        """Contribution of all constants, (B,)."""
        return sum(self.biases.values(), torch.zeros_like(self.output))

    @property
    def delta(self) -> Tensor:
        """output - tokens - biases (B,), 0 up to rounding if the activation is linearized."""
        return self.output - self.tokens.sum(-1) - self.bias

    def _columns(self) -> dict[str, Tensor]:
        return {"relevance": self.tokens}

    def _tokens(self) -> tuple[int, int]:
        return self.embedding.shape[0], self.embedding.shape[1]


def contributions_to(
    run: Run, activation: str, make_shares: MakeShares, *, by_layer: bool
) -> list[LogitContributions]:
    """Decompose the value of each target of a run; each mixing matrix is computed once.

    From last to first layer, add the direct contribution of the tokens that a layer reads, and
    trace all contributions so far back through earlier layers with their mixing matrices.

    Args:
        run: the run, with its targets.
        activation: see :class:`~captum_ssm.attr.vectors.contributions.Contributions`.
        make_shares: one of :data:`MIXINGS`.
        by_layer: whether the contributions of layers are traced back separately, or as one sum.
    """
    assert run.paths is not None
    layers, locals_ = run.layers, run.paths.locals
    # a row per layer and then per module within tokens; or one row, the sum of all
    first_local = len(layers) if by_layer else 1
    row_count = first_local + len(locals_) if by_layer else 1
    passes = [_run_direct_pass(run, question) for question in run.questions]
    like = passes[0].embedding
    rows = like.new_zeros(len(passes), row_count, *like.shape)
    # (mixers before the module, index) of modules within tokens, of which the last is added first
    pending = sorted((local.mixers, i) for i, local in enumerate(locals_))
    within = _directly_reached(layers, passes) if are_noted(like) else None

    # is_zero: no contribution was added yet; is_unmixed: rows are nonzero only in `within`
    is_zero = is_unmixed = True

    def add_locals(mixers_before: int) -> None:
        """Add contributions of modules, such as MLPs, after at least ``mixers_before`` mixers."""
        nonlocal is_zero
        while pending and pending[-1][0] >= mixers_before:
            _, i = pending.pop()
            is_zero = False
            for row, direct in zip(rows, passes, strict=True):
                row[first_local + i if by_layer else 0] += direct.locals[i].to(row.device)

    with torch.no_grad():
        for stage in shown(stages(layers)[::-1]):
            first = layers.index(stage[0])
            rows = rows.to(stage[-1].values)  # the layers may be on several devices
            add_locals(first + 1)  # modules behind this stage, which carries them back
            if not is_zero and may_hold_any(rows):
                mixing = make_shares(stage, run, activation)
                rows = mixing.rmatvec(rows, within if is_unmixed else None)
            for i, layer in enumerate(stage, first):  # own terms, after rows went through the stage
                rows[:, i if by_layer else 0] += _layer_terms(layer, activation, passes, i, within)
                is_zero = is_unmixed = False
        add_locals(0)
    rows = rows.to(like.device)
    return [
        LogitContributions(
            row[:first_local], row[first_local:], direct.embedding, direct.biases, direct.output
        )
        for row, direct in zip(rows, passes, strict=True)
    ]


def _directly_reached(layers: Sequence[Layer], passes: Sequence[_DirectPass]) -> range:
    """Return a range of tokens that includes all nonzero contributions along direct paths."""
    masks = [x.ne(0) for direct in passes for x in direct.locals]
    masks += [
        layer.in_order(gradient).ne(0).any(-1)
        for direct in passes
        for layer, gradient in zip(layers, direct.gradients, strict=True)
    ]
    return nonzero_range(torch.stack([x.to(masks[0].device) for x in masks]))


def _layer_terms(
    layer: Layer, activation: str, passes: Sequence[_DirectPass], index: int, within: range | None
) -> Tensor:
    """Return contributions through layer ``index`` to the T targets of ``passes``, (T, B, L).

    They are <T_i(x_j), gradient at i>, summed over i, with the gradient along direct paths. The
    contribution of the layer's constant is added to ``biases`` of each pass, in place.
    """
    shares = Contributions(layer, activation, hooks=False)  # the direct path has the hooks
    constant = shares.constant()
    by_target = []
    for direct in passes:
        direction = layer.in_order(direct.gradients[index]).to(shares.weight)
        by_target.append(shares.toward(direction, within))
        bias = (direction * constant).flatten(1).sum(1).to(direct.output.device)
        direct.biases[layer.name] = direct.biases.get(layer.name, 0) + bias
    return torch.stack(by_target)


@dataclass(frozen=True, eq=False)
class _DirectPass:
    """The results of one backward pass along the direct paths, which bypass later mixers.

    Attributes:
        gradients: gradients of the explained value at each mixer's output, (B, L, E) each.
        locals: contributions of each module within tokens, such as an MLP, (B, L) each.
        embedding: contribution of the residual stream entering the first block, (B, L).
        biases: contributions of constants (B,), by the name of the module that adds them.
        output: the explained value (B,).
    """

    gradients: Sequence[Tensor]
    locals: Sequence[Tensor]
    embedding: Tensor
    biases: dict[str, Tensor]
    output: Tensor


def _run_direct_pass(run: Run, question: Question) -> _DirectPass:
    """Run one target's backward pass along direct paths, and return the results of this pass."""
    paths, layers = run.paths, run.layers
    assert paths is not None and question.selected is not None
    if any(layer.map is not None for layer in layers):
        raise InputError(
            "The model's mixers act on windows of 2-D maps that become coarser, so their tokens "
            "cannot be traced back to the input tokens. Use LatimFlow, which needs no such tracing."
        )
    modules = [*paths.locals, *paths.beginnings]
    gradients, biases = account(
        paths.mode,
        question.selected,
        question.constant,
        [*paths.outputs, *(module.output for module in modules)],
    )
    at_mixers, at_modules = gradients[: len(layers)], gradients[len(layers) :]
    by_token = [_direct_contribution(run, x, g) for x, g in zip(modules, at_modules, strict=True)]
    # the first modules are local ones, the others begin the residual stream
    locals_, value = by_token[: len(paths.locals)], question.selected.detach()
    embedding = torch.zeros_like(paths.outputs[0][..., 0], device=value.device)
    embedding = sum((x.to(value.device) for x in by_token[len(paths.locals) :]), embedding)
    return _DirectPass(at_mixers, locals_, embedding, biases, value)


def _direct_contribution(run: Run, module: Local, gradient: Tensor) -> Tensor:
    """Return a module's direct contribution for each first-layer token (B, L): gradient x output.

    Raise if it is not 0 and the module's tokens are not known to be the first layer's.
    """
    layers = run.layers
    batch, tokens = len(layers[0].output), layers[0].tokens
    added = gradient * module.output.detach()
    # on a GPU, do not wait for `any` if the shapes agree
    is_aligned = are_noted(added) and added.shape[:2] == (batch, tokens)
    if not is_aligned and not bool(added.any()):
        return added.new_zeros(batch, tokens)
    # examples and tokens may share a dimension
    by_token = added.reshape(batch, -1, added.shape[-1]).sum(-1)
    at_tokens = by_token
    if module.given is not None:
        given = module.given.to(by_token.device)  # index in the output, or -1 for none
        at_tokens = by_token.gather(1, given.clamp_min(0)) * (given >= 0)
    if at_tokens.shape[1] != tokens or not module.is_placed:
        raise InputError(
            f"A module of the model contributes at {by_token.shape[1]} tokens, but layer "
            f"{layers[0].name!r} has {tokens} tokens, and the map between them is not known. Use "
            "LatimFlow, which needs no such map."
        )
    return at_tokens
