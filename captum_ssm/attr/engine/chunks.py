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
from itertools import chain, pairwise, product, zip_longest
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
from .decompose import Decomposition, decompose, is_exact, not_linear

if TYPE_CHECKING:
    from .linear_method import Rules
    from .run import Request

#: Gradients at the floating tensors of a cache, by label of the paths and by index of the tensor.
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
    for run in shown((sequence.run_forward, sequence.run_backward)):  # two steps of the progress
        run()
    return [sequence.joined(number, parts) for number, parts in sequence.numbers.items()]


@dataclass(frozen=True, eq=False)
class _Number:
    """An explained value (1,), its constant summand or None, and its gradient at the logits."""

    value: Tensor
    constant: Tensor | None
    at_logits: Tensor  # (1, K, V), at the K kept positions of the whole sequence


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
        """Check that model, mask and targets allow chunks, and divide the tokens into chunks."""
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
        # targets are checked against the shape of all logits, with a vocabulary above all real ones
        any_logits = torch.zeros(()).expand(*request.inputs.shape[:2], 2**31)
        for question in questions:
            require_real_target(target_index(question.target, any_logits), any_logits, mask)
        first, end = 0, request.inputs.shape[1]
        if mask is not None:
            real_positions = mask[0].nonzero()[:, 0].tolist()
            first, end = real_positions[0], real_positions[-1] + 1
            if len(real_positions) < end - first:
                raise InputError(
                    "The attention mask hides tokens between unmasked ones, which chunk_tokens "
                    "does not support. Leave chunk_tokens out."
                )
        self._chunks = _divided(range(first, end), tokens)
        #: the number of chunks that reach the targets
        self._reaching = sum(chunk.start <= kept.positions[-1] for chunk in self._chunks)
        self._borders: list[_Border] = []  #: the border before each chunk
        self._granted = 0.0  #: the tolerance for logits, from the tolerances of all operators
        self._sums: list[Tensor] = []  #: the sum of each root over all tokens so far, (1, 1, ...)
        #: the tokens of the first two chunks at which a plain run is compared, evenly spaced
        pairs = product(self._chunks[:2], range(_COMPARED))
        self._checked = sorted({chunk.stop - 1 - len(chunk) * i // _COMPARED for chunk, i in pairs})

    def _refused(self, reason: str) -> OptionError:
        """Return the error for a model that cannot run in chunks."""
        name = type(self._request.model).__name__
        return OptionError(f"chunk_tokens cannot be used: {name} {reason}. Leave chunk_tokens out.")

    def _empty_cache(self) -> Any:
        """Return a cache without tokens; fill another one in a plain run, to refuse some models."""
        transformers = optional("transformers", "transformers", "chunk_tokens")
        request = self._request
        filled, empty = (transformers.DynamicCache(config=request.model.config) for _ in range(2))
        with request.plain_settings():
            try:
                arguments = {self._cache_name: filled, "use_cache": True}
                call_model(request.forward_func, request.inputs[:, :1], (), arguments)
            except Exception as error:
                raise self._refused(f"does not run with a DynamicCache ({error})") from error
        return empty

    @contextmanager
    def _run(
        self, chunk: range, border: _Border, positions: Sequence[int], verify: bool | float
    ) -> Iterator[tuple[Network, Carried, Tensor]]:
        """Run a chunk after ``border``; yield network, cache, and logits at text ``positions``."""
        request, rules = self._request, self._rules
        require_deterministic(request.model)
        # a look-up of the explained ids is recognized by their memory, which nothing else may share
        tokens = request.inputs[:, chunk.start : chunk.stop].clone()
        first_token = self._chunks[0].start
        carried = Carried(chunk.start - first_token, border.sums, states=border.states)
        # a model computes logits of at least one token
        kept = Kept(tuple(p - chunk.start for p in positions) or (len(chunk) - 1,), len(chunk))
        with linearized(
            request.model,
            tokens,
            rule=rules.rule,
            by_role=rules.by_role,
            constants=rules.constants,
            layers=request.layers,
            steps=rules.by_layer,
            verify=verify,
            carried=carried,
        ) as network:
            arguments = {self._cache_name: border.cache(), "use_cache": True, **kept.arguments}
            if "position_ids" in parameters(type(request.model).forward):
                # by default positions count cached tokens, which lack the padding before the first
                token_indices = torch.arange(chunk.start, chunk.stop, device=tokens.device)
                arguments["position_ids"] = token_indices[None]
            model_input = network.mode.begun(tokens)
            try:
                output = logits_of(call_model(request.forward_func, model_input, (), arguments))
            except CachedStateError as error:
                raise self._refused("has a mixer that is explained only without a cache") from error
            network.check_ran()
            if carried.cache is None:  # no module of the model has the argument use_cache
                raise self._refused("does not read the cache that it is given")
            try:
                with unseen():
                    yield network, carried, output
            finally:  # free the graph, which the cache and the leaves hold, and hooks hold these
                carried.cache = None
                carried.leaves.clear()
                carried.states_for_next.clear()

    def run_forward(self) -> None:
        """Run all chunks, store the borders between them, and set :attr:`numbers`.

        Chunks after the last target are needed only for the mean baseline, so else they do not run.
        """
        border = _Border(self._empty_cache())
        logits_at: dict[int, Tensor] = {}
        chunks = self._chunks if self._is_mean else self._chunks[: self._reaching]
        for chunk in shown(chunks):
            self._borders.append(border)
            border = self._forward(chunk, border, logits_at)
            if self._checked[-1] in chunk and self._rules.verify is not False:
                self._require_same(torch.stack([logits_at[p] for p in self._checked], 1))
        logits = torch.stack([logits_at[p] for p in self._kept.positions], 1).requires_grad_()
        for question in self._questions:
            value, constant = contrasted(logits, question.target, question.contrast, self._kept)
            (gradient,) = torch.autograd.grad(value, logits, torch.ones_like(value))
            self.numbers[_Number(value.detach(), constant, gradient)] = []

    def _forward(self, chunk: range, border: _Border, logits_at: dict[int, Tensor]) -> _Border:
        """Run a chunk, write its logits to ``logits_at``, and return the border after it."""
        positions = sorted(p for p in {*self._kept.positions, *self._checked} if p in chunk)
        with self._run(chunk, border, positions, self._rules.verify) as (network, carried, output):
            self._granted = max(self._granted, network.granted * len(network.calls))
            # not strict: without positions there are logits of one token, which are ignored
            logits_at |= zip(positions, output.detach().unbind(1), strict=False)
            chunk_sums = [x.detach().sum(1, keepdim=True, dtype=_wide(x)) for x in network.roots]
            earlier_sums = self._sums or [torch.zeros_like(x) for x in chunk_sums]
            self._sums = [a + b for a, b in zip(earlier_sums, chunk_sums, strict=True)]
            states = [[x.detach() for x in scan_states] for scan_states in carried.states_for_next]
            return _Border(carried.cache, carried.sums_for_next, states, border)

    def _require_same(self, logits: Tensor) -> None:
        """Raise unless a plain run of the first chunks computes the same ``logits`` (1, K, V)."""
        request, end = self._request, self._checked[-1] + 1
        additional = tuple(x[:, :end] if isinstance(x, Tensor) else x for x in request.additional)
        kept = Kept(tuple(self._checked), end)
        first = replace(request, inputs=request.inputs[:, :end], additional=additional, kept=kept)
        expected = first.output_alone
        error = float((expected - logits).abs().max() / expected.abs().max().clamp_min(1e-30))
        if not error <= min(16 * self._granted, 0.25):  # as in :mod:`.alone`; also true for NaN
            raise ReconstructionError(
                f"{type(request.model).__name__} computes other logits for {end} tokens in two "
                f"chunks than in one run. They differ by {error:.1e} of the largest logit. The "
                "cache may not hold all that later tokens need. Leave chunk_tokens out, or pass "
                "verify=False to skip this comparison."
            )

    def run_backward(self) -> None:
        """Run the chunks that reach the targets again, from the last to the first."""
        grads_after: dict[_Number, _Gradients] = {number: {} for number in self.numbers}
        # not strict: chunks that did not run have no border
        pairs = list(zip(self._chunks, self._borders, strict=False))[: self._reaching]
        for chunk, border in shown(pairs[::-1]):
            grads_after = self._backward(chunk, border, grads_after)

    def _backward(
        self, chunk: range, border: _Border, grads_after: Mapping[_Number, _Gradients]
    ) -> dict[_Number, _Gradients]:
        """Run a chunk again, and add its part of each number's decomposition to :attr:`numbers`.

        ``grads_after`` has each number's gradients at the cache after the chunk. Return the
        gradients at the cache before the chunk.
        """
        indices = [i for i, position in enumerate(self._kept.positions) if position in chunk]
        positions = [self._kept.positions[i] for i in indices]
        grads_before: dict[_Number, _Gradients] = {}
        with self._run(chunk, border, positions, verify=False) as (network, carried, output):
            baselines = self._baselines_of(network, chunk)
            for number, parts in self.numbers.items():
                at_logits = number.at_logits[:, indices]
                part, grads_before[number] = self._decompose(
                    network, carried, output, at_logits, grads_after[number], baselines
                )
                parts.insert(0, part)
        return grads_before

    def _decompose(
        self,
        network: Network,
        carried: Carried,
        output: Tensor,
        at_logits: Tensor,
        grads_after: _Gradients,
        baselines: Sequence[Tensor],
    ) -> tuple[Decomposition, _Gradients]:
        """Decompose the part of a number that passes a chunk; return also the gradients before it.

        The part is the sum over tensors x at the chunk's end (logits, cache, states) of x times the
        number's gradient at x. ``at_logits`` (1, K, V) and ``grads_after`` are these gradients;
        the returned ones are at the cache before the chunk.
        """
        of_cache = [x for x in tensors_of(carried.cache) if x.is_floating_point()]
        end_tensors = [*of_cache, *chain.from_iterable(carried.states_for_next)]

        def part_of(label: Role | None) -> Tensor:
            """Return the part (1,) along paths of one label, or along all paths for None.

            Its graph has the tensors of all labels, so that each label's pass can reach them.
            """
            grad_at = {end_tensors[i]: g for i, g in grads_after.get(label, {}).items()}
            # at the logits every path is still content: no other factor has been passed
            if label in (None, "content") and at_logits.shape[1]:
                grad_at[output] = at_logits
            reached = [output, *(end_tensors[i] for i in grads_after.get(None, {}))]
            pairs = [(x, grad_at.get(x, torch.zeros_like(x))) for x in reached if x.requires_grad]
            return sum_tensors((x * g).flatten(1).sum(1, dtype=_wide(x)) for x, g in pairs)

        part = part_of(None)
        rules, by_label = self._rules, dict[Role, Tensor]()
        if rules.by_role and rules.rule != "frozen":
            # content is the first role, and always has a pass
            labels: list[Role] = ["content", *(role for role in ROLES[1:] if role in grads_after)]
            by_label = {label: part_of(label) for label in labels}
        carried.gradients.clear()  # hooks fill it in the backward passes of decompose
        flags: dict[str, Any] = {"by_role": rules.by_role, "features": rules.features}
        decomposition = decompose(network, part, baselines=baselines, by_label=by_label, **flags)
        if not is_exact(decomposition):
            raise not_linear(part)
        return decomposition, dict(carried.gradients)

    def _baselines_of(self, network: Network, chunk: range) -> Sequence[Tensor]:
        """Return a baseline for each root of a chunk (a mean is over all chunks); empty means 0."""
        roots, tokens = network.roots, self._request.inputs.shape[1]
        baselines = self._baselines
        if self._is_mean:  # from the forward runs, which had all tokens
            tokens_in_chunks = self._chunks[-1].stop - self._chunks[0].start
            pairs = zip(self._sums, roots, strict=True)
            return [(total / tokens_in_chunks).to(x).expand_as(x) for total, x in pairs]
        if isinstance(baselines, Tensor) and baselines.dim() > 1 and baselines.shape[1] == tokens:
            baselines = baselines[:, chunk.start : chunk.stop]
        return baselines_of(network, baselines)

    def joined(self, number: _Number, parts: Sequence[Decomposition]) -> Decomposition:
        """Return the decomposition of a number from its parts by chunk, on all L tokens."""
        before, end = self._chunks[0].start, self._chunks[len(parts) - 1].stop
        after = self._request.inputs.shape[1] - end

        def padded(tensors: Iterable[Tensor]) -> Tensor:
            """Concatenate tensors (1, T, ...) of chunks; pad with 0 to all L tokens."""
            joined = torch.cat(list(tensors), 1)
            other_dims = (0, 0) * (joined.dim() - 2)
            return F.pad(joined, (*other_dims, before, after)) if before or after else joined

        biases = {} if number.constant is None else {"output": number.constant.detach()}
        for part in parts:
            for name, bias in part.biases.items():
                if name != "cache":  # it is the contribution of earlier chunks
                    biases[name] = biases[name] + bias if name in biases else bias
        roles = [part.roles for part in parts if part.roles is not None]
        return replace(
            parts[0],
            inputs=padded(part.inputs for part in parts),
            streams=tuple(map(padded, zip(*(part.streams for part in parts), strict=True))),
            mixers=tuple(map(padded, zip(*(part.mixers for part in parts), strict=True))),
            biases={name: bias.to(number.value) for name, bias in biases.items()},
            output=number.value,
            virtual=sum_tensors(part.virtual for part in parts).to(number.value),
            roles={role: padded(x[role] for x in roles) for role in roles[0]} if roles else None,
        )


class _Border:
    """A cache between two chunks, as the model leaves it after one chunk.

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
        self._frame = copied(cache, lambda x: x.new_empty(0))  # the cache's objects, without data
        earlier_parts = [] if before is None else before._parts
        # the numbers differ after the first chunk, because an empty cache lacks some tensors
        pairs = zip_longest(tensors, earlier_parts if len(earlier_parts) == len(tensors) else [])
        self._parts: list[_Prefix] = [_Prefix.of(*pair) for pair in pairs]

    def cache(self) -> Any:
        """Return a new cache with the border's tensors."""
        parts = iter(self._parts)  # `copied` replaces tensors in the order of `tensors_of`
        return copied(self._frame, lambda _: next(parts).tensor)


@dataclass(eq=False)
class _Prefix:
    """The first ``size`` entries along a dimension of a tensor that later borders may replace.

    Prefixes of one tensor share the list ``whole`` of this tensor, so each sees a replacement.
    """

    whole: list[Tensor]
    dim: int = 0
    size: int | None = None

    @classmethod
    def of(cls, x: Tensor, earlier: _Prefix | None) -> _Prefix:
        """Return ``x`` as a prefix; if ``earlier`` is the beginning of ``x``, both share ``x``."""
        if earlier is not None and earlier.tensor.dim() == x.dim() and earlier.tensor.numel():
            shorter = earlier.tensor
            # x has grown in one dimension, as keys and values do, and begins with `shorter`
            grown_dims = [d for d in range(x.dim()) if x.shape[d] != shorter.shape[d]]
            if len(grown_dims) == 1 and x.shape[grown_dims[0]] > shorter.shape[grown_dims[0]]:
                dim, size = grown_dims[0], shorter.shape[grown_dims[0]]
                if torch.equal(x.narrow(dim, 0, size), shorter):
                    earlier.dim, earlier.size = dim, size
                    earlier.whole[0] = x  # frees the shorter tensor, also for all earlier prefixes
                    return cls(earlier.whole)
        return cls([x])

    @property
    def tensor(self) -> Tensor:
        """The first ``size`` entries, a view."""
        (x,) = self.whole
        return x if self.size is None else x.narrow(self.dim, 0, self.size)


def _divided(tokens: range, most: int) -> list[range]:
    """Divide tokens into chunks of nearly equal sizes, so that none has a single token."""
    count = -(-len(tokens) // most)  # rounded up
    edges = [tokens.start + len(tokens) * i // count for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(edges)]


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype for sums of ``x``, float32 or wider."""
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
    names = parameters(type(request.model).forward)[2:]  # after self and the inputs
    arguments = dict(zip(names, request.additional, strict=False))
    mask = arguments.pop("attention_mask", None)
    refused = next((name for name, x in arguments.items() if x is not None), None)
    if refused is not None or len(request.additional) > len(names):
        raise OptionError(
            f"chunk_tokens supports an attention mask as the only additional argument, but "
            f"{refused or 'more'} was passed. Leave chunk_tokens out."
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
