"""Subtract selected messages between tokens from the output of one mixer call."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..attr.call import checks
from ..errors import GradientModeError, InputError, OptionError, QueryError
from ..mixers.base import Call, LinearMixer
from ..operators.kernels.arithmetic import full_precision, sum_tensors
from ..tracing import Layer, Mixer, Trace
from ..tracing.hooks import detached
from ..tracing.offload import linearize
from ..tracing.projection import projection_of
from .messages import MessageShare, carried, is_attention, of_heads, share_of
from .pairs import Edges, Pairs, pairs_of

#: Values of the option ``replace``: None for zeros, ``"mean"`` for the mean token's message, or the
#: model's arguments for a second run, whose messages replace the cut ones.
Replacement = None | Literal["mean"] | Tensor | tuple[Any, ...] | Mapping[str, Any]


class Donor(NamedTuple):
    """The model's arguments for a second run; messages of that run replace the cut messages."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Kind(NamedTuple):
    """Settings of a cut. Edges with equal settings are merged, so no message is cut twice.

    Attributes:
        share: the components and heads of each message that are cut.
        selection: whether the sources' effect on the coefficients is also removed.
        by: the knock-out whose option ``replace`` supplies replacements; None for zeros.
    """

    share: MessageShare
    selection: bool
    by: KnockOut | None

    @property
    def is_whole(self) -> bool:
        """Return True if the mixer's whole output at the targets is cut."""
        return self.share.is_whole and self.by is None


def read_replacement(given: Replacement) -> Literal["mean"] | Donor | None:
    """Check the option ``replace``; return None, ``"mean"`` or a :class:`Donor`."""
    if given is None or isinstance(given, str):
        return None if given is None else checks.choice("replace", given, ("mean",))
    if isinstance(given, Tensor):
        return Donor((given,), {})
    if isinstance(given, tuple) and given and isinstance(given[0], Tensor):
        return Donor(given, {})
    if isinstance(given, Mapping):
        return Donor((), given)
    raise OptionError(
        f"replace={given!r} is not accepted. Pass None, 'mean', or the input of a second run: a "
        "tensor, a tuple of the model's arguments, or a mapping of them."
    )


class KnockOut(Protocol):
    """The attributes of a knock-out that :class:`CutCall` uses; see :func:`~captum_ssm.knock_out`.

    Attributes:
        of: for each mixer module, the edges that select the mixer.
        given: the checked value of ``replace``.
        verify: True to compare each mixer's operator with the module's output, or a tolerance.
        sent: messages of the second run along the edges, by mixer and call number.
        read: inputs of the mixers in the second run, by mixer and call number.
    """

    of: dict[nn.Module, list[Edges]]
    given: Literal["mean"] | Donor | None
    verify: bool | float
    sent: dict[tuple[nn.Module, int], dict[Kind, Tensor]]
    read: dict[tuple[nn.Module, int], Tensor]

    @property
    def donor(self) -> Donor | None:
        """The second run that supplies replacement messages, or None."""

    def record_matched(self, edges: Iterable[Edges]) -> None:
        """Record edges that matched a mixer; at the run's end, an unmatched kind is an error."""

    def given_tokens(self, layer: str, number: int) -> tuple[tuple[int, int], Tensor]:
        """Return the input's size (B, L), and the input position of each mixer token (B, L')."""


