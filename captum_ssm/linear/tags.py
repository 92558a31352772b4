"""Follow the positions of explained ids through a run to the look-up in an embedding table.

Each function of the ids, or of results of such functions, is called a second time on tagged copies
of its integer arguments. A tagged copy adds a multiple of a large prime to each explained id, by
the id's position. Any function that moves ids moves the tags with them. A function that computes
with ids returns integers without a valid tag.

The copies are on the CPU, because they are small, and because a tagged id that is used as an index
is out of bounds, after which a GPU could no longer be used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operators.kernels.arithmetic import unseen
from ..tracing.hooks import swapped, tensors_in
from ..tracing.layer import same_memory
from ..tracing.replays import begins_with

#: Used in place of positions: no explained id, and an integer perhaps computed from such ids.
NONE, UNKNOWN = -1, -2
#: Multiples of B * L that are added to positions, by how the positions were found.
FOLLOWED, RECOGNIZED, COMPUTED = 0, 1, 2
#: Upper limit of ids below the tags, and smallest prime with which ids and tags fit into 32 bits.
_ID_LIMIT, _MIN_PRIME = 2**24, 2**10


class Tags:
    """Follows the explained ids through the functions of a run.

    Args:
        ids: the explained ids (B, L).

    Example:
        >>> import torch
        >>> from captum_ssm.linear.tags import Tags
        >>> ids = torch.tensor([[4, 0, 7]])
        >>> tags = Tags(ids)
        >>> tags.positions_of(tags.call(torch.flip, (ids, [1]), {}))
        tensor([[2, 1, 0]])
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids.contiguous()  # examples that share memory have no separate places
        self._version, self._memory = _version(self.ids), _memory_of(self.ids)
        #: The ids as they were before any function used them.
        self._original: Tensor | None = None
        #: By memory address: a tensor that keeps the memory, and tagged copies of its integers.
        self._memories: dict[Any, tuple[Tensor, Tensor]] = {}

    @functools.cached_property
    def _prime(self) -> int:
        """The prime whose multiples are tags, as large as ids with tags in 32 bits allow."""
        tags = 2 * self.ids.numel() + 1  # of positions that are followed or recognized, and none
        prime = (2**31 - _ID_LIMIT) // tags
        prime = prime if prime >= _MIN_PRIME else 2**31 - 1  # tags that a cast to 32 bits destroys
        while pow(2, prime - 1, prime) != 1:  # Fermat's test
            prime -= 1
        return prime

    def follows(self, x: Tensor) -> bool:
        """Return True if ``x`` shares memory with the explained ids, or with results of them."""
        memory = _memory_of(x)
        return memory is not None and (memory == self._memory or memory in self._memories)

    def positions_of(self, x: Tensor) -> Tensor:
        """Return for each integer in ``x`` its position among the explained ids, on the CPU.

        Returns:
            Positions b * L + t in the shape of ``x``, :data:`NONE` or :data:`UNKNOWN`. Positions of
            recognized ids are larger by B * L. Positions of ids that were computed, but are equal
            to the explained ids, are larger by 2 * B * L.
        """
        count = self.ids.numel()
        if same_memory(x, self.ids) and _version(x) == self._version is not None:
            return self._count_from(0)
        with unseen():
            values, explained = _to_cpu(x), self._explained_ids
            tags = self._add_tags(x, values) - values
            # a tag is the prime times 1 + the position; for an integer that is no id, it is 0
            positions = tags.div(self._prime, rounding_mode="floor") - 1
            is_tag = (tags % self._prime == 0) & (positions >= NONE) & (positions < 2 * count)
            is_same = explained.flatten()[positions.clamp_min(0) % count] == values
            positions = positions.where(is_tag & (is_same | (positions == NONE)), UNKNOWN)
            # computed in a way that loses tags, such as a clamp
            is_equal = bool((positions == UNKNOWN).any()) and torch.equal(values, explained)
            return self._count_from(COMPUTED * count) if is_equal else positions

    def per_example(self, positions: Tensor) -> Tensor | None:
        """Convert positions b * L + t to positions t in examples (B, L'); keep :data:`NONE`.

        Return None if a position is unknown or in a different example, or if the shape is wrong.
        """
        (batch, length), is_id = self.ids.shape, positions > NONE
        if positions.dim() != 2 or len(positions) != batch or bool((positions == UNKNOWN).any()):
            return None
        first = length * torch.arange(batch, device="cpu")[:, None]
        index = positions % self.ids.numel() - first
        if bool((is_id & ((index < 0) | (index >= length))).any()):
            return None
        return index.where(is_id, NONE)

    def recognize(self, x: Tensor) -> bool:
        """Follow ids (B, L') if they begin with the explained ids; return True if they do."""
        with unseen():
            if not begins_with(x, self.ids):
                return False
            tagged, length = _to_cpu(x), self.ids.shape[1]
            tagged[:, :length] += self._prime * self._count_from(1 + RECOGNIZED * self.ids.numel())
            self._store(x, tagged)
        return True

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; if an argument may depend on explained ids, follow the results."""
        tensors = {id(x): x for x in tensors_in((args, kwargs))}
        if not any(map(self.follows, tensors.values())):
            return func(*args, **kwargs)
        ids = {key: x for key, x in tensors.items() if _memory_of(x) is not None}  # integers
        with unseen():  # the function may write to its arguments
            self._original = self.ids.detach().clone() if self._original is None else self._original
            before = {key: x if self.follows(x) else x.clone() for key, x in ids.items()}
        out = func(*args, **kwargs)
        # a function without a result, such as __setitem__, writes to its first argument
        results = list(tensors_in(args[:1] if out is None else (out,)))
        if not results or any(_memory_of(x) is None for x in results):  # floats, or booleans
            return out
        with unseen():
            tagged = {key: self._add_tags(ids[key], _to_cpu(x)) for key, x in before.items()}
            inputs = {key: tagged.get(key, x.cpu()) for key, x in tensors.items()}
            args, kwargs = swapped(args, inputs), swapped(kwargs, inputs)
            copies = _call_tagged(func, args, kwargs, len(results))
            pairs = [*zip(results, copies, strict=True), *((ids[k], x) for k, x in tagged.items())]
            # follow tensors with tags, or with unknown ones: a copy without tags equals its tensor
            for x, copy in pairs:
                if not (self.follows(x) or (copy is not None and torch.equal(_to_cpu(x), copy))):
                    self._store(x, copy)
        return out

    @property
    def _explained_ids(self) -> Tensor:
        """A copy of the explained ids on the CPU, as they were before functions changed them."""
        return _to_cpu(self.ids if self._original is None else self._original)

    def _count_from(self, first: int) -> Tensor:
        """Return consecutive integers from ``first`` in the shape of the ids (B, L)."""
        count = self.ids.numel()
        return torch.arange(first, first + count, device="cpu").view(self.ids.shape)

    def _add_tags(self, x: Tensor, values: Tensor) -> Tensor:
        """Return ``values``, the integers in ``x``, with tags if ``x`` depends on explained ids.

        The result is a view of the stored copy, so that in-place changes are stored as well.
        """
        memory = _memory_of(x)
        if memory == self._memory and memory not in self._memories:
            self._store(self.ids, self._explained_ids + self._prime * self._count_from(1))
        if memory not in self._memories:
            return values
        owner, cells = self._memories[memory]
        if owner.element_size() != x.element_size():
            return values + 1  # no valid tag
        return _view_like(cells, x)

    def _store(self, x: Tensor, tagged: Tensor | None) -> None:
        """Store the tagged copy of the memory of ``x``; ``tagged`` is None if tags are unknown."""
        size = x.untyped_storage().nbytes() // x.element_size()
        cells = _to_cpu(x.detach().as_strided((size,), (1,), 0))
        if tagged is None or tagged.shape != x.shape:
            cells += 1  # no valid tag
        else:
            _view_like(cells, x).copy_(tagged)
        self._memories[_memory_of(x)] = x, cells


def _call_tagged(
    func: Callable[..., Any], args: Any, kwargs: Any, count: int
) -> list[Tensor | None]:
    """Call a function on tagged copies; return ``count`` results, all None if the call fails."""
    try:
        out = func(*args, **kwargs)
    except (IndexError, RuntimeError, TypeError, ValueError):  # a tagged id is not an index
        return [None] * count
    results = [x.cpu().long() for x in tensors_in(args[:1] if out is None else (out,))]
    return list(results) if len(results) == count else [None] * count


def _to_cpu(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.int64, copy=True)


def _view_like(cells: Tensor, x: Tensor) -> Tensor:
    """Return a view of ``cells``, a copy of the memory of ``x``, with the layout of ``x``."""
    return cells.as_strided(x.shape, x.stride(), x.storage_offset())


def _version(x: Tensor) -> int | None:
    """Return the number of in-place changes; None for a tensor of inference mode."""
    return None if x.is_inference() else x._version


def _memory_of(x: Tensor) -> Any:
    """Return the device and address of an integer tensor's memory; None for other tensors."""
    if x.is_floating_point() or x.is_complex() or x.is_quantized or x.dtype == torch.bool:
        return None
    if x.layout != torch.strided or not x.numel():
        return None
    try:
        return x.device, x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # it has no memory
        return None
