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
from .constants import Ledger, divide_gradient
from .kernels import call_attention
from .reading import Reading
from .rules import BENT, FROZEN, RULES, VIEWS, Args, Kwargs, plain_name, to_positional
from .shares import Labels, Rule
from .tags import FOLLOWED, NONE, RECOGNIZED, UNKNOWN, Tags

if TYPE_CHECKING:
    from .blocks import Blocks

NOT_LINEAR = frozenset(f"{BENT} {FROZEN} pow glu log_softmax".split())
#: Functions that return uninitialized memory or zeros.
_BLANK = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
_BLANK |= {"zeros", "zeros_like", "new_zeros"}
_VIEWS = frozenset(["detach", *VIEWS.split()])
#: Functions whose second factor may be a weight, which a kernel may have unpacked.
_WITH_WEIGHT = frozenset(["linear", "matmul", "mm"])
#: Functions that also look up ids, but whose results do not show the token of each vector.
_OUT_OF_SHAPE = frozenset(["index_select", "embedding_bag", "take", "take_along_dim", "gather"])
#: Kinds of functions that may need no rule, even if an argument depends on the input.
_ATTRIBUTE, _VIEW, _PRODUCT = object(), object(), object()


def _kind_by_function() -> dict[Any, object]:
    """Return by function its kind (attribute, view or product), to skip the rules quickly."""
    attributes = "shape dtype device layout ndim is_cuda"
    sizes = "size dim stride numel is_floating_point is_complex is_contiguous __len__"
    views = """
        view reshape permute transpose t contiguous to float double half bfloat16 clone chunk split
        unbind narrow select expand squeeze unsqueeze flatten unflatten __getitem__
    """
    kinds: dict[Any, object] = {
        getattr(Tensor, name).__get__: _ATTRIBUTE for name in attributes.split()
    }
    kinds |= {getattr(Tensor, name): _ATTRIBUTE for name in sizes.split()}
    for name in views.split():
        functions = (getattr(holder, name, None) for holder in (Tensor, torch))
        kinds |= {function: _VIEW for function in functions if function is not None}
    return kinds | {torch.nn.functional.linear: _PRODUCT}


_KINDS = _kind_by_function()


