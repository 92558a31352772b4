"""Run blocks without a graph, and run each block again during a backward pass.

A forward run keeps only the inputs and outputs of each block. A backward pass goes from the last
block to the first. Each block runs again under the rules, and its graph is dropped before the next
block runs. Memory then grows by one residual stream for each block, and blocks take twice the
forward time (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import CaptumSSMError, GradientModeError, NotLinearError, OptionError
from ..operators.kernels.arithmetic import unseen
from ..tracing import Mixer
from ..tracing.changes import replaced_in_thread, value_in_thread
from ..tracing.hooks import swapped, tensors_in

if TYPE_CHECKING:
    from .mode import Linearizing
    from .network import Network, Step

#: A sort key that gives the position of a mixer's call in the run.
Place = tuple[float, ...]
#: Receives a step's sort key, the step, and the gradients at its block's inputs and its output.
Report = Callable[[Place, "Step", Sequence[Tensor | None]], None]


def outside(number: int) -> Place:
    """Return the sort key of the step with index ``number``, outside of blocks that run again."""
    return number, math.inf


def lists_of_blocks(
    model: nn.Module, mixers: Sequence[Mixer], needed: Collection[nn.Module] = ()
) -> dict[nn.Module, str]:
    """Return all modules, with names, in the innermost module lists that contain mixers' blocks.

    Args:
        model: the model.
        mixers: the mixers.
        needed: modules that are left out, because their graphs are needed. Default: none.

    Raises:
        OptionError: if no module list contains such a block, or all blocks are left out.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks: dict[nn.Module, str] = {}
    for mixer_name in (name for mixer in mixers for name in mixer.names):
        path = mixer_name.split(".")[:-1]
        # go up to a member of a module list
        while path and not isinstance(modules[".".join(path[:-1])], nn.ModuleList):
            path.pop()
        if path:
            outer = ".".join(path[:-1])
            children = modules[outer].named_children()
            blocks |= {block: f"{outer}.{index}" for index, block in children}
    if not blocks:
        raise OptionError(
            f"recompute=True runs blocks twice, but no nn.ModuleList of {type(model).__name__} "
            "contains blocks with mixers. Leave recompute out."
        )
    usable = {block: name for block, name in blocks.items() if block not in needed}
    if not usable:
        raise OptionError(
            "recompute=True keeps no graph inside blocks, but each block contains one of the "
            "layers, so each graph is needed. Pass blocks as layers, or leave recompute out."
        )
    return usable


