"""Base of the methods that run a linear network, and whose relevance sums to the output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import CaptumSSMError, InputError, OptionError
from ...linear import Network, Rule, Step, linearized, outside
from ...operators.kernels.arithmetic import unseen
from ...operators.kernels.portions import ran_out_of_memory
from ..call import checks
from ..call.head import Kept, kept_positions
from ..call.inputs import BatchPart, several_inputs, single_input
from ..call.targets import (
    Against,
    SumTarget,
    as_asked,
    contrasted,
    require_real_target,
    several,
    target_index,
)
from .alone import Alone, alone
from .baselines import Baselines, baselines_of, baselines_of_others, one_each
from .chunks import in_chunks
from .decompose import (
    Decomposition,
    OutputParts,
    account,
    decompose,
    exact,
    not_linear,
    not_reached,
    sums_up,
)
from .method import SSMAttribution
from .run import Request

A = TypeVar("A")
T = TypeVar("T")


class LinearMethod(SSMAttribution):
    """Base of the methods that decompose an output into a sum of contributions."""

    #: whether ``inputs`` may be a tuple of several tensors, such as a text and images
    takes_others = False
    #: whether the relevance of pixels sums to the output; if not, relevance of patches does
    sums_pixels = True

    @property
    def multiplies_by_inputs(self) -> bool:
        """Return True: relevance is a coefficient times the input."""
        return True

    def has_convergence_delta(self) -> bool:
        """Return True: ``attribute`` accepts ``return_convergence_delta``."""
        return True

    def _inputs(self, inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the first input, and the other inputs if the method accepts several."""
        return several_inputs(inputs) if self.takes_others else (single_input(inputs)[0], ())

    def _attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any,
        contrast: Any,
        additional_forward_args: Any,
        explain: Callable[[Request, Sequence[Against], BatchPart], Sequence[Explained]],
        *,
        internal_batch_size: int | None,
        return_convergence_delta: bool,
    ) -> Any:
        """Return relevance (stacked for an :class:`Each` target), and on request the delta."""
        checks.flags(return_convergence_delta=return_convergence_delta)
        tensor, others = self._inputs(inputs)
        questions = [Against(each, contrast) for each in several(target)]
        found = self._by_parts(
            tensor, questions, additional_forward_args, internal_batch_size, explain, others
        )

        def joined(which: int, like: Tensor) -> Tensor:
            wholes = [torch.cat([part[which] for part in parts]) for parts in found]
            return as_asked(wholes, target).detach().to(like.device).contiguous()

        relevance: Any = joined(0, tensor)
        if isinstance(inputs, tuple):
            relevance = (relevance, *(joined(2 + i, x) for i, x in enumerate(others)))
        return (relevance, joined(1, tensor)) if return_convergence_delta else relevance

    def _delta(self, found: OutputParts, explained: Sequence[Tensor], attributions: Any) -> Tensor:
        """Return output - attributions - biases (B,) for the user's ``attributions``.

        The result is the delta of ``found``, plus the sum of the relevance in ``explained`` minus
        the sum of ``attributions``. Differences in further inputs are divided equally.
        """
        first, others = several_inputs(attributions, "attributions")
        if 1 + len(others) != len(explained):
            raise InputError(
                f"attributions holds {1 + len(others)} tensors, but inputs holds "
                f"{len(explained)}. Pass the output of attribute() for these inputs."
            )
        one, *rest = explained
        sums = one.flatten(1).sum(1) - first.flatten(1).sum(1).to(one)
        delta = found.delta + sums.to(found.output)
        for x, other in zip(rest, others, strict=True):
            delta = delta + (x.sum() - other.sum().to(x)).to(delta) / len(delta)
        return delta


#: Relevance of the first input, the delta (B,), and relevance of each further input.
Explained = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rules:
    """The options of a linear network and its decomposition.

    Attributes:
        rule: the rule that divides relevance among the factors of a product in a mixer.
        constants: whether biases and other constants are kept.
        by_layer: whether the relevance of each mixer's residual stream and output is computed too,
            which keeps both in memory.
        verify: whether operators are checked against their modules; a number is the tolerance.
        by_role: whether relevance is computed by role. Default: False.
        features: whether relevance of streams and mixer outputs is kept by feature. Default: False,
            the sum over features.
        recompute: whether blocks run again in backward passes, to save memory. Default: None, only
            after the device's memory was too small without.
        chunk_tokens: the largest number of tokens that are run at once; see :mod:`.chunks`.
            Default: None, all.
    """

    rule: Rule
    constants: bool
    by_layer: bool
    verify: bool | float
    by_role: bool = False
    features: bool = False
    recompute: bool | None = None
    chunk_tokens: int | None = None