class CutCall:
    """Computes one mixer call's output without the messages that the ``acting`` knock-outs cut."""

    def __init__(self, mixer: Mixer, call: Call, number: int, acting: Sequence[KnockOut]) -> None:
        self.mixer, self.number = mixer, number
        self.acting, self.inner = acting, acting[-1]
        args, kwargs, output = (detached(x) for x in (call.args, call.kwargs, call.output))
        self.call = replace(call, args=args, kwargs=kwargs, output=output)
        self.hidden, self.output = call.hidden_states, call.output_tensor
        self.edges: dict[Kind, list[Edges]] = {}
        self._found: dict[tuple[Kind, tuple[Edges, ...]], list[Pairs]] = {}
        for one in acting:
            for edges in one.of[mixer.module]:
                by = None if one.given is None else one
                kind = Kind(share_of(edges), edges.selection, by)
                self.edges.setdefault(kind, []).append(edges)

    def sent(self, donor: KnockOut) -> dict[Kind, Tensor]:
        """Return this call's messages along the edges, which a later run uses as replacements."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.output.device):
            self._keep_kind()
            return {
                kind: self._message(kind, self._pairs(kind))
                for kind in self.edges
                if not kind.selection
            }

    def changed(self) -> Tensor | None:
        """Return the mixer's output without the cut messages; None if no message is cut."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.output.device):
            self._keep_kind()
            self._refuse_two_ways()
            parts = [k for k in self.edges if not k.is_whole]
            lost = [self._lost(kind) for kind in parts]
            delta = None
            if lost:
                before = sum_tensors(lost).flatten(-2)
                delta = self._as_returned(projection_of(self.linear).product(before))
            silent = [k for k in self.edges if k.is_whole]
            mask = self._pairs(silent[0])[0].targets[0] if silent else None
        out = self.output
        if delta is not None and bool(delta.any()):
            out = _Without.apply(out, delta)  # type: ignore[no-untyped-call]
        if mask is not None:
            where = self._as_returned(mask.to(out.device, torch.float32)[..., None]).bool()
            out = out.masked_fill(where, 0)
        return None if out is self.output else out

    @functools.cached_property
    def linear(self) -> LinearMixer:
        """The linear form of the mixer in this call, checked against the module's output."""
        record = Trace(0, self.inner.verify is not False)
        layer = Layer(record.linearize, self.mixer, self.call, None)
        record.layers.append(layer)
        found = record.read(layer)
        if self.inner.verify is not False:
            layer.verify(None if self.inner.verify is True else float(self.inner.verify))
        return found

    def _keep_kind(self) -> None:
        """Drop edges whose ``layers`` is ``"attention"`` or ``"ssm"`` and excludes this mixer."""
        if all(e.is_of_kind(True) and e.is_of_kind(False) for s in self.edges.values() for e in s):
            return
        attention = is_attention(self.linear)
        kept = {k: [e for e in s if e.is_of_kind(attention)] for k, s in self.edges.items()}
        self.edges = {kind: edges for kind, edges in kept.items() if edges}
        for one in self.acting:
            one.record_matched(edges for some in self.edges.values() for edges in some)

    @functools.cached_property
    def _tokens(self) -> tuple[tuple[int, int], Tensor | None]:
        """Return the input's (B, L), and mixer tokens' positions in the input, or None if equal."""
        if self.linear.map is not None:
            shape = self.linear.operator.shape
            return (shape.batch, shape.tokens), None
        every = [e for s in self.edges.values() for e in s]
        if all(e.sources is None and e.targets is None for e in every):
            return (self.hidden.shape[0], self.hidden.shape[1]), None
        size, places = self.inner.given_tokens(self.mixer.name, self.number)
        same = places.shape == size and torch.equal(places, torch.arange(size[1]).expand(size))
        return size, None if same else places

    def _pairs(self, kind: Kind, edges: Sequence[Edges] | None = None) -> list[Pairs]:
        """Return the (target, source) pairs of a kind's edges, or of the passed ``edges``."""
        size, places = self._tokens
        named = tuple(self.edges[kind] if edges is None else edges)
        if (kind, named) not in self._found:
            by_target = kind.selection or kind.share.constants
            self._found[kind, named] = list(pairs_of(named, size, places, by_target=by_target))
        return self._found[kind, named]

    def _refuse_two_ways(self) -> None:
        """Raise OptionError if two kinds of edges would cut the same message differently."""
        kinds = list(self.edges)
        for i, one in enumerate(kinds):
            for other in kinds[:i]:
                heads, others = one.share.heads, other.share.heads
                if heads is not None and others is not None and not set(heads) & set(others):
                    continue
                if (one.is_whole and other.by is None) or (other.is_whole and one.by is None):
                    continue  # nothing is left either way
                if _overlap(self._pairs(one), self._pairs(other)):
                    raise OptionError(
                        f"Layer {self.mixer.name!r}: {self.edges[other][0]} and "
                        f"{self.edges[one][0]} cut one message in two ways. Pass the same heads, "
                        "component, selection and replace in both (and sources in both or none), "
                        "or edges without a common pair of tokens."
                    )

    def _lost(self, kind: Kind) -> Tensor:
        """Sum the cut messages minus their replacements, before the projection, (B, L, H, P)."""
        pairs = self._pairs(kind)
        if kind.selection:
            return self._lost_with_selection(kind, pairs)
        lost = self._message(kind, pairs)
        self._refuse_against_causality(kind)
        if kind.by is None or kind.by.donor is None:
            return lost
        key = self.mixer.module, self.number
        sent = kind.by.sent.get(key, {}).get(kind)
        if sent is None or sent.shape[1:] != lost.shape[1:] or len(sent) not in (1, len(lost)):
            got = "does not run the layer" if sent is None else f"has {tuple(sent.shape[:2])}"
            raise InputError(
                f"Layer {self.mixer.name!r}: the run on the replace input {got}, but this run has "
                f"(B, L) = {tuple(lost.shape[:2])}. Pass replace with {lost.shape[1]} tokens."
            )
        return lost - sent

    def _message(self, kind: Kind, pairs: Sequence[Pairs]) -> Tensor:
        """Sum the messages along pairs; with ``replace="mean"``, minus the mean token's message."""
        linear, values = self.linear, None
        if kind.by is not None and kind.by.given == "mean":
            values = linear.values - _mean(linear.values, linear.mask)
        return carried(linear, pairs, kind.share, self.mixer.name, values)

    def _lost_with_selection(self, kind: Kind, pairs: Sequence[Pairs]) -> Tensor:
        """Return the targets' decrease (B, L, H, P) if the sources in the mixer's input change.

        The mixer's linear form and coefficients are computed again for each set of sources.
        """
        linear, hidden = self.linear, self.hidden.detach()
        fill = torch.zeros_like(hidden)
        if kind.by is not None and kind.by.given == "mean":
            fill = fill + _mean(hidden[..., None], linear.mask)[..., 0]
        elif kind.by is not None:
            read = kind.by.read.get((self.mixer.module, self.number))
            if read is None or read.shape[1:] != hidden.shape[1:]:
                got = None if read is None else tuple(read.shape)
                raise InputError(
                    f"Layer {self.mixer.name!r}: the layer's input has shape {got} in the run on "
                    f"the replace input, but {tuple(hidden.shape)} in this run. Pass replace with "
                    f"{hidden.shape[1]} tokens."
                )
            fill = fill + read
        whole, lost = linear.operator.affine(linear.values), torch.zeros_like(linear.values)
        for some in pairs:
            for targets, sources in zip(*some, strict=True):
                gone = self._as_returned(sources.to(hidden.device, torch.float32)[..., None]).bool()
                other = _with_hidden(self.call, torch.where(gone, fill, hidden))
                without = linearize(self.mixer, other, running=True)
                made = without.operator.affine(without.values)
                lost += (whole - made) * targets.to(hidden.device)[..., None, None]
        return lost * of_heads(linear, kind.share.heads, self.mixer.name)

    def _refuse_against_causality(self, kind: Kind) -> None:
        """Raise if a causal mixer's targets all precede their sources, so there are no messages."""
        for edges in self.edges[kind]:
            if edges.sources is None or kind.share.without is not None:
                continue
            pairs = self._pairs(kind, [edges])
            if not pairs or any(_goes_forward(some) for some in pairs):
                continue
            there = any(bool((s.targets.any(-1) & s.sources.any(-1)).any()) for s in pairs)
            if there and not bool(self._message(kind._replace(by=None), pairs).any()):
                raise QueryError(
                    f"Layer {self.mixer.name!r} reads only earlier tokens, but of the edges from "
                    f"sources={edges.sources!r} to targets={edges.targets!r} every target comes "
                    "before its source, so there is no message. Exchange sources and targets."
                )

    def _as_returned(self, x: Tensor) -> Tensor:
        """Reshape (B, L, E), in the operator's token order, to the layout of the mixer's output."""
        token_map = self.linear.map
        return x if token_map is None else token_map.as_returned(x)


