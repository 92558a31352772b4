"""The exact decomposition of a target over the input and the constants of a linear network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import GradientModeError, NotLinearError
from ...linear import Linearizing, Network, Step, along_all_paths, contribution, outside
from ...linear.shares import by_example
from ...operators.base import Role
from ...operators.coefficients import ROLES
from ...operators.kernels.arithmetic import autocast_dtype, sum_tensors
from ...operators.kernels.truths import holds
from ..call.layout import of_given
from .result import NamedTokens, Names

#: Largest accepted |delta| relative to the sum of |relevance|, for the least precise dtype used.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@dataclass(frozen=True, eq=False)
class Decomposition(NamedTokens):
    """Contributions of inputs and constants to one scalar of the model's output.

    ``inputs``, ``virtual``, ``by_others`` and ``biases`` sum to ``output``; :attr:`delta` is the
    rounding error.

    Attributes:
        inputs: relevance of every feature of the embeddings (B, L, E), or of every element of a
            floating input. If ids are looked up in several embedding tables, such as an adapter's,
            E is the number of features in all tables.
        streams: one tensor per mixer, the relevance of each token in the residual stream that
            enters the mixer's block, (B, L), or (B, L, E) by feature. Together with the constants
            added after that point, each tensor sums to the output.
        mixers: one tensor of the same shape per mixer, the relevance of tokens in its output.
        biases: contributions of biases and other constants (B,), by the name of the module that
            adds them. The key ``"cache"`` has the contribution of a cache passed to the call.
        output: the explained value (B,).
        virtual: contribution (B,) of tokens that the model inserts, such as a class token;
            ``streams`` and ``mixers`` include it. If a layer is explained, the contribution of all
            paths that bypass this layer.
        roles: relevance of each token (B, L) as content, key, query, gate or step. Roles sum to
            :attr:`tokens`. Each path from output to input counts for its first factor other than
            content, or for content if it has none. Default: None, not computed.
        content_only: names of mixers whose relevance all went to content although ``rule`` divides
            it among factors, because their adapters define no other factor. Empty with
            ``rule="frozen"`` and ``"half"``.
        sizes: sizes of the tensors concatenated in the last dimension of ``inputs``, for an
            explained layer or ids looked up in several tables. Default: empty.
        past: if a layer is explained, relevance of every feature of the embeddings (B, L, E) along
            paths that bypass this layer; it sums to ``virtual``. Default: None.
        others: one tensor per input after the first, such as the images of a text: the relevance
            of every element. Default: empty.
        by_others: contribution (B,) of all inputs after the first; None if there are none.
        names: names of each example's tokens, shown in the HTML page. Default: None, positions.
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
        """Relevance of each token (B, L), the sum over its features."""
        return self.inputs if self.inputs.dim() == 2 else self.inputs.flatten(2).sum(-1)

    @property
    def bias(self) -> Tensor:
        """Contribution of all constants (B,)."""
        return sum(self.biases.values(), torch.zeros_like(self.output))

    @property
    def cached(self) -> Tensor:
        """Contribution of a cache that was passed to the call (B,), included in :attr:`bias`."""
        return self.biases.get("cache", torch.zeros_like(self.output))

    @property
    def delta(self) -> Tensor:
        """output - inputs - virtual - others - biases (B,), 0 up to rounding."""
        delta = self.output - self.inputs.flatten(1).sum(1) - self.virtual - self.bias
        return delta if self.by_others is None else delta - self.by_others

    def __repr__(self) -> str:
        examples, tokens = self._tokens()
        of = f"{tokens} tokens" if examples == 1 else f"{examples} examples of {tokens} tokens"
        if examples > 1:
            return f"Decomposition({of})"
        rest = self.virtual + (0 if self.by_others is None else self.by_others)
        none = torch.zeros_like(self.output)
        named = {name: self.biases.get(name, none) for name in ("cache", "references", "baselines")}
        biases = self.bias - sum(named.values(), none)
        parts = {"tokens": self.tokens.sum(), **named, "biases": biases, "others": rest}
        shown = [f"{name} {float(part):.3g}" for name, part in parts.items() if bool(part.any())]
        sums = f"output {float(self.output):.3g} = {' + '.join(shown)}"
        return f"Decomposition({of}: {sums}, delta {float(self.delta):.0e})"

    def _columns(self) -> Mapping[str, Tensor]:
        roles: Mapping[Any, Tensor] = self.roles or {}
        return {"relevance": self.tokens, **roles}

    def _tokens(self) -> tuple[int, int]:
        return self.inputs.shape[0], self.inputs.shape[1]