@contextmanager
def in_place_of(blocks: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Call ``run(block, forward, *args)`` in place of each block's forward inside the ``with``."""
    with ExitStack() as stack:
        for block in blocks:
            forward = functools.partial(run, block, value_in_thread(block, "forward"))
            stack.enter_context(replaced_in_thread(block, "forward", forward))
        yield


@contextmanager
def checkpointed(model: nn.Module, mixers: Sequence[Mixer]) -> Iterator[None]:
    """Keep no graph of the model's own blocks; torch runs each block again in a backward pass.

    Take gradients in a second :func:`~captum_ssm.tracing.observe`, without watchers.

    Raises:
        OptionError: as :func:`lists_of_blocks` does.
    """

    def run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block under torch's checkpoint, if a backward pass may reach its input."""
        live = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
        if not (live and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        call = _BlockCall(names_of_blocks[block], block, forward, args, kwargs, live)

        def checked_forward(*args: Any, **kwargs: Any) -> Any:
            # in a rerun: the model may have changed the input in place after the first run
            call.check_unchanged(GradientModeError)
            return forward(*args, **kwargs)

        with_kwargs = functools.partial(checked_forward, **kwargs)
        return checkpoint(with_kwargs, *args, use_reentrant=False, preserve_rng_state=False)

    names_of_blocks = lists_of_blocks(model, mixers)
    with in_place_of(names_of_blocks, run):
        yield


def along_all_paths(
    steps: Sequence[Step],
    gradients: Iterator[Tensor | None],
    behind: Mapping[int, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[int, Step, list[Tensor | None]]]:
    """Yield each step with the gradients at the step's tensors, along all paths to the output.

    For a tensor that enters several blocks, gradients of later blocks are added to earlier ones.

    Args:
        steps: the steps.
        gradients: yields the gradients at each step's tensors. For a tensor that enters several
            blocks, each gradient is along the paths of one block only.
        behind: gradients along paths outside of steps, by the ids of tensors. Default: none.

    Yields:
        The number of a step, from the last to the first, the step, and the gradients.
    """
    at_steps = [[next(gradients) for _ in (*step.entering, step.output)] for step in steps]
    from_later_blocks: dict[int, Tensor | None] = {}  # sums of gradients, by Step.again
    for i in reversed(range(len(steps))):
        for k, (x, key) in enumerate(zip(steps[i].entering, steps[i].again, strict=True)):
            if key is not None:
                at_steps[i][k] = plus(at_steps[i][k], from_later_blocks.get(key))
                from_later_blocks[key] = at_steps[i][k]
            at_steps[i][k] = plus(at_steps[i][k], behind.get(id(x) if key is None else key))
        yield i, steps[i], at_steps[i]


class Blocks:
    """The calls of a network's blocks that run again in backward passes.

    Args:
        network: the network.
        enter: a function that is called with an entered module and the module's arguments; it may
            return new arguments.

    Attributes:
        entering: while a block runs without a graph, the tensors entering the block that depend on
            the input; else None.
        runs_again: whether a block is running again at present.
    """

    def __init__(self, network: Network, enter: Callable[..., Any]) -> None:
        self.network = network
        self.enter = enter
        self.entering: Sequence[Tensor] | None = None
        self.runs_again = False
        self._report: Report | None = None
        self._names: Mapping[nn.Module, str] = {}
        self._calls: list[_BlockCall] = []

    @contextmanager
    def watch(self, blocks: Mapping[nn.Module, str]) -> Iterator[None]:
        """Run blocks without a graph inside the ``with``; ``blocks`` maps blocks to names."""
        self._names = blocks
        with in_place_of(blocks, self._run):
            yield

    def _run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block without a graph; a backward pass from its outputs runs the block again."""
        live = {id(x): x for x in tensors_in((args, kwargs)) if self.network.mode.is_live(x)}
        # already in a rerun, inside another block, or without a graph
        if self.runs_again or self.entering is not None or not live:
            return forward(*args, **kwargs)
        call = _BlockCall(self._names[block], block, forward, args, kwargs, list(live.values()))
        self.entering = call.entering
        try:
            with torch.no_grad(), ExitStack() as stack:
                for context in self.network.mode.looking_away():
                    stack.enter_context(context)
                returned = forward(*args, **kwargs)
        finally:
            self.entering = None
        call.check_unchanged()
        entered = {id(x) for x in tensors_in((args, kwargs))}
        floating = {id(x): x for x in tensors_in(returned) if x.is_floating_point()}
        # outputs that are inputs keep their graph
        new_outputs = [x for key, x in floating.items() if key not in entered]
        call.output_shapes = [x.shape for x in new_outputs]
        call.steps_before = len(self.network.steps)
        self._calls.append(call)
        with unseen():
            replaced = _Returned.apply(call, new_outputs, call.anchor)  # type: ignore[no-untyped-call]
        return swapped(returned, dict(zip(map(id, new_outputs), replaced, strict=True)))

    def waits_for(self, module: nn.Module) -> bool:
        """Return True for a module that runs, or is about to, in a block that will run again."""
        return not self.runs_again and (self.entering is not None or module in self._names)

    @contextmanager
    def report_to(self, report: Report) -> Iterator[None]:
        """Call ``report`` inside the ``with`` for each mixer call in a block that runs again."""
        self._report = report
        try:
            yield
        finally:
            self._report = None

    def gradients(
        self, outputs: Tensor, wanted: Sequence[Tensor], seed: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients at ``wanted``, with None for a tensor without a gradient.

        From the last block to the first, each round goes from the outputs, or from the inputs of
        the last rerun, to the block before, and runs this block again. Index -1 ends the rounds.

        Args:
            outputs: the tensor that is differentiated.
            wanted: tensors of the graph outside blocks.
            seed: the gradient at ``outputs``. Default: None, 1.
        """
        if self._report is not None:
            self._require_separable()
        total: list[Tensor | None] = [None] * len(wanted)
        sources: Sequence[Tensor] = [outputs]  # where a round begins
        at_sources: Sequence[Tensor] = [torch.ones_like(outputs) if seed is None else seed]
        #: Gradients at tensors that enter blocks, by id: along all paths from some block on, and
        #: along those that enter this block or later ones.
        on_all_paths: dict[int, Tensor] = {}
        through_blocks: dict[int, Tensor] = {}
        for index in reversed(range(-1, len(self._calls))):
            earlier = self._calls[: index + 1]
            entering = [x for call in earlier if self._report for x in call.entering]
            if sources:
                ends = [*wanted, *(call.anchor for call in earlier), *entering]
                options = {"retain_graph": True, "allow_unused": True}
                gradients = torch.autograd.grad(sources, ends, at_sources, **options)
                total = [plus(*pair) for pair in zip(total, gradients, strict=False)]
                at_entering = gradients[len(ends) - len(entering) :]
                _add_gradients(on_all_paths, dict(zip(entering, at_entering, strict=True)))
            if index < 0:
                return total
            # if several tensors enter, one may be computed from another
            is_alone = len(self._calls[index].entering) == 1
            sources, at_sources = self._rerun(index, on_all_paths if is_alone else through_blocks)
            _add_gradients(through_blocks, dict(zip(sources, at_sources, strict=True)))
            needed = {id(x) for call in earlier[:-1] for x in call.entering if self._report}
            on_all_paths = {k: g for k, g in on_all_paths.items() if k in needed}
            through_blocks = {k: g for k, g in through_blocks.items() if k in needed}
        return total

    def _require_separable(self) -> None:
        """Raise OptionError if the paths from a tensor that enters several blocks are not followed.

        :meth:`gradients` follows them if all blocks that run again precede those that keep their
        graph, and no other tensor enters a block that runs again.
        """
        for index, step in enumerate(self.network.steps):
            unfollowed = {
                id(x)
                for call in self._calls
                for x in call.entering
                if call.steps_before > index or len(call.entering) > 1
            }
            for x, key in zip(step.entering, step.again, strict=True):
                if (id(x) if key is None else key) in unfollowed:
                    raise OptionError(
                        f"A tensor enters the block of {step.name!r}, which keeps its graph, and "
                        "other blocks, so recompute=True cannot separate the streams of blocks. "
                        "Call attribute(), pass a block as the layer, or leave recompute out."
                    )

    def _rerun(self, index: int, later: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run a block again; return the tensors that entered the block, and their gradients.

        Args:
            index: the index of the block's call in the run.
            later: the gradients at tensors along paths that do not enter the block, by id.
        """
        call, network, mode = self._calls[index], self.network, self.network.mode
        at_outputs = call.take_gradients()
        # a report needs the block's steps even if no gradient reaches them
        if self._report is None and all(gradient is None for gradient in at_outputs):
            return [], []
        call.check_unchanged()
        leaf_count, step_count = len(mode.ledger.leaves), len(network.steps)
        mode.labels.set_block(index)
        # only the first of several reruns is verified
        verify, network.verify = network.verify, network.verify if call.is_first else False
        mode.ledger.within, self.runs_again, call.is_first = call.name, True, False
        try:
            with torch.enable_grad(), torch._C._EnableTorchFunction():
                leaves = [mode.leaf(x) for x in call.entering]
                with unseen():
                    copies = [x.clone() for x in leaves]  # the block may change them in place
                for x, copy in zip(call.entering, copies, strict=True):
                    mode.resembles(copy, x)
                by_id = dict(zip(map(id, call.entering), copies, strict=True))
                args, kwargs = swapped(call.args, by_id), swapped(call.kwargs, by_id)
                args, kwargs = self.enter(call.block, args, kwargs) or (args, kwargs)
                inputs = {id(x) for x in tensors_in((args, kwargs))}
                outputs = {id(x): x for x in tensors_in(call.forward(*args, **kwargs))}
            # in the order of ``at_outputs``; see _run()
            results = [x for k, x in outputs.items() if x.is_floating_point() and k not in inputs]
            call.check_same(results, mode)
            new_steps = network.steps[step_count:]
            step_tensors = [x for step in new_steps for x in (*step.entering, step.output)]
            pairs = [(x, g) for x, g in zip(results, at_outputs, strict=True) if g is not None]
            for x, gradient in pairs:
                if not x.requires_grad:  # it does not depend on the input: a constant
                    mode.ledger.write(gradient, x, mode.ledger.within)
            pairs = [(x, g) for x, g in pairs if x.requires_grad]
            ends = [*leaves, *step_tensors, *mode.ledger.leaves[leaf_count:]]
            gradients: Sequence[Tensor | None] = [None] * len(ends)
            if pairs:
                starts, seeds = zip(*pairs, strict=True)
                gradients = torch.autograd.grad(starts, ends, seeds, allow_unused=True)
        finally:
            network.verify, mode.ledger.within, self.runs_again = verify, "", False
            mode.labels.set_block(None)
        at_leaves, at_steps = gradients[: len(leaves)], iter(gradients[len(leaves) :])
        originals = zip(copies, call.entering, strict=True)
        behind = {id(copy): later[id(x)] for copy, x in originals if id(x) in later}
        for i, step, at_step in along_all_paths(new_steps, at_steps, behind):
            if self._report is not None:
                self._report((call.steps_before, index, i), step, at_step)
        # forget this rerun: the next one appends its own steps and leaves
        network.begin_again()
        del network.steps[step_count:], mode.ledger.leaves[leaf_count:]
        entered = [(x, g) for x, g in zip(call.entering, at_leaves, strict=True) if g is not None]
        return [x for x, _ in entered], [g for _, g in entered]


class _BlockCall:
    """One call of a block, with the data to run the block again.

    Attributes:
        name: the block's name in the model.
        block: the block.
        forward: the block's forward method.
        args, kwargs: the arguments of the call.
        entering: the arguments that are tensors depending on the input.
        output_shapes: the shapes of the new floating tensors that the block returned.
        anchor: a leaf that makes autograd call :meth:`_Returned.backward` for this call.
        is_first: whether the block has not run again yet.
        steps_before: the number of steps outside of blocks before the call.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entering: list[Tensor],
    ) -> None:
        self.name, self.block, self.forward = name, block, forward
        self.args, self.kwargs, self.entering = args, kwargs, entering
        self.output_shapes: list[torch.Size] = []
        with unseen():
            self.anchor = torch.zeros((), requires_grad=True)
        self.is_first, self.steps_before = True, 0
        self._versions = [x._version for x in entering]
        self._arrived: list[Tensor | None] = []

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients at the block's outputs to the sums that :meth:`take_gradients` returns."""
        earlier = self._arrived or [None] * len(gradients)
        self._arrived = [plus(*pair) for pair in zip(earlier, gradients, strict=True)]

    def take_gradients(self) -> list[Tensor | None]:
        """Return the sums of gradients at the block's outputs, and reset the sums."""
        arrived, self._arrived = self._arrived or [None] * len(self.output_shapes), []
        return arrived

    def check_unchanged(self, error: type[CaptumSSMError] = NotLinearError) -> None:
        """Raise an error if a tensor that entered the block has been changed in place."""
        if self._versions != [x._version for x in self.entering]:
            raise error(
                f"The input of module {self.name!r} is changed in place, so recompute=True cannot "
                "run the module again in a backward pass. Leave recompute out."
            )

    def check_same(self, outputs: Sequence[Tensor], mode: Linearizing) -> None:
        """Raise NotLinearError if a second run of the block cannot take the place of the first.

        Its tensors must have the shapes of the first run, and none may come straight from an
        activation: code behind the block did not know that in the first run.
        """
        if [x.shape for x in outputs] != self.output_shapes or any(map(mode.is_bent, outputs)):
            raise NotLinearError(
                f"Module {self.name!r} returns other tensors when recompute=True runs it again, "
                "or ends in an activation. Leave recompute out."
            )


class _Returned(torch.autograd.Function):
    """Adds a block's outputs to the graph; backward stores gradients until the block runs again."""

    @staticmethod
    def forward(
        ctx: Any, call: _BlockCall, outputs: list[Tensor], anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, Tensor]:
        ctx.call.add_gradients(gradients)
        return None, None, torch.zeros_like(ctx.call.anchor)


def _add_gradients(total: dict[int, Tensor], gradients: Mapping[Tensor, Tensor | None]) -> None:
    """Add each tensor's gradient to the sum in ``total``, by the tensor's id."""
    for x, gradient in gradients.items():
        if gradient is not None:
            total[id(x)] = gradient + total[id(x)] if id(x) in total else gradient


def plus(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, where None counts as zero."""
    return x if y is None else y if x is None else x + y