class _Refused(torch.autograd.Function):
    """Copies a value whose dependence on the input is unknown; raises if a gradient reaches it."""

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
        self.checks: dict[str, Callable[[str, Args, Kwargs], None]] = {}
        self.given: Tensor | None = None
        self._ids = ids
        self._tags = None if ids is None else Tags(ids)
        self._ids_found = False  # whether the explained ids have been looked up
        self._look_up_kind = FOLLOWED  # how their positions were found
        self._look_ups: dict[int, LookUp] = {}  # by the table's address
        #: Tables, by address, in which ids were looked up that were computed from explained ids.
        self._computed_tables: dict[int, Tensor] = {}
        self._leaves = WeakIdKeyDictionary()  # as a set: leaves that are no weights
        self._bent = WeakIdKeyDictionary()  # as a set: see mark_bent()
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
        return self.root is not None and (self._ids is None or self._ids_found)

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
        """Return the input for the model: ids unchanged, or a copy of the floating root's leaf."""
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
        shapes = {x.leaf.shape[:2] for x in self._look_ups.values()}
        if shapes != {ids.shape}:
            size = None if self.root is None else tuple(self.root.shape)
            raise OptionError(
                f"baselines are token ids of shape {tuple(ids.shape)}, but the model reads "
                f"embeddings of shape {size}, or looked up no ids. Pass embeddings as baselines."
            )
        with unseen(), torch.no_grad():
            return [x.table[ids.to(x.table.device)] for x in self._look_ups.values()]

    def leaf(self, x: Tensor) -> Tensor:
        """Return ``x`` detached, as a new leaf that counts as depending on the input."""
        leaf = x.detach().requires_grad_()
        self._leaves[leaf] = True
        return leaf

    def carried_states(self, carried: Carried) -> list[Tensor]:
        """Return copies, with new leaves, of the states that the next mixer's call continues."""
        call_number = len(carried.states_for_next)  # each earlier call has appended its states
        states = [self.cached(x) for x in carried.states[call_number]]
        for leaf in self.ledger.leaves[-len(states) :]:  # as appended by cached()
            carried.watch_leaf(leaf, self.labels)
        return states

    def cached(self, x: Tensor, name: str = "cache") -> Tensor:
        """Return a copy of a constant, such as a cache's tensor, and record it under a name."""
        with unseen(), torch.enable_grad():
            if not x.is_floating_point():  # an index contributes nothing
                return x.clone()
            leaf = self.leaf(x.clone() if x.is_inference() else x)
            self.ledger.leaves.append(leaf)
            copy = leaf.clone()  # the model may change it in place
            self.ledger.record(copy, leaf.detach(), name)
        return copy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Call a torch function by its rule; follow ids, and refuse functions without a rule."""
        kind = _KINDS.get(func)
        if kind is _ATTRIBUTE or (kind is not None and self._is_simple(kind, args, kwargs)):
            out = func(*args, **(kwargs or {}))
            # a view of an activation's output counts as an activation's output
            if kind is _VIEW and (args[0] in self._bent or args[0] in self.at_rest):
                for view in out if isinstance(out, tuple | list) else (out,):
                    self.resembles(view, args[0])
            return out
        args, kwargs = self.without_weights(args), self.without_weights(kwargs or {})
        name = plain_name(func.__name__)
        check = self.checks.get(name.removesuffix("_"))
        if check is not None:
            check(name, args, kwargs)
        if name in _BLANK:
            return self._record_unwritten(func(*args, **kwargs))
        if self._unwritten:
            if name in _VIEWS and self._is_unwritten(args[0]):
                return self._record_unwritten(func(*args, **kwargs))
            args, kwargs = self._check_read(name, args, kwargs)
        look_up = _ids_and_table(name, args, kwargs)
        if look_up is not None and (name == "embedding" or self._hold_explained(look_up[0])):
            return self._handle_look_up(func(*args, **kwargs), *look_up)
        if not self._any_live((*args, *kwargs.values())):
            return self._call_without_input(func, name, args, kwargs)
        # such as add_, but not copy_ and __setitem__, which have their own rules
        in_place = name[-1] == "_" and plain_name(name[:-1]) in RULES and name not in RULES
        name = plain_name(name[:-1]) if in_place else name
        self.bends += name in NOT_LINEAR
        if in_place:
            return self._call_in_place(func, name, args, kwargs)
        if name in RULES:
            return RULES[name](self, func, args, kwargs)
        if self.reading is not None and name == "scaled_dot_product_attention":
            return call_attention(self.reading, func, *args, **kwargs)
        out = func(*args, **kwargs)
        if not self._any_live((out,)):  # such as a comparison, a coefficient
            return out
        module = self.where()
        source = f"Module {module!r}" if module else "The model, or forward_func,"
        remedy = (
            "A loss cannot be divided: run the model without labels, return the logits, and name a "
            "token with target=."
            if name.endswith(("loss", "cross_entropy"))
            else "If it mixes tokens, register an adapter for it (see register_mixer); else please "
            "report the function."
        )
        return self._refuse(
            out,
            f"{source} uses torch's {name}, for which no linear form is known, on a value that "
            f"depends on the input. {remedy}",
        )

    def _refuse(self, value: Any, complaint: str) -> Any:
        """Raise for a value whose dependence on the input is unknown.

        With :attr:`defers` the value is returned instead, and raises if a backward pass reaches it.
        In a mixer that is explained by its own code, the mixer's adapter handles the call instead.
        """
        if self.reading is not None:
            self.reading.given_up = True
            return detached(value)
        if not self.defers:
            raise NotLinearError(complaint)
        self.bends += 1  # the function counts as nonlinear
        if type(value) in (tuple, list):
            return type(value)(self._refuse(item, complaint) for item in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        # a backward pass asks for the gradient of each ledger leaf, and so runs _Refused.backward
        leaf = self.leaf(value.new_zeros(()))
        self.ledger.leaves.append(leaf)
        return _Refused.apply(value.detach(), leaf, complaint)  # type: ignore[no-untyped-call]

    def _record_unwritten(self, out: Any) -> Any:
        """Record that no torch function has written into the new tensors ``out``; return them."""
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                self._unwritten[x] = x._version
        return out

    def _is_unwritten(self, x: Any) -> bool:
        """Return True for new memory into which no torch function has written."""
        if not isinstance(x, Tensor) or x.requires_grad:  # such as results of autograd's functions
            return False
        return x in self._unwritten and self._unwritten[x] == x._version

    def _check_read(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Refuse arguments that a kernel may have written without torch; return all arguments.

        A weight is not checked: a kernel may have unpacked it without torch, but not from an input.
        """
        ordinary = name if name == "copy_" else plain_name(name.removesuffix("_"))
        if ordinary not in RULES or not torch.is_grad_enabled():
            return args, kwargs
        # an in-place function may write to its first argument without reading it
        written = int(name[-1] == "_" and ordinary != "__get__")
        # a factor of three dimensions or more is a batch of matrices, not a weight
        has_weight = name in _WITH_WEIGHT and len(args) > 1 and args[1].dim() < 3
        checked = 1 if has_weight else len(args)
        args = (*args[:written], *map(self.known, args[written:checked]), *args[checked:])
        return args, {k: v if k == "out" else self.known(v) for k, v in kwargs.items()}

    def _is_simple(self, kind: object, args: Args, kwargs: Kwargs | None) -> bool:
        """Return True if no rule is needed: a view without tensors as index, or a product.

        The product is ``linear`` without a bias: a bias is a constant that the ledger must record.
        """
        x: Any = args[0] if args else None
        if type(x) is not Tensor:
            return False
        if x.requires_grad:
            if x.grad_fn is None:  # a leaf that requires grad may be a weight, not an input
                return False
        elif not x.is_floating_point() or self._unwritten:
            # integers may be ids, which are followed; memory may be unwritten, which is checked
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
        if not self._is_unwritten(value) or holds(value.eq(0).all()):  # zeros are harmless
            return value
        return self._refuse(
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
        for item in values:
            if type(item) in (tuple, list):
                if not self.all_live(item):
                    return False
            elif isinstance(item, Tensor) and item.is_floating_point() and not item.requires_grad:
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
            x.copy_(new)  # a view cannot be detached
            self.ledger.included_in(x, new)
            return x
        x.copy_(new)
        if self.is_bent(new):
            self.mark_bent(x)
        return x

    def product(
        self,
        func: Callable[..., Tensor],
        args: Args,
        kwargs: Kwargs,
        constant: Tensor | None = None,
    ) -> Tensor:
        """Compute a product that divides relevance equally among factors depending on the input.

        With rule ``"frozen"``, activations' outputs get none if other factors depend on the input.
        ``constant`` is a bias that ``func`` adds to the product.
        """
        live = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
        if self.reading is not None:
            self.reading.mark_gate(live)
        straight = [x for x in live if not self.is_bent(x)]
        if self.rule == "frozen" and 0 < len(straight) < len(live):
            args = self._detach_bent(args)
            kwargs = {name: self._detach_bent(value) for name, value in kwargs.items()}
            live = straight
        out = func(*args, **kwargs)
        if constant is not None:
            out = self.ledger.included(out, constant)
        if len(live) > 1:
            self.bends += 1
            if self.reading is not None:
                divided = self.reading.split_gate(out, live, straight)
                if divided is not None:
                    return divided
            return divide_gradient(out, len(live))
        return out

    def _any_live(self, values: Iterable[Any]) -> bool:
        """Return True if a tensor in ``values`` depends on the input; called for every function."""
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad:
                    return True
            elif isinstance(value, tuple | list) and self._any_live(value):
                return True
        return False

    def _detach_bent(self, value: Any) -> Any:
        """Detach the tensors in ``value`` that come directly from an activation."""
        if type(value) in (tuple, list):
            return type(value)(self._detach_bent(item) for item in value)
        return value.detach() if self.is_bent(value) else value

    def _call_in_place(
        self, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs
    ) -> Tensor:
        """Call an in-place function by the rule of its ordinary form, and write the result."""

        def on_a_copy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return func(x.clone(), *args, **kwargs)

        x = args[0].clone()  # other results may need x as it was
        self.resembles(x, args[0])
        ordinary = getattr(Tensor, name, on_a_copy)  # if there is no ordinary form
        return self.overwrite(args[0], RULES[name](self, ordinary, (x, *args[1:]), kwargs))

    def _call_without_input(
        self, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs
    ) -> Any:
        """Call a function of constants or ids; follow the ids, or refuse an unclear look-up."""
        out = func(*args, **kwargs) if self._tags is None else self._tags.call(func, args, kwargs)
        is_look_up = name == "one_hot" or (name in _OUT_OF_SHAPE and out.is_floating_point())
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if is_look_up and self._hold_explained(*tensors):
            raise _look_up_error(self.where(), name)
        return out

    def _hold_explained(self, *ids: Tensor) -> bool:
        """Return True if some of the explained ids are among ``ids``."""
        tags = self._tags
        return tags is not None and any(
            tags.follows(x) and bool((tags.positions_of(x) > NONE).any()) for x in ids
        )

    def _handle_look_up(self, out: Tensor, ids: Tensor, table: Tensor) -> Tensor:
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
        if not tags.follows(ids):
            # compare values only until the ids are found, since a comparison waits for the device
            is_known = self._ids_found and self._look_up_kind == FOLLOWED
            if is_known or not tags.recognize(ids):
                return self._embed_others(out, ids, table, computed=False)
        positions = tags.positions_of(ids)
        if not bool((positions > NONE).any()):
            return self._embed_others(out, ids, table, computed=bool((positions == UNKNOWN).any()))
        # positions are larger by B * L times FOLLOWED, RECOGNIZED or COMPUTED, the kind
        given, kind = tags.per_example(positions), int(positions.max()) // tags.ids.numel()
        kind_before = self._look_up_kind if self._ids_found else kind
        if (kind_before, kind) == (FOLLOWED, RECOGNIZED):
            return out  # such as positions, equal to the ids by chance
        earlier_by_chance = (kind_before, kind) == (RECOGNIZED, FOLLOWED) and not self.again
        if given is None or not (kind == kind_before or earlier_by_chance):
            raise _look_up_error(self.where(), "embedding")
        if earlier_by_chance:
            self._ids_found = False
            self._look_ups.clear()
        self._look_up_kind = kind
        return self._embed_explained(out, given, table)

    def _embed_others(self, out: Tensor, ids: Tensor, table: Tensor, computed: bool) -> Tensor:
        """Return embeddings of other ids; ``computed`` ids may come from the explained ones."""
        assert self._ids is not None
        if self._ids_found:
            # a second sequence of tokens in the explained table, such as DNA complements
            if table.data_ptr() in self._look_ups and (computed or ids.shape == self._ids.shape):
                raise _other_tokens_error()
            return out
        if computed:  # refused if the explained ids follow in the same table
            self._computed_tables[table.data_ptr()] = table
        is_first = self.root is None and ids.dim() == 2 and len(ids) == len(self._ids)
        return self.begin(out) if is_first else out

    def _begin_at_table(self, out: Tensor, given: Tensor | None, table: Tensor) -> Tensor:
        """Begin the network at a table's first look-up of explained ids; return the embeddings."""
        if table.data_ptr() in self._computed_tables:
            raise _other_tokens_error()
        if self._ids_found:  # in another table
            leaf = self.leaf(out.detach().clone())
            self.again.append(LookUp(leaf, given, table.detach()))
            self._look_ups[table.data_ptr()] = self.again[-1]
            return leaf.clone()
        if self.root is not None and self.start is not None:
            # the root so far, of other ids, is a constant
            self.ledger.record(self.start, self.start.detach())
            self.ledger.leaves.append(self.root)
        self._ids_found, self.given = True, given
        embeddings = self.begin(out)
        assert self.root is not None
        self._look_ups[table.data_ptr()] = LookUp(self.root, given, table.detach())
        return embeddings

    def _embed_explained(self, out: Tensor, given: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings of explained ids, in any order, with a graph.

        A second look-up in the same table takes embeddings from the leaf of the first look-up.

        Args:
            out: the result (B, L', ...).
            given: for each embedding the id's position among the explained ids (B, L'), -1 for
                a different id.
            table: the embedding table.
        """
        assert self._ids is not None
        all_positions = torch.arange(self._ids.shape[1], device="cpu").expand(len(given), -1)
        earlier = self._look_ups.get(table.data_ptr())
        if earlier is None:
            is_same = given.shape == all_positions.shape and torch.equal(given, all_positions)
            return self._begin_at_table(out, None if is_same else given, table)
        earlier_given = all_positions if earlier.given is None else earlier.given
        # (B, L', L''): whether a new embedding and one of the first look-up are of the same id
        match = (given[:, :, None] == earlier_given[:, None]) & (given >= 0)[:, :, None]
        if bool(((given >= 0) & ~match.any(-1)).any()):
            raise InputError(
                "The model looks up token ids twice, the second time ids that the first look-up "
                "lacks, so no single tensor is the input. Pass embeddings (B, L, E) as inputs."
            )
        trailing = (1,) * (out.dim() - 2)
        sources = match.long().argmax(-1).view(*given.shape, *trailing).expand(out.shape)
        explained = (given >= 0).view(*given.shape, *trailing).to(out.device)
        constant = torch.where(explained, torch.zeros_like(out), out).detach()
        embeddings = earlier.leaf.gather(1, sources.to(out.device))
        embeddings = torch.where(explained, embeddings, constant)
        if not torch.equal(embeddings.detach(), out.detach()):
            raise _other_tokens_error()
        self.ledger.record(embeddings, constant)
        return embeddings

    def without_weights(self, value: Any) -> Any:
        """Detach the parameters in ``value``, which the rules treat as coefficients."""
        if isinstance(value, Tensor):
            is_weight = value.requires_grad and value.is_leaf and value not in self._leaves
            return value.detach() if is_weight else value
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.without_weights(v) for v in value])
        if kind is dict and value:
            return {name: self.without_weights(v) for name, v in value.items()}
        return value


def _ids_and_table(name: str, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor] | None:
    """Return the ids that a function looks up, and the table; None for other functions."""
    if name == "embedding":
        (ids, table, *_), _ = to_positional(args, kwargs, "input", "weight")
        # torch.embedding has them the other way round
        return (table, ids) if ids.is_floating_point() else (ids, table)
    if name != "__getitem__" or not all(isinstance(x, Tensor) for x in args):
        return None
    table, ids = args
    integers = ids.dtype in (torch.int64, torch.int32)
    return (ids, table) if integers and table.is_floating_point() else None


def _look_up_error(where: str, name: str) -> InputError:
    return InputError(
        f"Module {where!r} looks up the token ids by torch's {name}, which does not show which "
        "token each result belongs to. Pass embeddings (B, L, E) as inputs; for DNA, "
        "captum_ssm.models.OneHot computes embeddings."
    )


def _other_tokens_error() -> InputError:
    return InputError(
        "The model looks up its input tokens and, in the same table, tokens computed from them, "
        "such as DNA complements, so that its embeddings are not one input. Pass embeddings "
        "(B, L, E) as inputs; for DNA, captum_ssm.models.OneHot computes embeddings."
    )
