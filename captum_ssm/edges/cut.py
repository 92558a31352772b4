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
from .messages import MessageShare, head_mask, is_attention, share_of, sum_messages
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


def read_replacement(option: Replacement) -> Literal["mean"] | Donor | None:
    """Check the option ``replace``; return None, ``"mean"`` or a :class:`Donor`."""
    if option is None or isinstance(option, str):
        return None if option is None else checks.choice("replace", option, ("mean",))
    if isinstance(option, Tensor):
        return Donor((option,), {})
    if isinstance(option, tuple) and option and isinstance(option[0], Tensor):
        return Donor(option, {})
    if isinstance(option, Mapping):
        return Donor((), option)
    raise OptionError(
        f"replace={option!r} is not accepted. Pass None, 'mean', or the input of a second run: a "
        "tensor, a tuple of the model's arguments, or a mapping of them."
    )


class KnockOut(Protocol):
    """The attributes of a knock-out that :class:`CutCall` uses; see :func:`~captum_ssm.knock_out`.

    Attributes:
        edges_of: for each mixer module, the edges that select the mixer.
        replacement: the checked value of ``replace``.
        verify: True to compare each mixer's operator with the module's output, or a tolerance.
        donor_messages: messages of the second run along the edges, by mixer and call number.
        donor_inputs: inputs of the mixers in the second run, by mixer and call number.
    """

    edges_of: dict[nn.Module, list[Edges]]
    replacement: Literal["mean"] | Donor | None
    verify: bool | float
    donor_messages: dict[tuple[nn.Module, int], dict[Kind, Tensor]]
    donor_inputs: dict[tuple[nn.Module, int], Tensor]

    @property
    def donor(self) -> Donor | None:
        """The second run that supplies replacement messages, or None."""

    def record_matched(self, edges: Iterable[Edges]) -> None:
        """Record edges that matched a mixer; at the run's end, an unmatched kind is an error."""

    def input_positions(self, mixer_name: str, call_number: int) -> tuple[tuple[int, int], Tensor]:
        """Return the input's size (B, L), and the tokens' positions in it (B, L'), -1 for none."""


