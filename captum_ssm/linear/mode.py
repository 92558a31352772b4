"""Apply the rules to every torch function of a run, so that its graph is linear in the input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InputError, NotLinearError, OptionError
from ..operators.kernels.arithmetic import unseen, unseen_by
from ..operators.kernels.truths import holds
from ..tracing.hooks import detached, tensors_in
from .carried import Carried
from .constants import Ledger, share
from .kernels import attention
from .reading import Reading
from .rules import BENT, FROZEN, RULES, VIEWS, plain, positional
from .shares import Labels, Rule
from .tags import FOLLOWED, NONE, RECOGNIZED, UNKNOWN, Tags

if TYPE_CHECKING:
    from .blocks import Blocks

NOT_LINEAR = frozenset(f"{BENT} {FROZEN} pow glu log_softmax".split())
#: Functions that return uninitialized memory or zeros.
_BLANK = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
_BLANK |= {"zeros", "zeros_like", "new_zeros"}
_VIEWS = frozenset(["detach", *VIEWS.split()])
#: Functions whose second factor may be a weight that a kernel has unpacked.
_WEIGHED = frozenset(["linear", "matmul", "mm"])
#: Functions that also look up ids, but whose results do not show the token of each vector.
_OUT_OF_SHAPE = frozenset(["index_select", "embedding_bag", "take", "take_along_dim", "gather"])
#: Kinds of functions that need no rule, even if an argument depends on the input.
_ATTRIBUTE, _VIEW, _PRODUCT = object(), object(), object()


def _kinds() -> dict[Any, object]:
    """Return by function its kind (attribute, view or product), to skip the rules quickly."""
    attributes = "shape dtype device layout ndim is_cuda"
    sizes = "size dim stride numel is_floating_point is_complex is_contiguous __len__"
    views = """
        view reshape permute transpose t contiguous to float double half bfloat16 clone chunk split
        unbind narrow select expand squeeze unsqueeze flatten unflatten __getitem__
    """
    found: dict[Any, object] = {
        getattr(Tensor, name).__get__: _ATTRIBUTE for name in attributes.split()
    }
    found |= {getattr(Tensor, name): _ATTRIBUTE for name in sizes.split()}
    for name in views.split():
        places = (getattr(place, name, None) for place in (Tensor, torch))
        found |= {each: _VIEW for each in places if each is not None}
    return found | {torch.nn.functional.linear: _PRODUCT}


_KINDS = _kinds()


class _Refused(torch.autograd.Function):
    """A value whose dependence on the input is unknown; it raises when a gradient reaches it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor, complaint: str) -> Tensor:
        ctx.complaint = complaint
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotLinearError(ctx.complaint)


@dataclass(frozen=True, eq=False)
class LookUp:
    """The look-up of the explained ids in one embedding table.

    Attributes:
        leaf: the embeddings that were looked up, (B, L', ...), in which the network is linear.
        given: for each embedding the id's position among the explained ids (B, L'), -1 for a
            different id; None if the positions are 0 .. L - 1.
        table: the embedding table, (V, ...).
    """

    leaf: Tensor
    given: Tensor | None
    table: Tensor


