"""The exact decomposition of a target over the input and the constants of a linear network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import GradientModeError, NotLinearError
from ...linear import Linearising, Network, Step, along_all_paths, contribution, outside
from ...operators.base import Role
from ...operators.coefficients import ROLES
from ...operators.kernels.arithmetic import autocast_dtype, sum_tensors
from ...operators.kernels.truths import holds
from ..call.layout import of_given
from .result import NamedTokens, Names

#: Largest |delta| per |relevance| accepted, by the least precise dtype in sight.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@dataclass(frozen=True, eq=False)
class Decomposition(NamedTokens):
    """Contributions of all parts of a network's input to one number of its output.

    ``inputs``, ``virtual``, ``by_others`` and ``biases`` sum to ``output``; :attr:`delta` is the
    rounding error.

    Attributes:
        inputs: relevance of every feature of the embeddings (B, L, E), or of every element of a
            floating input. If ids are looked up in several tables, such as an adapter's, E counts
            the features of all.
        streams: relevance of each token of the residual stream entering each mixer's block, (B, L)
            each, or by feature, (B, L, E). Each sums to the output with the constants that enter
            behind it.
        mixers: relevance of each token of each mixer's output, in the same shape.
        biases: contributions of biases and other constants, (B,), by the module that adds them;
            of a cache that the call continues from, under ``"cache"``.
        output: the explained number (B,).
        virtual: contribution of tokens that the model adds itself, (B,), such as a class token;
            streams and mixers include it. For an explained layer, the contribution of all paths
            around it.
        roles: relevance of each token (B, L) as content, key, query, gate or step. Roles sum to
            :attr:`tokens`. Each path from output to input counts for its first factor other than
            content, or for content if it has none. Default: None, not found.
        content_only: names of the mixers that gave all relevance to content though the rule divides
            it, since their adapters offer no other factor. Empty with ``rule="frozen"`` and
            ``"half"``.
        sizes: sizes of the tensors concatenated in the last dimension of ``inputs``, for an
            explained layer or ids looked up in several tables. Default: empty.
        past: for an explained layer, relevance of every feature of the embeddings (B, L, E) along
            paths around it, which sum to ``virtual``. Default: None.
        others: relevance of every element of each further input, such as the images of a text, in
            its shape. Default: empty.
        by_others: contribution of all further inputs to the output of each example (B,); None if
            there are none.
        names: names of the tokens of each example, which its page shows. Default: None, positions.
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
        """Contribution of the cache that the call continues from (B,), a part of :attr:`bias`."""
        return self.biases.get("cache", torch.zeros_like(self.output))

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
        parts = {"tokens": self.tokens.sum(), "cache": self.cached}
        parts |= {"biases": self.bias - self.cached, "others": rest}
        shown = [f"{name} {float(part):.3g}" for name, part in parts.items() if bool(part.any())]
        sums = f"output {float(self.output):.3g} = {' + '.join(shown)}"
        return f"Decomposition({of}: {sums}, delta {float(self.delta):.0e})"

    def _columns(self) -> Mapping[str, Tensor]:
        roles: Mapping[Any, Tensor] = self.roles or {}
        return {"relevance": self.tokens, **roles}

    def _tokens(self) -> tuple[int, int]:
        return self.inputs.shape[0], self.inputs.shape[1]


