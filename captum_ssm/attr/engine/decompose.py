"""The exact decomposition of a target over the input and the constants of a linear network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import GradientModeError, NotLinearError
from ...linear import Ledger, Network, contribution
from ...operators.base import Role
from ...operators.kernels.arithmetic import autocast_dtype
from ...operators.kernels.truths import holds
from ...operators.readings.coefficients import ROLES
from ..call.layout import of_given
from .result import NamedTokens, Names

#: Largest |delta| per |relevance| accepted, by the least precise dtype in sight.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@dataclass(frozen=True, eq=False)
class Decomposition(NamedTokens):
    """What every part of a network's input adds to one number of its output.

    ``inputs``, ``virtual``, ``by_others`` and ``biases`` sum to ``output``; :attr:`delta` is what
    rounding leaves.

    Attributes:
        inputs: relevance of every feature of the embeddings (B, L, E), or of every element of a
            floating input. Of ids that are looked up in several tables, such as that of an adapter,
            E counts the features of all.
        streams: relevance of each token of the residual stream entering the block of each mixer,
            (B, L) each, or where features were asked for of each of its features, (B, L, E); with
            the constants that enter behind it, each sums to the output too.
        mixers: relevance of each token of what each mixer returns, in the same shape.
        biases: what biases and other constants add, (B,), by the module that adds them.
        output: the explained number (B,).
        virtual: what else adds that is no constant, (B,): tokens that the model reads and was not
            given, such as one that forward_func puts in front, which streams and mixers hold, too;
            for a layer that is explained in place of the input, all that passes it by.
        roles: relevance of each token (B, L) by what it did: as content that was moved, as a key
            that was matched, as a query that asked, as a gate that let something through, or as a
            step by which states moved on.  They sum to :attr:`tokens`: every path from the output
            to the input counts for the first factor other than content that it takes, and for
            content where it takes none.  None if nobody asked. Default: None.
        content_only: names of the mixers that moved content alone though the rule divides, for
            their adapters give it no other factor with its graph: none by the rules ``"frozen"``
            and ``"half"``, which ask for none.
        sizes: of the tensors that ``inputs`` holds one behind the other in its last dimension, for
            a layer that is explained in place of the input, or ids looked up in several tables;
            else empty.
        past: relevance of every feature of the embeddings (B, L, E) by what passes such a layer by,
            which ``virtual`` sums up; else None.
        others: relevance of every element of each further input, such as the images of a text, in
            its shape. Default: empty.
        by_others: what they add to the output of each example (B,), whichever of their elements
            belong to it; None if there are none.
        names: of the tokens of each example, which its page shows. Default: None, positions.
    """

    inputs: Tensor
    streams: tuple[Tensor, ...]
    mixers: tuple[Tensor, ...]
    biases: dict[str, Tensor]
    output: Tensor
    virtual: Tensor
    roles: dict[Role, Tensor] | None = None
    content_only: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    past: Tensor | None = None
    others: tuple[Tensor, ...] = ()
    by_others: Tensor | None = None
    names: Names | None = None

    @property
    def tokens(self) -> Tensor:
        """Relevance of each token (B, L): that of its features together."""
        return self.inputs if self.inputs.dim() == 2 else self.inputs.flatten(2).sum(-1)

    @property
    def bias(self) -> Tensor:
        """What all constants add (B,)."""
        return sum(self.biases.values(), torch.zeros_like(self.output))

    @property
    def delta(self) -> Tensor:
        """output - inputs - virtual - others - biases (B,): 0, but for rounding."""
        delta = self.output - self.inputs.flatten(1).sum(1) - self.virtual - self.bias
        return delta if self.by_others is None else delta - self.by_others

    def __repr__(self) -> str:
        examples, tokens = self._tokens()
        of = f"{tokens} tokens" if examples == 1 else f"{examples} examples of {tokens} tokens"
        if examples > 1:
            return f"Decomposition({of})"
        rest = self.virtual + (0 if self.by_others is None else self.by_others)
        parts = {"tokens": self.tokens.sum(), "biases": self.bias, "others": rest}
        shown = [f"{name} {float(part):.3g}" for name, part in parts.items() if bool(part.any())]
        sums = f"output {float(self.output):.3g} = {' + '.join(shown)}"
        return f"Decomposition({of}: {sums}, delta {float(self.delta):.0e})"

    def _tokens(self) -> tuple[int, int]:
        return self.inputs.shape[0], self.inputs.shape[1]


class OutputParts(Protocol):
    """What an output is taken apart into."""

    @property
    def biases(self) -> Mapping[str, Tensor]:
        """What constants add (B,), by the module that adds them."""

    @property
    def output(self) -> Tensor:
        """The explained number (B,)."""

    @property
    def delta(self) -> Tensor:
        """What is left (B,)."""


def decompose(
    network: Network,
    output: Tensor,
    constant: Tensor | None = None,
    baselines: Sequence[Tensor] = (),
    of_others: Sequence[Tensor | None] = (),
    by_role: bool = False,
    features: bool = False,
    apart: bool = False,
) -> Decomposition:
    """One backward pass through a linear network; one more for each role where they are asked for.

    Further inputs do not say which of their elements belong to which example: of a batch that has
    some each example takes a pass of its own, in which all that is found is its.

    Args:
        network: the network, after its forward run.
        output: the number to explain per example (B,), of the network's graph.
        constant: a summand of the output that no module added (B,). Default: None.
        baselines: what relevance is in comparison with, like the roots. Default: empty, 0.
        of_others: the same for each further input. Default: empty, as for none.
        by_role: whether relevance is found by role. Default: False.
        features: whether that of what enters and leaves the mixers is kept by feature. Default:
            False.
        apart: whether what constants add is told apart by example, by passes of its own. Default:
            False, by where they stand.
    """
    ledger, others = network.mode.ledger, network.mode.others
    roots, passing, steps = network.roots, network.passing, network.steps
    wanted = [*roots, *passing, *others, *(x for s in steps for x in (*s.entering, s.output))]
    gradients, biases = account(ledger, output, constant, wanted)
    parts = zip(gradients, wanted, strict=True)
    own_gradients = [next(parts)[0] for _ in roots]

    def parted() -> Tensor:
        gradient, value = next(parts)
        found: Tensor = gradient * value.detach()
        return found

    def tokens(of_mixer: Tensor) -> Tensor:
        found = _in_a_row(parted(), of_mixer)
        return found if features else found.flatten(min(2, found.dim() - 1)).sum(-1)

    past = [parted() for _ in passing]
    each = [[next(parts)[0] for _ in others]]
    streams, mixers = [], []
    for step in steps:
        entering = [tokens(step.output) for _ in step.entering]
        if entering:
            streams.append(sum(entering[1:], entering[0]))
        mixers.append(tokens(step.output))
    if len(output) > 1 and (others or apart):
        # the root with them: constants are met where gradients pass
        own, biases = _apart(ledger, output, constant, (*others, *roots, *passing))
        each = [gradients[: len(others)] for gradients in own]
    if baselines:
        added = [(g * b).flatten(1).sum(1) for g, b in zip(own_gradients, baselines, strict=True)]
        biases["baselines"] = sum(added[1:], added[0]).to(output)
    more = changes(network, baselines)
    read = [g * change for g, change in zip(own_gradients, more, strict=True)]
    whole = sum((x.flatten(1).sum(1) for x in read[1:]), read[0].flatten(1).sum(1))
    inputs = _on_given(read, network)
    virtual = (whole - inputs.flatten(1).sum(1)).to(output.detach())
    for each_past in past:
        virtual = virtual + each_past.flatten(1).sum(1).to(virtual)
    found = Decomposition(
        inputs,
        tuple(streams),
        tuple(mixers),
        biases,
        output.detach(),
        virtual,
        content_only=tuple(dict.fromkeys(network.content_only)),
        sizes=_sizes(network),
        past=_behind_each_other(past) if past else None,
    )
    if others:
        found = _with_others(found, others, of_others, each)
    if not by_role:
        return found
    return replace(found, roles=_by_role(network, output, more, found.tokens))


def _in_a_row(x: Tensor, like: Tensor) -> Tensor:
    """The tokens of a map (B, h, w, E) as those of a mixer (B, L, E), where they are the same."""
    same = x.dim() > 3 and x.shape[-1] == like.shape[-1] and x.numel() == like.numel()
    return x.reshape(like.shape) if same else x


def _apart(
    ledger: Ledger, output: Tensor, constant: Tensor | None, starts: Sequence[Tensor]
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """By example the gradients of all that the network begins at, and what constants add (B,)."""
    passes = []
    for i in range(len(output)):
        own = None if constant is None else constant[i : i + 1]
        passes.append(account(ledger, output[i : i + 1], own, starts))
    names = dict.fromkeys(name for _, biases in passes for name in biases)
    zero = output.new_zeros(1)
    biases = {name: torch.cat([found.get(name, zero) for _, found in passes]) for name in names}
    return [gradients for gradients, _ in passes], biases


def _with_others(
    found: Decomposition,
    others: Sequence[Tensor],
    baselines: Sequence[Tensor | None],
    each: Sequence[Sequence[Tensor]],
) -> Decomposition:
    """The decomposition, with the relevance of further inputs.

    Args:
        found: the decomposition.
        others: the further inputs.
        baselines: what that is in comparison with, one for each; None for 0.
        each: for each example the gradients of the others.
    """
    values = [x.detach() for x in others]
    starts = [
        torch.zeros_like(x) if start is None else start
        for x, start in zip(values, baselines, strict=True)
    ]

    def added(factors: Sequence[Tensor]) -> Tensor:
        sums = [sum((g * x).sum() for g, x in zip(own, factors, strict=True)) for own in each]
        return torch.stack([torch.as_tensor(x) for x in sums]).to(found.output)

    changes = [x - start for x, start in zip(values, starts, strict=True)]
    relevance = tuple(
        torch.stack([own[i] for own in each]).sum(0) * change for i, change in enumerate(changes)
    )
    biases = found.biases
    if any(start is not None for start in baselines):
        before = biases.get("baselines", torch.zeros_like(found.output))
        biases = {**biases, "baselines": before + added(starts)}
    return replace(found, biases=biases, others=relevance, by_others=added(changes))


def changes(network: Network, baselines: Sequence[Tensor]) -> list[Tensor]:
    """Subtract each root's baseline from it.

    Args:
        network: the network, after its forward run.
        baselines: one for each root; empty for 0.
    """
    values = [x.detach() for x in network.roots]
    if not baselines:
        return values
    return [x - baseline for x, baseline in zip(values, baselines, strict=True)]


def _sizes(network: Network) -> tuple[int, ...]:
    """How many features each of several tensors has that relevance is of."""
    if network.begins is not None:
        return network.met(network.begins).sizes
    roots = network.roots
    return tuple(x[0, 0].numel() for x in roots) if len(roots) > 1 else ()


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    """The features of the same tokens in one dimension, where there are several tensors of them."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def _on_given(parts: Sequence[Tensor], network: Network) -> Tensor:
    """Relevance of what the model read, on the tokens that it was given."""
    mode = network.mode
    if network.begins is not None:
        return _behind_each_other(parts)
    places = [mode.given, *(x.given for x in mode.again)]
    return _behind_each_other(
        [
            x if given is None else of_given(x, given, mode.tokens)
            for x, given in zip(parts, places, strict=True)
        ]
    )


