"""Run one example without cuts, to reuse its states in runs of copies with different cuts.

Modules before the first cut mixer compute the same with and without the cuts. Blocks there return
the tensors that they returned without cuts, one copy for each example of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..attr.call.head import Kept
from ..attr.call.inputs import call_model
from ..attr.call.targets import logits_of
from ..errors import OptionError
from ..linear.blocks import in_place_of, lists_of_blocks
from ..mixers.base import Call
from ..tracing import Mixer
from ..tracing.find import registered_mixers
from ..tracing.hooks import swapped, tensors_in
from ..tracing.observe import Watcher, observe
from ..tracing.verification import relative_error, tolerance_for
from .given import Given

#: The accepted relative difference of outputs with and without reused states, in multiples of the
#: tolerance of a mixer's output.
_TIMES = 4
#: The number of different depths up to which states are reused; each is checked once.
_DEPTHS = 8


class UncutRun(Watcher):
    """The outputs of a model and of its blocks for one example without cuts.

    Args:
        forward_func, model: the function that runs the model, and the model.
        inputs, additional: the arguments of forward_func for the one example.
        kept: the positions at which the model's head runs, or None for all.

    Attributes:
        output: the model's output (1, ...).
        kept: the positions in the output, or None for all.
        tokens: the token mapping of each call of the model in a run, once it is known.
        checked: the numbers of reused calls with which a run without cuts had an equal output.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module,
        inputs: Tensor,
        additional: tuple[Any, ...],
        kept: Kept | None,
    ) -> None:
        self.forward_func, self.kept = forward_func, kept
        self.tokens: list[Given] = []
        #: Blocks in the order in which they were called, and copies of the tensors they returned.
        self._calls: list[tuple[nn.Module, Any]] = []
        #: For each mixer name, the number of calls of blocks before the mixer returned first.
        self._before: dict[str, int] = {}
        self.checked = {0}
        mixers = registered_mixers(model)
        try:
            self._blocks = list(lists_of_blocks(model, mixers))
        except OptionError:  # the model has no list of blocks
            self._blocks = []
        with ExitStack() as stack:
            observe(model, mixers, (self,), stack, gradients=False, vouched=True)
            stack.enter_context(self._in_place_of_blocks(self._record))
            self.output = self.call(inputs, additional)
            if kept is not None and not kept.fit(self.output):  # the model returned all positions
                self.kept = None
                self.forget()
                self.output = self.call(inputs, additional)
        # a tensor without a batch dimension cannot be repeated for copies
        if any(x.dim() < 2 or len(x) != 1 for x in tensors_in([x for _, x in self._calls])):
            self.forget()

    @torch.no_grad()
    def call(self, inputs: Tensor, additional: tuple[Any, ...]) -> Tensor:
        """Run the model; return logits, at the kept positions only."""
        named = {} if self.kept is None else self.kept.arguments
        return logits_of(call_model(self.forward_func, inputs, additional, named))

    def returned(self, mixer: Mixer, call: Call) -> None:
        """Remember the number of calls recorded so far, which are of blocks before the mixer's."""
        for name in mixer.names:
            self._before.setdefault(name, len(self._calls))

    def calls_before(self, names: Collection[str]) -> int:
        """Return how many calls of blocks, from the first one, to reuse while mixers are cut.

        Args:
            names: the names of the mixers; an empty name means all mixers.
        """
        first = min(self._before.values(), default=0)
        before_first = min((self._before.get(name, first) for name in names), default=first)
        # rounded down to one of few depths, as each needs a check
        return before_first - before_first % max(1, len(self._calls) // _DEPTHS)

    def forget(self) -> None:
        """Reuse no states in later runs."""
        self._calls, self._before = [], {}

    def check(self, count: int, output: Tensor) -> bool:
        """Return True if a run without cuts that reused ``count`` calls has the known output.

        Otherwise more than tensors connects the blocks, and no states are reused later.
        """
        equal = relative_error(output, self.output) <= _TIMES * tolerance_for(self.output)
        if not equal:
            self.forget()
        self.checked |= {count}
        return equal

    @contextmanager
    def reused(self, count: int, copies: int) -> Iterator[None]:
        """In the ``with``, the first ``count`` calls of blocks return copies of known tensors.

        Raises:
            LookupError: if another block is called, or a block without a batch of ``copies``.
        """
        calls = iter(self._calls[:count])

        def replay_block(block: nn.Module, forward: Callable[[], Any], arguments: Any) -> Any:
            """Return copies of the next recorded tensors; after the last, run the block."""
            known_block, returned = next(calls, (None, None))
            if known_block is None:
                return forward()
            batches = {len(x) for x in tensors_in(arguments) if x.dim()}  # or sizes without batch
            if known_block is not block or copies not in batches:
                raise LookupError("no call of this block without cuts is known")
            copies_of = {id(x): x.repeat_interleave(copies, 0) for x in tensors_in(returned)}
            return swapped(returned, copies_of)

        with self._in_place_of_blocks(replay_block) if count else nullcontext():
            yield

    def _record(self, block: nn.Module, forward: Callable[[], Any], arguments: Any) -> Any:
        """Run a block, and record copies of the tensors that it returns."""
        returned = forward()
        copies = {id(x): x.detach().clone() for x in tensors_in(returned)}
        self._calls.append((block, swapped(returned, copies)))
        return returned

    @contextmanager
    def _in_place_of_blocks(
        self, call: Callable[[nn.Module, Callable[[], Any], Any], Any]
    ) -> Iterator[None]:
        """In the ``with``, run ``call(block, forward, arguments)`` in place of outermost blocks."""
        inside = False

        def outermost(block: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
            """Use ``call``; but a block inside another is a part of that block's result."""
            nonlocal inside
            if inside:
                return forward(*args, **kw)
            inside = True
            try:
                return call(block, lambda: forward(*args, **kw), (args, kw))
            finally:
                inside = False

        with in_place_of(self._blocks, outermost):
            yield