class OutputParts(Protocol):
    """The parts of an output, as far as :func:`sums_up` checks them."""

    @property
    def biases(self) -> Mapping[str, Tensor]:
        """Contributions of constants (B,), by the module that adds them."""

    @property
    def output(self) -> Tensor:
        """The explained number (B,)."""

    @property
    def delta(self) -> Tensor:
        """The output less all parts (B,)."""


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
    """Decompose an output by one backward pass through a linear network.

    Each role takes one more pass. Elements of further inputs belong to no known example of a batch:
    with them each example takes its own pass.

    Args:
        network: the network, after its forward run.
        output: the number to explain per example (B,), of the network's graph.
        constant: a summand of the output that no module added (B,). Default: None.
        baselines: the baseline of each root. Default: empty, 0.
        of_others: likewise for each further input. Default: empty, as for none.
        by_role: whether relevance is found by role. Default: False.
        features: whether relevance of streams and mixers is kept by feature. Default: False.
        apart: whether constants are assigned to examples by a pass for each example. Default:
            False, by their place in the batch.
    """
    mode, others = network.mode, network.mode.others
    roots, passing, steps = network.roots, network.passing, network.steps
    of_steps = [x for step in steps for x in (*step.entering, step.output)]
    by_layer: dict[Any, tuple[Tensor | None, Tensor]] = {}

    def note(place: Any, step: Step, gradients: Sequence[Tensor | None]) -> None:
        by_layer[place] = _of_step(step, gradients, features)

    wanted = [*roots, *passing, *others, *of_steps]
    with nullcontext() if mode.blocks is None else mode.blocks.reading(note):
        gradients, biases = account(mode, output, constant, wanted)
    left = iter(gradients)
    at_roots, at_passing, at_others = ([next(left) for _ in x] for x in (roots, passing, others))
    for i, step, at_step in along_all_paths(steps, left):
        note(outside(i), step, at_step)
    layers = [by_layer[place] for place in sorted(by_layer)]
    by_example = [at_others]
    if len(output) > 1 and (others or apart):
        # with the roots: constants are found where gradients pass
        starts = (*others, *roots, *passing)
        passes, biases = _example_by_example(mode, output, constant, starts)
        by_example = [gradients[: len(others)] for gradients in passes]
    if baselines:
        pairs = zip(at_roots, baselines, strict=True)
        biases["baselines"] = sum_tensors((g * b).flatten(1).sum(1) for g, b in pairs).to(output)
    change = changes(network, baselines)
    read = [g * x for g, x in zip(at_roots, change, strict=True)]
    inputs = _on_given(read, network)
    past = [g * x.detach() for g, x in zip(at_passing, passing, strict=True)]
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
        past=_behind_each_other(past) if past else None,
    )
    if others:
        found = _with_others(found, others, of_others, by_example)
    if not by_role:
        return found
    return replace(found, roles=_by_role(network, output, change, found.tokens))