class OutputParts(Protocol):
    """The attributes of a decomposition that :func:`sums_up` reads."""

    @property
    def biases(self) -> Mapping[str, Tensor]:
        """Contributions of constants (B,), by the name of the module that adds them."""

    @property
    def output(self) -> Tensor:
        """The explained value (B,)."""

    @property
    def delta(self) -> Tensor:
        """The output minus the sum of all contributions (B,)."""


def decompose(
    network: Network,
    output: Tensor,
    constant: Tensor | None = None,
    baselines: Sequence[Tensor] = (),
    of_others: Sequence[Tensor | None] = (),
    by_role: bool = False,
    features: bool = False,
    apart: bool = False,
    by_label: Mapping[Role, Tensor] = MappingProxyType({}),
) -> Decomposition:
    """Decompose an output by one backward pass through a linear network.

    Each role needs one more pass. Several inputs need one pass per example, because inputs after
    the first may have no batch dimension.

    Args:
        network: the network, after its forward run.
        output: the number to explain per example (B,), with its autograd graph.
        constant: a summand of the output that no module added (B,). Default: None.
        baselines: the baseline of each root, a tensor where the network begins. Default: empty, 0.
        of_others: the baseline of each input after the first. Default: empty, if there are none.
        by_role: whether relevance is computed by role. Default: False.
        features: whether relevance of streams and mixers is kept by feature. Default: False.
        apart: whether one pass per example finds the constants of each example. Default: False,
            constants are assigned to examples by their index in the batch.
        by_label: for a chunk of a sequence, the part of the output whose paths have a label, by
            label; see :class:`~captum_ssm.linear.shares.Labels`. Default: empty, all paths begin
            at the output.
    """
    mode, others = network.mode, network.mode.others
    roots, passing, steps = network.roots, network.passing, network.steps
    of_steps = [x for step in steps for x in (*step.entering, step.output)]
    #: Relevance of each mixer's stream and output, by its place in the run.
    by_layer: dict[Any, tuple[Tensor | None, Tensor]] = {}

    def note(place: Any, step: Step, gradients: Sequence[Tensor | None]) -> None:
        by_layer[place] = _of_step(step, gradients, features)

    wanted = [*roots, *passing, *others, *of_steps]
    with nullcontext() if mode.blocks is None else mode.blocks.reading(note):
        gradients, biases = account(mode, output, constant, wanted)
    unused = iter(gradients)
    at_roots, at_passing, at_others = ([next(unused) for _ in x] for x in (roots, passing, others))
    # a stream that enters several blocks has a gradient for each, which are added
    for i, step, at_step in along_all_paths(steps, unused):
        note(outside(i), step, at_step)
    layers = [by_layer[place] for place in sorted(by_layer)]
    separate = [at_others]
    if len(output) > 1 and (others or apart):
        # with the roots: constants are found where gradients pass
        starts = (*others, *roots, *passing)
        passes, biases = _example_by_example(mode, output, constant, starts)
        separate = [gradients[: len(others)] for gradients in passes]
    if baselines:
        pairs = zip(at_roots, baselines, strict=True)
        biases["baselines"] = sum_tensors((g * b).flatten(1).sum(1) for g, b in pairs).to(output)
    change = changes(network, baselines)
    read = [g * x for g, x in zip(at_roots, change, strict=True)]
    inputs = _on_input_tokens(read, network)
    past = [g * x.detach() for g, x in zip(at_passing, passing, strict=True)]
    # of tokens that the model adds, and of paths that pass by the layer where the network begins
    virtual = sum_tensors(x.flatten(1).sum(1) for x in read) - inputs.flatten(1).sum(1)
    virtual = virtual.to(output.detach())
    for each in past:
        virtual = virtual + each.flatten(1).sum(1).to(virtual)
    found = Decomposition(
        inputs,
        tuple(stream for stream, _ in layers if stream is not None),
        tuple(mixer for _, mixer in layers),
        biases,
        output.detach(),
        virtual,
        content_only=tuple(dict.fromkeys(network.content_only)),
        sizes=_sizes(network),
        past=_concatenated(past) if past else None,
    )
    if others:
        found = _with_others(found, others, of_others, separate)
    if not by_role:
        return found
    return replace(found, roles=_by_role(network, output, change, found.tokens, by_label))


