"""Record the mixer calls of a model's forward run by hooks inside a ``with``."""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import NoMixerError, NonFiniteError, PaddedExampleError
from ..mixers.base import Call, LinearMixer, first_tensor, in_batch
from ..operators.kernels.arithmetic import full_precision
from ..operators.kernels.truths import all_finite, are_noted, holds
from .find import Mixer, find_mixers, find_model
from .gradients import in_graph, new_graph
from .hooks import detached, swap_first
from .layer import Layer
from .observe import Arguments, Watcher, observe
from .offload import lasting_form, linearize, tensors_of
from .projection import Projection
from .split import smallest_of_processes
from .verification import Errors, accepted, combined_errors, require_as_it_was, rounding_explains

#: The part of a run that keeps its autograd graph: ``"none"``, ``"tail"`` (after the last mixer),
#: ``"outputs"`` (after the first mixer) or ``"all"``; see :func:`trace`.
Graph = Literal["none", "tail", "outputs", "all"]

#: The operators of a run may take the free memory divided by this number.
_OPERATOR_DIVISOR = 4
_MEMINFO = Path("/proc/meminfo")
#: Bytes of free memory that are assumed if the system does not report them (4 GiB).
_ASSUMED_BYTES = 2**32


class Trace:
    """The recorded layers of one forward run, as :func:`trace` yields them.

    Args:
        room: the bytes that operators built during the run may take. Default: None, operators are
            built when they are read.
        check: whether new operators are checked against their modules. Default: False.

    Attributes:
        layers: one :class:`Layer` for each mixer call, in the order in which they ran.
        checks: whether new operators are checked against their modules.
        room: the bytes that operators built from now on may take.
        is_of_the_run: whether operators built later must reproduce the mixers' recorded outputs.

    Example:
        >>> import torch
        >>> from captum_ssm import trace
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> with trace(model) as record:
        ...     _ = model(torch.tensor([tokenizer.encode("anna owns the lamp")]))
        >>> [tuple(layer.output.shape[:2]) for layer in record.layers], record.mask
        ([(1, 4), (1, 4)], None)
    """

    def __init__(self, room: int | None = None, check: bool = False) -> None:
        self.layers: list[Layer] = []
        self.is_of_the_run = room is not None
        self.room = room or 0
        self.checks = check
        self._last: tuple[Layer, LinearMixer] | None = None

    def __repr__(self) -> str:
        kinds = Counter(layer.architecture for layer in self.layers)
        return f"Trace({', '.join(f'{n} x {kind}' for kind, n in kinds.items()) or 'no layers'})"

    def recorded(self, layer: Layer) -> None:
        """Add the layer of a mixer that has just returned; build its operator if memory allows."""
        self.layers.append(layer)
        if self.room <= 0 and not self.checks:
            return
        linear = self.read(layer)
        parameters = layer.mixer.module.parameters()
        size = bytes_of(tensors_of(linear), besides=parameters)
        if size <= self.room:
            self.room -= size
            layer.keep(linear)

    def read(self, layer: Layer) -> LinearMixer:
        """Build the latest layer's linear mixer, directly after its module returned.

        The result stays valid if the module changes later. If :attr:`checks` is True, it is
        checked against the module's output.
        """
        linear = self._call_adapter(layer, running=True)
        with torch.inference_mode(False), torch.no_grad():
            stored = lasting_form(layer.mixer, layer.call, linear)
        if self.checks:
            # a projection that loads its weights would unload them from the module that runs
            is_stored = isinstance(stored.project, Projection)
            layer.checked = _errors(layer, stored if is_stored else linear)
        return stored

    def linearize(self, layer: Layer) -> LinearMixer:
        """Build the linear mixer of a layer after its call; the latest result is cached.

        Args:
            layer: one of :attr:`layers`.

        Raises:
            NonFiniteError: when a coefficient of the layer is NaN or infinite.
            InputError: when the model overwrote recorded tensors.
            ReconstructionError: when the mixer has changed since the run.
        """
        if self._last is None or self._last[0] is not layer:
            self._last = None
            layer.check_unchanged()
            linear = self._call_adapter(layer, running=False)
            in_run = layer.checked  # the errors in the run; Layer.verify refuses large ones
            if self.is_of_the_run and (in_run is None or accepted(in_run.strict, layer.tolerance)):
                require_as_it_was(layer.name, _errors(layer, linear).strict, layer.tolerance)
            self._last = (layer, linear)
        return self._last[1]

    def _call_adapter(self, layer: Layer, *, running: bool) -> LinearMixer:
        """Call the adapter, and raise for the first layer with a coefficient that is not finite."""
        device = layer.output.device
        with torch.inference_mode(False), torch.no_grad(), full_precision(device):
            linear = linearize(layer.mixer, layer.call, running=running)
            try:
                linear.check_finite(layer.name)
            except NonFiniteError:
                self._blame_first(layer)
                raise
            return linear

    def forget(self) -> None:
        """Drop the cached linear mixer, to free its memory."""
        self._last = None

    def _blame_first(self, layer: Layer) -> None:
        """Raise for the first earlier layer, if any, whose NaN or infinity reached ``layer``."""
        for earlier in self.layers[: self.layers.index(layer)]:
            linearize(earlier.mixer, earlier.call).check_finite(earlier.name)

    @property
    def mask(self) -> Tensor | None:
        """A mask (B, L), True for real tokens, or None if no token is padding.

        Some architectures get no mask, so the last layer of each architecture is tried, the latest
        first. A mixer that received only the sequence has no mask. It is not linearized, to save
        memory, unless its output is not finite; an error then names the first such layer. Layers
        with a different number of tokens than the last layer, such as an image tower's, are
        ignored.
        """
        last_size = self.layers[-1].call.hidden_states.shape[:2] if self.layers else ()
        architectures = set()
        for layer in reversed(self.layers):
            if layer.architecture in architectures:
                continue
            architectures.add(layer.architecture)
            finite = all_finite(layer.output)
            # layer.linear raises for coefficients that are not finite
            if (_may_have_mask(layer.call) or not finite) and layer.linear.mask is not None:
                mask = layer.linear.mask
                if layer.call.hidden_states.shape[:2] == last_size:
                    return mask
        return None


