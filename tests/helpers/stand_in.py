"""A device that stands in for a GPU where there is none, on which every operation is counted.

Tensors lie in a processor's memory, and those that were sent to the device answer that they are
on ``cuda:0``, so that code takes the paths that it takes on a GPU; or on ``mps:0``, where what
Apple's MPS has no operator or number of is refused.  Operations on tensors of the device and of the
host are refused as CUDA refuses them.  A tensor is where its storage is, which views, detached
copies and what autograd has saved share.  What is sent to ``cuda:1`` is on another such device,
which is counted with the first.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.operators.kernels import fused_scan, wide_products
from captum_ssm.operators.kernels.scan_backward import selective_scan
from captum_ssm.operators.kernels.token_loop import ScanSteps
from helpers import mps
from helpers.counts import Counts, arithmetic, kind_of, place, tensors_in

#: The number of the host among devices, as of ``Tensor.get_device``.
_HOST = -1
#: Functions that make tensors on a device that is named to them.
_MAKING = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace "
    "ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor "
    "tensor tril_indices triu_indices zeros zeros_like"
)
_MAKING_METHODS = "new_empty new_full new_ones new_tensor new_zeros"
#: Those of them that read numbers of the host.
_READING = ("as_tensor", "asarray", "new_tensor", "tensor")
#: What may copy from one device to the other, or is told places by the host.
_BETWEEN = ("copy_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")

aten = torch.ops.aten
_built_in = torch._C.TensorBase
_plain_device = _built_in.device.__get__


class MixedDevicesError(RuntimeError):
    """Tensors of the device and of the host have met."""


class StandIn(TorchDispatchMode):
    """A device that is there inside its ``with``, where ``.to("cuda")`` sends tensors to it.

    Counting takes a third of the time. A device of kind ``"mps"`` has no fused kernels.

    Attributes:
        name: of the device.
        counts: of what has run there since they were last replaced.
        mixed: the operations refused, for code that goes on after an error.
        lacking: what MPS was asked for and does not have, likewise.
        copied: the most bytes of copies of watched weights that there were at a time.
    """

    def __init__(self, counted: bool = True, kind: str = "cuda") -> None:
        super().__init__()
        self.counted = counted
        self.kind, self.name = kind, f"{kind}:0"
        self.counts = Counts()
        self.mixed: list[str] = []
        self.lacking: list[str] = []
        self.copied = 0
        self._watched: set[int] = set()
        self._copies: list[tuple[StorageWeakRef, int]] = []
        self._there: dict[int, tuple[int, StorageWeakRef]] = {}
        self._most = 1024
        self._adrift: dict[int, StorageWeakRef] = {}
        self._making: int | None = None
        self._in_kernel = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> StandIn:
        self._undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        self._replace()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    # --- where tensors are ---------------------------------------------------------------------

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return not self._in_kernel and self._is_there(x)

    def _is_there(self, x: Tensor) -> bool:
        return self._number(x) != _HOST

    def _number(self, x: Tensor) -> int:
        """Of the device on which a tensor lies; -1 of the host."""
        if x.layout != torch.strided:
            return _HOST
        found = self._there.get(x.untyped_storage()._cdata)
        return _HOST if found is None else found[0]

    def _put(self, x: Tensor, number: int) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata in self._there:
            return x
        if self.kind == "mps" and x.dtype in mps.WITHOUT:
            self.lacking.append(f"{x.dtype} at {place()}")
            raise TypeError(f"Cannot convert a MPS Tensor to {self.lacking[-1]}")
        # a weak reference, for as long as it is held, keeps the address from another storage
        self._there[storage._cdata] = number, StorageWeakRef(storage)
        if len(self._there) > self._most:
            self._there = {k: at for k, at in self._there.items() if not at[1].expired()}
            self._adrift = {k: ref for k, ref in self._adrift.items() if not ref.expired()}
            self._most = 2 * len(self._there) + 1024
        return x

    def _is_adrift(self, x: Tensor) -> bool:
        """Whether torch itself made a tensor, from nothing: autograd makes its zeros so."""
        return x.layout == torch.strided and x.untyped_storage()._cdata in self._adrift

    def _fetched(self, x: Tensor, number: int) -> int:
        """The number of a device for which it did so, else that of the host."""
        if not self._is_adrift(x):
            return _HOST
        self._put(x, number)
        self.counts.launched((), (x,))
        return number

    def watch(self, model: nn.Module) -> None:
        """Let copies of a model's weights, in whatever precision, be counted in :attr:`copied`."""
        self._watched = {x.untyped_storage()._cdata for x in model.parameters()}

    def _note_copy(self, given: list[Tensor], out: Any) -> None:
        if given and given[0].untyped_storage()._cdata in self._watched:
            storage = out.untyped_storage()
            self._copies = [x for x in self._copies if not x[0].expired()]
            self._copies.append((StorageWeakRef(storage), storage.nbytes()))
            self.copied = max(self.copied, sum(size for _, size in self._copies))

    # --- operations ----------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to keep compilers out takes time at each operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kind_of(func).is_view:  # which lies where its argument does
            looked_up = self.kind == "mps" and any(map(self._is_there, tensors_in(args)))
            return self._run(func, args, kwargs, looked_up)
        if self._in_kernel:
            out = func(*args, **kwargs)
            if self.counted:
                self.counts.flops += arithmetic(func, args, kwargs, out)
            return self._marked(out, args, kwargs)
        given = tensors_in((args, kwargs))
        numbers = [self._number(x) for x in given]
        first = next((n for n in numbers if n != _HOST), _HOST)
        if first == _HOST:
            is_made = self._making not in (None, _HOST)
            out = self._run(func, args, kwargs, is_made)
            for x in tensors_in(out):
                if is_made:
                    self._put(x, self._making)
                elif self._making is None and all(map(self._is_adrift, given)):
                    self._adrift[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
            if is_made and self.counted:
                self.counts.add(func, args, kwargs, out, given)
            return out
        pairs = zip(given, numbers, strict=True)
        numbers = [self._fetched(x, first) if n == _HOST else n for x, n in pairs]
        if set(numbers) != {first}:
            self._require_one(func, given, numbers)
        there = [n != _HOST for n in numbers]
        out = self._run(func, args, kwargs, True)
        for x in tensors_in(out):
            self._put(x, first)
        if not self.counted:
            return out
        self.counts.add(func, args, kwargs, out, given)
        if func._overloadpacket in (aten._to_copy, aten.clone):
            self._note_copy(given, out)
        if func._overloadpacket in (aten.copy_, aten.index, aten.index_put_) and not all(there):
            self._between(func, given, there)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, there: bool) -> Any:
        """What an operation returns, if the device has it where it is to run there."""
        if not there or self.kind != "mps":
            return func(*args, **kwargs)
        try:
            return mps.run(func, args, kwargs)
        except mps.LackingOperatorError as error:
            self.lacking.append(str(error))
            raise

    def _marked(self, out: Any, args: Any, kwargs: Any) -> Any:
        """What is made inside a kernel of tensors of a device is there as well."""
        numbers = (self._number(x) for x in tensors_in((args, kwargs)))
        number = next((n for n in numbers if n != _HOST), _HOST)
        if number != _HOST:
            for x in tensors_in(out):
                self._put(x, number)
        return out

    def _require_one(self, func: Any, given: list[Tensor], numbers: list[int]) -> None:
        """Raise for tensors of several devices, but for what CUDA takes: numbers, and places."""
        name = func._overloadpacket.__name__
        if name == "copy_":
            return
        devices = {n for n in numbers if n != _HOST}
        elsewhere = [x for x, n in zip(given, numbers, strict=True) if n == _HOST]
        takes_numbers = name == "fill_" or torch.Tag.pointwise in func.tags
        takes_numbers = takes_numbers and all(x.dim() == 0 for x in elsewhere)
        if len(devices) == 1 and (takes_numbers or (name in _BETWEEN and numbers[0] != _HOST)):
            return
        sizes = [tuple(x.shape) for x in elsewhere]
        where = " and ".join(
            [*(f"{self.kind}:{n}" for n in sorted(devices)), *(["cpu"] if sizes else [])]
        )
        message = (
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{where}: {func} with {sizes} on the host at {place()}"
        )
        self.mixed.append(message)
        raise MixedDevicesError(message)

    def _between(self, func: Any, given: list[Tensor], there: list[bool]) -> None:
        if func._overloadpacket is aten.copy_ and not there[0]:
            self.counts.synchronised(func, place())
        elif any(not is_there and x.dim() for x, is_there in zip(given, there, strict=True)):
            self.counts.uploaded(place())

    # --- kernels -------------------------------------------------------------------------------

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a fused kernel: in one launch, and another for its backward."""

        @functools.wraps(function)
        def launched(*args: Any, **kwargs: Any) -> Any:
            places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
            named = [k for k, x in kwargs.items() if isinstance(x, Tensor)]
            tensors = [*(args[i] for i in places), *(kwargs[k] for k in named)]

            def call(*given: Tensor) -> Any:
                new = list(args)
                for i, x in zip(places, given, strict=False):
                    new[i] = x
                more = dict(zip(named, given[len(places) :], strict=True))
                return function(*new, **{**kwargs, **more})

            out = _Kernel.apply(self, call, *tensors)  # type: ignore[no-untyped-call]
            return out

        return launched

    @contextlib.contextmanager
    def inside_kernel(self) -> Iterator[None]:
        """A context whose operations are those of one kernel, launched once."""
        before, self._in_kernel = self._in_kernel, True
        try:
            yield
        finally:
            self._in_kernel = before

    # --- what torch is asked -------------------------------------------------------------------

    def _replace(self) -> None:
        """Let torch answer for the device, until the context is left.

        Properties and functions are replaced, and no mode of functions is used, because what looks
        at none would then see a processor.
        """
        self._set(Tensor, "device", _Property(self._device))
        self._set(Tensor, f"is_{self.kind}", _Property(lambda x: self.holds(x)))
        self._set(Tensor, "is_cpu", _Property(lambda x: not self.holds(x)))
        self._set(Tensor, "get_device", lambda x: self._number(x) if self.holds(x) else _HOST)
        self._set(Tensor, "to", lambda x, *args, **kwargs: self._to(x, *args, **kwargs))
        self._set(Tensor, "cpu", lambda x, **_: self._to(x, "cpu"))
        self._set(Tensor, "tolist", self._read(_built_in.tolist))
        self._set(Tensor, "numpy", self._refused(Tensor.numpy))
        self._set(Tensor, "__array__", self._refused(Tensor.__array__))
        for name in _MAKING.split():
            self._set(torch, name, self._made(name, getattr(torch, name)))
        for name in _MAKING_METHODS.split():
            self._set(Tensor, name, self._made(name, getattr(_built_in, name)))
        if self.kind == "mps":  # whose attention is no processor's
            self._undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            return
        self._set(Tensor, "cuda", lambda x, *_, **__: self._to(x, self.name))
        self._set(fused_scan, "has_triton", lambda: True)
        self._set(fused_scan, "run", self.kernel(_scanned))
        self._set(fused_scan, "states_between_runs", self.kernel(_kept))
        self._set(fused_scan, "gradients_from_states", self.kernel(_pulled))
        self._set(wide_products, "multiply", self.kernel(lambda x, y: x.float() @ y.float()))
        self._set(torch, "autocast", self._autocast(torch.autocast))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            self._set(torch, name, self._on_host(getattr(torch, name)))
        self._set(torch.cuda, "mem_get_info", lambda device=None: (2**36, 2**37))
        self._set(torch.cuda, "default_stream", lambda device=None: None)
        for context in ("device", "stream"):
            self._set(torch.cuda, context, lambda chosen: contextlib.nullcontext())

    def _set(self, holder: Any, name: str, new: Any) -> None:
        own, before = name in vars(holder), vars(holder).get(name)
        if callable(new) or isinstance(new, property):
            new.__name__ = name  # by which modes of functions know it
        setattr(holder, name, new)
        if own:
            self._undo.callback(setattr, holder, name, before)
        else:
            self._undo.callback(delattr, holder, name)

    def _number_of(self, device: Any) -> int:
        """Of a device of this kind; -1 of another."""
        named = torch.device(device)
        return (named.index or 0) if named.type == self.kind else _HOST

    def _device(self, x: Tensor) -> torch.device:
        return torch.device(self.kind, self._number(x)) if self.holds(x) else _plain_device(x)

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to`` in all its forms, of which only the device is ours."""
        given, wanted = list(args), kwargs.pop("device", None)
        other = kwargs.pop("other", None)
        if given and isinstance(given[0], Tensor):
            other = given.pop(0)
        if other is not None:
            wanted, dtype = other.device, other.dtype
        else:
            if given and not isinstance(given[0], torch.dtype):
                wanted = given.pop(0)
            dtype = given.pop(0) if given else kwargs.pop("dtype", None)
        if dtype is not None:
            kwargs["dtype"] = dtype
        if wanted is not None and torch.device(wanted).type not in ("cpu", self.kind):
            return _built_in.to(x, wanted, **kwargs)  # as to meta
        now = self._number(x) if self.holds(x) else _HOST
        sent = now if wanted is None else self._number_of(wanted)
        kwargs.update(zip(("non_blocking", "copy"), given, strict=False))
        if sent == now:
            return _built_in.to(x, **kwargs)
        if sent == _HOST:
            self.counts.synchronised(aten._to_copy.default, place())
        elif now == _HOST:
            if not kwargs.get("non_blocking"):
                self.counts.uploaded(place())
        elif torch.is_grad_enabled() and x.requires_grad:
            out: Tensor = _Sent.apply(self, x, sent)  # type: ignore[no-untyped-call]
            return _built_in.to(out, **kwargs)
        with self.inside_kernel():  # so that the copy is not a launch
            kwargs["copy"] = True
            out = _built_in.to(x, **kwargs)
        self._there.pop(out.untyped_storage()._cdata, None)  # where it was made
        if sent == _HOST:
            return out
        self._note_copy([x], out)
        return self._put(out, sent)

    def _made(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            before = self._making
            if device is None:
                self._making = _HOST if before is None else before
                try:
                    out = make(*args, **kwargs)
                finally:
                    self._making = before
                if name == "new_tensor" and self.holds(args[0]):
                    self.counts.uploaded(place())
                    self._put(out, self._number(args[0]))
                return out
            there = self._number_of(device)
            kwargs["device"] = "cpu"
            given = args[0] if args else kwargs.get("data")
            if name in _READING and isinstance(given, Tensor):
                return self._to(given, device, dtype=kwargs.get("dtype"))
            self._making = there
            try:
                out = make(*args, **kwargs)
            finally:
                self._making = before
            if there != _HOST:
                self._put(out, there)
                if name in _READING:
                    self.counts.uploaded(place())
            else:
                self._there.pop(out.untyped_storage()._cdata, None)
            return out

        return made

    def _autocast(self, autocast: Callable[..., Any]) -> Callable[..., Any]:
        """Autocast of the device is that of the host, by which its operations are computed."""

        def of_host(device_type: str, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
            if device_type == "cuda":
                dtype = dtype or torch.float16
            return autocast("cpu" if device_type == "cuda" else device_type, dtype, **kwargs)

        return of_host

    def _on_host(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda device="cuda": ask("cpu" if device == "cuda" else device)

    def _read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def told(x: Tensor) -> Any:
            # where modes of functions are on, they are told first, and call this again
            if self.holds(x) and not torch.overrides.has_torch_function((x,)):
                self.counts.synchronised(aten._local_scalar_dense.default, place())
            return read(x)

        return told

    def _refused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def refused(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.holds(x):
                raise TypeError(f"can't convert {self.name} device type tensor to numpy.")
            return function(x, *args, **kwargs)

        return refused


def _scanned(dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """What :func:`fused_scan.run` returns, on a processor."""
    stack, batch = x.shape[:2]
    b, c = (fused_scan.by_vector(t, stack).flatten(0, 1) for t in (b, c))
    scan = SimpleNamespace(dt=dt.expand(stack, *dt.shape).flatten(0, 1), a=a, b=b, c=c)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.no_grad():
        steps = ScanSteps(scan, 1, 32, transposed)
        steps(
            x.reshape(1, stack * batch, *x.shape[2:]), slice(0, x.shape[2]), out.flatten(0, 1)[None]
        )
    return out


def _kept(dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
    """Zeros in the shape of :func:`fused_scan.states_between_runs`; :func:`_pulled` reads none."""
    return dt.new_zeros(-(-x.shape[2] // 16), *x.shape[:2], x.shape[3], b.shape[4])


def _pulled(
    dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor, up: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`fused_scan.gradients_from_states` returns: the sums over channels, and zeros."""
    heads, (groups, count) = x.shape[3], b.shape[3:]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, dt.expand(x.shape), b, c)]
        of_x, of_dt, of_b, of_c = (t.flatten(0, 1) for t in leaves)
        scanned = [
            selective_scan(x.mT, dt.mT, rates, b.mT, c.mT).mT
            for x, dt, rates, b, c in zip(
                *(t.chunk(groups, -1) for t in (of_x, of_dt)), a.chunk(groups),
                *(t.unbind(2) for t in (of_b, of_c)), strict=True,
            )
        ]  # fmt: skip
        out = torch.cat(scanned, -1).view(x.shape)
    of_x, of_dt, *of_shared = torch.autograd.grad(out, leaves, up)
    _, blocks = fused_scan.blocks_of(heads // groups, count)
    found = dt.new_zeros(2, blocks, *b.shape)
    found[:, 0] = torch.stack(of_shared)
    return of_x, of_dt, found


class _Property(property):
    """A property that says its name, as torch's own do."""

    __name__: str


class _Sent(torch.autograd.Function):
    """From one device to another, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, device: StandIn, x: Tensor, number: int) -> Tensor:
        ctx.device, ctx.number = device, device._number(x)
        return device._to(x.detach(), f"{device.kind}:{number}")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, ctx.device._to(gradients[0], f"{ctx.device.kind}:{ctx.number}"), None


class _Kernel(torch.autograd.Function):
    """A function whose forward and backward are a launch each."""

    @staticmethod
    def forward(ctx: Any, device: StandIn, call: Callable[..., Any], *tensors: Tensor) -> Any:
        with device.inside_kernel(), torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(x.requires_grad and x.is_floating_point())
                for x in tensors
            ]
            out = call(*leaves)
        ctx.device, ctx.leaves = device, leaves
        ctx.outputs = out if isinstance(out, tuple) else (out,)
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in ctx.outputs)
        device.counts.launched(tensors, plain)
        return plain if isinstance(out, tuple) else plain[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        wanted = [x for x in ctx.leaves if x.requires_grad]
        pairs = [
            (x, g) for x, g in zip(ctx.outputs, gradients, strict=True)
            if isinstance(x, Tensor) and x.requires_grad and g is not None
        ]  # fmt: skip
        with ctx.device.inside_kernel():
            found = torch.autograd.grad(
                [x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        by_leaf = dict(zip(map(id, wanted), found, strict=True))
        ctx.device.counts.launched([*wanted, *(g for _, g in pairs)], tuple(found))
        return None, None, *(by_leaf.get(id(x)) for x in ctx.leaves)
