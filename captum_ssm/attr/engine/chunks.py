"""Decompose an output of a long sequence chunk by chunk, in the memory that one chunk needs.

The model runs on one chunk of tokens after the other, each from the cache of the chunk before. The
caches between chunks are kept. The chunks then run again from the last to the first, and relevance
that reaches the cache of a chunk continues in the chunk before. The result is the same as for the
whole sequence (Li et al., SeCO, arXiv 2505.16710, train models in this way).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._optional import optional
from ...errors import CachedStateError, InputError, OptionError, ReconstructionError
from ...linear import Network, linearized
from ...linear.carried import Carried
from ...operators.base import Role
from ...operators.coefficients import ROLES
from ...operators.kernels.arithmetic import sum_tensors, unseen
from ...tracing import require_deterministic, require_real_tokens
from ...tracing.caches import CACHES, copied, parameters, tensors_of
from ..call.head import Kept, kept_positions
from ..call.inputs import call_model
from ..call.progress import shown
from ..call.targets import Against, contrasted, logits_of, require_real_target, target_index
from .baselines import Baselines, baselines_of
from .decompose import Decomposition, decompose, exact, not_linear

if TYPE_CHECKING:
    from .linear_method import Rules
    from .run import Request

#: Gradients at the floating tensors of a cache, by label and by place.
_Gradients = Mapping[Role | None, Mapping[int, Tensor]]


def in_chunks(
    request: Request, questions: Sequence[Against], rules: Rules, baselines: Baselines, tokens: int
) -> list[Decomposition]:
    """Decompose each target of one example, in chunks of at most ``tokens`` tokens.

    Raises:
        OptionError: if the model, or an option, does not allow chunks.
        InputError: if a real token follows a padded one that follows a real one.
        ReconstructionError: if the model computes other logits without chunks.
    """
    if baselines is None and rules.rule not in ("frozen", "half"):
        baselines = "mean"
    sequence = _Sequence(request, questions, rules, tokens, baselines)
    for run in shown((sequence.run_forward, sequence.run_backward)):
        run()
    return [sequence.joined(*each) for each in sequence.numbers.items()]


@dataclass(frozen=True, eq=False)
class _Number:
    """An explained value (1,), its constant summand or None, and its gradient at the logits."""

    value: Tensor
    constant: Tensor | None
    at_logits: Tensor


#: The number of tokens in a chunk at which logits are compared with the logits of a plain run.
_COMPARED = 8


class _Sequence:
    """One example, and the model's runs on its chunks.

    Attributes:
        numbers: the explained number of each question, and the parts of its decomposition, by
            chunk. Empty before :meth:`run_forward`.
    """

    def __init__(
        self,
        request: Request,
        questions: Sequence[Against],
        rules: Rules,
        tokens: int,
        baselines: Baselines,
    ) -> None:
        self._request, self._rules, self._baselines = request, rules, baselines
        self._is_mean = isinstance(baselines, str) and baselines == "mean"
        self._cache_name = _name_of_cache(request, rules)
        self._questions, self.numbers = questions, dict[_Number, list[Decomposition]]()
        mask = _mask_of(request)
        kept = kept_positions(request.forward_func, request.inputs, request.additional, questions)
        if kept is None:
            raise self._refused(
                "must be a language model of transformers without hooks on its output layer, and "
                "the target a pair (position, token)"
            )
        self._kept = kept
        of_any = torch.zeros(()).expand(*request.inputs.shape[:2], 2**31)
        for question in questions:
            require_real_target(target_index(question.target, of_any), of_any, mask)
        first, end = 0, request.inputs.shape[1]
        if mask is not None:
            real = mask[0].nonzero()[:, 0].tolist()
            first, end = real[0], real[-1] + 1
            if len(real) < end - first:
                raise InputError(
                    "The attention mask hides tokens between unmasked ones, which chunk_tokens "
                    "does not support. Leave chunk_tokens out."
                )
        self._chunks = _divided(range(first, end), tokens)
        #: the number of chunks that reach the targets
        self._reaching = sum(chunk.start <= kept.positions[-1] for chunk in self._chunks)
        self._borders: list[_Border] = []
        self._granted = 0.0
        self._sums: list[Tensor] = []
        #: the tokens of the first two chunks at which a plain run is compared
        self._checked = sorted(
            {
                chunk.stop - 1 - len(chunk) * i // _COMPARED
                for chunk in self._chunks[:2]
                for i in range(_COMPARED)
            }
        )

    def _refused(self, reason: str) -> OptionError:
        name = type(self._request.model).__name__
        return OptionError(f"chunk_tokens cannot be used: {name} {reason}. Leave chunk_tokens out.")

    def _empty_cache(self) -> Any:
        """Return a cache without tokens, after a plain run of one token that it must support."""
        transformers = optional("transformers", "transformers", "chunk_tokens")
        request = self._request
        one, two = (transformers.DynamicCache(config=request.model.config) for _ in range(2))
        with request.plainly():
            try:
                given = {self._cache_name: one, "use_cache": True}
                call_model(request.forward_func, request.inputs[:, :1], (), given)
            except Exception as error:
                raise self._refused(f"does not run with a DynamicCache ({error})") from error
        return two

    @contextmanager
    def _run(
        self, chunk: range, border: _Border, asked: Sequence[int], verify: bool | float
    ) -> Iterator[tuple[Network, Carried, Tensor]]:
        """Run the model on a chunk; yield network, cache, and logits at ``asked`` positions."""
        request, rules = self._request, self._rules
        require_deterministic(request.model)
        start = request.inputs[:, chunk.start : chunk.stop].clone()
        first = self._chunks[0].start
        carried = Carried(chunk.start - first, border.sums, states=border.states)
        kept = Kept(tuple(p - chunk.start for p in asked) or (len(chunk) - 1,), len(chunk))
        with linearized(
            request.model,
            start,
            rule=rules.rule,
            by_role=rules.by_role,
            constants=rules.constants,
            layers=request.layers,
            steps=rules.by_layer,
            verify=verify,
            carried=carried,
        ) as network:
            named = {self._cache_name: border.cache(), "use_cache": True, **kept.arguments}
            if "position_ids" in parameters(type(request.model).forward):
                positions = torch.arange(chunk.start, chunk.stop, device=start.device)
                named["position_ids"] = positions[None]
            given = network.mode.begun(start)
            try:
                output = logits_of(call_model(request.forward_func, given, (), named))
            except CachedStateError as error:
                raise self._refused("has a mixer that is explained only without a cache") from error
            network.check_ran()
            if carried.cache is None:  # no module of it has the argument use_cache
                raise self._refused("does not read the cache that it is given")
            try:
                with unseen():
                    yield network, carried, output
            finally:  # the cache and the leaves hold the graph, and hooks hold these
                carried.cache = None
                carried.leaves.clear()
                carried.left.clear()

    def run_forward(self) -> None:
        """Run all chunks, keep what lies between them, and find the numbers to explain."""
        border = _Border(self._empty_cache())
        found: dict[int, Tensor] = {}
        run = self._chunks if self._is_mean else self._chunks[: self._reaching]
        for chunk in shown(run):
            self._borders.append(border)
            border = self._forward(chunk, border, found)
            if self._checked[-1] in chunk and self._rules.verify is not False:
                self._require_same(torch.stack([found[p] for p in self._checked], 1))
        logits = torch.stack([found[p] for p in self._kept.positions], 1).requires_grad_()
        for question in self._questions:
            number, constant = contrasted(logits, question.target, question.contrast, self._kept)
            (gradient,) = torch.autograd.grad(number, logits, torch.ones_like(number))
            self.numbers[_Number(number.detach(), constant, gradient)] = []

    def _forward(self, chunk: range, border: _Border, found: dict[int, Tensor]) -> _Border:
        """Run a chunk; add its logits to ``found``, by position; return the border behind it."""
        asked = sorted(p for p in {*self._kept.positions, *self._checked} if p in chunk)
        with self._run(chunk, border, asked, self._rules.verify) as (network, carried, output):
            self._granted = max(self._granted, network.granted * len(network.calls))
            found |= zip(asked, output.detach().unbind(1), strict=False)
            new = [x.detach().sum(1, keepdim=True, dtype=_wide(x)) for x in network.roots]
            before = self._sums or [torch.zeros_like(x) for x in new]
            self._sums = [a + b for a, b in zip(before, new, strict=True)]
            left = [[x.detach() for x in each] for each in carried.left]
            return _Border(carried.cache, carried.after, left, border)

    def _require_same(self, logits: Tensor) -> None:
        """Raise unless a plain run of the first chunks computes the same ``logits`` (1, K, V)."""
        request, end = self._request, self._checked[-1] + 1
        additional = tuple(x[:, :end] if isinstance(x, Tensor) else x for x in request.additional)
        kept = Kept(tuple(self._checked), end)
        begin = replace(request, inputs=request.inputs[:, :end], additional=additional, kept=kept)
        alone = begin.output_alone
        error = float((alone - logits).abs().max() / alone.abs().max().clamp_min(1e-30))
        if not error <= min(16 * self._granted, 0.25):
            raise ReconstructionError(
                f"{type(request.model).__name__} computes other logits for {end} tokens in two "
                f"chunks than in one run. They differ by {error:.1e} of the largest logit. The "
                "cache may not hold all that later tokens need. Leave chunk_tokens out, or pass "
                "verify=False to skip this comparison."
            )

    def run_backward(self) -> None:
        """Run the chunks that reach the targets again, from the last to the first."""
        later: dict[_Number, _Gradients] = {number: {} for number in self.numbers}
        pairs = list(zip(self._chunks, self._borders, strict=False))[: self._reaching]
        for chunk, border in shown(pairs[::-1]):
            later = self._backward(chunk, border, later)

    def _backward(
        self, chunk: range, border: _Border, later: Mapping[_Number, _Gradients]
    ) -> dict[_Number, _Gradients]:
        """Run a chunk again, and add its parts; return the gradients at the cache before it."""
        here = [i for i, position in enumerate(self._kept.positions) if position in chunk]
        asked, sooner = [self._kept.positions[i] for i in here], dict[_Number, _Gradients]()
        with self._run(chunk, border, asked, False) as (network, carried, output):
            start = self._start(network, chunk)
            for number, parts in self.numbers.items():
                at = number.at_logits[:, here]
                given = network, carried, output, at, later[number], start
                part, sooner[number] = self._decomposed(*given)
                parts.insert(0, part)
        return sooner

    def _decomposed(
        self,
        network: Network,
        carried: Carried,
        output: Tensor,
        at_logits: Tensor,
        later: _Gradients,
        start: Sequence[Tensor],
    ) -> tuple[Decomposition, _Gradients]:
        """Decompose the part of a number that passes a chunk.

        Args:
            at_logits: the number's gradient at the chunk's logits (1, K, V).
            later: the number's gradients at the cache that the chunk leaves.
            start: a baseline for each root of the network.

        Returns:
            The part of the decomposition, and the gradients at the cache that the chunk received.
        """
        of_cache = [x for x in tensors_of(carried.cache) if x.is_floating_point()]
        left = [*of_cache, *chain.from_iterable(carried.left)]

        def reached(label: Role | None) -> Tensor:
            """Return the number's part along paths of a label; its graph is of all labels."""
            at = {left[i]: gradient for i, gradient in later.get(label, {}).items()}
            if label in (None, "content") and at_logits.shape[1]:
                at[output] = at_logits
            every = [output, *(left[i] for i in later.get(None, {}))]
            pairs = [(x, at.get(x, torch.zeros_like(x))) for x in every if x.requires_grad]
            return sum_tensors((x * g).flatten(1).sum(1, dtype=_wide(x)) for x, g in pairs)

        number = reached(None)
        rules, by_label = self._rules, dict[Role, Tensor]()
        if rules.by_role and rules.rule != "frozen":
            labels: list[Role] = ["content", *(role for role in ROLES[1:] if role in later)]
            by_label = {label: reached(label) for label in labels}
        carried.gradients.clear()
        found = decompose(
            network,
            number,
            None,
            start,
            by_role=rules.by_role,
            features=rules.features,
            by_label=by_label,
        )
        if not exact(found):
            raise not_linear(number)
        return found, dict(carried.gradients)

    def _start(self, network: Network, chunk: range) -> Sequence[Tensor]:
        """Return a baseline for each root of a chunk; an empty list means 0."""
        roots, tokens = network.roots, self._request.inputs.shape[1]
        baselines = self._baselines
        if self._is_mean:
            count = self._chunks[-1].stop - self._chunks[0].start
            pairs = zip(self._sums, roots, strict=True)
            return [(total / count).to(x).expand_as(x) for total, x in pairs]
        if isinstance(baselines, Tensor) and baselines.dim() > 1 and baselines.shape[1] == tokens:
            baselines = baselines[:, chunk.start : chunk.stop]
        return baselines_of(network, baselines)

    def joined(self, number: _Number, parts: Sequence[Decomposition]) -> Decomposition:
        """Return the decomposition of a number from its parts by chunk, on all L tokens."""
        first, end = self._chunks[0].start, self._chunks[len(parts) - 1].stop
        behind = self._request.inputs.shape[1] - end

        def along(tensors: Iterable[Tensor]) -> Tensor:
            whole = torch.cat(list(tensors), 1)
            none = (0, 0) * (whole.dim() - 2)
            return F.pad(whole, (*none, first, behind)) if first or behind else whole

        biases = {} if number.constant is None else {"output": number.constant.detach()}
        for part in parts:
            for name, bias in part.biases.items():
                if name != "cache":  # what the chunks before contribute
                    biases[name] = biases[name] + bias if name in biases else bias
        roles = [part.roles for part in parts if part.roles is not None]
        return replace(
            parts[0],
            inputs=along(part.inputs for part in parts),
            streams=tuple(map(along, zip(*(part.streams for part in parts), strict=True))),
            mixers=tuple(map(along, zip(*(part.mixers for part in parts), strict=True))),
            biases={name: bias.to(number.value) for name, bias in biases.items()},
            output=number.value,
            virtual=sum_tensors(part.virtual for part in parts).to(number.value),
            roles={role: along(x[role] for x in roles) for role in roles[0]} if roles else None,
        )


