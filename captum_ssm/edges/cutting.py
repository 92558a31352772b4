"""Run a model after removing selected messages between tokens from its mixers' outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.given import with_argument_advice
from ..errors import InputError, NoMixerError, OptionError, QueryError
from ..mixers.base import Call
from ..tracing import Mixer, find_mixers, find_model
from ..tracing.find import registered_mixers
from ..tracing.hooks import hooked
from ..tracing.observe import Arguments, Watcher, observe
from ..tracing.structure import state_of
from .cut import CutCall, Donor, Kind, Replacement, read_replacement
from .given import Given, given_tokens
from .pairs import KINDS, Edges

#: Fields of :class:`Edges` of which at least one must be set.
_NAMED = ("layers", "sources", "targets", "heads", "component")


@with_argument_advice
@contextmanager
def knock_out(
    model: nn.Module | Callable[..., Any],
    *edges: Edges,
    replace: Replacement = None,
    verify: bool | float = True,
) -> Iterator[None]:
    """Run a model without some of the messages between its tokens.

    Inside the ``with`` block, the messages along the edges are subtracted from each mixer's output,
    with the coefficients of that run. A source also changes its neighbors' coefficients (B, C and
    the step of a Mamba, computed after a convolution). This effect stays, unless :class:`Edges` has
    ``selection=True``. Knock-outs may be nested; a message that several of them cut is cut once.
    The model runs without a cache in the block: generate texts with ``use_cache=False``.

    Positions count the tokens given to the model, for images the tokens of its first mixer. If
    edges name sources or targets, the model runs once more, and some ten times without its mixers,
    to find the tokens that each layer reads. Your hooks are called in these runs, too. A second
    call with the same arguments reuses the result.

    Args:
        model: a module, wrapped or not, or a function that runs one; see
            :func:`~captum_ssm.tracing.find_model`.
        *edges: the messages to cut; see :class:`Edges`.
        replace: the replacement of the messages: ``"mean"`` for the message of the example's mean
            token, or a second input with as many tokens (a tensor, or a tuple or mapping of
            arguments), whose messages are used instead. Default: None, no message.
        verify: check the operators against their mixers' outputs; a number is the tolerance.
            Default: True.

    Yields:
        Nothing.

    Raises:
        OptionError: for values of wrong types, edges that select nothing, components or heads
            that a layer does not have, and edges that cut one message in two ways.
        QueryError: for positions outside the tokens, or edges to earlier tokens in a causal layer.
        InputError: when a layer's tokens are not found in the input, or ``replace`` has a different
            size.
        TrainingModeError: if edges name sources or targets and a module is random.
        GradientModeError: when a gradient is taken through messages that were cut.
        ReconstructionError: when ``verify`` finds that an operator differs from its module.

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
    for edge in edges:
        if not isinstance(edge, Edges):
            raise OptionError(
                f"edges contains {edge!r}. Pass only Edges(layers, sources, targets)."
            )
        if all(getattr(edge, name) is None for name in _NAMED):
            raise OptionError(
                "Edges() has no arguments, so it would cut the whole output of every mixer. Pass "
                "layers, sources, targets, heads or component; for every layer, pass "
                "Edges(layers=slice(None))."
            )
    module = find_model(model)
    verify = checks.tolerance("verify", verify)
    cut = _KnockOut(module, edges, read_replacement(replace), verify)
    if cut.donor is not None:
        cut.run_donor(cut.donor)
    token = _active.set((*_active.get(), cut))
    try:
        with ExitStack() as stack:
            cut.watch(stack)
            yield
    finally:
        _active.reset(token)


