"""Runs of a model without some of the messages that its mixers carry between tokens."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..attr.call import checks
from ..errors import GradientModeError, InputError, NoMixerError, OptionError, QueryError
from ..mixers.base import Call, LinearMixer, first_tensor
from ..operators.kernels.arithmetic import full_precision, sum_tensors, unseen_by
from ..tracing import Layer, Mixer, Trace, find_mixers, find_model
from ..tracing.find import registered_mixers
from ..tracing.hooks import detached, hooked
from ..tracing.observe import Watcher, observe
from ..tracing.offload import linearize
from ..tracing.places import Places
from ..tracing.projection import projection_of
from ..tracing.record import look_past
from .messages import Share, carried, is_attention, of_heads, share_of
from .pairs import KINDS, Edges, Pairs, pairs_of

#: What stands in place of messages: nothing, what the mean token would send, or what is sent in a
#: run on another input, given as the model's arguments.
Replacement = None | Literal["mean"] | Tensor | tuple[Any, ...] | Mapping[str, Any]


@contextmanager
def knock_out(
    model: nn.Module | Callable[..., Any],
    *edges: Edges,
    replace: Replacement = None,
    verify: bool | float = True,
) -> Iterator[None]:
    """Run a model without some of the messages between its tokens.

    Inside the ``with`` the output of every mixer that the edges name loses exactly what its
    operator carries along them, by the coefficients that it has in that run: an intervention in
    the model as it is, after which everything else runs on.  What a source does to its neighbours'
    coefficients (B, C and the step of a Mamba, computed behind a convolution) is no message and
    stays, unless :class:`Edges` asks for it by ``selection``.  Knock-outs may be nested; a message
    that several of them cut is cut once.  The model keeps no cache meanwhile; let it generate
    texts with ``use_cache=False``, and every step is free of these messages.

    Positions count the tokens that the model is given, wherever a layer reads them; for images, the
    tokens that its first mixer reads.

    Args:
        model: a module, wrapped or not, or whatever runs one; see
            :func:`~captum_ssm.tracing.find_model`.
        *edges: which messages; see :class:`Edges`.
        replace: what stands in their place: nothing, ``"mean"`` for what the mean of the example's
            tokens would have sent, or for the messages of another run its input, of as many tokens
            (a tensor, or a tuple or mapping of the model's arguments). Default: None, nothing.
        verify: hold the operators to what their mixers returned; a number is the tolerance.
            Default: True.

    Yields:
        Nothing.

    Raises:
        OptionError: for arguments of other kinds, components or heads that a layer does not have,
            and edges that cut one message in two ways.
        QueryError: for positions that the tokens do not have, or edges that no message can take,
            for the layer reads earlier tokens alone.
        InputError: when tokens cannot be followed to a layer, or the other run differs in size.
        GradientModeError: when a gradient is taken through messages that were cut.
        ReconstructionError: when ``verify`` finds an operator that is not its module.

    Example:
        >>> import torch
        >>> from captum_ssm import knock_out
        >>> from captum_ssm.edges import Edges
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp . lamp")])
        >>> with torch.no_grad(), knock_out(model, Edges(sources=0, targets=-1)):
        ...     without = model(ids).logits
        >>> torch.allclose(without[:, :-1], model(ids).logits[:, :-1], atol=1e-4)
        True
    """
    for one in edges:
        if not isinstance(one, Edges):
            raise OptionError(f"edges holds {one!r}. Pass Edges(layers, sources, targets).")
    module = find_model(model)
    verify = checks.tolerance("verify", verify)
    cut = _KnockOut(module, edges, _replacement(replace), verify)
    if cut.donor is not None:
        cut.listen(cut.donor)
    token = _active.set((*_active.get(), cut))
    try:
        with ExitStack() as stack:
            cut.watch(stack)
            yield
    finally:
        _active.reset(token)


class _Donor(NamedTuple):
    """The arguments of another run."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Kind(NamedTuple):
    """What edges have to have in common to be counted together.

    Attributes:
        share: which share of their messages is cut.
        selection: whether the sources' share in coefficients goes as well.
        by: the knock-out that puts something in place of the messages; None for nothing.
    """

    share: Share
    selection: bool
    by: _KnockOut | None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left of what the targets are written."""
        return self.share.is_whole and self.by is None


def _replacement(given: Replacement) -> Literal["mean"] | _Donor | None:
    if given is None or isinstance(given, str):
        return None if given is None else checks.choice("replace", given, ("mean",))
    if isinstance(given, Tensor):
        return _Donor((given,), {})
    if isinstance(given, tuple) and given and isinstance(given[0], Tensor):
        return _Donor(given, {})
    if isinstance(given, Mapping):
        return _Donor((), given)
    raise OptionError(
        f"replace={given!r} is not known. Use None, 'mean', or the input of another run: a tensor, "
        "a tuple of the model's arguments, or a mapping of them."
    )


@dataclass(eq=False)
class _KnockOut(Watcher):
    """One knock-out, while its ``with`` lasts."""

    model: nn.Module
    edges: Sequence[Edges]
    given: Literal["mean"] | _Donor | None
    verify: bool | float
    #: Of the other run what is sent along the edges, by mixer and the number of its call.
    sent: dict[tuple[nn.Module, int], dict[_Kind, Tensor]] = field(default_factory=dict)
    read: dict[tuple[nn.Module, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vouched = all(_names_layers(one) for one in self.edges)
        mixers = registered_mixers(self.model) if vouched else find_mixers(self.model)
        inside = {mixer.module for mixer in mixers}
        self.mixers = [mixer for mixer in mixers if inside.isdisjoint(mixer.around)]
        self.of: dict[nn.Module, list[Edges]] = {}
        for one in self.edges:
            for mixer in one.chosen(self.mixers):
                self.of.setdefault(mixer.module, []).append(one)
        self.follow: Places | None = None
        self._entered: list[Tensor] = []
        self._depth = 0
        self._calls: Counter[nn.Module] = Counter()
        self._listening = False
        self._met: set[Edges] = set()

    @property
    def donor(self) -> _Donor | None:
        return self.given if isinstance(self.given, _Donor) else None

    def listen(self, donor: _Donor) -> None:
        """Run the model on another input, and keep what it sends along the edges."""
        self._listening = True
        try:
            with ExitStack() as stack:
                self.watch(stack)
                stack.enter_context(torch.no_grad())
                self.model(*donor.args, **donor.kwargs)
        except QueryError as error:
            raise QueryError(f"In the run that replace asks for: {error}") from error
        finally:
            self._listening = False

    def watch(self, stack: ExitStack) -> None:
        """Look on at the model's runs until the stack is left."""
        where = type(self.model).__name__
        self.follow = Places(lambda: where)
        modules = {outer for m in self.mixers for outer in (m.module, *m.around)}
        for module in modules:
            before = hooked(
                module.register_forward_pre_hook, self._begin, prepend=True, with_kwargs=True
            )
            stack.enter_context(before)
            after = functools.partial(hooked, module.register_forward_hook)
            stack.enter_context(after(self._end, always_call=True))
        observe(self.model, self.mixers, (self,), stack, gradients=False)
        look_past(self.follow, self.model, stack)
        stack.enter_context(self.follow)
        stack.callback(self._forget)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            self._calls.clear()
            first = _sequence(args, kwargs)
            assert self.follow is not None
            self.follow.restart()
            if first is not None:
                self.follow.begin(first)
        self._depth += 1

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and output is not None:  # else the call failed
            missed = [e for es in self.of.values() for e in es if e not in self._met]
            kind = next((e.layers for e in missed if e.layers in KINDS), None)
            if kind is not None:
                raise NoMixerError(
                    f"layers={kind!r}, but no mixer that ran is of this kind. Its mixers are "
                    f"{', '.join(mixer.name for mixer in self.mixers)}."
                )

    def meets(self, edges: Iterable[Edges]) -> None:
        """Note edges that a mixer of their kind has run for."""
        self._met.update(edges)

    def _forget(self) -> None:
        self._depth, self.follow = 0, None
        self._entered.clear()

    def while_mixing(self) -> Sequence[AbstractContextManager[Any]]:
        return () if self.follow is None else (unseen_by(self.follow),)

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        assert self.follow is not None
        hidden, number = call.hidden_states, self._calls[mixer.module]
        if not self.follow.has_begun and hidden.dim() == 3:
            self.follow.begin(hidden)
        self._entered.append(hidden)
        self._calls[mixer.module] += 1
        acting = [one for one in _active.get() if mixer.module in one.of]
        with ExitStack() as stack:
            for context in self.while_mixing():
                stack.enter_context(context)
            if self._listening:
                if mixer.module in self.of:
                    cut = _Cut(mixer, call, number, [self])
                    self.sent[mixer.module, number] = cut.sent(self)
                    self.read[mixer.module, number] = hidden.detach()
            elif acting and acting[-1] is self:  # the innermost one acts for all
                return _Cut(mixer, call, number, acting).changed()
        return None

    def left(self, mixer: Mixer, output: Any) -> None:
        assert self.follow is not None
        hidden = self._entered.pop()
        origin = self.follow.origin(hidden)
        places = None if origin is None or origin.mixed is not None else origin.tokens(0)
        left = first_tensor(output)
        if origin is not None and places and places[0].shape == left.shape[:2]:
            self.follow.declare(left, 0, places[0], origin.sizes[0])

    def given_tokens(self, layer: str, hidden: Tensor) -> tuple[tuple[int, int], Tensor] | None:
        """The size (B, L) of what the model was given, and which of it each token is (B, L').

        Args:
            layer: what to call the layer in an error.
            hidden: what it reads.

        Returns:
            That, -1 being a token from elsewhere; None if the tokens are those given.
        """
        assert self.follow is not None
        origin = self.follow.origin(hidden)
        if origin is not None and origin.mixed is None:
            places = origin.tokens(0)
            if places and all(torch.equal(other, places[0]) for other in places[1:]):
                batch, tokens = origin.sizes[0]
                first = torch.arange(batch, device=places[0].device)[:, None] * tokens
                found = torch.where(places[0] < 0, -1, places[0].long() - first)
                if (
                    len(found) == batch
                    and bool((found < tokens).all())
                    and bool((found >= -1).all())
                ):
                    return (batch, tokens), found.cpu()
        raise InputError(
            f"Layer {layer!r}: the tokens that the model was given cannot be followed to what the "
            "layer reads, so that positions mean nothing there. Leave sources and targets out to "
            "cut all of it, or pass the model the tokens that its layers read."
        )


#: The knock-outs of this thread, or asynchronous task, the innermost last.
_active: ContextVar[tuple[_KnockOut, ...]] = ContextVar("captum_ssm_knock_out", default=())


def _names_layers(edges: Edges) -> bool:
    """Whether a user has said which mixers are meant, and vouches for all others."""
    given = edges.layers
    several = given if isinstance(given, list | tuple) else [given]
    return bool(several) and all(isinstance(one, str | nn.Module) for one in several)


def _sequence(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The ids (B, L) or embeddings (B, L, E) among a model's arguments."""
    named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")]
    for x in (*named, *args, *kwargs.values()):
        if isinstance(x, Tensor) and x.dim() == (3 if x.is_floating_point() else 2):
            return x
    return None


class _Cut:
    """One call of a mixer, and what is cut of it.

    Args:
        mixer, call: the mixer and its call.
        number: of the call among those of this mixer in the run.
        acting: the knock-outs that name the mixer, the innermost last.
    """

    def __init__(self, mixer: Mixer, call: Call, number: int, acting: Sequence[_KnockOut]) -> None:
        self.mixer, self.number = mixer, number
        self.acting, self.inner = acting, acting[-1]
        args, kwargs, output = (detached(x) for x in (call.args, call.kwargs, call.output))
        self.call = replace(call, args=args, kwargs=kwargs, output=output)
        self.hidden, self.output = call.hidden_states, call.output_tensor
        self.edges: dict[_Kind, list[Edges]] = {}
        for one in acting:
            for edges in one.of[mixer.module]:
                by = None if one.given is None else one
                kind = _Kind(share_of(edges), edges.selection, by)
                self.edges.setdefault(kind, []).append(edges)

    def sent(self, donor: _KnockOut) -> dict[_Kind, Tensor]:
        """What is sent along the edges in this run, before the projection, (B, L, H, P) each."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.output.device):
            self._keep_kind()
            return {
                kind: self._message(kind, self._pairs(kind))
                for kind in self.edges
                if not kind.selection
            }

    def changed(self) -> Tensor | None:
        """The mixer's output without the messages; None if all stay."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.output.device):
            self._keep_kind()
            self._refuse_two_ways()
            parts = [k for k in self.edges if not k.is_whole]
            lost = [self._lost(kind) for kind in parts]
            delta = None
            if lost:
                before = sum_tensors(lost).flatten(-2)
                delta = self._as_returned(before @ projection_of(self.linear).weight)
            silent = [k for k in self.edges if k.is_whole]
            mask = self._pairs(silent[0])[0].targets[0] if silent else None
        out = self.output
        if delta is not None and bool(delta.any()):
            out = _Without.apply(out, delta)  # type: ignore[no-untyped-call]
        if mask is not None:
            where = self._as_returned(mask.to(out.device, torch.float32)[..., None]).bool()
            out = out.masked_fill(where, 0)
        return None if out is self.output else out

    # --- the mixer as a map -----------------------------------------------------------------

    @functools.cached_property
    def linear(self) -> LinearMixer:
        """The mixer at this call, held to what it returned."""
        record = Trace(0, self.inner.verify is not False)
        layer = Layer(record.linearize, self.mixer, self.call, None)
        record.layers.append(layer)
        found = record.read(layer)
        if self.inner.verify is not False:
            layer.verify(None if self.inner.verify is True else float(self.inner.verify))
        return found

    def _keep_kind(self) -> None:
        """Leave out edges of mixers of the other kind."""
        if all(e.is_of_kind(True) and e.is_of_kind(False) for s in self.edges.values() for e in s):
            return
        kind_of = is_attention(self.linear)
        kept = {k: [e for e in s if e.is_of_kind(kind_of)] for k, s in self.edges.items()}
        self.edges = {kind: edges for kind, edges in kept.items() if edges}
        for one in self.acting:
            one.meets(edges for some in self.edges.values() for edges in some)

    # --- pairs of its tokens ----------------------------------------------------------------

    @functools.cached_property
    def _tokens(self) -> tuple[tuple[int, int], Tensor | None]:
        """The size that positions are of, and which of them each of the mixer's tokens is."""
        if self._has_map:
            shape = self.linear.operator.shape
            return (shape.batch, shape.tokens), None
        asks = [e for s in self.edges.values() for e in s]
        if all(e.sources is None and e.targets is None for e in asks):
            return (self.hidden.shape[0], self.hidden.shape[1]), None
        size, given = self.inner.given_tokens(self.mixer.name, self.hidden)  # type: ignore[misc]
        same = given.shape == size and torch.equal(given, torch.arange(size[1]).expand(size))
        return size, None if same else given

    @property
    def _has_map(self) -> bool:
        """Whether the mixer is called on windows of a map."""
        return self.linear.map is not None

    def _pairs(self, kind: _Kind, edges: Sequence[Edges] | None = None) -> list[Pairs]:
        size, given = self._tokens
        named = self.edges[kind] if edges is None else edges
        return list(pairs_of(named, size, given, by_target=kind.selection or kind.share.constants))

    def _refuse_two_ways(self) -> None:
        """Raise if edges cut one message in two ways."""
        kinds = list(self.edges)
        for i, one in enumerate(kinds):
            for other in kinds[:i]:
                heads, others = one.share.heads, other.share.heads
                if heads is not None and others is not None and not set(heads) & set(others):
                    continue
                if (one.is_whole and other.by is None) or (other.is_whole and one.by is None):
                    continue  # nothing is left either way
                if _meet(self._pairs(one), self._pairs(other)):
                    raise OptionError(
                        f"Layer {self.mixer.name!r}: edges cut one message in two ways, by other "
                        "heads, component, selection or replacement, or once with what belongs to "
                        "no token (sources=None). Let edges of different ways have no pair of "
                        "tokens in common."
                    )

    # --- what is cut ------------------------------------------------------------------------

    def _lost(self, kind: _Kind) -> Tensor:
        """What the output loses before its projection, (B, L, H, P)."""
        pairs = self._pairs(kind)
        if kind.selection:
            return self._unread(kind, pairs)
        lost = self._message(kind, pairs)
        self._refuse_against_causality(kind)
        if kind.by is None or kind.by.donor is None:
            return lost
        key = self.mixer.module, self.number
        sent = kind.by.sent.get(key, {}).get(kind)
        if sent is None or sent.shape[1:] != lost.shape[1:] or len(sent) not in (1, len(lost)):
            got = "no such call" if sent is None else f"(B, L) = {tuple(sent.shape[:2])}"
            raise InputError(
                f"Layer {self.mixer.name!r}: replace is the input of a run with {got}, but this "
                f"run has (B, L) = {tuple(lost.shape[:2])}. Pass an input of as many tokens."
            )
        return lost - sent

    def _message(self, kind: _Kind, pairs: Sequence[Pairs]) -> Tensor:
        """What the operator carries along pairs, (B, L, H, P), less what the mean would send."""
        linear, values = self.linear, None
        if kind.by is not None and kind.by.given == "mean":
            values = linear.values - _mean(linear.values, linear.mask)
        return carried(linear, pairs, kind.share, self.mixer.name, values)

    def _unread(self, kind: _Kind, pairs: Sequence[Pairs]) -> Tensor:
        """What the output loses if targets read what is made without the sources."""
        linear, hidden = self.linear, self.hidden.detach()
        fill = torch.zeros_like(hidden)
        if kind.by is not None and kind.by.given == "mean":
            fill = fill + _mean(hidden[..., None], linear.mask)[..., 0]
        elif kind.by is not None:
            read = kind.by.read.get((self.mixer.module, self.number))
            if read is None or read.shape[1:] != hidden.shape[1:]:
                raise InputError(
                    f"Layer {self.mixer.name!r}: replace is the input of a run of another size. "
                    "Pass an input of as many tokens."
                )
            fill = fill + read
        whole, lost = linear.operator.affine(linear.values), torch.zeros_like(linear.values)
        for some in pairs:
            for targets, sources in zip(*some, strict=True):
                gone = self._as_returned(sources.to(hidden.device, torch.float32)[..., None]).bool()
                other = _reading(self.call, torch.where(gone, fill, hidden))
                without = linearize(self.mixer, other, running=True)
                made = without.operator.affine(without.values)
                lost += (whole - made) * targets.to(hidden.device)[..., None, None]
        return lost * of_heads(linear, kind.share.heads, self.mixer.name)

    def _refuse_against_causality(self, kind: _Kind) -> None:
        """Raise for edges of which every target comes before its source, where nothing is read."""
        for edges in self.edges[kind]:
            if edges.sources is None or kind.share.without is not None:
                continue
            pairs = self._pairs(kind, [edges])
            if not pairs or any(_goes_forward(some) for some in pairs):
                continue
            there = any(bool((s.targets.any(-1) & s.sources.any(-1)).any()) for s in pairs)
            if there and not bool(self._message(kind._replace(by=None), pairs).any()):
                raise QueryError(
                    f"Layer {self.mixer.name!r} reads earlier tokens alone, but of the edges from "
                    f"sources={edges.sources!r} to targets={edges.targets!r} every target comes "
                    "before its source: there is no message. Exchange them?"
                )

    def _as_returned(self, x: Tensor) -> Tensor:
        """(B, L, E) of the operator's tokens, as the mixer returned it."""
        if not self._has_map:
            return x
        assert self.linear.map is not None
        return self.linear.map.windows.cut(x[..., None])[..., 0]


class _Without(torch.autograd.Function):
    """An output less messages, whose coefficients follow from the input in ways not recorded."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lost: Tensor) -> Tensor:
        return (output.to(lost) - lost).to(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GradientModeError(
            "A gradient was taken through messages that knock_out has cut: what they were made of "
            "is not recorded, so it would be wrong. Run the model under torch.no_grad() there, and "
            "explain it outside of knock_out; EdgeEffects says beforehand what a cut does."
        )


def _reading(call: Call, hidden: Tensor) -> Call:
    """The call on another sequence."""
    old = call.hidden_states

    def other(x: Any) -> Any:
        return hidden if x is old else x

    kwargs = {name: other(x) for name, x in call.kwargs.items()}
    return replace(call, args=tuple(map(other, call.args)), kwargs=kwargs)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of an example's real tokens, (B, 1, H, P)."""
    if mask is None:
        return x.mean(1, keepdim=True)
    keep = mask.to(x)[..., None, None]
    return (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)


def _meet(one: Sequence[Pairs], other: Sequence[Pairs]) -> bool:
    """Whether two sets have a pair of tokens in common."""
    return any(
        bool((a.targets[r] & t).any(-1).logical_and((a.sources[r] & s).any(-1)).any())
        for a in one
        for r in range(len(a.targets))
        for b in other
        for t, s in zip(*b, strict=True)
    )


def _goes_forward(pairs: Pairs) -> bool:
    """Whether a target is not before its source, in any example."""
    tokens = pairs.targets.shape[-1]
    position = torch.arange(tokens)
    last = torch.where(pairs.targets, position, -1).amax(-1)
    first = torch.where(pairs.sources, position, tokens).amin(-1)
    return bool((last >= first).any())