class _Border:
    """A cache between two chunks.

    The keys and values of attention grow from chunk to chunk. All borders share the longest ones.

    Args:
        cache: the cache after a chunk.
        sums, states: see :class:`.Carried`. Default: empty.
        before: the border before the chunk. Default: None, the chunk is the first.
    """

    def __init__(
        self,
        cache: Any,
        sums: Sequence[dict[str, Tensor]] = (),
        states: Sequence[Sequence[Tensor]] = (),
        before: _Border | None = None,
    ) -> None:
        self.sums, self.states = sums, states
        tensors = [x.detach() for x in tensors_of(cache)]
        self._frame = copied(cache, lambda x: x.new_empty(0))
        earlier = [] if before is None else before._parts
        pairs = zip_longest(tensors, earlier if len(earlier) == len(tensors) else [])
        self._parts: list[_Prefix] = [_Prefix.of(*pair) for pair in pairs]

    def cache(self) -> Any:
        """Return a new cache with the border's tensors."""
        parts = iter(self._parts)
        return copied(self._frame, lambda _: next(parts).tensor)


@dataclass(eq=False)
class _Prefix:
    """The first ``size`` entries along a dimension of a tensor that later borders may replace."""

    whole: list[Tensor]
    dim: int = 0
    size: int | None = None

    @classmethod
    def of(cls, x: Tensor, earlier: _Prefix | None) -> _Prefix:
        """Return the part that is all of ``x``; an earlier part that begins ``x`` shares it."""
        if earlier is not None and earlier.tensor.dim() == x.dim() and earlier.tensor.numel():
            was = earlier.tensor
            grown = [d for d in range(x.dim()) if x.shape[d] != was.shape[d]]
            if len(grown) == 1 and x.shape[grown[0]] > was.shape[grown[0]]:
                dim, size = grown[0], was.shape[grown[0]]
                if torch.equal(x.narrow(dim, 0, size), was):
                    earlier.dim, earlier.size = dim, size
                    earlier.whole[0] = x
                    return cls(earlier.whole)
        return cls([x])

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        (whole,) = self.whole
        return whole if self.size is None else whole.narrow(self.dim, 0, self.size)