@dataclass(eq=False)
class _KnockOut(Watcher):
    """The state of one knock-out while its ``with`` block is active."""

    model: nn.Module
    edges: Sequence[Edges]
    replacement: Literal["mean"] | Donor | None
    verify: bool | float
    #: Messages along the edges in the run on the ``replace`` input, by mixer and call number.
    donor_messages: dict[tuple[nn.Module, int], dict[Kind, Tensor]] = field(default_factory=dict)
    #: The mixers' inputs in the run on the ``replace`` input, by mixer and call number.
    donor_inputs: dict[tuple[nn.Module, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mixers = registered_mixers(self.model)
        #: Whether edges name only single mixers, so that no other module needs an adapter.
        self.vouched = all(_lists_mixers(edge_set, mixers) for edge_set in self.edges)
        if not self.vouched:
            mixers = find_mixers(self.model)
        modules = {mixer.module for mixer in mixers}
        self.mixers = [m for m in mixers if modules.isdisjoint(m.around)]  # none inside another
        self.edges_of: dict[nn.Module, list[Edges]] = {}
        for edge_set in self.edges:
            for mixer in edge_set.chosen(self.mixers):
                self.edges_of.setdefault(mixer.module, []).append(edge_set)
        # this one will act for all active ones, so it needs the tokens of their edges, too
        acting = (*_active.get(), self)
        by_token = [
            m for m in self.mixers if any(_names_tokens(k.edges_of, m.module) for k in acting)
        ]
        #: Mixers whose edges name tokens, and modules that contain these mixers. A call of the
        #: outermost module first maps each mixer's tokens to the input's tokens.
        self._by_token = {outer for m in by_token for outer in (m.module, *m.around)}
        #: The model's state before and after this knock-out registered its hooks.
        self._states: tuple[Any, Any] = (), ()
        self._given: Given | None = None
        self._depth = 0  # of nested calls of watched modules
        self._calls: Counter[nn.Module] = Counter()  # of each mixer, in the current run
        self._runs_donor = False
        self._matched: set[Edges] = set()

    @property
    def donor(self) -> Donor | None:
        return self.replacement if isinstance(self.replacement, Donor) else None

    def run_donor(self, donor: Donor) -> None:
        """Run the model on the ``replace`` input, and store the messages along the edges."""
        self._runs_donor = True
        try:
            with ExitStack() as stack:
                self.watch(stack)
                stack.enter_context(torch.no_grad())
                self.model(*donor.args, **donor.kwargs)
        except QueryError as error:
            raise QueryError(f"In the run on the replace input: {error}") from error
        finally:
            self._runs_donor = False

    def watch(self, stack: ExitStack) -> None:
        """Register hooks on the model; the exit stack removes them."""
        unwatched = self._state()
        modules = {outer for m in self.mixers for outer in (m.module, *m.around)}
        for module in modules:
            # before other pre-hooks, which the run that maps tokens calls on the same arguments
            register = module.register_forward_pre_hook
            stack.enter_context(hooked(register, self._enter, prepend=True, with_kwargs=True))
            stack.enter_context(hooked(module.register_forward_hook, self._leave, always_call=True))
        observe(self.model, self.mixers, (self,), stack, gradients=False, vouched=self.vouched)
        stack.callback(self._forget)
        self._states = unwatched, self._state()

    def _state(self) -> tuple[Any, ...]:
        """Return the model's state, to check cached token maps; empty if no edges name tokens."""
        return tuple(state_of(self.model)) if self._by_token else ()

    @property
    def looks_away(self) -> bool:
        return _looks_away.get()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count nested calls; if an outermost call begins, map mixers' tokens to input tokens."""
        if self.looks_away:
            return
        if self._depth == 0:
            self._calls.clear()
            self._given = None
            if module in self._by_token:
                self._given = self._find_tokens(module, (args, kwargs))
        self._depth += 1

    def _find_tokens(self, module: nn.Module, arguments: Arguments) -> Given:
        """Run the module again without cuts, to map each mixer's tokens to the input tokens.

        A model state that only this knock-out's hooks have changed counts as unchanged, so
        knock-outs of equal calls share a result.
        """
        unwatched, watched = self._states
        state = self._state()
        token = _looks_away.set(True)
        try:
            return given_tokens(
                module,
                arguments,
                self.mixers,
                vouched=self.vouched,
                state=unwatched if state == watched else state,
            )
        finally:
            _looks_away.reset(token)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raise at the end of a run if edges name a kind of mixer and no such mixer ran."""
        if self.looks_away:
            return
        self._depth = max(0, self._depth - 1)  # the ``with`` may begin inside a call
        if self._depth == 0 and output is not None:  # else the call failed
            unmatched = [e for es in self.edges_of.values() for e in es if e not in self._matched]
            kind = next((e.layers for e in unmatched if e.layers in KINDS), None)
            if kind is not None:
                raise NoMixerError(
                    f"layers={kind!r}, but no mixer that ran is of this kind. Pass one of the "
                    f"model's mixers, {', '.join(mixer.name for mixer in self.mixers)}."
                )

    def record_matched(self, edges: Iterable[Edges]) -> None:
        """Record edges that matched a mixer; at the run's end, an unmatched kind is an error."""
        self._matched.update(edges)

    def _forget(self) -> None:
        self._depth, self._given = 0, None

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        """Return the mixer's output without the cut messages; None if the output is unchanged.

        In the run on the ``replace`` input nothing changes; messages and inputs are stored.
        """
        if self.looks_away:
            return None
        call_number = self._calls[mixer.module]
        self._calls[mixer.module] += 1
        acting = [knock_out for knock_out in _active.get() if mixer.module in knock_out.edges_of]
        if self._runs_donor:
            if mixer.module in self.edges_of:
                donor_call = CutCall(mixer, call, call_number, [self])
                self.donor_messages[mixer.module, call_number] = donor_call.messages()
                self.donor_inputs[mixer.module, call_number] = call.hidden_states.detach()
        elif acting and acting[-1] is self:  # the innermost one acts for all
            return CutCall(mixer, call, call_number, acting).cut_output()
        return None

    def input_positions(self, mixer_name: str, call_number: int) -> tuple[tuple[int, int], Tensor]:
        """Return the input's size (B, L), and the input position of each token of a mixer call.

        Positions are (B, L'), -1 for an inserted token. Raise InputError if they are unknown.
        """
        places = None if self._given is None else self._given.places.get((mixer_name, call_number))
        if self._given is None or places is None:
            raise InputError(
                f"Layer {mixer_name!r}: sources and targets are positions in the model's input, "
                "but the layer's tokens were not found there. Leave sources and targets out to cut "
                "the whole layer, or call the model with the tokens that its layers read."
            )
        return self._given.size, places


#: True while the model runs without cuts, to map the mixers' tokens to the input's tokens.
_looks_away: ContextVar[bool] = ContextVar("captum_ssm_looks_away", default=False)
#: The active knock-outs of this thread or asynchronous task, from outermost to innermost.
_active: ContextVar[tuple[_KnockOut, ...]] = ContextVar("captum_ssm_knock_out", default=())


def _names_tokens(edges_of: Mapping[nn.Module, Sequence[Edges]], mixer: nn.Module) -> bool:
    """Return True if some edges of a mixer set ``sources`` or ``targets``."""
    return any(e.sources is not None or e.targets is not None for e in edges_of.get(mixer, ()))


def _lists_mixers(edges: Edges, mixers: Sequence[Mixer]) -> bool:
    """Return True if ``layers`` names single mixers only; other mixers then need no adapter.

    A number, kind or family may select a mixer without an adapter, which must raise an error.
    """
    layers = edges.layers
    entries = layers if isinstance(layers, list | tuple) else [layers]
    names = [name for mixer in mixers for name in mixer.names]
    are_named = [isinstance(x, nn.Module) or (isinstance(x, str) and x in names) for x in entries]
    return bool(are_named) and all(are_named)