def _linearized(find_trace: weakref.ref[Trace], is_of_the_run: bool, layer: Layer) -> LinearMixer:
    """Build a layer's linear mixer on demand, even if the layer's trace no longer exists."""
    record = find_trace()
    if record is None:  # room 0: check like the trace, but keep no operator
        record = Trace(0 if is_of_the_run else None)
        record.layers.append(layer)
    return record.linearize(layer)


def _errors(layer: Layer, linear: LinearMixer) -> Errors:
    """Return the errors of a layer's operator; 0 if the module's own rounding is as large."""
    real = layer.call.output_tensor.detach()
    with torch.no_grad(), full_precision(real.device):
        ordered = real if linear.map is None else linear.map.in_order(real)
        # where checks are read later, one of them is that the output is finite
        if not are_noted(real) and not all_finite(real):  # the output will be refused itself
            return Errors(0.0, 0.0)
        errors = combined_errors(linear, ordered)
        if accepted(errors.strict, layer.tolerance) or linear.map is not None:
            return errors  # on a grid the outputs' tokens could not be compared below
        rounding = rounding_explains(layer.mixer, layer.call, linear.output(), linearize)
        return Errors(0.0, 0.0) if rounding else errors


def _may_have_mask(call: Call) -> bool:
    """Return True if a call has more than the sequence and plain values, perhaps a mask."""
    sequence = call.hidden_states
    others = (x for x in (*call.args, *call.kwargs.values()) if x is not sequence)
    return any(not isinstance(x, type(None) | bool | int | float | str) for x in others)