def _of_step(
    step: Step, gradients: Sequence[Tensor | None], features: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the relevance of a mixer's stream, None without one, and of its output.

    Each is (B, L), or (B, L, E) by feature. ``gradients`` holds those at the tensors entering the
    block and at the output.
    """

    def relevance(x: Tensor, gradient: Tensor | None) -> Tensor:
        product = torch.zeros_like(x) if gradient is None else gradient * x.detach()
        found = _in_a_row(product, step.output)
        return found if features else found.flatten(min(2, found.dim() - 1)).sum(-1)

    *entering, mixer = map(relevance, (*step.entering, step.output), gradients)
    return sum_tensors(entering) if entering else None, mixer


def _in_a_row(x: Tensor, like: Tensor) -> Tensor:
    """Lay a map (B, h, w, E) out as a mixer's tokens (B, L, E), if it has as many."""
    same = x.dim() > 3 and x.shape[-1] == like.shape[-1] and x.numel() == like.numel()
    return x.reshape(like.shape) if same else x


def _example_by_example(
    mode: Linearising, output: Tensor, constant: Tensor | None, starts: Sequence[Tensor]
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Take one backward pass per example; return gradients at ``starts``, and constants."""
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
    by_example: Sequence[Sequence[Tensor]],
) -> Decomposition:
    """Add the relevance of further inputs to a decomposition.

    Args:
        baselines: the baseline of each further input; None for 0.
        by_example: for each example the gradients at the further inputs.
    """
    values = [x.detach() for x in others]
    starts = [
        torch.zeros_like(x) if start is None else start
        for x, start in zip(values, baselines, strict=True)
    ]

    def added(factors: Sequence[Tensor]) -> Tensor:
        sums = [
            sum_tensors((g * x).sum() for g, x in zip(gradients, factors, strict=True))
            for gradients in by_example
        ]
        return torch.stack(sums).to(found.output)

    changes = [x - start for x, start in zip(values, starts, strict=True)]
    at_others = zip(*by_example, strict=True)
    relevance = tuple(
        torch.stack(each).sum(0) * change for each, change in zip(at_others, changes, strict=True)
    )
    biases = found.biases
    if any(start is not None for start in baselines):
        before = biases.get("baselines", torch.zeros_like(found.output))
        biases = {**biases, "baselines": before + added(starts)}
    return replace(found, biases=biases, others=relevance, by_others=added(changes))


def changes(network: Network, baselines: Sequence[Tensor]) -> list[Tensor]:
    """Subtract each root's baseline from it; empty baselines are 0."""
    values = [x.detach() for x in network.roots]
    if not baselines:
        return values
    return [x - baseline for x, baseline in zip(values, baselines, strict=True)]


def _sizes(network: Network) -> tuple[int, ...]:
    """Return the ``sizes`` of a :class:`Decomposition`; empty for one root."""
    if network.begins is not None:
        return network.met(network.begins).sizes
    roots = network.roots
    return tuple(x[0, 0].numel() for x in roots) if len(roots) > 1 else ()


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the features of the same tokens, if there are several tensors of them."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def _on_given(parts: Sequence[Tensor], network: Network) -> Tensor:
    """Move relevance of the roots to the tokens that the model was given, (B, L, ...)."""
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
    network: Network, output: Tensor, change: Sequence[Tensor], tokens: Tensor
) -> dict[Role, Tensor]:
    """Return the relevance of tokens (B, L) along the paths of each role; it sums to ``tokens``.

    ``change`` is each root less its baseline.
    """
    labels = network.mode.labels
    found = {role: torch.zeros_like(tokens) for role in ROLES}

    def along(role: Role) -> Tensor:
        """Return the relevance of tokens (B, L) along the paths of one role."""
        seed = torch.ones_like(output) if role == "content" else torch.zeros_like(output)
        with labels.only(role):
            gradients = network.mode.gradients(output, network.roots, seed)
        relevance = [
            torch.zeros_like(x) if gradient is None else gradient * x
            for gradient, x in zip(gradients, change, strict=True)
        ]
        of_tokens = _on_given(relevance, network)
        return of_tokens if of_tokens.dim() == 2 else of_tokens.flatten(2).sum(-1)

    found["content"] = tokens if network.mode.rule == "frozen" else along("content")
    *others, last = [role for role in ROLES if role in labels.begun] or ["content"]
    for role in others:
        found[role] = along(role)
    if last != "content":  # the rest, without another pass
        found[last] = tokens - torch.stack(list(found.values())).sum(0)
    labels.begun.clear()
    return found


def account(
    mode: Linearising,
    output: Tensor,
    constant: Tensor | None,
    wanted: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Take one backward pass, in which all constants of the graph are met.

    Args:
        mode: the rules of the run, and the constants of its graph.
        output: the number to explain per example (B,).
        constant: a summand of the output that no module added (B,), or None.
        wanted: tensors of the graph.

    Returns:
        The gradients at ``wanted``, zeros where none arrives; and the contribution of constants
        (B,), by the module that adds them.
    """
    biases: dict[str, Tensor] = {} if constant is None else {"output": constant.detach()}

    def write(gradient: Tensor, value: Tensor, where: str) -> None:
        entry = _per_example(contribution(gradient, value), len(output))
        biases[where] = biases.get(where, 0) + entry.to(output)

    live = [x for x in (*wanted, *mode.ledger.leaves) if x.requires_grad]
    with mode.ledger.entries_to(write):
        try:
            found = mode.gradients(output, live)
        except RuntimeError as error:
            if "checkpoint" in str(error):  # its layers run again, out of the rules' sight
                raise not_linear(output) from error
            raise
    arrived = {x: g for x, g in zip(live, found, strict=True) if g is not None}
    return [arrived.get(x, torch.zeros_like(x)) for x in wanted], biases


def _per_example(x: Tensor, batch: int) -> Tensor:
    """Sum over all dimensions but examples, (B,), if these, or their tokens or windows, come first.

    Other sums, such as over tokens routed to an expert, are wrong by example; :func:`exact` checks.
    """
    if x.dim() and len(x) % batch == 0:
        return x.reshape(batch, -1).sum(1)
    return (x.sum() / batch).expand(batch)


def exact(found: Decomposition, apart: bool = False) -> bool:
    """Return True if inputs and biases sum to the output for every example.

    In a batch a tenth of the tolerance is accepted, as constants may be given to the wrong example.

    Args:
        found: the decomposition.
        apart: whether examples were explained one by one. Default: False.
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
    """Return True if parts sum to the output for every example.

    Args:
        found: the parts.
        inputs: parts of the input (B, ...).
        share: factor on the tolerance. Default: 1.0.
        together: whether to check the sum over examples alone, as constants may be given to the
            wrong example. Default: False.
        past: parts along paths around the explained layer, (B, ...). Default: None.
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
    """Join the decompositions of parts of a batch."""
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
        "The model's output does not depend linearly on its input. Does it end in a softmax or "
        "another function that is frozen, or run under no_grad or detach? Explain the logits; "
        "contrast='all' gives log-probabilities, contrast='others' log-odds."
    )


#: Where the package's own functions are.
_OURS = f"{__name__.split('.', 1)[0]}."


def not_linear(output: Tensor) -> NotLinearError:
    """Return the error for a graph that is not linear; it names functions that may be the cause."""
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
    custom, blame = sorted(found), ""
    if custom:
        blame = f" It runs functions of its own ({', '.join(custom)}), which cannot be seen into."
    elif len(output) > 1:
        blame = " Do examples of the batch mix, as in x - x.mean(0)? Then explain them one by one."
    return NotLinearError(
        f"The model's output is not the sum of what its inputs and biases contribute.{blame} Run "
        "it with torch's own functions in place of fused kernels, without torch.utils.checkpoint, "
        "or report the model."
    )