def _of_step(
    step: Step, gradients: Sequence[Tensor | None], features: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the relevance of a mixer's residual stream (None without one), and of its output.

    Shapes are (B, L), or (B, L, E) by feature. ``gradients`` has one gradient per tensor entering
    the block, and the gradient at the mixer's output last.
    """

    def relevance(x: Tensor, gradient: Tensor | None) -> Tensor:
        product = torch.zeros_like(x) if gradient is None else gradient * x.detach()
        found = _as_sequence(product, step.output)
        return found if features else found.flatten(min(2, found.dim() - 1)).sum(-1)

    *entering, mixer = map(relevance, (*step.entering, step.output), gradients)
    return sum_tensors(entering) if entering else None, mixer


def _as_sequence(x: Tensor, like: Tensor) -> Tensor:
    """Reshape a 2-D grid of tokens (B, h, w, E) to the shape (B, L, E) of ``like``, if possible."""
    same = x.dim() > 3 and x.shape[-1] == like.shape[-1] and x.numel() == like.numel()
    return x.reshape(like.shape) if same else x


def _example_by_example(
    mode: Linearizing, output: Tensor, constant: Tensor | None, starts: Sequence[Tensor]
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Run one backward pass per example; return gradients at ``starts``, and bias contributions."""
    passes = []
    for i in range(len(output)):
        summand = None if constant is None else constant[i : i + 1]
        passes.append(account(mode, output[i : i + 1], summand, starts))
    names = dict.fromkeys(name for _, biases in passes for name in biases)
    zero = output.new_zeros(1)
    biases = {name: torch.cat([found.get(name, zero) for _, found in passes]) for name in names}
    return [gradients for gradients, _ in passes], biases


def _with_others(
    found: Decomposition,
    others: Sequence[Tensor],
    baselines: Sequence[Tensor | None],
    separate: Sequence[Sequence[Tensor]],
) -> Decomposition:
    """Add the relevance of the inputs after the first to a decomposition.

    Args:
        baselines: the baseline of each input after the first; None for 0.
        separate: for each example, the gradients at all of ``others``.
    """
    values = [x.detach() for x in others]
    starts = [
        torch.zeros_like(x) if start is None else start
        for x, start in zip(values, baselines, strict=True)
    ]

    def added(factors: Sequence[Tensor]) -> Tensor:
        sums = [
            sum_tensors((g * x).sum() for g, x in zip(gradients, factors, strict=True))
            for gradients in separate
        ]
        return torch.stack(sums).to(found.output)

    changes = [x - start for x, start in zip(values, starts, strict=True)]
    at_others = zip(*separate, strict=True)
    relevance = tuple(
        torch.stack(each).sum(0) * change for each, change in zip(at_others, changes, strict=True)
    )
    biases = found.biases
    if any(start is not None for start in baselines):
        before = biases.get("baselines", torch.zeros_like(found.output))
        biases = {**biases, "baselines": before + added(starts)}
    return replace(found, biases=biases, others=relevance, by_others=added(changes))


def changes(network: Network, baselines: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor where the network starts minus its baseline; no ``baselines`` means 0."""
    values = [x.detach() for x in network.roots]
    if not baselines:
        return values
    return [x - baseline for x, baseline in zip(values, baselines, strict=True)]


def _sizes(network: Network) -> tuple[int, ...]:
    """Return :attr:`Decomposition.sizes`, the sizes of the tensors concatenated in ``inputs``."""
    if network.begins is not None:
        return network.met(network.begins).sizes
    roots = network.roots
    return tuple(x[0, 0].numel() for x in roots) if len(roots) > 1 else ()


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the features of tensors (B, L, ...) that have the same tokens."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def _on_input_tokens(parts: Sequence[Tensor], network: Network) -> Tensor:
    """Move relevance from the tensors where the network starts to input tokens, (B, L, ...)."""
    mode = network.mode
    if network.begins is not None:
        return _concatenated(parts)
    places = [mode.given, *(x.given for x in mode.again)]
    return _concatenated(
        [
            x if given is None else of_given(x, given, mode.tokens)
            for x, given in zip(parts, places, strict=True)
        ]
    )


def _by_role(
    network: Network,
    output: Tensor,
    change: Sequence[Tensor],
    tokens: Tensor,
    by_label: Mapping[Role, Tensor],
) -> dict[Role, Tensor]:
    """Return the relevance of tokens (B, L) for each role; the sum over roles is ``tokens``.

    Args:
        network, output, by_label: the arguments of :func:`decompose`.
        change: the result of :func:`changes`.
        tokens: the relevance of tokens (B, L).
    """
    labels, carried = network.mode.labels, network.carried
    wanted = [*network.roots, *(() if carried is None else carried.leaves)]
    found = {role: torch.zeros_like(tokens) for role in ROLES}

    def along(role: Role) -> Tensor:
        """Return the relevance of tokens (B, L) along the paths that count for one role."""
        seed = torch.ones_like(output) if role in by_label or role == "content" else 0 * output
        with labels.only(role):
            number = by_label.get(role, output)
            gradients = network.mode.gradients(number, wanted, seed.detach())
        relevance = [
            torch.zeros_like(x) if gradient is None else gradient * x
            for gradient, x in zip(gradients, change, strict=False)
        ]
        of_tokens = _on_input_tokens(relevance, network)
        return of_tokens if of_tokens.dim() == 2 else of_tokens.flatten(2).sum(-1)

    found["content"] = tokens if network.mode.rule == "frozen" else along("content")
    for role in by_label.keys() - {"content"}:
        labels.begun.setdefault(role, {})
    *others, last = [role for role in ROLES if role in labels.begun] or ["content"]
    if by_label and last != "content":  # also for its gradients at the cache
        others, last = [*others, last], "content"
    for role in others:
        found[role] = along(role)
    if last != "content":  # the rest, without another pass
        found[last] = tokens - torch.stack(list(found.values())).sum(0)
    labels.begun.clear()
    return found


def account(
    mode: Linearizing,
    output: Tensor,
    constant: Tensor | None,
    wanted: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run one backward pass, which also collects the contributions of constants.

    Args:
        mode: the linearization rules of the run, and the constants in its graph.
        output: the number to explain per example (B,).
        constant: a summand of the output that no module added (B,), or None.
        wanted: the tensors whose gradients are returned.

    Returns:
        The gradients at ``wanted``, zeros if none arrives; and the contributions of constants
        (B,), by the name of the module that adds them.
    """
    biases: dict[str, Tensor] = {} if constant is None else {"output": constant.detach()}

    def write(gradient: Tensor, value: Tensor, where: str) -> None:
        entry = by_example(contribution(gradient, value), len(output))
        biases[where] = biases.get(where, 0) + entry.to(output)

    live = [x for x in (*wanted, *mode.ledger.leaves) if x.requires_grad]
    with mode.ledger.entries_to(write):
        try:
            found = mode.gradients(output, live)
        except RuntimeError as error:
            if "checkpoint" in str(error):  # its layers run again without the rules
                raise not_linear(output) from error
            raise
    arrived = {x: g for x, g in zip(live, found, strict=True) if g is not None}
    return [arrived.get(x, torch.zeros_like(x)) for x in wanted], biases


def exact(found: Decomposition, apart: bool = False) -> bool:
    """Return True if inputs and biases sum to the output for every example.

    A batch has a tenth of the tolerance, because constants may be assigned to the wrong example.

    Args:
        found: the decomposition.
        apart: whether examples had separate backward passes. Default: False.
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
    """Return True if contributions sum to the output for every example.

    Args:
        found: the decomposition.
        inputs: contributions of the input (B, ...).
        share: factor on the tolerance. Default: 1.0.
        together: whether to check only the sum over examples, because constants may be assigned to
            the wrong example. Default: False.
        past: contributions along paths that bypass the explained layer, (B, ...). Default: None.
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
    if past is not None:  # the inputs may be less precise than the explained layer
        size = size + past.flatten(1).abs().sum(1).to(size)
        dtypes.add(past.dtype)
    limit = share * max(TOLERANCES.get(dtype, 1e-3) for dtype in dtypes)
    if together:
        return holds(found.delta.sum().abs() <= limit * size.sum())
    return holds((found.delta.abs() <= limit * size).all())


def stacked(parts: Sequence[Decomposition]) -> Decomposition:
    """Concatenate decompositions of parts of a batch along the batch dimension."""
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
    """Return the error for an output that does not depend linearly on the input."""
    return GradientModeError(
        "The model's output does not depend linearly on its input. Does forward_func end in a "
        "softmax, or run under no_grad or detach? Return logits from forward_func; contrast='all' "
        "explains log-probabilities, contrast='others' log-odds."
    )


#: The prefix of this package's module names.
_OURS = f"{__name__.split('.', 1)[0]}."


def not_linear(output: Tensor) -> NotLinearError:
    """Return the error for a graph that is not linear, with possible causes."""
    kind = torch.finfo(output.dtype)
    if bool((output.detach().abs() < kind.tiny / kind.eps).any()):
        return NotLinearError(
            f"The model's output is so small that products in {output.dtype} underflow. Pass "
            "model.double(), or choose a target with a larger output."
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
    custom, blame = sorted(found), ""
    if custom:
        blame = f" It runs custom autograd functions ({', '.join(custom)}), which are not analyzed."
    elif len(output) > 1:
        blame = " Do examples of the batch mix, as in x - x.mean(0)? Then explain them one by one."
    return NotLinearError(
        "The contributions of the model's inputs and biases do not sum to the model's output."
        f"{blame} Replace fused kernels by torch functions, switch off torch.utils.checkpoint, or "
        "report the model."
    )