class Linearizing(TorchFunctionMode):
    """A torch function mode in which a forward run leaves a graph that is linear in the input.

    Attributes:
        root: the input in which the network is linear; None until the run computes it.
        start: the copy of ``root`` that the model uses.
        again: look-ups of the explained ids in further tables, such as a LoRA adapter's.
        others: further inputs in which the network is linear as well.
        ledger: the constants that the run adds.
        given: for each token of the root its id's position among the explained ids (B, L'), -1 for
            a different id; None if the positions are 0 .. L - 1.
        bends: the number of calls of nonlinear functions so far.
        at_rest: for results of functions that were replaced by their tangents, such as a sigmoid,
            the value at 0, or None if it is not needed.
        reading: the mixer call whose own code is running. Default: None.
        defers: whether a function without a linear form is refused only if a gradient reaches it.
            Default: False.
        labels: the paths that a backward pass follows.
        blocks: the blocks that run again in backward passes. Default: None, blocks keep their
            graphs.
        checks: by torch function name, a check that is called with the name and the arguments
            before the torch function runs; empty at first.

    Args:
        ids: the explained token ids, at whose look-up the network begins; None if the explained
            input is floating and passed to :meth:`begin`.
        rule: how relevance is divided; see :mod:`.shares`. In a product outside of mixers,
            ``"frozen"`` gives all relevance to the factor that does not come directly from an
            activation; other rules give equal shares. If all factors come from activations, or
            none does, every rule gives equal shares.
        where: a function that returns the name of the running module, or the function's argument
            if no module is running.
        constants: whether biases and other constants are kept. Default: True.
        by_role: whether backward passes can follow one role. Default: False.
    """

    def __init__(
        self,
        ids: Tensor | None,
        rule: Rule,
        where: Callable[[str], str],
        constants: bool = True,
        by_role: bool = False,
    ) -> None:
        super().__init__()
        self.rule: Rule = rule
        self.by_role = by_role
        self.labels = Labels(by_role)
        self.root: Tensor | None = None
        self.start: Tensor | None = None
        self.again: list[LookUp] = []
        self.others: tuple[Tensor, ...] = ()
        self.blocks: Blocks | None = None
        self.ledger = Ledger(where, constants)
        self.bends = 0
        self.reading: Reading | None = None
        self.defers = False
        self.checks: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = {}
        self.given: Tensor | None = None
        self._ids = ids
        self._tags = None if ids is None else Tags(ids)
        self._found = False
        self._kind = FOLLOWED
        self._tables: dict[int, LookUp] = {}
        #: Tables, by address, in which ids were looked up that were computed from explained ids.
        self._computed: dict[int, Tensor] = {}
        self._leaves = WeakIdKeyDictionary()
        self._bent = WeakIdKeyDictionary()
        self.at_rest = WeakIdKeyDictionary()
        #: Tensors into which no torch function has written, with their versions.
        self._unwritten = WeakIdKeyDictionary()

    def where(self) -> str:
        """Return the name of the module that is running."""
        return self.ledger.where()

    def looking_away(self) -> Sequence[AbstractContextManager[None]]:
        """Return contexts to enter so that torch functions run without the rules."""
        return (unseen_by(self),)

    @property
    def divides(self) -> bool:
        """True if factors other than content and gates may get a share of relevance."""
        return self.rule not in ("frozen", "half") or (self.by_role and self.rule == "half")

    @property
    def follows_tangents(self) -> bool:
        """True if the rule keeps a linear part (tangent) of functions such as a sigmoid."""
        return self.rule not in ("frozen", "half")

    @property
    def knows_root(self) -> bool:
        """True if the root is the explained input, and not a look-up of other ids."""
        return self.root is not None and (self._ids is None or self._found)

    @property
    def tokens(self) -> int:
        """The number L of explained ids in each example; 0 for a floating input."""
        return 0 if self._ids is None else self._ids.shape[1]

    def begin(self, x: Tensor) -> Tensor:
        """Make ``x`` the root, and return a copy of the root that the model may change in place."""
        self.root = self.leaf(x.detach().clone())
        self.start = self.root.clone()
        return self.start

    def begin_others(self, others: Iterable[Tensor]) -> None:
        """Make the network linear in further inputs as well."""
        self.others = tuple(self.leaf(x.detach().clone()) for x in others)

    def begun(self, inputs: Tensor) -> Tensor:
        """Return the input for the model: the ids, or a copy of a floating root with a graph."""
        if inputs.is_floating_point() and self.root is not None:
            return self.root.clone()
        return inputs

    def looked_up(self, ids: Tensor) -> list[Tensor]:
        """Return the embeddings of other ids, in each table that looked up the explained ids.

        Args:
            ids: the ids, with the shape (B, L) of the root's tokens.

        Raises:
            OptionError: when the model looked up no ids, or the shape differs from the root's.
        """
        shapes = {x.leaf.shape[:2] for x in self._tables.values()}
        if shapes != {ids.shape}:
            size = None if self.root is None else tuple(self.root.shape)
            raise OptionError(
                f"baselines are token ids of shape {tuple(ids.shape)}, but the model reads "
                f"embeddings of shape {size}, or looked up no ids. Pass embeddings as baselines."
            )
        with unseen(), torch.no_grad():
            return [x.table[ids.to(x.table.device)] for x in self._tables.values()]

    def leaf(self, x: Tensor) -> Tensor:
        """Return ``x`` detached, as a new leaf that counts as depending on the input."""
        leaf = x.detach().requires_grad_()
        self._leaves[leaf] = True
        return leaf

    def carried_states(self, carried: Carried) -> list[Tensor]:
        """Return leaves for the states of a mixer's call before a chunk of a sequence."""
        found = [self.cached(x) for x in carried.states[len(carried.left)]]
        for leaf in self.ledger.leaves[-len(found) :]:
            carried.receives(leaf, self.labels)
        return found

    def cached(self, x: Tensor, name: str = "cache") -> Tensor:
        """Return a copy of a constant, such as a cache's tensor, and record it under a name."""
        with unseen(), torch.enable_grad():
            if not x.is_floating_point():
                return x.clone()
            leaf = self.leaf(x.clone() if x.is_inference() else x)
            self.ledger.leaves.append(leaf)
            start = leaf.clone()  # the model may change it in place
            self.ledger.record(start, leaf.detach(), name)
        return start

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kind = _KINDS.get(func)
        if kind is _ATTRIBUTE or (kind is not None and self._is_simple(kind, args, kwargs)):
            out = func(*args, **(kwargs or {}))
            if kind is _VIEW and (args[0] in self._bent or args[0] in self.at_rest):
                for view in out if isinstance(out, tuple | list) else (out,):
                    self.resembles(view, args[0])
            return out
        args, kwargs = self.without_weights(args), self.without_weights(kwargs or {})
        name = plain(func.__name__)
        check = self.checks.get(name.removesuffix("_"))
        if check is not None:
            check(name, args, kwargs)
        if name in _BLANK:
            return self._made_blank(func(*args, **kwargs))
        if self._unwritten:
            if name in _VIEWS and self._is_unwritten(args[0]):
                return self._made_blank(func(*args, **kwargs))
            args, kwargs = self._read(name, args, kwargs)
        found = _ids_and_table(name, args, kwargs)
        if found is not None and (name == "embedding" or self._are_explained(found[0])):
            return self._looked_up(func(*args, **kwargs), *found)
        if not self._any_live((*args, *kwargs.values())):
            return self._without_input(func, name, args, kwargs)
        in_place = name[-1] == "_" and plain(name[:-1]) in RULES and name not in RULES
        name = plain(name[:-1]) if in_place else name
        self.bends += name in NOT_LINEAR
        if in_place:
            return self._in_place(func, name, args, kwargs)
        if name in RULES:
            return RULES[name](self, func, args, kwargs)
        if self.reading is not None and name == "scaled_dot_product_attention":
            return attention(self.reading, func, *args, **kwargs)
        out = func(*args, **kwargs)
        if not self._any_live((out,)):
            return out
        place = self.where()
        who = f"Module {place!r}" if place else "The model, or forward_func,"
        remedy = (
            "A loss cannot be divided: run the model without labels, return the logits, and name a "
            "token with target=."
            if name.endswith(("loss", "cross_entropy"))
            else "If it mixes tokens, register an adapter for it (see register_mixer); else please "
            "report the function."
        )
        return self._unknown(
            out,
            f"{who} uses torch's {name}, for which no linear form is known, on a value that "
            f"depends on the input. {remedy}",
        )

    def _unknown(self, value: Any, complaint: str) -> Any:
        """Raise for a value whose dependence on the input is unknown.

        With :attr:`defers` the value is returned instead, and raises if a backward pass reaches it.
        In a mixer that is explained by its own code, the mixer's adapter handles the call instead.
        """
        if self.reading is not None:
            self.reading.given_up = True
            return detached(value)
        if not self.defers:
            raise NotLinearError(complaint)
        self.bends += 1
        if type(value) in (tuple, list):
            return type(value)(self._unknown(item, complaint) for item in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        # backward passes ask for the ledger's leaves, and on the way to this one meet the refusal
        self.ledger.leaves.append(self.leaf(value.new_zeros(())))
        return _Refused.apply(  # type: ignore[no-untyped-call]
            value.detach(), self.ledger.leaves[-1], complaint
        )

    def _made_blank(self, out: Any) -> Any:
        """Record that no torch function has written into the new tensors ``out``; return them."""
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                self._unwritten[x] = x._version
        return out

    def _is_unwritten(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.requires_grad:  # such as results of autograd's functions
            return False
        return x in self._unwritten and self._unwritten[x] == x._version

    def _read(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Refuse arguments that a kernel may have written without torch; return all arguments.

        A weight is not checked: a kernel may have unpacked it without torch, but not from an input.
        """
        base = name if name == "copy_" else plain(name.removesuffix("_"))
        if base not in RULES or not torch.is_grad_enabled():
            return args, kwargs
        writes = int(name[-1] == "_" and base != "__get__")  # to its first argument
        # a factor of three dimensions or more is a batch of matrices, not a weight
        weighed = name in _WEIGHED and len(args) > 1 and args[1].dim() < 3
        last = 1 if weighed else len(args)
        args = (*args[:writes], *map(self.known, args[writes:last]), *args[last:])
        return args, {k: v if k == "out" else self.known(v) for k, v in kwargs.items()}

    def _is_simple(
        self, kind: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> bool:
        """Return True if a call needs no rule: it has one tensor and at most a constant weight."""
        x: Any = args[0] if args else None
        if type(x) is not Tensor:
            return False
        if x.requires_grad:
            if x.grad_fn is None:
                return False
        elif not x.is_floating_point() or self._unwritten:  # ids, perhaps, which are followed
            return False
        if kind is _VIEW:
            return len(args) < 2 or not isinstance(args[1], Tensor | list)
        weight, *bias = args[1:]
        return not (kwargs or weight.requires_grad or any(y is not None for y in bias))

    def is_live(self, x: Any) -> bool:
        """Return True if ``x`` depends on the input."""
        return isinstance(x, Tensor) and x.requires_grad

    def known(self, value: Any) -> Any:
        """Return a value that is about to be read, after checking that torch functions wrote it.

        Raises:
            NotLinearError: if a kernel may have written the value without torch. With
                :attr:`defers` the error comes when a gradient reaches the value.
        """
        if type(value) in (tuple, list):
            return type(value)(map(self.known, value))
        if not self._is_unwritten(value) or holds(value.eq(0).all()):
            return value
        return self._unknown(
            value,
            f"Module {self.where()!r} reads memory into which no torch function has written. If a "
            "kernel wrote it, the dependence on the input is unknown. Run the model with torch "
            "functions in place of the kernel.",
        )

    def constant_part(self, x: Any) -> Any:
        """Replace tensors in ``x`` that depend on the input by zeros."""
        if type(x) in (tuple, list):
            return type(x)(self.constant_part(item) for item in x)
        return torch.zeros_like(x) if self.is_live(x) else x

    def all_live(self, values: Iterable[Any]) -> bool:
        """Return True if every floating tensor in ``values`` depends on the input."""
        for value in values:
            if type(value) in (tuple, list):
                if not self.all_live(value):
                    return False
            elif (
                isinstance(value, Tensor) and value.is_floating_point() and not self.is_live(value)
            ):
                return False
        return True

    def is_bent(self, x: Any) -> bool:
        """Return True if ``x`` comes directly from an activation function."""
        return isinstance(x, Tensor) and x in self._bent

    def mark_bent(self, x: Tensor) -> None:
        """Record that ``x`` comes directly from an activation function."""
        if self.is_live(x):
            self._bent[x] = True

    def resembles(self, x: Tensor, other: Tensor) -> None:
        """Treat ``x``, a copy of ``other``, as an activation or gate if ``other`` is one."""
        if self.is_bent(other):
            self.mark_bent(x)
        if other in self.at_rest:
            self.at_rest[x] = self.at_rest[other]

    def gradients(
        self, output: Tensor, wanted: Sequence[Tensor], seed: Tensor | None = None
    ) -> Sequence[Tensor | None]:
        """Return the gradients of ``output`` at tensors of the graph, None if there is none.

        Args:
            output: one scalar for each example (B,), or a tensor of the graph.
            wanted: the tensors.
            seed: the gradient at ``output``. Default: None, 1 for each entry.
        """
        if self.blocks is not None:
            return self.blocks.gradients(output, wanted, seed)
        seed = torch.ones_like(output) if seed is None else seed
        return torch.autograd.grad(output, wanted, seed, retain_graph=True, allow_unused=True)

    def overwrite(self, x: Tensor, new: Tensor) -> Tensor:
        """Write ``new`` and its graph into ``x``; if ``new`` has no graph, record a constant."""
        self._bent.pop(x, None)  # type: ignore[no-untyped-call]
        if x.requires_grad and not new.requires_grad:
            if not x._is_view():
                return x.detach_().copy_(new)
            x.copy_(new)
            self.ledger.included_in(x, new)
            return x
        x.copy_(new)
        if self.is_bent(new):
            self.mark_bent(x)
        return x

    def product(
        self,
        func: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constant: Tensor | None = None,
    ) -> Tensor:
        """Compute a product that divides relevance equally among factors depending on the input.

        With rule ``"frozen"``, activations' outputs get none if other factors depend on the input.
        """
        live = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
        if self.reading is not None:
            self.reading.find_gate(live)
        straight = [a for a in live if not self.is_bent(a)]
        if self.rule == "frozen" and 0 < len(straight) < len(live):
            args = self._straight(args)
            kwargs = {name: self._straight(value) for name, value in kwargs.items()}
            live = straight
        out = func(*args, **kwargs)
        if constant is not None:
            out = self.ledger.included(out, constant)
        if len(live) > 1:
            self.bends += 1
            if self.reading is not None:
                joined = self.reading.product(out, live, straight)
                if joined is not None:
                    return joined
            return share(out, len(live))
        return out

    def _any_live(self, values: Iterable[Any]) -> bool:
        for value in values:  # called for every function of a run
            if isinstance(value, Tensor):
                if value.requires_grad:
                    return True
            elif isinstance(value, tuple | list) and self._any_live(value):
                return True
        return False

    def _straight(self, value: Any) -> Any:
        """Detach the tensors in ``value`` that come directly from an activation."""
        if type(value) in (tuple, list):
            return type(value)(self._straight(item) for item in value)
        return value.detach() if self.is_bent(value) else value

    def _in_place(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Call an in-place function by the rule of its ordinary form, and write the result."""

        def on_a_copy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return func(x.clone(), *args, **kwargs)

        x = args[0].clone()  # other results may need x as it was
        self.resembles(x, args[0])
        ordinary = getattr(Tensor, name, on_a_copy)
        return self.overwrite(args[0], RULES[name](self, ordinary, (x, *args[1:]), kwargs))

    def _without_input(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of constants or ids; follow the ids, or refuse an unclear look-up."""
        out = func(*args, **kwargs) if self._tags is None else self._tags.call(func, args, kwargs)
        is_look_up = name == "one_hot" or (name in _OUT_OF_SHAPE and out.is_floating_point())
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if is_look_up and self._are_explained(*tensors):
            raise _unknown_look_up(self.where(), name)
        return out

    def _are_explained(self, *ids: Tensor) -> bool:
        """Return True if some of the explained ids are among ``ids``."""
        tags = self._tags
        return tags is not None and any(
            tags.follow(x) and bool((tags.places(x) > NONE).any()) for x in ids
        )

    def _looked_up(self, out: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        """Return the result ``out`` of a look-up, with a graph if the ids are the explained ids.

        Until the explained ids are looked up, the network begins at the first look-up of any ids,
        which may be a prompt stored in forward_func; see :attr:`knows_root`. Ids with tags
        (``FOLLOWED``) are sure to be the explained ids; ids with equal values (``RECOGNIZED``) may
        be equal by chance. A sure look-up after a recognized one begins the network again; a
        recognized one after a sure one is ignored. Any other change of kind is refused.
        """
        tags = self._tags
        if tags is None:
            return out
        if not tags.follow(ids):
            # others are compared only until the ids are found: a device would be waited for
            is_known = self._found and self._kind == FOLLOWED
            if is_known or not tags.recognize(ids):
                return self._of_others(out, ids, table)
        places = tags.places(ids)
        if not bool((places > NONE).any()):
            return self._of_others(out, ids, table, computed=bool((places == UNKNOWN).any()))
        given, kind = tags.by_example(places), int(places.max()) // tags.ids.numel()
        before = self._kind if self._found else kind
        if (before, kind) == (FOLLOWED, RECOGNIZED):
            return out  # positions, say, that are equal to the ids by chance
        earlier_by_chance = (before, kind) == (RECOGNIZED, FOLLOWED) and not self.again
        if given is None or not (kind == before or earlier_by_chance):
            raise _unknown_look_up(self.where(), "embedding")
        if earlier_by_chance:
            self._found = False
            self._tables.clear()
        self._kind = kind
        return self._of_explained(out, given, table)

    def _of_others(self, out: Tensor, ids: Tensor, table: Tensor, computed: bool = False) -> Tensor:
        """Return the result of a look-up of ids other than the explained ids."""
        assert self._ids is not None
        if self._found:
            if table.data_ptr() in self._tables and (computed or ids.shape == self._ids.shape):
                raise _other_tokens()
            return out
        if computed:
            self._computed[table.data_ptr()] = table
        first = self.root is None and ids.dim() == 2 and len(ids) == len(self._ids)
        return self.begin(out) if first else out

    def _begun(self, out: Tensor, given: Tensor | None, table: Tensor) -> Tensor:
        """Begin the network at a table's first look-up of explained ids; return the embeddings."""
        if table.data_ptr() in self._computed:
            raise _other_tokens()
        if self._found:
            leaf = self.leaf(out.detach().clone())
            self.again.append(LookUp(leaf, given, table.detach()))
            self._tables[table.data_ptr()] = self.again[-1]
            return leaf.clone()
        if self.root is not None and self.start is not None:
            # the earlier look-up was not the input, but a constant
            self.ledger.record(self.start, self.start.detach())
            self.ledger.leaves.append(self.root)
        self._found, self.given = True, given
        start = self.begin(out)
        assert self.root is not None
        self._tables[table.data_ptr()] = LookUp(self.root, given, table.detach())
        return start

    def _of_explained(self, out: Tensor, given: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings of explained ids, in any order, with a graph.

        A second look-up in the same table takes embeddings from the leaf of the first look-up.

        Args:
            out: the result (B, L', ...).
            given: for each embedding the id's position among the explained ids (B, L'), -1 for
                a different id.
            table: the embedding table.
        """
        assert self._ids is not None
        everywhere = torch.arange(self._ids.shape[1], device="cpu").expand(len(given), -1)
        known = self._tables.get(table.data_ptr())
        if known is None:
            is_same = given.shape == everywhere.shape and torch.equal(given, everywhere)
            return self._begun(out, None if is_same else given, table)
        leaf, before = known.leaf, everywhere if known.given is None else known.given
        match = (given[:, :, None] == before[:, None]) & (given >= 0)[:, :, None]
        if bool(((given >= 0) & ~match.any(-1)).any()):
            raise InputError(
                "The model looks up token ids twice, the second time ids that the first look-up "
                "lacks, so no single tensor is the input. Pass embeddings (B, L, E) as inputs."
            )
        behind = (1,) * (out.dim() - 2)
        places = match.long().argmax(-1).view(*given.shape, *behind).expand(out.shape)
        explained = (given >= 0).view(*given.shape, *behind).to(out.device)
        constant = torch.where(explained, torch.zeros_like(out), out).detach()
        live = torch.where(explained, leaf.gather(1, places.to(out.device)), constant)
        if not torch.equal(live.detach(), out.detach()):
            raise _other_tokens()
        self.ledger.record(live, constant)
        return live

    def without_weights(self, value: Any) -> Any:
        """Detach the parameters in ``value``, which the rules treat as coefficients."""
        if isinstance(value, Tensor):
            foreign = value.requires_grad and value.is_leaf and value not in self._leaves
            return value.detach() if foreign else value
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.without_weights(v) for v in value])
        if kind is dict and value:
            return {name: self.without_weights(v) for name, v in value.items()}
        return value


def _ids_and_table(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Return the ids that a function looks up, and the table; None for other functions."""
    if name == "embedding":
        (ids, table, *_), _ = positional(args, kwargs, "input", "weight")
        # torch.embedding has them the other way round
        return (table, ids) if ids.is_floating_point() else (ids, table)
    if name != "__getitem__" or not all(isinstance(x, Tensor) for x in args):
        return None
    table, ids = args
    integers = ids.dtype in (torch.int64, torch.int32)
    return (ids, table) if integers and table.is_floating_point() else None


def _unknown_look_up(where: str, name: str) -> InputError:
    return InputError(
        f"Module {where!r} looks up the token ids by torch's {name}, which does not show which "
        "token each result belongs to. Pass embeddings (B, L, E) as inputs; for DNA, "
        "captum_ssm.models.OneHot computes embeddings."
    )


def _other_tokens() -> InputError:
    return InputError(
        "The model looks up its input tokens and, in the same table, tokens computed from them, "
        "such as DNA complements, so that its embeddings are not one input. Pass embeddings "
        "(B, L, E) as inputs; for DNA, captum_ssm.models.OneHot computes embeddings."
    )