def _divided(tokens: range, most: int) -> list[range]:
    """Divide tokens into chunks of nearly equal sizes, so that none has a single token."""
    count = -(-len(tokens) // most)
    edges = [tokens.start + len(tokens) * i // count for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(edges)]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _name_of_cache(request: Request, rules: Rules) -> str:
    """Return the name of the model's argument for a cache; raise if chunks are not possible."""
    model = request.model
    reason = ""
    if not request.is_model:
        reason = "forward_func must be the model itself, which is called once for each chunk"
    elif request.others or request.begins or request.ends or request.cuts:
        reason = "only the token ids or embeddings of one text can be explained in chunks"
    elif rules.recompute:
        reason = "recompute=True does not support a cache"
    elif not rules.constants:
        reason = "zero_bias=True needs operators of whole sequences"
    elif any(getattr(module, "indexer", None) is not None for module in model.modules()):
        reason = "an indexer picks the tokens to attend to, by the length of each run"
    names = [x for x in CACHES if x in parameters(type(model).forward)]
    if not reason and not (names and hasattr(model, "get_output_embeddings")):
        reason = f"{type(model).__name__} is no language model of transformers with a cache"
    if reason:
        raise OptionError(f"chunk_tokens cannot be used: {reason}. Leave chunk_tokens out.")
    return names[0]


def _mask_of(request: Request) -> Tensor | None:
    """Return the attention mask (1, L) as booleans; raise for other additional arguments."""
    names = parameters(type(request.model).forward)[2:]
    given = dict(zip(names, request.additional, strict=False))
    mask = given.pop("attention_mask", None)
    other = next((name for name, x in given.items() if x is not None), None)
    if other is not None or len(request.additional) > len(names):
        raise OptionError(
            f"chunk_tokens supports an attention mask as the only additional argument, but "
            f"{other or 'more'} was passed. Leave chunk_tokens out."
        )
    if mask is None:
        return None
    if mask.shape != request.inputs.shape[:2]:
        raise InputError(
            f"The attention mask has shape {tuple(mask.shape)}, but chunk_tokens needs "
            f"{tuple(request.inputs.shape[:2])}, one entry for each token."
        )
    keep: Tensor = mask != 0
    require_real_tokens(keep)
    return keep
