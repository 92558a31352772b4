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
from .alone import PlainRun, plain_run
from .baselines import Baselines, baselines_of, baselines_of_others, one_per_input
from .chunks import in_chunks
from .decompose import (
    Decomposition,
    OutputParts,
    account,
    decompose,
    is_exact,
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
        questions = [Against(one_target, contrast) for one_target in several(target)]
        parts_by_target = self._by_parts(
            tensor, questions, additional_forward_args, internal_batch_size, explain, others
        )

        def joined(index: int, like: Tensor) -> Tensor:
            """Concatenate entry ``index`` of the parts' :data:`Explained`, for every target."""
            by_target = [torch.cat([part[index] for part in parts]) for parts in parts_by_target]
            return as_asked(by_target, target).detach().to(like.device).contiguous()

        relevance: Any = joined(0, tensor)
        if isinstance(inputs, tuple):
            relevance = (relevance, *(joined(2 + i, x) for i, x in enumerate(others)))
        return (relevance, joined(1, tensor)) if return_convergence_delta else relevance

    def _delta(self, found: OutputParts, explained: Sequence[Tensor], attributions: Any) -> Tensor:
        """Return output - attributions - biases (B,) for the user's ``attributions``.

        That is the delta of ``found``, plus the sums of its relevance ``explained`` (a tensor per
        input) minus ``attributions``. The part of further inputs, which may have no batch
        dimension, is divided equally among examples.
        """
        given_first, given_others = several_inputs(attributions, "attributions")
        if 1 + len(given_others) != len(explained):
            raise InputError(
                f"attributions holds {1 + len(given_others)} tensors, but inputs holds "
                f"{len(explained)}. Pass the output of attribute() for these inputs."
            )
        of_first, *of_others = explained
        missing = of_first.flatten(1).sum(1) - given_first.flatten(1).sum(1).to(of_first)
        delta = found.delta + missing.to(found.output)
        for ours, given in zip(of_others, given_others, strict=True):
            delta = delta + (ours.sum() - given.sum().to(ours)).to(delta) / len(delta)
        return delta


#: Entry 0: relevance of the first input; 1: the delta (B,); 2 to n: relevance of further inputs.
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


#: A phrase for the warning, such as "blocks ran again", and the function that computes the result.
#: The phrase is empty for the function that saves no memory.
Attempt = tuple[str, Callable[[], T]]


def first_that_fits(
    run: Callable[[bool], T], recompute: bool | None = None, others: Sequence[Attempt[T]] = ()
) -> T:
    """Return ``run(recompute)``; for None, the result of the first run that memory allows.

    Args:
        run: a function of ``recompute``, which is called with False and then with True.
        recompute: the only argument for ``run``. Default: None, both.
        others: further attempts, in this order. Default: none.

    Raises:
        RuntimeError: the device's error, if no attempt fits into memory, or if those that may fit
            are refused.
    """
    if recompute is not None:
        return run(recompute)
    refused: CaptumSSMError | None = None
    first: list[Attempt[T]] = [("", lambda: run(False)), (_RECOMPUTED, lambda: run(True))]
    for phrase, compute in (*first, *others):
        try:
            result = compute()
        except CaptumSSMError as error:
            if not phrase:  # the error is about the call; later ones are about the attempt
                raise
            refused = error
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            # not the error itself, whose traceback would hold the tensors that filled the memory
            error_type, message = type(error), str(error)
        else:
            if phrase:
                warnings.warn(f"The device's memory is too small, so {phrase}", stacklevel=2)
            return result
    # both are set: the first attempt has returned, raised, or run out of memory
    raise error_type(f"{message}\n{_TOO_LARGE}") from refused


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

        def run(recompute: bool | None, chunk_tokens: int | None = None) -> list[Decomposition]:
            """Decompose with these two rules; recompute is None only together with chunks."""
            chosen = replace(rules, recompute=recompute, chunk_tokens=chunk_tokens)
            return decompositions(request, questions, chosen, baselines)

        sizes = [tokens // parts for parts in (4, 16, 64) if tokens // parts >= _FEW_TOKENS]
        in_parts = [(_in_chunks_of(size), partial(run, None, size)) for size in sizes]
        return first_that_fits(run, None, in_parts if len(request.inputs) == 1 else ())
    results, plain = _decompose_in_one_run(request, questions, rules, baselines)
    if plain is not None:
        plain.require_equal([(q, x.output) for q, x in zip(questions, results, strict=True)])
    return results


def _in_chunks_of(tokens: int) -> str:
    """Return the phrase of the warning for chunks that the user did not ask for."""
    return (
        f"the sequence ran in chunks of {tokens} tokens. Pass chunk_tokens={tokens} to the method "
        "to skip the first attempts."
    )


def _decompose_in_one_run(
    request: Request, questions: Sequence[Against], rules: Rules, baselines: Baselines
) -> tuple[list[Decomposition], PlainRun | None]:
    """Decompose each target; if sums are wrong in a batch, repeat with one pass per example.

    Also return the plain run to compare with, which runs later: the graph is then freed.
    """
    with linear_run(request, questions, rules) as (network, output, kept):
        results = _decompose_each(network, output, kept, questions, rules, baselines)
        exact = all(map(is_exact, results))
        if not exact and len(output) > 1:
            # constants may lack a batch dimension, such as the biases of experts
            arguments = (network, output, kept, questions, rules, baselines)
            results = _decompose_each(*arguments, one_pass_per_example=True)
            exact = all(is_exact(result, one_pass_per_example=True) for result in results)
        plain = plain_run_of(request, rules, network, kept)
    if not exact:
        raise not_linear(output)
    return results, plain


def plain_run_of(
    request: Request, rules: Rules, network: Network, kept: Kept | None
) -> PlainRun | None:
    """Return the plain run to compare explained values with; None if no comparison is needed."""
    # without constants, and for a value inside the model, the output is another number
    if rules.verify is False or not rules.constants or request.ends is not None:
        return None
    return plain_run(replace(request, kept=kept), network.calls, network.granted)


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
    # the run needs only the positions of the targets, whose tokens are not known yet: 0 for each
    placeholder = Against(SumTarget(positions, torch.zeros(len(positions)).long()), None)
    with linear_run(request, [placeholder], rules) as (network, output, kept):
        indices = torch.tensor(positions) % (output.shape[1] if kept is None else kept.tokens)
        if kept is not None:  # from positions in the sequence to rows of the output
            indices = torch.searchsorted(torch.tensor(kept.positions), indices)
        logits = output.detach()[0, indices.to(output.device)]

        explained: list[tuple[Against, Tensor]] = []

        def answer(question: Against) -> Decomposition:
            """Decompose one target, and note it for the comparison with a plain run."""
            (decomposition,) = _decompose_each(network, output, kept, [question], rules, baselines)
            if not is_exact(decomposition):
                raise not_linear(output)
            explained.append((question, decomposition.output))
            return decomposition

        result = answer_questions(ask(lambda: logits), answer)
        plain = plain_run_of(request, rules, network, kept)
    if plain is not None:
        plain.require_equal(explained)
    return result


def answer_questions(questions: Generator[Against, A, T], answer: Callable[[Against], A]) -> T:
    """Send a generator the answer to each question it yields; return the generator's result."""
    latest: A | None = None  # None starts the generator
    while True:
        try:
            question = next(questions) if latest is None else questions.send(latest)
        except StopIteration as stop:  # `answer` is outside the try, so its errors pass
            result: T = stop.value
            return result
        latest = answer(question)


def _decompose_each(
    network: Network,
    output: Tensor,
    kept: Kept | None,
    questions: Sequence[Against],
    rules: Rules,
    baselines: Baselines,
    *,
    one_pass_per_example: bool = False,
) -> list[Decomposition]:
    """Decompose the value of each target; ``output`` has logits only at ``kept`` positions."""
    values = numbers_of(network, output, kept, questions)
    first_baseline, *other_baselines = one_per_input(baselines, 1 + len(network.mode.others))
    options: dict[str, Any] = {
        "baselines": start_of(network, rules, first_baseline),
        "other_baselines": baselines_of_others(network, other_baselines),
        "by_role": rules.by_role,
        "features": rules.features,
        "one_pass_per_example": one_pass_per_example,
    }
    return [decompose(network, value, constant, **options) for value, constant in values]


def numbers_of(
    network: Network, output: Tensor, kept: Kept | None, questions: Sequence[Against]
) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each target the value to explain (B,), and the value's constant summand or None.

    Raises:
        TargetError, OptionError, NonFiniteError: if a target or contrast does not fit the output.
        GradientModeError: if the output does not depend on the input.
    """
    # zeros in the shape of all logits, because targets are checked against that shape
    all_logits = output if kept is None else kept.whole(output)
    for question in questions:
        index = target_index(question.target, all_logits)
        require_real_target(index, all_logits, network.mask)
    values = [contrasted(output, q.target, q.contrast, kept) for q in questions]
    if not output.requires_grad:
        raise not_reached()
    return values


def start_of(network: Network, rules: Rules, baselines: Baselines) -> list[Tensor]:
    """Return a baseline for each root of the network; an empty list means 0.

    If ``baselines`` is None, the rule selects 0 or the mean over tokens. After a cache, None means
    0 for every rule, because the few new tokens have no useful mean.
    """
    if baselines is None and rules.rule not in ("frozen", "half") and not network.has_past:
        baselines = "mean"
    return baselines_of(network, baselines)


def coefficients(
    request: Request, questions: Sequence[Against], rule: Rule = "half", recompute: bool = False
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return for each target the explained value (B,), and its gradients at mixers' outputs.

    There is one gradient (B, L, E) per mixer call, in order. A mixer output's relevance is the
    output times this gradient. With ``recompute`` blocks run again in backward passes.
    """
    rules = Rules(rule, constants=True, by_layer=True, verify=False, recompute=recompute)
    with _linear_run(request, rules) as (network, output):
        pairs = [contrasted(output, question.target, question.contrast) for question in questions]
        if not all(value.requires_grad for value, _ in pairs):
            raise not_reached()
        return [(value.detach(), _gradients(network, value, constant)) for value, constant in pairs]


@contextmanager
def linear_run(
    request: Request, questions: Sequence[Against], rules: Rules
) -> Iterator[tuple[Network, Tensor, Kept | None]]:
    """Run the linear network, with the model's head at only the positions of the targets.

    Yield the network, its output, and the positions of the output (None for all).
    """
    begins = () if request.begins is None else (request.begins,)
    # activations of these modules are needed at all positions, even if they are part of the head
    needed = [site.module for site in (*begins, *request.cuts)]
    arguments = (*request.others, *request.additional)
    kept = kept_positions(request.forward_func, request.inputs, arguments, questions, needed)
    if kept is not None:
        with _linear_run(replace(request, kept=kept), rules) as (network, output):
            if kept.fit(output):  # else the model ignored the positions, so run it again
                yield network, output, kept
                return
    with _linear_run(request, rules) as (network, output):
        yield network, output, None


@contextmanager
def _linear_run(request: Request, rules: Rules) -> Iterator[tuple[Network, Tensor]]:
    """Run the linear network; yield the network and its output, or the value ``request.ends``."""
    # a look-up of the explained ids is recognized by their memory, which nothing else may share
    if not request.inputs.is_floating_point():
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
        # copies, because the model may change its inputs in place
        output = request.output(mode.begun(request.inputs), [x.clone() for x in mode.others])
        network.check_ran()
        if request.ends is not None:
            activation = network.met(request.ends.site)
            output = request.ends.value_of(activation.tensors, network.mask)
        with unseen():  # the caller's functions are not part of the network
            yield network, output


def _gradients(network: Network, value: Tensor, constant: Tensor | None) -> list[Tensor]:
    """Return the gradients of a value (B,) at mixers' outputs; raise if sums are not exact."""
    mode, outputs = network.mode, [step.output for step in network.steps]
    # embeddings of the ids in further tables count as inputs, too
    roots = [] if mode.root is None else [mode.root, *(x.leaf for x in mode.again)]
    by_place: dict[Any, Tensor] = {}

    def note(place: Any, step: Step, gradients: Sequence[Tensor | None]) -> None:
        """Store the gradient at a mixer's output, the last of the step's tensors."""
        gradient = gradients[-1]
        by_place[place] = torch.zeros_like(step.output) if gradient is None else gradient

    with nullcontext() if mode.blocks is None else mode.blocks.report_to(note):
        gradients, biases = account(mode, value, constant, [*roots, *outputs])
    by_place |= {outside(i): gradients[len(roots) + i] for i in range(len(outputs))}
    # not strict: the gradients at outputs follow
    sums = [(g * x.detach()).flatten(1).sum(1) for g, x in zip(gradients, roots, strict=False)]
    if sums:  # of inputs and constants; mixers' outputs need not sum to the value
        inputs, output = torch.stack(sums, 1), value.detach()
        virtual = torch.zeros_like(output)  # relevance of inserted tokens is part of `inputs`
        found = Decomposition(inputs, (), (), biases, output, virtual)
        if not sums_up(found, inputs, together=True):
            raise not_linear(value)
    return [by_place[place] for place in sorted(by_place)]