def _by_role(
    network: Network, output: Tensor, more: Sequence[Tensor], tokens: Tensor
) -> dict[Role, Tensor]:
    """Relevance of tokens (B, L) along the paths of each role; together it is all of ``tokens``."""
    labels = network.mode.labels
    found = {role: torch.zeros_like(tokens) for role in ROLES}

    def along(role: Role) -> Tensor:
        seed = torch.ones_like(output) if role == "content" else torch.zeros_like(output)
        with labels.only(role):
            gradients = torch.autograd.grad(
                output, network.roots, seed, retain_graph=True, allow_unused=True
            )
        relevance = [
            torch.zeros_like(change) if gradient is None else gradient * change
            for gradient, change in zip(gradients, more, strict=True)
        ]
        given = _on_given(relevance, network)
        return given if given.dim() == 2 else given.flatten(2).sum(-1)

    found["content"] = tokens if network.mode.rule == "frozen" else along("content")
    *others, last = [role for role in ROLES if role in labels.begun] or ["content"]
    for role in others:
        found[role] = along(role)
    if last != "content":  # what is left, without another pass
        found[last] = tokens - torch.stack(list(found.values())).sum(0)
    labels.begun.clear()
    return found


def account(
    ledger: Ledger,
    output: Tensor,
    constant: Tensor | None,
    wanted: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One backward pass: gradients, and what each constant adds.

    Args:
        ledger: the constants of the graph.
        output: the number to explain per example (B,).
        constant: a summand of the output that no module added (B,), or None.
        wanted: the tensors whose gradients are wanted; zeros where none arrives.
    """
    biases: dict[str, Tensor] = {} if constant is None else {"output": constant.detach()}

    def write(gradient: Tensor, value: Tensor, where: str) -> None:
        entry = _per_example(contribution(gradient, value), len(output))
        biases[where] = biases.get(where, 0) + entry.to(output)

    live = [x for x in (*wanted, *ledger.leaves) if x.requires_grad]
    with ledger.entries_to(write):
        try:
            found = torch.autograd.grad(output.sum(), live, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" in str(error):  # its layers run again, out of the rules' sight
                raise not_linear(output) from error
            raise
    given = {x: g for x, g in zip(live, found, strict=True) if g is not None}
    return [given.get(x, torch.zeros_like(x)) for x in wanted], biases


def _per_example(x: Tensor, batch: int) -> Tensor:
    """Sums (B,) of what has examples, or their tokens or windows, in front.

    What does not, such as the tokens routed to an expert, is spread evenly, or taken for examples
    that it does not hold: :func:`exact` then sees it in the deltas.
    """
    if x.dim() and len(x) % batch == 0:
        return x.reshape(batch, -1).sum(1)
    return (x.sum() / batch).expand(batch)


def exact(found: Decomposition, apart: bool = False) -> bool:
    """Whether inputs and biases sum to the output for every example.

    In a batch a tenth of the tolerance holds: constants may stand with the wrong example, and
    each can be explained by itself.

    Args:
        found: the decomposition.
        apart: whether each was. Default: False.
    """
    share = 1 if apart or len(found.output) == 1 else 0.1
    return sums_up(found, found.inputs, share, past=found.past)


def sums_up(
    found: OutputParts,
    inputs: Tensor,
    share: float = 1.0,
    *,
    together: bool = False,
    past: Tensor | None = None,
) -> bool:
    """Whether parts sum to the output for every example.

    Args:
        found: the parts.
        inputs: those of the input (B, ...).
        share: of the tolerance. Default: 1.0.
        together: whether those of all examples together do, where constants may stand with the
            wrong example. Default: False.
        past: those that pass by what is explained, (B, ...). Default: None.
    """
    size = inputs.flatten(1).abs().sum(1) + found.output.abs()
    if found.biases:
        size = size + torch.stack(list(found.biases.values())).abs().sum(0)
    output = found.output
    dtypes = {inputs.dtype, output.dtype, autocast_dtype(output.device) or output.dtype}
    if isinstance(found, Decomposition):
        for other in found.others:
            size = size + other.abs().sum().to(size)
            dtypes.add(other.dtype)
    if past is not None:  # of inputs that may be less precise than a layer behind them
        size = size + past.flatten(1).abs().sum(1).to(size)
        dtypes.add(past.dtype)
    limit = share * max(TOLERANCES.get(dtype, 1e-3) for dtype in dtypes)
    if together:
        return holds(found.delta.sum().abs() <= limit * size.sum())
    return holds((found.delta.abs() <= limit * size).all())


def stacked(parts: Sequence[Decomposition]) -> Decomposition:
    """Decompositions of parts of a batch as one."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(name for part in parts for name in part.biases))
    pasts = [part.past for part in parts if part.past is not None]
    return Decomposition(
        torch.cat([part.inputs for part in parts]),
        tuple(map(torch.cat, zip(*(part.streams for part in parts), strict=True))),
        tuple(map(torch.cat, zip(*(part.mixers for part in parts), strict=True))),
        {
            name: torch.cat([p.biases.get(name, torch.zeros_like(p.output)) for p in parts])
            for name in names
        },
        torch.cat([part.output for part in parts]),
        torch.cat([part.virtual for part in parts]),
        _stacked_roles(parts),
        tuple(dict.fromkeys(name for part in parts for name in part.content_only)),
        parts[0].sizes,
        torch.cat(pasts) if pasts else None,
    )  # of a batch with further inputs there are no parts


def _stacked_roles(parts: Sequence[Decomposition]) -> dict[Role, Tensor] | None:
    known = [part.roles for part in parts if part.roles is not None]
    if len(known) < len(parts):
        return None
    return {role: torch.cat([roles[role] for roles in known]) for role in ROLES}


def not_reached() -> GradientModeError:
    """The error for an output that is not, or not linearly, reached from the input."""
    return GradientModeError(
        "The model's output does not depend linearly on its input. Does it end in a softmax or "
        "another function that is frozen, or run under no_grad or detach? Explain the logits; "
        "contrast='all' gives log-probabilities, contrast='others' log-odds."
    )


#: Where the package's own functions are.
_OURS = f"{__name__.split('.', 1)[0]}."


def not_linear(output: Tensor) -> NotLinearError:
    """The error for a network whose graph is not linear; names functions that may be to blame."""
    kind = torch.finfo(output.dtype)
    if bool((output.detach().abs() < kind.tiny / kind.eps).any()):
        return NotLinearError(
            f"The model's output is so small that products of {output.dtype} underflow. Explain "
            "model.double(), or larger numbers."
        )
    found: set[str] = set()
    seen: set[Any] = set()
    todo: list[Any] = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = node._forward_cls  # type: ignore[attr-defined]
            if not function.__module__.startswith(_OURS):  # those are linear maps
                found.add(function.__name__)
    own, blame = sorted(found), ""
    if own:
        blame = f" It runs functions of its own ({', '.join(own)}), which cannot be seen into."
    elif len(output) > 1:
        blame = " Do examples of the batch mix, as in x - x.mean(0)? Then explain them one by one."
    return NotLinearError(
        f"The model's output is not the sum of what its inputs and biases contribute.{blame} Run "
        "it with torch's own functions in place of fused kernels, without torch.utils.checkpoint, "
        "or report the model."
    )