class _Without(torch.autograd.Function):
    """Subtracts messages from an output; raises in backward, where gradients would be wrong."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lost: Tensor) -> Tensor:
        return (output.to(lost) - lost).to(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GradientModeError(
            "A gradient was taken through messages that knock_out has cut. It would be wrong, "
            "because cuts are not differentiated. Inside knock_out, run the model under "
            "torch.no_grad(); to estimate effects of cuts, use EdgeEffects."
        )


def _with_hidden(call: Call, hidden: Tensor) -> Call:
    """Copy a mixer's call, with ``hidden`` (B, L, E) in place of the hidden states."""
    old = call.hidden_states

    def other(x: Any) -> Any:
        return hidden if x is old else x

    kwargs = {name: other(x) for name, x in call.kwargs.items()}
    return replace(call, args=tuple(map(other, call.args)), kwargs=kwargs)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over each example's unpadded tokens, (B, 1, H, P)."""
    if mask is None:
        return x.mean(1, keepdim=True)
    keep = mask.to(x)[..., None, None]
    return (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)


def _overlap(one: Sequence[Pairs], other: Sequence[Pairs]) -> bool:
    """Return True if some pair of tokens is in both ``one`` and ``other``."""
    return any(
        bool((a.targets[r] & t).any(-1).logical_and((a.sources[r] & s).any(-1)).any())
        for a in one
        for r in range(len(a.targets))
        for b in other
        for t, s in zip(*b, strict=True)
    )


def _goes_forward(pairs: Pairs) -> bool:
    """Return True if some pair, in any example, has its target at or after its source."""
    tokens = pairs.targets.shape[-1]
    position = torch.arange(tokens)
    last = torch.where(pairs.targets, position, -1).amax(-1)
    first = torch.where(pairs.sources, position, tokens).amin(-1)
    return bool((last >= first).any())