#: What a way to compute a result did to save memory, and the way.
Way = tuple[str, Callable[[], T]]


def as_memory_allows(
    run: Callable[[bool], T], recompute: bool | None = None, others: Sequence[Way[T]] = ()
) -> T:
    """Return ``run(recompute)``; for None, the result of the first run that memory allows.

    Args:
        run: a function of ``recompute``, which is called with False and then with True.
        recompute: the only argument for ``run``. Default: None, both.
        others: further ways, in this order. Default: none.

    Raises:
        RuntimeError: the device's error, if memory allows no way, or if the ways that may fit are
            refused.
    """
    if recompute is not None:
        return run(recompute)
    refused: CaptumSSMError | None = None
    ways: list[Way[T]] = [("", lambda: run(False)), (_RECOMPUTED, lambda: run(True)), *others]
    for did, way in ways:
        try:
            found = way()
        except CaptumSSMError as error:
            if not did:
                raise
            refused = error
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            # without the traceback, which would hold what has filled the memory
            kind, full = type(error), str(error)
        else:
            if did:
                warnings.warn(f"The device's memory is too small, so {did}", stacklevel=2)
            return found
    raise kind(f"{full}\n{_TOO_LARGE}") from refused


_RECOMPUTED = (
    "blocks ran again in backward passes. Pass recompute=True to the method to skip the first "
    "attempt."
)
_TOO_LARGE = (
    "The call does not fit into the device's memory. Pass fewer tokens, or for a batch "
    "internal_batch_size=1. For a language model of transformers, `captum-ssm estimate MODEL "
    "--tokens N --gpu GIB` computes the memory that LatimFlow needs."
)
#: The smallest chunks that are tried without being asked for.
_FEW_TOKENS = 256


