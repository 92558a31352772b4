"""Make a mixer linear while its own code runs, by the roles of its kernels' arguments.

A mixer's code runs once, under the rules for torch functions. One argument of a kernel is the
content; the others are keys, queries and steps (see :mod:`.kernels`). With the rules ``"frozen"``
and ``"half"`` everything except the content is detached, so that the kernel's own backward is
linear. With the other rules a kernel, and a gate that multiplies its result, share relevance as in
:mod:`.shares`, with the kernel's own derivatives. No adapter is called.

A :class:`Reading` follows one call of a mixer. It leaves the call to the mixer's adapter if roles
do not describe the code: for a kernel without an entry, for options that change the meaning of a
kernel's arguments, or for a product of several factors that is not a gate's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..mixers.base import Call
from ..mixers.parts.common import applied_mask, padding_mask
from ..mixers.registry import class_path, is_built_in
from ..mixers.table import ADAPTERS
from ..operators.base import Role
from ..operators.kernels.arithmetic import autocast_dtype, unseen
from ..tracing.hooks import tensors_in
from ..tracing.split import is_split
from .carried import Before, Carried
from .divided import Core, divide
from .shares import FAMILY, nodes_of

if TYPE_CHECKING:
    from .mode import Linearizing

#: The role of each factor of a kernel, and the factor's token dimension.
Roles = Mapping[str, tuple[Role, int]]

#: The factors of a kernel, by name.
Factors = Mapping[str, Tensor]

#: Modules of the adapters whose mixers are explained by their own running code.
_READ = """
attention lfm2 mamba mamba2 delta fla.attention fla.delta fla.gated fla.linear fla.mesa_net fla.rwkv
xlstm
"""
#: Adapters whose operators are faster on a CPU than the mixer's code, if factors get shares.
_SLOW_ON_CPU = ("mamba", "mamba2", "delta")
#: Adapters of these modules that are always used. If gradients are recorded, PaTH refuses a cache,
#: and Gated DeltaProduct refuses float32; the blocks of xLSTMLMModel have no kernel.
_ADAPTER_ONLY = (
    *("fla.attention:fla_path", "fla.delta:fla_delta_product"),
    *("xlstm:xlstm_mlstm", "xlstm:xlstm_slstm"),
)
#: The module of the adapter of each mixer class that is explained by its code, by class path.
READ = {
    path: kind
    for path, adapter in ADAPTERS.items()
    if (kind := adapter.partition(":")[0]) in _READ.split() and adapter not in _ADAPTER_ONLY
}

#: Roles of the factors of torch's mul, for content (B, D, L) that a gate multiplies.
_GATED_CONTENT: Roles = {"input": ("gate", -1), "other": ("content", -1)}
#: Names of kernels' arguments for first states.
STATES = frozenset(("initial_states", "initial_state"))

current_reading: ContextVar[Reading | None] = ContextVar("captum_ssm_reading", default=None)


class Reading:
    """One call of a mixer whose own code runs under the rules.

    Attributes:
        mode: the rules.
        given_up: whether the call must be explained by an adapter.
        mask: True for real tokens (B, L), once the call has ended; None if none is padding.
        continues: whether the run continues from a cache.
        carried: what the run receives and passes on as one chunk of a sequence, or None.
        mixer: the mixer.
        scans: the number of selective scans so far, if they are of a chunk.
        step: RWKV-7's step sizes for erasing (B, L, H N), or None.
        gates: in a short convolution with gates (LFM2), the number of products so far; in each, the
            first factor is the gate, a projection without an activation. None in other mixers.

    Args:
        mode: the rules.
        sequence: the mixer's first floating input, at which a search of the graph ends.
        continues: whether the run continues from a cache. Default: False.
        carried, mixer: the values of the attributes. Default: None.
    """

    def __init__(
        self,
        mode: Linearizing,
        sequence: Tensor | None = None,
        continues: bool = False,
        carried: Carried | None = None,
        mixer: nn.Module | None = None,
    ) -> None:
        self.mode, self.continues, self.carried, self.mixer = mode, continues, carried, mixer
        self._entry_node = None if sequence is None else sequence.grad_fn
        self.given_up, self.scans = False, 0
        kind = None if mixer is None else READ.get(class_path(type(mixer)))
        self.gates = 0 if kind == "lfm2" else None
        self.step: Tensor | None = None
        #: Whether products before the kernel, as of RWKV's token mixing, are shared equally.
        self._shares_products = kind == "fla.rwkv"
        self.mask: Tensor | None = None
        self._has_mixed = False  # whether a kernel with several factors has run
        #: Graph nodes of kernels' contents, by the graph node of each kernel's result.
        self._contents: dict[Any, Any] = {}
        #: Kernels that divide relevance, with their results, by the graph nodes of the results.
        self._cores: dict[Any, tuple[Core, Tensor]] = {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Apply :mod:`.kernels` to the kernel calls of the mixer that runs inside the ``with``."""
        outer_reading, self.mode.reading = self.mode.reading, self
        token = current_reading.set(self)
        try:
            yield
        finally:
            current_reading.reset(token)
            self.mode.reading = outer_reading

    def give_up(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leave the mixer call to an adapter, and return a kernel's result without a graph."""
        self.given_up = True
        with torch.no_grad(), unseen():
            return kernel(*args, **kwargs)

    def call(
        self, run: Callable[..., Tensor], roles: Roles, factors: Factors, softmax: bool = False
    ) -> Tensor:
        """Call a kernel; its result has a linear graph, or one that divides relevance by the rule.

        Args:
            run: a function that calls the kernel with the factors as keyword arguments.
            roles: the roles of the factors.
            factors: the factors by name.
            softmax: whether the kernel is softmax attention. Default: False.
        """
        self._has_mixed |= len(roles) > 1  # a kernel with one factor may be a convolution
        if self.mode.divides and len(roles) > 1:
            return self._divide(self._make_core(run, roles, factors, softmax))[0]
        contents = [name for name, (role, _) in roles.items() if role == "content"]
        with unseen():
            inputs = {k: x if k in contents else x.detach() for k, x in factors.items()}
            out = run(**inputs)
            if out.grad_fn is not None:  # for explains(), which skips the kernel's own nodes
                self._contents[out.grad_fn] = [factors[name].grad_fn for name in contents]
        return out

    def call_with_state(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        roles: Roles,
        factors: Factors,
        softmax: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return a kernel's result as :meth:`call` does, and its last state for a cache."""
        states: list[Tensor] = []

        def run_and_store(**factors: Tensor) -> Tensor:
            out, state = run(**factors)
            states[:] = [state]
            return out

        if not self.mode.divides or len(roles) == 1:
            return self.call(run_and_store, roles, factors, softmax), states[0]
        self._has_mixed = True
        nodes = nodes_of(self.mode.rule, softmax)
        if nodes == (1.0,):  # the cache's state is the state at the only node
            out, state = self._divide(self._make_core(run, roles, factors, softmax))
            return out, state
        core = self._make_core(run_and_store, roles, factors, softmax)
        (out,), (state,) = self._divide(core), states
        # the next chunk takes derivatives at each node: pass a state for each, with its own graph
        state_core = replace(core, run=lambda **kwargs: run(**kwargs)[1])
        cores = [replace(state_core, node_index=i) for i in range(len(nodes))]
        assert self.carried is not None
        self.carried.states_for_next.append([divide(x, x.value_at_node())[0] for x in cores])
        return out, state.detach()

    def _make_core(
        self,
        run: Callable[..., Tensor | tuple[Tensor, Tensor]],
        roles: Roles,
        factors: Factors,
        softmax: bool,
    ) -> Core:
        """Return a kernel's :class:`.Core`, with the sums and states of earlier chunks, if any."""
        sums, at_nodes = dict[str, Before](), dict[str, Sequence[Tensor]]()
        if self.carried is not None:
            shares = FAMILY[self.mode.rule]
            # keys and queries (B, L, ...) whose means are over tokens of earlier chunks too
            compared = {
                name: factors[name].movedim(dim, 1)
                for name, (role, dim) in roles.items()
                if role in shares and shares[role].compared_with(softmax) == "mean"
            }
            sums = self.carried.add_sums(compared) if compared else sums
            has_several_nodes = nodes_of(self.mode.rule, softmax) != (1.0,)
            for name in factors.keys() & STATES if has_several_nodes else ():
                at_nodes[name] = self.mode.carried_states(self.carried)
        return Core(
            self, run, roles, dict(factors), softmax=softmax, sums_before=sums, at_nodes=at_nodes
        )

    def for_keys(self, x: Tensor) -> Tensor:
        """Return ``x``, from which keys or steps are computed; detach it if they get no share."""
        return x if self.mode.divides else x.detach()

    def _divide(self, core: Core, value: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return a core's results as :func:`.divide` does, and record the core for its gate."""
        out, *further_results = divide(core, value)
        if out.grad_fn is not None:  # so that split_gate() finds the kernel behind a gate
            self._cores[out.grad_fn] = core, out
        return out, *further_results

    def mark_gate(self, live: list[Tensor]) -> None:
        """Mark the first factor of a product as an activation, if the mixer counts its gates."""
        if self.gates is not None and len(live) > 1:
            self.mode.mark_bent(live[0])
            self.gates += 1

    def gated_core(self, x: Tensor) -> Core | None:
        """Return the core of gate times content from which ``x`` is computed; None if none."""
        cores = [] if self.gates is None or not self.mode.divides else self._kernels_behind(x)[0]
        return cores[0][0] if len(cores) == 1 else None

    def split_gate(self, out: Tensor, live: list[Tensor], straight: list[Tensor]) -> Tensor | None:
        """Divide the product of a kernel's result and a gate; leave other products to the adapter.

        Args:
            out: the product.
            live: the factors that depend on the input.
            straight: the factors in ``live`` that do not come directly from an activation.

        Returns:
            The product divided among a kernel and its gate, or None to divide it equally.
        """
        sources = [(x, *self._kernels_behind(x)) for x in live if self.mode.divides]
        from_kernels = [source for source in sources if source[1]]
        if not from_kernels:
            # before the kernel only a gate may multiply: two live factors, one an activation
            self.given_up |= (len(live), len(straight)) != (2, 1) and not self._shares_products
            if self.gates != 1 or not self.mode.divides:  # not LFM2's first product
                return None
            factors = dict(zip(_GATED_CONTENT, live, strict=False))  # the gate comes first
            return self._divide(Core(self, torch.mul, _GATED_CONTENT, factors), out)[0]
        (mapped, cores, has_other_sources), *others = from_kernels
        gates = [x for x in live if x is not mapped]
        # None if the product has several kernels, several gates, or no known gate
        at_rest = self._value_at_rest(gates[0]) if len(gates) == 1 and not others else None
        is_only_kernel = len(cores) == 1 and not has_other_sources
        if at_rest is None or not is_only_kernel or mapped.shape != out.shape:
            self.given_up = True
            return None
        (core, result), gate = cores[0], gates[0].expand_as(out)
        if nodes_of(self.mode.rule, core.softmax) == (1.0,):  # kernel and gate share separately
            core = Core(self, torch.mul, _GATED_CONTENT, {"input": gate, "other": mapped})
        else:
            core = core.times(result, mapped, gate, at_rest)
        return divide(core, out)[0]

    def divide_corrected(
        self, out: Tensor, mapped: Tensor, own: Tensor, gate: Tensor, at_rest: Tensor
    ) -> Tensor:
        """Divide ``out``, (mapped + own v) gate; v are values of the kernel behind ``mapped``."""
        cores, has_other_sources = self._kernels_behind(mapped)
        if len(cores) != 1 or has_other_sources:
            self.given_up = True
            return out
        ((core, result),) = cores
        core = core.add_result(lambda own, v, **_: own * v, "own", own, "key")
        return divide(core.times(result, mapped, gate, at_rest), out)[0]

    def _value_at_rest(self, gate: Tensor) -> float | None:
        """Return the value that ``gate`` has for an input of 0; None if the value is not known."""
        if self.mode.is_bent(gate):
            return 0.0
        value: float | None = self.mode.at_rest.get(gate)  # type: ignore[no-untyped-call]
        return value

    def _kernels_behind(self, x: Tensor) -> tuple[list[tuple[Core, Tensor]], bool]:
        """Return the kernels from which ``x`` is computed, and True if ``x`` has other sources."""
        nodes, visited = [x.grad_fn], set[Any]()
        cores, has_other_sources = list[tuple[Core, Tensor]](), False
        while nodes:
            node = nodes.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if node in self._cores:
                cores.append(self._cores[node])
            elif node is self._entry_node or not node.next_functions:
                has_other_sources = True
            else:
                nodes += [earlier for earlier, _ in node.next_functions]
        return cores, has_other_sources

    def explains(self, call: Call) -> bool:
        """Return True if the call's output has a linear graph through at least one kernel.

        Args:
            call: the call, which has ended. The records of its graph are dropped.
        """
        # the graph is searched from the output to the arguments, past the insides of kernels
        out, entering, contents = call.output_tensor, call.hidden_states, self._contents
        self._contents, self._cores = {}, {}
        has_mixed = self._has_mixed if self.gates is None else self.gates == 2  # before and behind
        if self.given_up or not has_mixed or not out.requires_grad:
            return False
        if len(out) != len(entering):  # such as for a mask of more examples
            return False
        starts = {x.grad_fn for x in tensors_in((call.args, call.kwargs)) if x.grad_fn is not None}
        nodes, visited = [out.grad_fn], set(starts)
        while nodes:
            node = nodes.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if node in contents:  # a kernel's result
                nodes += contents[node]
                continue
            custom_function = getattr(node, "_forward_cls", None)
            if custom_function is not None and not custom_function.__module__.startswith(_PACKAGE):
                return False  # a kernel without an entry
            nodes += [earlier for earlier, _ in node.next_functions]
        return True


#: Prefix of the names of this package's modules.
_PACKAGE = f"{__name__.split('.', 1)[0]}."


def is_read(module: nn.Module, sequence: Tensor, divides: bool, continues: bool = False) -> bool:
    """Return True if a mixer is explained by its own running code, not by its adapter.

    Args:
        module: the mixer.
        sequence: the mixer's input.
        divides: whether factors other than content and gates get a share.
        continues: whether the run continues from a cache, which no adapter supports. Default:
            False.
    """
    path = class_path(type(module))
    if path not in READ or not is_built_in(type(module)) or any(map(is_split, module.modules())):
        return False
    if READ[path] == "lfm2" and hasattr(module, "slow_forward"):  # transformers 4
        return False
    if READ[path] == "xlstm" and divides:  # its kernels do not return the normalizer, a constant
        return False
    if continues:
        return True
    if sequence.device.type == "cpu":  # where operators compute half precision in float32
        computes_as_is = sequence.dtype in (torch.float32, torch.float64) and not autocast_dtype(
            sequence.device
        )
        if not computes_as_is:  # a fake tensor on the CPU may represent one on a GPU
            return isinstance(sequence, FakeTensor)
        return not (divides and READ[path] in _SLOW_ON_CPU)
    return READ[path] != "mamba" or not _scans_by_loop(module, sequence.device)


def _scans_by_loop(module: nn.Module, device: torch.device) -> bool:
    """Return True if a mixer's scan is a loop over tokens, whose graph takes much time and memory.

    The scan runs on two tokens, once per kind of device. A kernel's result has a custom backward.
    """
    code = vars(sys.modules[type(module).__module__])
    names = "mamba_selective_scan", "selective_scan_fn"
    kernel = next(code[name] for name in names if name in code)
    key = inspect.unwrap(kernel), device.type
    if key not in _known_loops:
        with unseen(), torch.enable_grad():
            u, delta = (torch.zeros(1, 8, 2, device=device) for _ in range(2))
            A, B, C = (torch.zeros(size, device=device) for size in ((8, 4), *2 * [(1, 4, 2)]))
            out = kernel(u.requires_grad_(), delta, A, B, C)
        _known_loops[key] = not hasattr(out.grad_fn, "_forward_cls")
    return _known_loops[key]


_known_loops: dict[tuple[Any, str], bool] = {}


def mask_of(module: nn.Module, call: Call) -> Tensor | None:
    """Return the mask of a call, True for real tokens (B, L); None if no token is padding.

    If attention continues from a cache, the mask begins with the cached tokens.

    Args:
        module: the mixer, for which :func:`is_read` returns True.
        call: the mixer's call.
    """
    index = _index_of_mask(type(module).forward)
    mask = None if index is None else call.argument("attention_mask", index)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:  # of tokens
        original, mask = applied_mask(module, call)
        return padding_mask(mask, call.hidden_states, type(module), original)
    visible = mask if mask.dtype == torch.bool else mask == 0  # of pairs of tokens
    is_seen, hidden = visible.any(-2).any(1), call.hidden_states  # by any query, in any head
    is_seen = is_seen.expand(len(hidden), -1).to(hidden.device)
    return padding_mask(is_seen, is_seen[..., None], type(module), mask)


@functools.cache
def _index_of_mask(forward: Callable[..., Any]) -> int | None:
    """Return the place of ``attention_mask`` among a forward's arguments; None if it has none."""
    names = list(inspect.signature(forward).parameters)
    return names.index("attention_mask") - 1 if "attention_mask" in names else None
