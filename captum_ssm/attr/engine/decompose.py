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
from ...linear.shares import sum_per_example
from ...operators.base import Role
from ...operators.coefficients import ROLES
from ...operators.kernels.arithmetic import autocast_dtype, sum_tensors
from ...operators.kernels.truths import holds
from ..call.layout import to_input_tokens
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
        size = f"{tokens} tokens" if examples == 1 else f"{examples} examples of {tokens} tokens"
        if examples > 1:
            return f"Decomposition({size})"
        rest = self.virtual + (0 if self.by_others is None else self.by_others)
        zero = torch.zeros_like(self.output)
        # separate terms for constants that are not a module's bias
        named = {name: self.biases.get(name, zero) for name in ("cache", "references", "baselines")}
        biases = self.bias - sum(named.values(), zero)
        parts = {"tokens": self.tokens.sum(), **named, "biases": biases, "others": rest}
        terms = [f"{name} {float(term):.3g}" for name, term in parts.items() if bool(term.any())]
        equation = f"output {float(self.output):.3g} = {' + '.join(terms)}"
        return f"Decomposition({size}: {equation}, delta {float(self.delta):.0e})"

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
    other_baselines: Sequence[Tensor | None] = (),
    by_role: bool = False,
    features: bool = False,
    one_pass_per_example: bool = False,
    by_label: Mapping[Role, Tensor] = MappingProxyType({}),
) -> Decomposition:
    """Decompose an output by one backward pass through a linear network.

    A contribution is the gradient times the value, minus the baseline if there is one. Each role
    needs one more pass. Several inputs need one pass per example, because inputs after the first
    may have no batch dimension.

    Args:
        network: the network, after its forward run.
        output: the number to explain per example (B,), with its autograd graph.
        constant: a summand of the output that no module added (B,). Default: None.
        baselines: the baseline of each root, a tensor where the network begins. Default: empty, 0.
        other_baselines: the baseline of each input after the first. Default: empty, no such input.
        by_role: whether relevance is computed by role. Default: False.
        features: whether relevance of streams and mixers is kept by feature. Default: False.
        one_pass_per_example: whether each example has its own backward pass, which finds its
            constants. Default: False, constants are assigned by their index in the batch.
        by_label: for a chunk of a sequence, the part of the output whose paths have a label, by
            label; see :class:`~captum_ssm.linear.shares.Labels`. Default: empty, all paths begin
            at the output.
    """
    mode, others = network.mode, network.mode.others
    roots, passing, steps = network.roots, network.passing, network.steps
    step_tensors = [x for step in steps for x in (*step.entering, step.output)]
    #: Relevance of each mixer's stream and output, by its place in the run.
    by_layer: dict[Any, tuple[Tensor | None, Tensor]] = {}

    def note(place: Any, step: Step, gradients: Sequence[Tensor | None]) -> None:
        """Store a mixer's relevance at ``place``, its sort key in the order of the run."""
        by_layer[place] = _stream_and_mixer(step, gradients, features)

    tensors = [*roots, *passing, *others, *step_tensors]
    # blocks that run again keep no graph, so they report their mixers' gradients to `note`
    with nullcontext() if mode.blocks is None else mode.blocks.report_to(note):
        gradients, biases = account(mode, output, constant, tensors)
    # split the gradients into those at roots, passing, others, and the remaining ones at steps
    remaining = iter(gradients)
    at_roots = [next(remaining) for _ in roots]
    at_passing = [next(remaining) for _ in passing]
    at_others = [next(remaining) for _ in others]
    # a stream that enters several blocks has one gradient for each block; they are added
    for i, step, at_tensors in along_all_paths(steps, remaining):
        note(outside(i), step, at_tensors)
    in_order = [by_layer[place] for place in sorted(by_layer)]
    at_others_by_example = [at_others]  # one entry for all examples, unless there are more passes
    if len(output) > 1 and (others or one_pass_per_example):
        # roots are included, because constants are found where gradients pass
        sources = (*others, *roots, *passing)
        passes, biases = _one_pass_per_example(mode, output, constant, sources)
        at_others_by_example = [gradients[: len(others)] for gradients in passes]
    if baselines:
        pairs = zip(at_roots, baselines, strict=True)
        biases["baselines"] = sum_tensors((g * b).flatten(1).sum(1) for g, b in pairs).to(output)
    differences = changes(network, baselines)
    of_roots = [g * x for g, x in zip(at_roots, differences, strict=True)]
    inputs = _on_input_tokens(of_roots, network)
    of_passing = [g * x.detach() for g, x in zip(at_passing, passing, strict=True)]
    # relevance outside the input tokens: of tokens that the model adds, such as a class token, and
    # of paths that bypass the layer where the network begins
    virtual = sum_tensors(x.flatten(1).sum(1) for x in of_roots) - inputs.flatten(1).sum(1)
    virtual = virtual.to(output.detach())
    for relevance in of_passing:
        virtual = virtual + relevance.flatten(1).sum(1).to(virtual)
    result = Decomposition(
        inputs=inputs,
        streams=tuple(stream for stream, _ in in_order if stream is not None),
        mixers=tuple(mixer for _, mixer in in_order),
        biases=biases,
        output=output.detach(),
        virtual=virtual,
        content_only=tuple(dict.fromkeys(network.content_only)),
        sizes=_sizes(network),
        past=_concatenated(of_passing) if of_passing else None,
    )
    if others:
        result = _with_others(result, others, other_baselines, at_others_by_example)
    if not by_role:
        return result
    return replace(result, roles=_by_role(network, output, differences, result.tokens, by_label))