class CutCall:
    """Computes one mixer call's output without the messages that the ``acting`` knock-outs cut."""

    def __init__(
        self, mixer: Mixer, call: Call, call_number: int, acting: Sequence[KnockOut]
    ) -> None:
        self.mixer, self.call_number = mixer, call_number
        # the innermost acts for all, with its map of tokens and its tolerance
        self.acting, self.inner = acting, acting[-1]
        args, kwargs, output = (detached(x) for x in (call.args, call.kwargs, call.output))
        self.call = replace(call, args=args, kwargs=kwargs, output=output)
        self.hidden, self.output = call.hidden_states, call.output_tensor  # with their graph
        self.edges: dict[Kind, list[Edges]] = {}
        self._pairs_of_edges: dict[tuple[Kind, tuple[Edges, ...]], list[Pairs]] = {}
        for knock_out in acting:
            for selected in knock_out.edges_of[mixer.module]:
                by = None if knock_out.replacement is None else knock_out
                kind = Kind(share_of(selected), selected.selection, by)
                self.edges.setdefault(kind, []).append(selected)

    def messages(self) -> dict[Kind, Tensor]:
        """Return this call's messages along the edges, which a later run uses as replacements."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.output.device):
            self._drop_other_kinds()
            return {
                kind: self._message(kind, self._pairs(kind))
                for kind in self.edges
                if not kind.selection  # with selection, donor_inputs are the replacements
            }

    def cut_output(self) -> Tensor | None:
        """Return the mixer's output without the cut messages; None if no message is cut."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.output.device):
            self._drop_other_kinds()
            self._refuse_conflicting_cuts()
            partial_kinds = [k for k in self.edges if not k.is_whole]
            cut_messages = [self._decrease(kind) for kind in partial_kinds]
            decrease = None
            if cut_messages:
                unprojected = sum_tensors(cut_messages).flatten(-2)
                decrease = self._as_returned(projection_of(self.linear).product(unprojected))
            # whole outputs become exactly 0; a difference would leave rounding errors
            whole_kinds = [k for k in self.edges if k.is_whole]
            silent = [pairs.targets.any(0) for kind in whole_kinds for pairs in self._pairs(kind)]
            mask = torch.stack(silent).any(0) if silent else None  # (B, L)
        out = self.output
        if decrease is not None and bool(decrease.any()):
            out = _Without.apply(out, decrease)  # type: ignore[no-untyped-call]
        if mask is not None:
            is_silent = self._as_returned(mask.to(out.device, torch.float32)[..., None]).bool()
            out = out.masked_fill(is_silent, 0)
        return None if out is self.output else out

    @functools.cached_property
    def linear(self) -> LinearMixer:
        """The linear form of the mixer in this call, checked against the module's output."""
        # a record of only this call: 0 bytes for operators, and whether to check them
        record = Trace(0, self.inner.verify is not False)
        layer = Layer(record.linearize, self.mixer, self.call, None)
        record.layers.append(layer)
        linear = record.read(layer)
        if self.inner.verify is not False:
            layer.verify(None if self.inner.verify is True else float(self.inner.verify))
        return linear

    def _drop_other_kinds(self) -> None:
        """Drop edges whose ``layers`` is ``"attention"`` or ``"ssm"`` and excludes this mixer."""
        if all(e.is_of_kind(True) and e.is_of_kind(False) for s in self.edges.values() for e in s):
            return  # no edges name a kind, so the mixer is not linearized here
        attention = is_attention(self.linear)
        of_this_kind = {k: [e for e in s if e.is_of_kind(attention)] for k, s in self.edges.items()}
        self.edges = {kind: edges for kind, edges in of_this_kind.items() if edges}
        for knock_out in self.acting:
            knock_out.record_matched(edge for edges in self.edges.values() for edge in edges)

    @functools.cached_property
    def _size_and_places(self) -> tuple[tuple[int, int], Tensor | None]:
        """Return the input's (B, L), and mixer tokens' positions in the input, or None if equal."""
        if self.linear.map is not None:  # an image: positions count the mixer's own tokens
            shape = self.linear.operator.shape
            return (shape.batch, shape.tokens), None
        all_edges = [e for s in self.edges.values() for e in s]
        if all(e.sources is None and e.targets is None for e in all_edges):
            return (self.hidden.shape[0], self.hidden.shape[1]), None
        size, places = self.inner.input_positions(self.mixer.name, self.call_number)
        in_order = places.shape == size and torch.equal(places, torch.arange(size[1]).expand(size))
        return size, None if in_order else places

    def _pairs(self, kind: Kind, edges: Sequence[Edges] | None = None) -> list[Pairs]:
        """Return the (target, source) pairs of a kind's edges, or of the passed ``edges``."""
        size, places = self._size_and_places
        selected = tuple(self.edges[kind] if edges is None else edges)
        if (kind, selected) not in self._pairs_of_edges:
            by_target = kind.selection or kind.share.constants
            self._pairs_of_edges[kind, selected] = list(
                pairs_of(selected, size, places, by_target=by_target)
            )
        return self._pairs_of_edges[kind, selected]

    def _refuse_conflicting_cuts(self) -> None:
        """Raise OptionError if two kinds of edges would cut the same message differently."""
        kinds = list(self.edges)
        for i, kind in enumerate(kinds):
            for earlier in kinds[:i]:
                heads, earlier_heads = kind.share.heads, earlier.share.heads
                if (
                    heads is not None
                    and earlier_heads is not None
                    and not set(heads) & set(earlier_heads)
                ):
                    continue  # no message in common
                if (kind.is_whole and earlier.by is None) or (earlier.is_whole and kind.by is None):
                    continue  # nothing is left either way
                if _share_a_pair(self._pairs(kind), self._pairs(earlier)):
                    raise OptionError(
                        f"Layer {self.mixer.name!r}: {self.edges[earlier][0]} and "
                        f"{self.edges[kind][0]} cut one message in two ways. Pass the same heads, "
                        "component, selection and replace in both (and sources in both or none), "
                        "or edges without a common pair of tokens."
                    )

    def _decrease(self, kind: Kind) -> Tensor:
        """Sum the cut messages minus their replacements, before the projection, (B, L, H, P)."""
        pairs = self._pairs(kind)
        if kind.selection:
            return self._decrease_with_selection(kind, pairs)
        cut = self._message(kind, pairs)
        self._refuse_against_causality(kind)
        if kind.by is None or kind.by.donor is None:
            return cut
        key = self.mixer.module, self.call_number
        sent = kind.by.donor_messages.get(key, {}).get(kind)
        if sent is None or sent.shape[1:] != cut.shape[1:] or len(sent) not in (1, len(cut)):
            problem = "does not run the layer" if sent is None else f"has {tuple(sent.shape[:2])}"
            raise InputError(
                f"Layer {self.mixer.name!r}: the run on the replace input {problem}, but this run "
                f"has (B, L) = {tuple(cut.shape[:2])}. Pass replace with {cut.shape[1]} tokens."
            )
        return cut - sent

    def _message(self, kind: Kind, pairs: Sequence[Pairs]) -> Tensor:
        """Sum the messages along pairs; with ``replace="mean"``, minus the mean token's message."""
        linear, values = self.linear, None
        if kind.by is not None and kind.by.replacement == "mean":
            values = linear.values - _mean(linear.values, linear.mask)  # messages are linear
        return sum_messages(linear, pairs, kind.share, self.mixer.name, values)

    def _decrease_with_selection(self, kind: Kind, pairs: Sequence[Pairs]) -> Tensor:
        """Return the targets' decrease (B, L, H, P) if the sources in the mixer's input change.

        The mixer's linear form and coefficients are computed again for each set of sources.
        """
        linear, hidden = self.linear, self.hidden.detach()
        replacement = torch.zeros_like(hidden)
        if kind.by is not None and kind.by.replacement == "mean":
            replacement = replacement + _mean(hidden[..., None], linear.mask)[..., 0]  # (B, 1, E)
        elif kind.by is not None:
            recorded = kind.by.donor_inputs.get((self.mixer.module, self.call_number))
            if recorded is None or recorded.shape[1:] != hidden.shape[1:]:
                shape = None if recorded is None else tuple(recorded.shape)
                raise InputError(
                    f"Layer {self.mixer.name!r}: the layer's input has shape {shape} in the run on "
                    f"the replace input, but {tuple(hidden.shape)} in this run. Pass replace with "
                    f"{hidden.shape[1]} tokens."
                )
            replacement = replacement + recorded
        unchanged, decrease = linear.operator.affine(linear.values), torch.zeros_like(linear.values)
        for products in pairs:
            for targets, sources in zip(*products, strict=True):
                mask = sources.to(hidden.device, torch.float32)[..., None]
                is_source = self._as_returned(mask).bool()
                call = _with_hidden(self.call, torch.where(is_source, replacement, hidden))
                linear_without = linearize(self.mixer, call, running=True)
                changed = linear_without.operator.affine(linear_without.values)
                decrease += (unchanged - changed) * targets.to(hidden.device)[..., None, None]
        return decrease * head_mask(linear, kind.share.heads, self.mixer.name)

    def _refuse_against_causality(self, kind: Kind) -> None:
        """Raise if a causal mixer's targets all precede their sources, so there are no messages."""
        for edges in self.edges[kind]:
            if edges.sources is None or kind.share.without is not None:
                continue  # the part of a message that belongs to a component may be 0
            pairs = self._pairs(kind, [edges])
            if not pairs or any(_has_pair_along_time(each_pairs) for each_pairs in pairs):
                continue
            have_tokens = any(bool((p.targets.any(-1) & p.sources.any(-1)).any()) for p in pairs)
            # by=None: without replacements, which may equal the messages
            if have_tokens and not bool(self._message(kind._replace(by=None), pairs).any()):
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
    def forward(ctx: Any, output: Tensor, messages: Tensor) -> Tensor:
        return (output.to(messages) - messages).to(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GradientModeError(
            "A gradient was taken through messages that knock_out has cut. It would be wrong, "
            "because cuts are not differentiated. Inside knock_out, run the model under "
            "torch.no_grad(); to estimate effects of cuts, use EdgeEffects."
        )


def _with_hidden(call: Call, hidden: Tensor) -> Call:
    """Copy a mixer's call, with ``hidden`` (B, L, E) in place of the hidden states."""
    original = call.hidden_states

    def swapped(x: Any) -> Any:
        return hidden if x is original else x

    kwargs = {name: swapped(x) for name, x in call.kwargs.items()}
    return replace(call, args=tuple(map(swapped, call.args)), kwargs=kwargs)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over each example's unpadded tokens, (B, 1, H, P)."""
    if mask is None:
        return x.mean(1, keepdim=True)
    keep = mask.to(x)[..., None, None]
    return (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)


def _share_a_pair(first: Sequence[Pairs], second: Sequence[Pairs]) -> bool:
    """Return True if, in some example, two products overlap in targets and also in sources."""
    return any(
        bool(((p.targets[r] & targets).any(-1) & (p.sources[r] & sources).any(-1)).any())
        for p in first
        for r in range(len(p.targets))
        for q in second
        for targets, sources in zip(*q, strict=True)
    )


def _has_pair_along_time(pairs: Pairs) -> bool:
    """Return True if some pair, in any example, has its target at or after its source."""
    tokens = pairs.targets.shape[-1]
    position = torch.arange(tokens)
    last_target = torch.where(pairs.targets, position, -1).amax(-1)
    first_source = torch.where(pairs.sources, position, tokens).amin(-1)
    return bool((last_target >= first_source).any())
