"""Of every tensor in a run, from which tokens of which source each of its elements comes.

Folds of layers take it for granted that layers are a chain: that what a mixer reads is what those
before it left, token by token.  Here is what tells.  A *source* is something whose tokens are
numbered: the explained input, or what a mixer returned.  While the model runs, mixers aside, every
function of torch says what becomes of the tokens: views and reorderings move them, norms and
products with weights leave them where they are, and whatever brings several together, be it
attention, a pool or a function nobody knows, leaves a tensor that says so.

Places are on the host, wherever the tensors are: they are small, are looked at again and again, and
a device would be waited for each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ...operators.kernels.arithmetic import unseen
from .calls import (
    is_followed,
    is_ids,
    is_number,
    layout_of,
    name_of,
    not_in_place,
    storage_of,
    written_by,
)
from .origin import OTHERS, Mixed, Origin, without_others
from .rules import (
    BENDING,
    CONSTANT,
    EMPTY,
    GATED,
    HANDING,
    INDEXED,
    OF_FIRST,
    PRODUCTS,
    PROJECTING,
    REPLACING,
    RULES,
    WITH_SUMMAND,
    WRITING,
    plain,
)
from .rules.groups import (
    Call,
    Group,
    Groups,
    TokensMeet,
    gating,
    joined,
    plain_number,
    tensors,
    thinned,
)
from .rules.moves import kept

#: What a rule raises where torch cannot do to places what it did to numbers.
_CANNOT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, StopIteration)


class _Record(NamedTuple):
    """A tensor's origin, and how often its memory had been written to by then.

    A dictionary that holds tensors weakly takes several times as long to look one up as one by
    their ids, from which they are taken out when they die.
    """

    alive: weakref.ref[Tensor]
    origin: Origin | None
    writes: int


@dataclass(eq=False)
class _Memory:
    """What was written in place to memory that tensors may share: how it lies there, its origin."""

    alive: StorageWeakRef
    writes: list[tuple[tuple[Any, ...], Origin | None]]


#: Hears of a function before it is called; what it returns, if anything, hears of the result.
Tell = Callable[[str, tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None]


class Places(TorchFunctionMode):
    """While this mode is on, tensors that are computed from a source are followed.

    Nothing raises that would not raise without it.  Not followed is what torch's functions are not
    told of: what runs out of sight of modes (``unseen``), in ``torch.vmap``, in scripted code, or
    by way of numpy.  A tensor that ought to come from a source and has no origin went such a way.

    Args:
        where: returns the name of the module that is running.

    Attributes:
        tell: what is told of functions before they are called, of their names and arguments, by
            these names; what that returns, if anything, is told of their results. Empty at first.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing.places import Places
        >>> ids, table = torch.tensor([[4, 0, 7]]), torch.randn(9, 2)
        >>> with Places(lambda: "model") as places:
        ...     places.begin(ids)
        ...     x = torch.cat([torch.zeros(1, 1, 2), table[ids]], 1)
        >>> places.origin(x).tokens(0)[0].tolist(), places.origin(x).is_identity(0)
        ([[-1, 0, 1, 2]], False)
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.where = where
        self.tell: dict[str, Tell] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._unseen: dict[int, str] = {}
        self._records: dict[int, _Record] = {}
        self._memories: dict[int, _Memory] = {}
        self._steps: dict[tuple[int, int], Tensor] = {}
        self._given: Tensor | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a source was declared."""
        return bool(self._sizes)

    def restart(self) -> None:
        """Forget all that was followed, for another run."""
        self._given = None
        for known in (self._sizes, self._unseen, self._records, self._memories):
            known.clear()

    def begin(self, tensor: Tensor, source: int = 0) -> None:
        """Declare ids (B, L) or embeddings (B, L, E) to be a source.

        Args:
            tensor: the source itself.
            source: its number. Default: 0, the explained input.
        """
        if source == 0 and tensor.dim() == 2 and is_ids(tensor):
            self._given = tensor
        self.declare(tensor, source)

    def declare(
        self,
        tensor: Tensor,
        source: int,
        order: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Declare what a mixer returned to be a source.

        Args:
            tensor: what it returned, (B, L, ...).
            source: its number, from 1 on.
            order: the source's token b * L + t at every place of the tensor's first dimensions,
                for one whose tokens lie in another order. Default: None, that of the tensor.
            size: batch and tokens (B, L) of the source. Default: None, those of the tensor.
        """
        with unseen():
            batch, length = size or (tensor.shape[0], tensor.shape[1])
            if order is None:
                order = self._identity(batch, length)
            order = order.to("cpu", torch.int32)
            self._sizes[source] = batch, length
            places = order.reshape(order.shape + (1,) * (tensor.dim() - order.dim()))
            self._record(tensor, self._origin(tensor, (Group(places, {source: 1.0}),)))

    def through(self, result: Tensor, *operands: Tensor) -> None:
        """Declare that a tensor was computed from others token by token, out of sight.

        Args:
            result: the tensor.
            operands: the others, that broadcast to it.
        """
        with unseen():
            self._note("mul", torch.mul, operands, {}, [result], self._known(operands))

    def origin(self, tensor: Tensor) -> Origin | None:
        """Where the tensor's elements come from; None if they come from no source."""
        record = self._records.get(id(tensor))
        origin = None if record is None else record.origin
        if not self._memories:
            return origin
        memory = self._memories.get(storage_of(tensor))
        done = 0 if record is None else record.writes
        if memory is None or done == len(memory.writes):
            return origin
        with unseen():
            for lies, written in memory.writes[done:]:
                origin = self._overwritten(tensor, origin, lies, written)
            self._record(tensor, origin)
        return origin

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__iter__":  # what it returns are views that torch says nothing of
            return iter(self.__torch_function__(torch.unbind, types, args))
        if name == "embedding":  # modes around this one may ask at once
            self._recognise((*args, *kwargs.values()))
        tell = self.tell.get(not_in_place(name))
        told = None if tell is None else tell(not_in_place(name), args, kwargs)
        out = func(*args, **kwargs)
        if told is not None:
            told(out)
        if not self._sizes:
            return out
        if name in ("__get__", "__set__"):
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            if name == "__set__" and attribute != "data":
                return out
            name = attribute if name == "__get__" else name
        if isinstance(out, Tensor | tuple | list) and type(out) is not torch.Size:
            results = list(tensors((out,)))
        else:
            results = list(written_by(func, name, args, kwargs))
        name = plain(name)
        known = self._known((*args, *kwargs.values()))
        if results and (known or name in EMPTY):
            with unseen():
                if name == "cat" and known:
                    self._number_others(tensors((*args, *kwargs.values())), results[0], known)
                self._note(name, func, args, kwargs, results, known)
        return out

    def _recognise(self, values: Iterable[Any]) -> None:
        """Follow ids that are looked up, if they are those explained, made anew.

        Captum's wrappers of language models make them of the prompt that they hold, and put what
        was generated behind them.
        """
        if self._given is None:
            return
        batch, length = self._given.shape
        for x in values:
            if not (isinstance(x, Tensor) and is_ids(x) and x.dim() == 2 and len(x) == batch):
                continue
            if self.origin(x) is not None:
                return
            with unseen():
                if torch.equal(x[:, :length].to(self._given), self._given):
                    order = torch.full(x.shape, -1, dtype=torch.int32, device="cpu")
                    order[:, :length] = self._identity(batch, length)
                    self.declare(x, 0, order, (batch, length))

    def _known(self, values: Iterable[Any]) -> dict[int, tuple[Tensor, Origin]]:
        """The followed tensors among ``values``, however nested, by their ids."""
        known = {}
        for x in tensors(values):
            if id(x) not in known and type(x) is not torch.nn.Parameter:
                found = self.origin(x)
                if found is not None:
                    known[id(x)] = x, found
        return known

    def _number_others(
        self, parts: Iterable[Tensor], whole: Tensor, known: dict[int, tuple[Tensor, Origin]]
    ) -> None:
        """Declare tokens that are put beside followed ones, such as virtual tokens, to be sources.

        Args:
            parts: what is put beside each other.
            whole: the result.
            known: those of the parts that are followed; the others are added.
        """
        if whole.dim() != (2 if is_ids(whole) else 3):
            return
        for x in parts:
            beside = x.dim() == whole.dim() and x.shape[1] < whole.shape[1]
            if beside and x.numel() and id(x) not in known:
                self.declare(x, OTHERS + len(self._sizes))
                origin = self.origin(x)
                assert origin is not None
                known[id(x)] = x, origin

    def _note(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
        known: dict[int, tuple[Tensor, Origin]],
    ) -> None:
        """Note where what a function returned, or wrote to, comes from."""
        writes = name in ("__setitem__", "__set__")
        if "out" in kwargs:
            kwargs, writes = {k: v for k, v in kwargs.items() if k != "out"}, True
            known = self._known((*args, *kwargs.values()))
        elif name in EMPTY:
            self._fill(results[0])
            return
        if name[-1] == "_" != name[-2]:
            name, writes = name if name in RULES else plain(name[:-1]), True
        origins = self._origins(name, func, args, kwargs, results, known)
        for result, origin in zip(results, origins, strict=True):
            changed = writes or (id(result) in known and name not in HANDING)
            if changed and RULES.get(name) is not kept:
                self._write(result, origin)
            elif origin is not None:
                self._record(result, origin)

    def _origins(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
        known: dict[int, tuple[Tensor, Origin]],
    ) -> list[Origin | None]:
        rule, gates = RULES.get(name), _gates(name, args, kwargs, known)
        sizes = {
            key: (o.shape, tuple(g.gating() for g in o.groups) if key in gates else o.groups)
            for key, (_, o) in known.items()
        }
        call = Call(name, func, args, kwargs, results, sizes, self._length)
        live = [r.numel() > 0 and is_followed(r, name, known.values()) for r in results]
        if not any(live):
            return [None] * len(results)

        def sources() -> frozenset[int]:
            each = (gating(o.numbers) if k in gates else o.numbers for k, (_, o) in known.items())
            return frozenset[int]().union(*each)

        blend = self._blend(call, known, sources)
        groups: Sequence[Groups] = [()] * len(results)
        if blend is None and known:
            try:
                ids = any(not is_number(x) for x, _ in known.values())
                if rule is None or (name in INDEXED and ids and is_number(results[0])):
                    raise TokensMeet
                groups = rule(call)
            except TokensMeet as met:
                given = without_others(known)
                if given is not None:  # what is no token of the input may meet others
                    return self._origins(name, func, args, kwargs, results, given)
                blend = Mixed(name, self.where(), met.pooled, sources=sources())
            except _CANNOT:
                blend = Mixed(name, self.where(), sources=sources())
        is_bent = _bends(name, known)
        return [
            self._origin(result, found, blend, is_bent) if is_live and (found or blend) else None
            for result, found, is_live in zip(results, groups, live, strict=True)
        ]

    def _blend(
        self,
        call: Call,
        known: dict[int, tuple[Tensor, Origin]],
        sources: Callable[[], frozenset[int]],
    ) -> Mixed | None:
        """What mixed the tokens of an operand already, if the function hands that on.

        Args:
            call: of the function.
            known: the followed operands.
            sources: finds what all of them come from.
        """
        operands = list(known.values())
        if call.name in CONSTANT:
            return None
        if call.name in REPLACING:
            operands = [o for o in operands if o[0] is call.argument(1, "src")]
        elif call.name in OF_FIRST:
            heads = {id(x) for x in tensors((call.first,))}
            operands = [o for o in operands if id(o[0]) in heads]
        blends = [(x, o.blend) for x, o in operands if o.blend is not None]
        if not blends:
            return None
        blend = replace(blends[0][1], sources=sources())
        onto = [o for _, o in operands if o.blend is None and o.shape == call.results[0].shape]
        if (call.name in WRITING and onto) or any(b.joined for _, b in blends):
            return replace(blend, joined=True)
        return blend

    def _origin(
        self, tensor: Tensor, groups: Groups, blend: Mixed | None = None, is_bent: bool = False
    ) -> Origin:
        if blend is not None:
            groups = ()
        return Origin(tensor.shape, groups, self._sizes, self._unseen, blend, is_bent)

    def _identity(self, batch: int, length: int) -> Tensor:
        """The places of a source's own tokens, the same tensor for all sources of one size."""
        key = batch, length
        if key not in self._steps:
            steps = torch.arange(batch * length, dtype=torch.int32, device="cpu")
            self._steps[key] = steps.view(batch, length)
        return self._steps[key]

    def _length(self, source: int) -> int:
        return self._sizes[plain_number(source)][1] if source >= 0 else 1

    def _fill(self, tensor: Tensor) -> None:
        """Note that whatever comes to be in new memory has come there out of sight."""
        if not is_number(tensor) or not tensor.numel() or tensor.is_meta:
            return
        module = self.where()
        source = next((s for s, name in self._unseen.items() if name == module), None)
        if source is None:
            source = -1 - len(self._unseen)
            self._unseen[source] = module
        places = torch.zeros((1,) * tensor.dim(), dtype=torch.int32, device="cpu")
        self._record(tensor, self._origin(tensor, (Group(places, {source: 0.0}),)))

    # --- memory that several tensors share ----------------------------------------------------

    def _record(self, tensor: Tensor, origin: Origin | None) -> None:
        memory = self._memories.get(storage_of(tensor)) if self._memories else None
        writes = 0 if memory is None else len(memory.writes)
        key, records = id(tensor), self._records
        alive = weakref.ref(tensor, lambda _: records.pop(key, None))
        records[key] = _Record(alive, origin, writes)

    def _write(self, tensor: Tensor, origin: Origin | None) -> None:
        """Note what a tensor holds after a function changed it in place.

        Others that share its memory learn of it when they are asked for.
        """
        key = storage_of(tensor)
        if key not in self._memories:
            if len(self._memories) >= 64:
                gone = [k for k, m in self._memories.items() if m.alive.expired()]  # type: ignore[no-untyped-call]
                for k in gone:
                    del self._memories[k]
            alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._memories[key] = _Memory(alive, [])
        self._memories[key].writes.append((layout_of(tensor), origin))
        self._record(tensor, origin)

    def _overwritten(
        self, tensor: Tensor, origin: Origin | None, lies: tuple[Any, ...], new: Origin | None
    ) -> Origin | None:
        """The origin of a tensor, of whose memory a part was written to.

        Args:
            tensor: the tensor.
            origin: its origin before that.
            lies: where in memory the part lies.
            new: the part's origin.
        """
        if lies == layout_of(tensor):
            return None if new is None else replace(new, shape=tensor.shape)
        if origin is None and new is None:
            return None
        if lies[-1] != tensor.element_size():
            return self._origin(tensor, (), Mixed("view", self.where()))
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        cells = torch.arange(size, device="cpu")
        part = cells.as_strided(*lies[:3])
        owner = torch.full((size,), -1, device="cpu")
        owner[part.flatten()] = torch.arange(part.numel(), device="cpu")
        ours = owner[cells.as_strided(*layout_of(tensor)[:3])]
        hit = ours >= 0
        if not bool(hit.any()):
            return origin
        blends = [o.blend for o in (origin, new) if o is not None and o.blend is not None]
        if blends:
            apart = any(o is not None and o.blend is None for o in (origin, new))
            return self._origin(tensor, (), replace(blends[0], joined=apart or blends[0].joined))

        def combine(pieces: Sequence[Tensor | None]) -> Tensor:
            like = next(p for p in pieces if p is not None)
            old, put = (like.new_full((), -1) if p is None else p for p in pieces)
            put = put.expand(lies[0]).flatten()[ours.clamp_min(0)]
            return thinned(torch.where(hit, put, old))

        try:
            groups = joined([() if o is None else o.groups for o in (origin, new)], combine)
        except TokensMeet:
            return self._origin(tensor, (), Mixed("copy", self.where()))
        return self._origin(tensor, groups) if groups else None


def _gates(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: dict[int, tuple[Tensor, Origin]],
) -> set[int]:
    """The followed operands that are gates to others, by their ids."""
    if len(known) < 2:
        return set()
    if name in GATED:
        return {id(x) for x in (*args, *kwargs.values())[GATED[name] :]}
    first = next(iter((*args, *kwargs.values())))
    summand = id(first) if name in WITH_SUMMAND else None
    factors = {key: o.is_bent for key, (_, o) in known.items() if key != summand}
    bent = {key for key, is_bent in factors.items() if is_bent}
    return bent if name in PRODUCTS and len(bent) < len(factors) else set()


def _bends(name: str, known: dict[int, tuple[Tensor, Origin]]) -> bool:
    """Whether a function's result is bent: as by an activation, or as all that it is given is.

    A projection of what is bent is straight again.
    """
    if name in BENDING:
        return True
    return name not in PROJECTING and all(o.is_bent for _, o in known.values())