def decompositions(
    request: Request, questions: Sequence[Against], rules: Rules, baselines: Baselines = None
) -> list[Decomposition]:
    """Run the linear network once, and decompose each target with one backward pass."""
    tokens = request.inputs.shape[1]
    if rules.chunk_tokens is not None and tokens > rules.chunk_tokens:
        return in_chunks(request, questions, rules, baselines, rules.chunk_tokens)
    if rules.recompute is None:

        def run(again: bool | None, most: int | None = None) -> list[Decomposition]:
            chosen = replace(rules, recompute=again, chunk_tokens=most)
            return decompositions(request, questions, chosen, baselines)

        sizes = [tokens // parts for parts in (4, 16, 64) if tokens // parts >= _FEW_TOKENS]
        in_parts = [(_in_chunks_of(most), partial(run, None, most)) for most in sizes]
        return as_memory_allows(run, None, in_parts if len(request.inputs) == 1 else ())
    found, alone_run = _decompositions(request, questions, rules, baselines)
    if alone_run is not None:
        alone_run.require([(q, each.output) for q, each in zip(questions, found, strict=True)])
    return found


def _in_chunks_of(tokens: int) -> str:
    return (
        f"the sequence ran in chunks of {tokens} tokens. Pass chunk_tokens={tokens} to the method "
        "to skip the first attempts."
    )


def _decompositions(
    request: Request, questions: Sequence[Against], rules: Rules, baselines: Baselines
) -> tuple[list[Decomposition], Alone | None]:
    """Decompose each target; if sums are wrong in a batch, repeat with one pass per example."""
    with linear_run(request, questions, rules) as (network, output, kept):
        found = _each_decomposed(network, output, kept, questions, rules, baselines)
        sums_up = all(map(exact, found))
        if not sums_up and len(output) > 1:
            # constants may lack a batch dimension, such as the biases of experts
            arguments = (network, output, kept, questions, rules, baselines)
            found = _each_decomposed(*arguments, apart=True)
            sums_up = all(exact(each, apart=True) for each in found)
        alone_run = alone_of(request, rules, network, kept)
    if not sums_up:
        raise not_linear(output)
    return found, alone_run


def alone_of(request: Request, rules: Rules, network: Network, kept: Kept | None) -> Alone | None:
    """Return the plain run to compare explained values with; None if no comparison is needed."""
    if rules.verify is False or not rules.constants or request.ends is not None:
        return None
    return alone(replace(request, kept=kept), network.calls, network.granted)


def in_turn(
    request: Request,
    positions: Sequence[int],
    ask: Callable[[Callable[[], Tensor]], Generator[Against, Decomposition, T]],
    rules: Rules,
    baselines: Baselines = None,
) -> T:
    """Run the linear network once, and decompose targets that depend on earlier decompositions.

    Args:
        request: the arguments of the run, with one example.
        positions: all output positions that targets may have, counted from the end.
        ask: function that receives a callable for the logits at ``positions`` (n, V), and returns
            a generator. The generator yields targets, and is sent each target's decomposition.
        rules: the options of the linear network.
        baselines: see :meth:`~captum_ssm.LatimFlow.attribute`. Default: None.

    Returns:
        The return value of the generator.
    """
    if rules.chunk_tokens is not None:
        raise OptionError(
            "chunk_tokens was passed, but targets that depend on earlier results need the whole "
            "autograd graph. Leave chunk_tokens out."
        )
    # before the run only the positions are known, so token 0 replaces the real tokens
    anywhere = Against(SumTarget(positions, torch.zeros(len(positions)).long()), None)
    with linear_run(request, [anywhere], rules) as (network, output, kept):
        where = torch.tensor(positions) % (output.shape[1] if kept is None else kept.tokens)
        if kept is not None:
            where = torch.searchsorted(torch.tensor(kept.positions), where)
        logits = output.detach()[0, where.to(output.device)]

        numbers: list[tuple[Against, Tensor]] = []

        def answer(question: Against) -> Decomposition:
            (found,) = _each_decomposed(network, output, kept, [question], rules, baselines)
            if not exact(found):
                raise not_linear(output)
            numbers.append((question, found.output))
            return found

        result = answered(ask(lambda: logits), answer)
        alone_run = alone_of(request, rules, network, kept)
    if alone_run is not None:
        alone_run.require(numbers)
    return result


def answered(questions: Generator[Against, A, T], answer: Callable[[Against], A]) -> T:
    """Send a generator the answer to each question it yields; return the generator's result."""
    latest: A | None = None
    while True:
        try:
            question = next(questions) if latest is None else questions.send(latest)
        except StopIteration as stop:  # `answer` is outside the try, so its errors pass
            result: T = stop.value
            return result
        latest = answer(question)


def _each_decomposed(
    network: Network,
    output: Tensor,
    kept: Kept | None,
    questions: Sequence[Against],
    rules: Rules,
    baselines: Baselines,
    *,
    apart: bool = False,
) -> list[Decomposition]:
    """Decompose the value of each target; ``output`` has logits only at ``kept`` positions."""
    numbers = numbers_of(network, output, kept, questions)
    one, *rest = one_each(baselines, 1 + len(network.mode.others))
    start, of_others = start_of(network, rules, one), baselines_of_others(network, rest)
    more = (start, of_others, rules.by_role, rules.features, apart)
    return [decompose(network, number, constant, *more) for number, constant in numbers]


def numbers_of(
    network: Network, output: Tensor, kept: Kept | None, questions: Sequence[Against]
) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each target the value to explain (B,), and the value's constant summand or None.

    Raises:
        TargetError, OptionError, NonFiniteError: if a target or contrast does not fit the output.
        GradientModeError: if the output does not depend on the input.
    """
    whole = output if kept is None else kept.whole(output)
    for question in questions:
        index = target_index(question.target, whole)
        require_real_target(index, whole, network.mask)
    numbers = [contrasted(output, q.target, q.contrast, kept) for q in questions]
    if not output.requires_grad:
        raise not_reached()
    return numbers


def start_of(network: Network, rules: Rules, baselines: Baselines) -> list[Tensor]:
    """Return a baseline for each tensor where the network starts; an empty list means 0.

    If ``baselines`` is None, the rule selects 0 or the mean over tokens. After a cache, None means
    0 for every rule, because the few new tokens have no useful mean.
    """
    if baselines is None and rules.rule not in ("frozen", "half") and not network.has_past:
        baselines = "mean"
    return baselines_of(network, baselines)


def coefficients(
    request: Request, questions: Sequence[Against], rule: Rule = "half", recompute: bool = False
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return each target's gradients at the mixers' outputs in the linear network.

    A mixer output's relevance is the output times this gradient. With ``recompute`` blocks run
    again in backward passes.

    Returns:
        For each target the explained value (B,), and one tensor (B, L, E) per mixer call, in order.
    """
    rules = Rules(rule, constants=True, by_layer=True, verify=False, recompute=recompute)
    with _linear_run(request, rules) as (network, output):
        numbers = [contrasted(output, each.target, each.contrast) for each in questions]
        if not all(number.requires_grad for number, _ in numbers):
            raise not_reached()
        return [(number.detach(), _gradients(network, number, rest)) for number, rest in numbers]


@contextmanager
def linear_run(
    request: Request, questions: Sequence[Against], rules: Rules
) -> Iterator[tuple[Network, Tensor, Kept | None]]:
    """Run the linear network, with the model's head at only the positions of the targets.

    Yields:
        The network, its output, and the positions of the output (None for all).
    """
    begins = () if request.begins is None else (request.begins,)
    read = [site.module for site in (*begins, *request.cuts)]
    more = (*request.others, *request.additional)
    kept = kept_positions(request.forward_func, request.inputs, more, questions, read)
    if kept is not None:
        with _linear_run(replace(request, kept=kept), rules) as (network, output):
            if kept.fit(output):
                yield network, output, kept
                return
    with _linear_run(request, rules) as (network, output):
        yield network, output, None


@contextmanager
def _linear_run(request: Request, rules: Rules) -> Iterator[tuple[Network, Tensor]]:
    """Run the linear network; yield the network and its output, for work that is not traced."""
    if not request.inputs.is_floating_point():  # ids are identified by their memory address
        ids = request.inputs.clone(memory_format=torch.contiguous_format)
        request = replace(request, inputs=ids)
    with linearized(
        request.model,
        request.ids,
        rule=rules.rule,
        by_role=rules.by_role,
        constants=rules.constants,
        others=request.others,
        layers=request.layers,
        steps=rules.by_layer,
        verify=rules.verify,
        begins=request.begins,
        cuts=request.cuts,
        reads=() if request.ends is None else (request.ends.site,),
        recompute=bool(rules.recompute),
    ) as network:
        mode = network.mode
        output = request.output(mode.begun(request.inputs), [x.clone() for x in mode.others])
        network.check_ran()
        if request.ends is not None:
            met = network.met(request.ends.site)
            output = request.ends.chosen(met.tensors, network.mask)
        with unseen():
            yield network, output


def _gradients(network: Network, number: Tensor, constant: Tensor | None) -> list[Tensor]:
    """Return the gradients of a value (B,) at mixers' outputs; raise if sums are not exact."""
    mode, outputs = network.mode, [step.output for step in network.steps]
    # embeddings that are looked up later count as inputs, too
    roots = [] if mode.root is None else [mode.root, *(x.leaf for x in mode.again)]
    by_place: dict[Any, Tensor] = {}

    def note(place: Any, step: Step, gradients: Sequence[Tensor | None]) -> None:
        gradient = gradients[-1]
        by_place[place] = torch.zeros_like(step.output) if gradient is None else gradient

    with nullcontext() if mode.blocks is None else mode.blocks.reading(note):
        gradients, biases = account(mode, number, constant, [*roots, *outputs])
    by_place |= {outside(i): gradients[len(roots) + i] for i in range(len(outputs))}
    parts = [(g * x.detach()).flatten(1).sum(1) for g, x in zip(gradients, roots, strict=False)]
    if parts:
        inputs, output = torch.stack(parts, 1), number.detach()
        found = Decomposition(inputs, (), (), biases, output, torch.zeros_like(output))
        if not sums_up(found, inputs, together=True):
            raise not_linear(number)
    return [by_place[place] for place in sorted(by_place)]
