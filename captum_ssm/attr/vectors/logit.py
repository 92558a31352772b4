"""What each input token adds to an output along the direct paths, traced back layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InputError
from ...linear import Local
from ...operators.kernels.truths import are_noted, may_hold_any, reached
from ...tracing import Layer
from ..engine.decompose import account
from ..engine.fold import shown, stages
from ..engine.result import NamedTokens, Names
from ..engine.run import Question, Run
from .contributions import Contributions
from .shares import AltiShares, ProjectionShares


class TokenShares(Protocol):
    """How the tokens behind a stage are made of those before it."""

    def rmatvec(self, row: Tensor, within: range | None = None) -> Tensor:
        """Rows (..., B, L) times the mixing, whose rows sum to 1.

        Args:
            row: the rows.
            within: tokens with all that are not 0 among them. Default: None, that is not known.
        """


MakeShares = Callable[[Sequence[Layer], Run, str], TokenShares]

#: How tokens are traced back through a stage: from the stage and the run.
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
    """What input tokens add to one number of the output, by the layer that wrote it.

    Attributes:
        layers: by mixer (Λ, B, L); where nobody asked by which, of all parts together (1, B, L).
        locals: by each part that acts within tokens, such as an MLP (M, B, L); where nobody asked
            by which, none (0, B, L).
        embedding: what the embeddings add by themselves (B, L).
        biases: what biases and other constants add (B,), by the module that adds them.
        output: the explained number (B,).
        names: of the tokens of each example, which its page shows. Default: None, positions.
    """

    layers: Tensor
    locals: Tensor
    embedding: Tensor
    biases: dict[str, Tensor]
    output: Tensor
    names: Names | None = None

    @property
    def tokens(self) -> Tensor:
        """What each token adds in all, (B, L)."""
        return self.layers.sum(0) + self.locals.sum(0) + self.embedding

    @property
    def bias(self) -> Tensor:
        """What all constants add, (B,)."""
        return sum(self.biases.values(), torch.zeros_like(self.output))

    @property
    def delta(self) -> Tensor:
        """output - tokens - biases (B,): 0, but for rounding, if the activation is linearised."""
        return self.output - self.tokens.sum(-1) - self.bias

    def _tokens(self) -> tuple[int, int]:
        return self.embedding.shape[0], self.embedding.shape[1]


def contributions_to(
    run: Run,
    activation: str,
    make: MakeShares,
    description: str | None,
    *,
    by_layer: bool,
) -> list[LogitContributions]:
    """Take apart each of the run's questions; what they have in common is made once.

    Args:
        run: the run.
        activation: see :class:`~captum_ssm.attr.vectors.contributions.Contributions`.
        make: one of :data:`MIXINGS`.
        description: of the progress bar; None for no bar.
        by_layer: whether to tell apart what each layer adds.  All of it is traced back through the
            layers before, which for a sum takes as long as for one of them.
    """
    assert run.paths is not None
    layers, locals_ = run.layers, run.paths.locals
    apart = len(layers) if by_layer else 1
    count = apart + len(locals_) if by_layer else 1
    asked = [_direct(run, question) for question in run.questions]
    like = asked[0].embedding
    rows = like.new_zeros(len(asked), count, *like.shape)
    # parts within tokens, by the last layer that they have read; the latest last
    pending = sorted((part.mixers, at) for at, part in enumerate(locals_))
    within = _directly_reached(layers, asked) if are_noted(like) else None

    is_zero = is_unmixed = True  # as long as nothing has entered the rows, and come through a stage

    def enter_locals(layers_read: int) -> None:
        nonlocal is_zero
        while pending and pending[-1][0] >= layers_read:
            _, part = pending.pop()
            is_zero = False
            for row, direct in zip(rows, asked, strict=True):
                row[apart + part if by_layer else 0] += direct.locals[part].to(row.device)

    with torch.no_grad():
        for stage in shown(stages(layers)[::-1], description or "", description is not None):
            first = layers.index(stage[0])
            rows = rows.to(stage[-1].values)  # of a model on several devices, where the layers are
            enter_locals(first + 1)
            if not is_zero and may_hold_any(rows):
                mixing = make(stage, run, activation)
                rows = mixing.rmatvec(rows, within if is_unmixed else None)
            for i, layer in enumerate(stage, first):
                rows[:, i if by_layer else 0] += _of_layer(layer, activation, asked, i, within)
                is_zero = is_unmixed = False
        enter_locals(0)
    rows = rows.to(like.device)
    return [
        LogitContributions(row[:apart], row[apart:], direct.embedding, direct.biases, direct.output)
        for row, direct in zip(rows, asked, strict=True)
    ]


def _directly_reached(layers: Sequence[Layer], asked: Sequence[_Direct]) -> range:
    """The tokens at which the direct paths pass what mixers and parts within tokens return."""
    some = [x.ne(0) for direct in asked for x in direct.locals]
    some += [
        layer.in_order(toward).ne(0).any(-1)
        for direct in asked
        for layer, toward in zip(layers, direct.toward, strict=True)
    ]
    return reached(torch.stack([x.to(some[0].device) for x in some]))


def _of_layer(
    layer: Layer, activation: str, asked: Sequence[_Direct], at: int, within: range | None
) -> Tensor:
    """What each token adds to each question through one layer, (T, B, L); notes its constants."""
    shares = Contributions(layer, activation, hooks=False)  # the direct path passes the hooks
    constant = shares.constant()
    found = []
    for direct in asked:
        direction = layer.in_order(direct.toward[at]).to(shares.weight)
        found.append(shares.toward(direction, within))
        added = (direction * constant).flatten(1).sum(1).to(direct.output.device)
        direct.biases[layer.name] = direct.biases.get(layer.name, 0) + added
    return torch.stack(found)


@dataclass(frozen=True, eq=False)
class _Direct:
    """One backward pass along the direct paths.

    Attributes:
        toward: the gradient of the output at what each mixer returned, (B, L, E) each.
        locals: what each part within tokens adds at its tokens, (B, L) each.
        embedding: what the stream entering the first block adds at its tokens, (B, L).
        biases: what constants add, (B,) by module.
        output: the explained number (B,).
    """

    toward: Sequence[Tensor]
    locals: Sequence[Tensor]
    embedding: Tensor
    biases: dict[str, Tensor]
    output: Tensor


def _direct(run: Run, question: Question) -> _Direct:
    paths, layers = run.paths, run.layers
    assert paths is not None and question.selected is not None
    if any(layer.map is not None for layer in layers):
        raise InputError(
            "The model's mixers act on windows of maps that become coarser, whose tokens cannot be "
            "traced back to those of the first. Use LatimFlow, which needs no tracing back."
        )
    parts = [*paths.locals, *paths.beginnings]
    gradients, biases = account(
        paths.mode.ledger,
        question.selected,
        question.constant,
        [*paths.outputs, *(part.output for part in parts)],
    )
    toward, given = gradients[: len(layers)], gradients[len(layers) :]
    added = [_by_token(run, part, gradient) for part, gradient in zip(parts, given, strict=True)]
    locals_, output = added[: len(paths.locals)], question.selected.detach()
    embedding = torch.zeros_like(paths.outputs[0][..., 0], device=output.device)
    embedding = sum((x.to(output.device) for x in added[len(paths.locals) :]), embedding)
    return _Direct(toward, locals_, embedding, biases, output)


def _by_token(run: Run, part: Local, gradient: Tensor) -> Tensor:
    """What a part adds to the output at its tokens, in the order of the first layer's, (B, L)."""
    layers = run.layers
    batch, tokens = len(layers[0].output), layers[0].tokens
    added = gradient * part.output.detach()
    at_its_tokens = are_noted(added) and added.shape[:2] == (batch, tokens)
    if not at_its_tokens and not bool(added.any()):
        return added.new_zeros(batch, tokens)
    # examples and tokens may share a dimension
    by_token = added.reshape(batch, -1, added.shape[-1]).sum(-1)
    found = by_token
    if part.given is not None:
        given = part.given.to(by_token.device)
        found = by_token.gather(1, given.clamp_min(0)) * (given >= 0)
    if found.shape[1] != tokens or not part.is_placed:
        raise InputError(
            f"A part of the model adds to the output by {by_token.shape[1]} tokens, but layer "
            f"{layers[0].name!r} reads {tokens}, so that it cannot be traced back to them. Use "
            "LatimFlow, which needs no tracing back."
        )
    return found