@contextmanager
def trace(
    model: nn.Module | Callable[..., Any],
    *,
    layers: Sequence[str | nn.Module] | None = None,
    graph: Graph = "none",
    operators: bool = True,
    verify: bool = False,
    watchers: Sequence[Watcher] = (),
) -> Iterator[Trace]:
    """Record every mixer call of the forward runs made inside the ``with``.

    The model is not changed: hooks are removed when the block ends. Inside the ``with`` models run
    without a cache.

    Args:
        model: a module, wrapped or not (torch.compile, DataParallel, PEFT), or a bound method.
        layers: names or modules of the mixers to record. Default: None, all.
        graph: the part of the autograd graph to keep, from cheap to expensive. ``"tail"``: after
            the last mixer. ``"outputs"``: after the first mixer, for gradients at mixer outputs.
            ``"all"``: also for gradients at block inputs. With gradient checkpointing, take the
            gradients inside the ``with``. Default: ``"none"``.
        operators: whether operators are built directly after the mixers return, as long as they fit
            in a quarter of the free memory. Default: True; False builds them when they are read.
        verify: whether every new operator is compared with its module's output;
            :meth:`Layer.verify` raises for an operator that differs. Default: False.
        watchers: further objects that observe the run by hooks. Default: none.

    Yields:
        The :class:`Trace`; its layers are complete when the block ends.

    Raises:
        ModelNotFoundError: when no module is found from ``model``.
        NoMixerError, UnsupportedMixerError: as :func:`~captum_ssm.tracing.find_mixers` does.

    Example:
        >>> import torch
        >>> from captum_ssm import trace
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> with trace(model) as t:
        ...     _ = model(torch.tensor([tokenizer.encode("anna owns the lamp")]))
        >>> [layer.name for layer in t.layers]
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    module = find_model(model)
    mixers = find_mixers(module, layers)
    operator_bytes = None
    if operators:
        free_bytes = free_memory(_device_of(module))
        # the processes of a model with split weights must decide alike
        free_bytes = smallest_of_processes(free_bytes, module.modules())
        operator_bytes = free_bytes // _OPERATOR_DIVISOR
    record = Trace(operator_bytes, verify)
    with ExitStack() as stack:
        # with graph="tail" the recorder turns gradients on behind the last mixer
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        recorder = Recorder(record, graph, mixers[-1])
        watching, vouched = (recorder, *watchers), layers is not None
        observe(module, mixers, watching, stack, gradients=graph != "none", vouched=vouched)
        yield record


def require_layers(record: Trace, model: nn.Module) -> None:
    """Raise if mixers were found but none of them ran.

    Args:
        record: the trace of a forward run that has ended.
        model: the module that should have run.

    Raises:
        NoMixerError: naming the mixers, for example if a compiled copy of the model was run.

    Example:
        >>> import torch
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.tracing import require_layers, trace
        >>> model, tokenizer = load_bundled()
        >>> with trace(model) as record:
        ...     _ = model(torch.tensor([tokenizer.encode("anna owns the lamp")]))
        >>> require_layers(record, model)  # two mixers ran
        >>> record.layers.clear()
        >>> require_layers(record, model)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        captum_ssm.errors.NoMixerError: The model has mixers (backbone.layers.0.mixer, ...
    """
    if not record.layers:
        raise none_ran(find_mixers(model))


def require_real_tokens(mask: Tensor | None) -> None:
    """Raise unless every example has a token that is not padding.

    Args:
        mask: True for real tokens (B, L), or None if no token is padding.

    Raises:
        PaddedExampleError: naming the first example in which every token is padding.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing import require_real_tokens
        >>> require_real_tokens(torch.tensor([[True, False], [True, True]]))
    """
    if mask is None:
        return
    empty = ~mask.any(-1)
    if not holds(~empty.any()):
        raise PaddedExampleError(int(empty.nonzero()[0]))


def none_ran(mixers: Sequence[Mixer]) -> NoMixerError:
    """Return the error for a forward run that called no mixer."""
    names = ", ".join(mixer.name for mixer in mixers)
    return NoMixerError(
        f"The model has mixers ({names}) but the forward run called none of them. Pass a "
        "forward_func that calls this model itself, not a copy or a compiled form of it."
    )


class Recorder(Watcher):
    """Adds each mixer call of a run to a trace, as a layer."""

    def __init__(self, record: Trace, graph: Graph, last: Mixer) -> None:
        self.record, self.graph, self.last = record, graph, last
        #: The latest sequence that entered each block, at which an autograd graph may begin.
        self._begun: dict[nn.Module, Tensor] = {}
        self._pending: list[Layer] = []

    def enters(self, module: nn.Module, arguments: Arguments, is_block: bool) -> Arguments | None:
        """With ``graph="all"``, begin an autograd graph at the sequence that enters a block."""
        if not is_block or self.graph != "all":
            return None
        self._begun.pop(module, None)  # of an earlier call
        arguments, stream = swap_first(arguments, in_graph)
        if stream is not None:
            self._begun[module] = stream
        return arguments

    def returned(self, mixer: Mixer, call: Call) -> None:
        """Record the call as a layer. The output after other hooks is added by :meth:`left`."""
        record, block = self.record, call.block
        args, kwargs, output = (detached(x) for x in (call.args, call.kwargs, call.output))
        kept = replace(call, args=args, kwargs=kwargs, output=output)
        # weakly, so that a call's memory is free when it ends, and not when garbage is collected
        make_linear = functools.partial(_linearized, weakref.ref(record), record.is_of_the_run)
        layer = Layer(make_linear, mixer, kept, self._begun.get(block) if block else None)
        layer.is_reached = call.hidden_states.requires_grad
        record.recorded(layer)
        self._pending.append(layer)

    def left(self, mixer: Mixer, output: Any) -> Any:
        """Record the output after hooks, and make it part of the autograd graph if one is kept."""
        layer, left = self._pending.pop(), in_batch(first_tensor(output))
        graph, is_last = self.graph, mixer is self.last
        if graph == "tail" and is_last:
            torch.set_grad_enabled(True)  # undone when the trace ends
        joins = graph in ("outputs", "all") or (graph == "tail" and is_last)
        if joins:
            # the graph before the first output is dropped
            swap = new_graph if graph == "outputs" and layer is self.record.layers[0] else in_graph
            output, _ = swap_first(output, swap)
        kept = in_batch(first_tensor(output)) if joins else left.detach()
        layer.leave(kept, layer.hook_factor(left))
        return output if joins else None


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device, or a fixed guess if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and _MEMINFO.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        if match is not None:
            return 1024 * int(match[1])
    return _ASSUMED_BYTES


def bytes_of(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Return the bytes of tensors, counting shared memory once and ``besides`` not at all."""
    # a quantized weight's memory may lie in parts that it alone knows
    plain = (x for x in besides if type(x) in (Tensor, nn.Parameter))
    excluded = {x.untyped_storage().data_ptr() for x in plain}
    storages = (tensor.untyped_storage() for tensor in tensors)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for pointer, size in sizes.items() if pointer not in excluded)


def _device_of(model: nn.Module) -> torch.device:
    devices = (p.device for p in model.parameters() if not p.is_meta)
    return next(devices, torch.device("cpu"))