def _stream_and_mixer(
    step: Step, gradients: Sequence[Tensor | None], features: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the relevance of a mixer's residual stream (None without one), and of its output.

    Shapes are (B, L), or (B, L, E) by feature. ``gradients`` has one gradient per tensor entering
    the block, and the gradient at the mixer's output last.
    """

    def relevance(x: Tensor, gradient: Tensor | None) -> Tensor:
        """Return gradient times ``x``, for tokens in the order of the mixer's output."""
        product = torch.zeros_like(x) if gradient is None else gradient * x.detach()
        by_feature = _as_sequence(product, step.output)
        # (B, L, ...) -> (B, L); of a vector (B, F) for all tokens, the sum is (B,)
        return by_feature if features else by_feature.flatten(min(2, by_feature.dim() - 1)).sum(-1)

    *entering, mixer = map(relevance, (*step.entering, step.output), gradients)
    entering = [x for x in entering if x.dim() == mixer.dim()]  # a vector (B, F) is no stream
    return sum_tensors(entering) if entering else None, mixer


def _as_sequence(x: Tensor, like: Tensor) -> Tensor:
    """Reshape a grid (B, h, w, E) that enters a block to the mixer's (B, L, E), if possible."""
    same = x.dim() > 3 and x.shape[-1] == like.shape[-1] and x.numel() == like.numel()
    return x.reshape(like.shape) if same else x


def _one_pass_per_example(
    mode: Linearizing, output: Tensor, constant: Tensor | None, sources: Sequence[Tensor]
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Return for each example the gradients at ``sources``, and bias contributions (B,) by name."""
    passes = []  # all constants that a pass finds belong to its example
    for i in range(len(output)):
        summand = None if constant is None else constant[i : i + 1]
        passes.append(account(mode, output[i : i + 1], summand, sources))
    names = dict.fromkeys(name for _, biases in passes for name in biases)
    zero = output.new_zeros(1)
    biases = {name: torch.cat([biases.get(name, zero) for _, biases in passes]) for name in names}
    return [gradients for gradients, _ in passes], biases


def _with_others(
    decomposition: Decomposition,
    others: Sequence[Tensor],
    baselines: Sequence[Tensor | None],
    gradients_by_example: Sequence[Sequence[Tensor]],
) -> Decomposition:
    """Add the relevance of the inputs after the first to a decomposition.

    ``baselines`` has one entry per such input, None for 0. ``gradients_by_example`` has for each
    backward pass (one per example) the gradients at all of ``others``.
    """
    values = [x.detach() for x in others]
    baseline_values = [
        torch.zeros_like(x) if baseline is None else baseline
        for x, baseline in zip(values, baselines, strict=True)
    ]

    def sums_of(factors: Sequence[Tensor]) -> Tensor:
        """Return the sum of gradient times factor over all of ``others``, (B,)."""
        sums = [
            sum_tensors((g * x).sum() for g, x in zip(gradients, factors, strict=True))
            for gradients in gradients_by_example
        ]
        return torch.stack(sums).to(decomposition.output)

    differences = [x - baseline for x, baseline in zip(values, baseline_values, strict=True)]
    # relevance of all examples is added, because an input need not belong to a single example
    by_input = zip(*gradients_by_example, strict=True)
    relevance = tuple(
        torch.stack(grads).sum(0) * x for grads, x in zip(by_input, differences, strict=True)
    )
    biases = decomposition.biases
    if any(baseline is not None for baseline in baselines):
        of_first = biases.get("baselines", torch.zeros_like(decomposition.output))
        biases = {**biases, "baselines": of_first + sums_of(baseline_values)}
    return replace(decomposition, biases=biases, others=relevance, by_others=sums_of(differences))


def changes(network: Network, baselines: Sequence[Tensor]) -> list[Tensor]:
    """Return each root minus its baseline; empty ``baselines`` mean 0."""
    values = [x.detach() for x in network.roots]
    if not baselines:
        return values
    return [x - baseline for x, baseline in zip(values, baselines, strict=True)]


def _sizes(network: Network) -> tuple[int, ...]:
    """Return :attr:`Decomposition.sizes`, the sizes of the tensors concatenated in ``inputs``."""
    if network.begins is not None:
        return network.met(network.begins).sizes
    roots = network.roots  # one per table in which ids are looked up; x[0, 0] is of one token
    return tuple(x[0, 0].numel() for x in roots) if len(roots) > 1 else ()


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the features of tensors (B, L, ...) that have the same tokens."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def _on_input_tokens(parts: Sequence[Tensor], network: Network) -> Tensor:
    """Move relevance from the roots' tokens to input tokens (B, L, ...); drop inserted tokens."""
    mode = network.mode
    if network.begins is not None:  # an explained layer keeps its own tokens
        return _concatenated(parts)
    # for each root its tokens' positions in the input, -1 for inserted tokens; None if all are same
    input_positions = [mode.given, *(look_up.given for look_up in mode.again)]
    return _concatenated(
        [
            x if given is None else to_input_tokens(x, given, mode.tokens)
            for x, given in zip(parts, input_positions, strict=True)
        ]
    )


def _by_role(
    network: Network,
    output: Tensor,
    differences: Sequence[Tensor],
    tokens: Tensor,
    by_label: Mapping[Role, Tensor],
) -> dict[Role, Tensor]:
    """Return the relevance of tokens (B, L) for each role; the sum over roles is ``tokens``.

    The pass for content comes first: it stores the gradients from which other roles' paths start.
    ``differences`` is the result of :func:`changes`; see :func:`decompose` for other arguments.
    """
    labels, carried = network.mode.labels, network.carried
    tensors = [*network.roots, *(() if carried is None else carried.leaves)]
    by_role = {role: torch.zeros_like(tokens) for role in ROLES}

    def relevance_along(role: Role) -> Tensor:
        """Return the relevance of tokens (B, L) along the paths that count for one role."""
        # paths of other roles begin inside the network, so nothing of the output enters them
        seed = torch.ones_like(output) if role in by_label or role == "content" else 0 * output
        with labels.follow(role):
            explained = by_label.get(role, output)
            gradients = network.mode.gradients(explained, tensors, seed.detach())
        relevance = [
            torch.zeros_like(x) if gradient is None else gradient * x
            # without the cache's leaves, whose hooks record their gradients
            for gradient, x in zip(gradients, differences, strict=False)
        ]
        of_tokens = _on_input_tokens(relevance, network)
        return of_tokens if of_tokens.dim() == 2 else of_tokens.flatten(2).sum(-1)

    by_role["content"] = tokens if network.mode.rule == "frozen" else relevance_along("content")
    for role in by_label.keys() - {"content"}:  # paths that started in a later chunk need a pass
        labels.path_starts.setdefault(role, {})
    # roles without paths have no relevance; without any role, content is last and needs no more
    *other_roles, last_role = [role for role in ROLES if role in labels.path_starts] or ["content"]
    if by_label and last_role != "content":  # its pass is needed for gradients at the cache
        other_roles, last_role = [*other_roles, last_role], "content"
    for role in other_roles:
        by_role[role] = relevance_along(role)
    if last_role != "content":  # the rest, without another pass
        by_role[last_role] = tokens - torch.stack(list(by_role.values())).sum(0)
    labels.path_starts.clear()
    return by_role


def account(
    mode: Linearizing, output: Tensor, constant: Tensor | None, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run one backward pass from an output (B,), and return the gradients at ``tensors``.

    Gradients are zeros where none arrives. Also return the contributions of constants (B,), by the
    name of the module that adds them. ``constant`` is a summand that no module added, or None.
    """
    biases: dict[str, Tensor] = {} if constant is None else {"output": constant.detach()}

    def add(gradient: Tensor, value: Tensor, module: str) -> None:
        """Add the contribution of a constant of ``module``, called when its gradient arrives."""
        entry = sum_per_example(contribution(gradient, value), len(output))
        biases[module] = biases.get(module, 0) + entry.to(output)

    # gradients at the ledger's leaves are not returned, but their hooks report to `add`
    live = [x for x in (*tensors, *mode.ledger.leaves) if x.requires_grad]
    with mode.ledger.entries_to(add):
        try:
            gradients = mode.gradients(output, live)
        except RuntimeError as error:
            if "checkpoint" in str(error):  # torch runs such layers again, without our rules
                raise not_linear(output) from error
            raise
    gradient_at = {x: g for x, g in zip(live, gradients, strict=True) if g is not None}
    return [gradient_at.get(x, torch.zeros_like(x)) for x in tensors], biases


def is_exact(decomposition: Decomposition, one_pass_per_example: bool = False) -> bool:
    """Return True if inputs and biases sum to the output for every example.

    After one pass for a whole batch the tolerance is a tenth: constants may be assigned to the
    wrong example, and the caller can repeat with one pass per example.
    """
    share = 1 if one_pass_per_example or len(decomposition.output) == 1 else 0.1
    return sums_up(decomposition, decomposition.inputs, share, past=decomposition.past)


def sums_up(
    decomposition: OutputParts,
    inputs: Tensor,
    share: float = 1.0,
    *,
    together: bool = False,
    past: Tensor | None = None,
) -> bool:
    """Return True if contributions sum to the output for every example.

    Args:
        decomposition: the decomposition.
        inputs: contributions of the input (B, ...).
        share: factor on the tolerance. Default: 1.0.
        together: whether to check only the sum over examples, because constants may be assigned to
            the wrong example. Default: False.
        past: contributions along paths that bypass the explained layer, (B, ...). Default: None.
    """
    # the sum of all magnitudes, to which the tolerance is relative
    size = inputs.flatten(1).abs().sum(1) + decomposition.output.abs()
    if decomposition.biases:
        size = size + torch.stack(list(decomposition.biases.values())).abs().sum(0)
    output = decomposition.output
    dtypes = {inputs.dtype, output.dtype, autocast_dtype(output.device) or output.dtype}
    if isinstance(decomposition, Decomposition):
        for other in decomposition.others:
            size = size + other.abs().sum().to(size)
            dtypes.add(other.dtype)
    if past is not None:  # the inputs may be less precise than the explained layer
        size = size + past.flatten(1).abs().sum(1).to(size)
        dtypes.add(past.dtype)
    limit = share * max(TOLERANCES.get(dtype, 1e-3) for dtype in dtypes)
    if together:
        return holds(decomposition.delta.sum().abs() <= limit * size.sum())
    return holds((decomposition.delta.abs() <= limit * size).all())


def stacked(parts: Sequence[Decomposition]) -> Decomposition:
    """Concatenate decompositions of parts of a batch along the batch dimension."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(name for part in parts for name in part.biases))
    pasts = [part.past for part in parts if part.past is not None]
    return Decomposition(
        inputs=torch.cat([part.inputs for part in parts]),
        streams=tuple(map(torch.cat, zip(*(part.streams for part in parts), strict=True))),
        mixers=tuple(map(torch.cat, zip(*(part.mixers for part in parts), strict=True))),
        biases={
            name: torch.cat([p.biases.get(name, torch.zeros_like(p.output)) for p in parts])
            for name in names
        },
        output=torch.cat([part.output for part in parts]),
        virtual=torch.cat([part.virtual for part in parts]),
        roles=_stacked_roles(parts),
        content_only=tuple(dict.fromkeys(name for part in parts for name in part.content_only)),
        sizes=parts[0].sizes,
        past=torch.cat(pasts) if pasts else None,
    )  # a batch with several inputs is never split, so `others` and `by_others` are not needed


def _stacked_roles(parts: Sequence[Decomposition]) -> dict[Role, Tensor] | None:
    """Concatenate the parts' relevance by role; return None if a part has none."""
    by_part = [part.roles for part in parts if part.roles is not None]
    if len(by_part) < len(parts):
        return None
    return {role: torch.cat([by_role[role] for by_role in by_part]) for role in ROLES}


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
    """Return the error for an output to which contributions do not sum, with possible causes."""
    precision = torch.finfo(output.dtype)
    # below this value, rounding errors are larger than the usual fraction of the result
    if bool((output.detach().abs() < precision.tiny / precision.eps).any()):
        return NotLinearError(
            f"The model's output is so small that products in {output.dtype} underflow. Pass "
            "model.double(), or choose a target with a larger output."
        )
    names: set[str] = set()  # of custom autograd functions in the output's graph
    visited: set[Any] = set()
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        pending += [next_node for next_node, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = node._forward_cls  # type: ignore[attr-defined]
            if not function.__module__.startswith(_OURS):  # ours are linear maps
                names.add(function.__name__)
    custom, cause = sorted(names), ""
    if custom:
        cause = f" It runs custom autograd functions ({', '.join(custom)}), which are not analyzed."
    elif len(output) > 1:
        cause = " Do examples of the batch mix, as in x - x.mean(0)? Then explain them one by one."
    return NotLinearError(
        "The contributions of the model's inputs and biases do not sum to the model's output."
        f"{cause} Replace fused kernels by torch functions, switch off torch.utils.checkpoint, or "
        "report the model."
    )
