"""Check that the adapters of a model's mixers keep every promise of the package."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import pickle
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._optional import optional
from ..attr.call.checks import parse_components
from ..attr.call.targets import logits_of
from ..attr.flow import LatimFlow
from ..edges import Edges, knock_out
from ..inside import LayerLatimFlow, NeuronLatimFlow
from ..mixers.base import first_tensor
from ..tracing import Layer, trace

#: A function of a module, its input and its keyword arguments, in float64. It returns the matrices
#: of all channels (B, H * P, L, L), or such matrices by names of components ("exact", "s6",
#: "unified-gate"), or None for a module of a different class.
Formula = Callable[[Any, Tensor, Mapping[str, Any]], Tensor | Mapping[str, Tensor] | None]

#: Largest accepted max|a - b| / max|b| between two computations of the same result. It is the same
#: for float64 and float32, since many float64 modules compute parts of recurrences in float32.
_SAME = 1e-5
#: Errors up to this multiple of a module's own rounding error are accepted as well.
_OWN = 32
_ALL = slice(None)
#: Largest error of an operator compared with a formula, by the formula's dtype.
_EXACT = {torch.float64: 1e-9, torch.float32: 2e-6}


def check_adapter(
    make: Callable[[], nn.Module],
    inputs: Tensor,
    formula: Formula | None = None,
    refuses: Mapping[str, str] = MappingProxyType({}),
    clauses: Collection[str] | None = None,
) -> list[str]:
    """Check that the adapters of a model's mixers keep every promise of the package.

    The model is built once. A clause checks one promise for each mixer that runs:

    - ``"float32"``, ``"float64"``, ``"bfloat16"``: the operator reproduces the module's output. The
      operators of a bfloat16 module are computed in float32.
    - ``"matrices"``: the matrices agree with the operator and its adjoint, and with ``formula``.
    - ``"batches"``, ``"lengths"``: an example by itself gives the same results as in its batch, and
      so do the first tokens of an example, for a causal mixer.
    - ``"left padding"``, ``"right padding"``: an example by itself gives the same results as in a
      padded batch, and padded tokens are never read.
    - ``"sums"``: relevance of :class:`~captum_ssm.LatimFlow` and biases add up to the output.
    - ``"layers"``, ``"neurons"``, ``"heads"``: these sums also hold at blocks, mixers and heads.
    - ``"knock-out"``: a mixer without some edges equals its matrices with these entries zeroed.
    - ``"LoRA"``: the operator includes the weights of LoRA adapters. This clause needs peft.
    - ``"checkpointing"``, ``"offload"``, ``"copy and pickle"``: gradient checkpointing, offloaded
      weights (with accelerate) and copies of the model give the same results.

    Args:
        make: a function that builds the model, or a single mixer, with random parameters. It is
            called once.
        inputs: two or more different examples: token ids (B, L), embeddings (B, L, E) or images
            (B, C, H, W). Images have neither lengths nor padding.
        formula: the mixer's definition, written without this package; see :data:`Formula`. It is
            called with a module in float64, the module's input (B, L, E) and the keyword arguments
            of the call. Default: None, no formula.
        refuses: clauses that the mixer does not keep, each with a regular expression that matches
            the error. An error is raised if such a clause holds. Default: none.
        clauses: the names of the clauses to check. Default: None, all clauses, except LoRA without
            peft and offloading without accelerate.

    Returns:
        The names of the clauses that were checked.

    Raises:
        AssertionError: when a clause does not hold; the message begins with the clause's name.
        ImportError: when ``clauses`` names a clause whose package is missing.

    Example:
        >>> import torch
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.testing.adapters import check_adapter
        >>> ids = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
        >>> check_adapter(lambda: load_bundled()[0], ids, clauses=["float32", "sums"])
        ['float32', 'sums']
    """
    asked = [name for name in CLAUSES if clauses is None or name in clauses]
    if unknown := {*refuses, *(clauses or ())} - set(CLAUSES):
        raise ValueError(f"Unknown clauses {sorted(unknown)}. Use names from {list(CLAUSES)}.")
    if clauses is None:
        asked = [name for name in asked if _is_there(_NEEDS.get(name))]
    if inputs.dim() == 4:
        asked = [name for name in asked if name not in _OF_SEQUENCES]
    subject = _Subject(make().eval(), inputs, formula, refuses)
    for name in asked:
        try:
            with torch.random.fork_rng(devices=[]):
                CLAUSES[name](subject)
        except Exception as error:
            said = f"{name}: {type(error).__name__}: {error}"
            if name not in refuses:
                if isinstance(error, ImportError):
                    raise
                advice = "Correct the adapter, or name the clause in refuses."
                raise AssertionError(f"{said.rstrip('.')}. {advice}") from error
            if not re.search(refuses[name], said):
                raise AssertionError(f"{said} (refuses expects {refuses[name]!r})") from error
        else:
            assert name not in refuses, f"{name}: the clause holds, so remove it from refuses"
    return asked


class _Subject:
    """The checked model in its own precision and in float64, with the input and traced layers."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, formula: Formula | None, refuses: Collection[str]
    ) -> None:
        self.single, self.inputs, self.formula, self.refuses = model, inputs, formula, refuses
        self.model: Any = copy.deepcopy(model).double()
        self.wide: Tensor = _as(inputs, torch.float64)
        self._at_layers: dict[tuple[str, bool], Any] = {}
        self.hooks, self.pickles = _hooks(self.model), True
        try:
            pickle.dumps(self.model)
        except Exception:  # such as a class that is in no file
            self.pickles = False
        self.layers = _layers(self.model, self.wide)
        assert self.layers, "the model ran no mixer: pass a model that calls a supported mixer"
        self.names = [layer.name for layer in self.layers]
        with torch.no_grad():
            output = logits_of(_run(self.model, self.wide))
        self.target: Any = 1 if output.dim() == 2 else (-1, min(3, output.shape[-1] - 1))

    @functools.cached_property
    def decomposition(self) -> Any:
        """Return LatimFlow's decomposition of the float64 model's output."""
        flow = LatimFlow(self.model, rule="frozen")
        return flow.decompose(self.wide, self.target, features=True)

    def at_layer(self, name: str, at_input: bool) -> Any:
        """Return the decomposition of the float64 model's output at a layer, cached."""
        if (name, at_input) not in self._at_layers:
            explain = LayerLatimFlow(self.model, name, rule="frozen")
            found = explain.decompose(self.wide, self.target, None, at_input)
            self._at_layers[name, at_input] = found
        return self._at_layers[name, at_input]

    def is_padded(self, side: str) -> bool:
        """Return True if the mixers accept a batch that is padded on ``side``."""
        takes = self.inputs.dim() < 4 and _takes_mask(self.model)
        return takes and f"{side} padding" not in self.refuses

    @property
    def places(self) -> list[tuple[str, bool]]:
        """The first and the last module of each class of blocks and mixers, to be explained.

        Each is a pair: the first module's name with True, for the module's input, or the last
        module's name with False, for the output. Modules that run several times are left out.
        """
        names = {module: name for name, module in self.model.named_modules()}
        ran = [x for layer in self.layers for x in (layer.block, layer.mixer.module) if x in names]
        found: dict[type, list[str]] = {}
        for module in ran:
            if ran.count(module) == 1 and names[module]:
                found.setdefault(type(module), []).append(names[module])
        return [end for some in found.values() for end in ((some[0], True), (some[-1], False))]


# --- the operator is the module ---------------------------------------------------------------


def _reproduces(dtype: torch.dtype) -> Callable[[_Subject], None]:
    def check(subject: _Subject) -> None:
        model, inputs = copy.deepcopy(subject.single).to(dtype), _as(subject.inputs, dtype)
        with torch.no_grad():
            before = logits_of(_run(model, inputs))
            with trace(model) as record:
                traced = logits_of(_run(model, inputs))
        if dtype != torch.bfloat16:
            _close("the output while it is traced", traced, before)
        for layer in record.layers:
            _is_the_module(layer)

    return check


def _is_the_module(layer: Layer) -> None:
    """Check that the operator reproduces the module's output, in float32 for bfloat16 modules."""
    linear, wanted = layer.linear, layer.in_order(layer.output)
    working = torch.float64 if wanted.dtype == torch.float64 else torch.float32
    rebuilt = linear.output()
    for dtype in (linear.values.dtype, linear.operator.dtype, rebuilt.dtype):
        assert dtype == working, f"{layer.name}: linearized in {dtype}; compute in {working}"
    limit = _SAME
    if wanted.dtype == torch.bfloat16:
        layer.verify()
        wanted = layer.in_order(_again(layer, torch.float32))
    if working == torch.float32 and _error(rebuilt, wanted) > limit:
        # the module may enlarge rounding errors, too
        limit = max(limit, _OWN * _error(wanted, layer.in_order(_again(layer, torch.float64))))
    _close(f"{layer.name} ({layer.architecture})", rebuilt, wanted, limit=limit)


def _again(layer: Layer, dtype: torch.dtype) -> Tensor:
    """Run a layer's module again on the recorded input in a different dtype; return the output."""
    module = copy.deepcopy(layer.mixer.module).to(dtype)
    args, kwargs = tree_map(lambda x: _as(x, dtype), (layer.call.args, dict(layer.call.kwargs)))
    with torch.no_grad(), trace(module, operators=False) as record:
        module(*args, **kwargs)
    return record.layers[0].output


def _matrices(subject: _Subject) -> None:
    for layer in subject.layers:
        _is_its_matrices(layer)
    if subject.formula is None:
        return
    batches, covered = [subject.layers], 0
    sides = [side for side in ("left", "right") if subject.is_padded(side)]
    batches += [_padded(subject, side)[0] for side in sides]
    for layer in (layer for layers in batches for layer in layers):
        call = layer.call
        wanted = subject.formula(layer.mixer.module, call.hidden_states, call.kwargs)
        if wanted is None:
            continue
        covered += 1
        for name, exact in (wanted if isinstance(wanted, Mapping) else {"exact": wanted}).items():
            part = layer.linear.restrict(parse_components(name)).operator.per_channel()
            said, limit = f"{layer.name}: {name}, against the formula", _EXACT[exact.dtype]
            _close(said, part.dense(None), exact, limit=limit)
            _close(said, part.dense("mean"), exact.mean(1), exact, limit)
            _close(said, part.rows([-1, 0], None), exact[:, :, [-1, 0]], exact, limit)
    assert covered, "the formula returns None for all mixers: return matrices for one of them"


def _is_its_matrices(layer: Layer) -> None:
    linear, name = layer.linear, layer.name
    operator, own = linear.operator, linear.operator.per_channel()
    matrices = own.dense(None)
    _close(f"{name}: the mean over channels", own.dense("mean"), matrices.mean(1), matrices)
    u, v = torch.randn_like(linear.values), torch.randn_like(linear.values)
    mapped = u * operator.apply(v)
    size = mapped.abs().sum()  # of all terms, which may cancel
    _close(f"{name}: the adjoint", (operator.transpose(u) * v).sum(), mapped.sum(), size)
    for tensor in operator.tensors().values():
        assert not tensor.requires_grad, f"{name}: a coefficient requires grad; detach it"
    if own is operator:
        found = torch.einsum("bcij,bjc->bic", matrices, linear.values.flatten(2))
        wanted = operator.affine(linear.values).flatten(2)
        _close(f"{name}: matrices, values and bias", found + linear.bias.flatten(2), wanted)


# --- the same tokens in other company ---------------------------------------------------------


def _batches(subject: _Subject) -> None:
    row = len(subject.inputs) - 1
    for alone, layer in _pairs(subject, subject.wide[row:], subject.layers):
        _is_same(alone, layer, slice(row, row + 1))


def _lengths(subject: _Subject) -> None:
    causal = not any(_dense(x).triu(1).any() for x in subject.layers)
    for length in sorted({1, subject.inputs.shape[1] - 1}):
        for alone, layer in _pairs(subject, subject.wide[:, :length], subject.layers):
            _is_the_module(alone)
            if causal:
                _is_same(alone, layer, tokens=slice(length))


def _padding(side: str) -> Callable[[_Subject], None]:
    def check(subject: _Subject) -> None:
        layers, mask, inputs = _padded(subject, side)
        for layer in layers:
            _is_the_module(layer)
            found = layer.linear.mask
            assert found is not None, f"{layer.name}: the mixer returns no mask"
            assert torch.equal(found, mask.bool()), f"{layer.name}: returns a different mask"
            read = _dense(layer).abs().sum((1, 2))  # (B, L)
            assert not read[mask == 0].any(), f"{layer.name}: padded tokens are read"
        for row in range(1, len(mask)):
            own = mask[row].bool()
            for alone, layer in _pairs(subject, inputs[row : row + 1, own], layers):
                _is_same(alone, layer, slice(row, row + 1), own)

    return check


def _padded(subject: _Subject, side: str) -> tuple[list[Layer], Tensor, Tensor]:
    """Run three examples with all, half and two real tokens; return layers, mask and inputs."""
    assert _takes_mask(subject.model), "the model's forward takes no attention_mask"
    inputs = subject.wide[[0, 1, 0]]
    tokens = inputs.shape[1]
    mask = torch.zeros(3, tokens, dtype=torch.long)
    for row, kept in enumerate((tokens, tokens // 2 + 1, 2)):
        mask[row, tokens - kept if side == "left" else 0 :][:kept] = 1
    return _layers(subject.model, inputs, mask), mask, inputs


def _pairs(subject: _Subject, inputs: Tensor, layers: list[Layer]) -> Iterator[tuple[Layer, Layer]]:
    return zip(_layers(subject.model, inputs), layers, strict=True)


def _is_same(own: Layer, among: Layer, rows: Any = _ALL, tokens: Any = _ALL) -> None:
    """Check that a layer has the same matrices, values and bias as in a run on a larger batch."""
    found, every = _dense(own), _dense(among)
    mine, all_ = own.linear, among.linear
    wanted = every[rows][:, :, tokens][..., tokens]
    _close(f"{own.name}: matrices in a batch and by themselves", found, wanted, every)
    for name in ("values", "bias"):
        found, wanted = getattr(mine, name), getattr(all_, name)[rows, tokens]
        _close(f"{own.name}: {name} in a batch and by themselves", found, wanted, all_.values)


def _dense(layer: Layer) -> Tensor:
    """Return the matrices of all channels (B, H * P, L, L), cached as long as the layer exists."""
    if layer not in _MATRICES:
        _MATRICES[layer] = layer.operator.per_channel().dense(None)
    return _MATRICES[layer]


_MATRICES: weakref.WeakKeyDictionary[Layer, Tensor] = weakref.WeakKeyDictionary()


# --- methods on adapters ----------------------------------------------------------------------


def _sums(subject: _Subject) -> None:
    centered = LatimFlow(subject.model).decompose(subject.wide, subject.target, rule="centered")
    for rule, found in (("frozen", subject.decomposition), ("centered", centered)):
        assert found.roles is not None
        _adds_up(f"LatimFlow, rule={rule!r}", found)
        if subject.inputs.dim() < 4:  # an image's tokens are patches
            _close("the sum of roles", torch.stack([*found.roles.values()]).sum(0), found.tokens)
    if subject.is_padded("left"):
        _, mask, inputs = _padded(subject, "left")
        flow = LatimFlow(lambda x, m: _run(subject.model, x, m), subject.model)
        found = flow.decompose(inputs, subject.target, mask, roles=False)
        _adds_up("LatimFlow of a padded batch", found)
        assert not found.tokens[mask == 0].any(), "padded tokens have relevance"


def _adds_up(name: str, found: Any) -> None:
    size = found.inputs.abs().flatten(1).sum(1) + found.output.abs()
    if found.past is not None:
        size = size + found.past.abs().flatten(1).sum(1)
    share = found.delta / size.clamp_min(1e-30)
    _close(f"{name}: the sum of relevance and biases", 1 + share, torch.ones_like(share))


def _at_layers(subject: _Subject) -> None:
    mixers = dict(zip(subject.names, subject.decomposition.mixers, strict=True))
    for name, at_input in subject.places:
        found = subject.at_layer(name, at_input)
        _adds_up(name, found)
        if name in mixers and not at_input:
            first = found.inputs[..., : found.sizes[0]]
            _close(f"{name}, against the whole decomposition", first, mixers[name])


def _at_neurons(subject: _Subject) -> None:
    places = subject.places
    for name, at_input in [*places[:1], *(place for place in places[1:] if not place[1])]:
        seen: list[Tensor] = []

        def one(activation: Any, seen: list[Tensor] = seen) -> Tensor:
            activation = first_tensor(activation)
            seen.append(activation.detach())
            place = [size // 2 for size in activation.shape[1:-1]]
            chosen: Tensor = activation[(slice(None), *place, 1)]
            return chosen

        found = NeuronLatimFlow(subject.model, name).decompose(subject.wide, one, None, at_input)
        _adds_up(name, found)
        _close(f"{name}: the neuron's own value", found.output, one(seen[-1]), seen[-1])


def _at_heads(subject: _Subject) -> None:
    for layer in _kinds(subject.layers):
        name = layer.name
        if not name or subject.names.count(name) > 1:  # a mixer alone, or one that runs again
            continue
        mixed, found = subject.at_layer(name, False), subject.at_layer(f"{name}.heads", False)
        _adds_up(f"{name}.heads", found)
        behind = sum(bias for at, bias in found.biases.items() if at.startswith(name))
        adds, wanted = (x.inputs.flatten(1).sum(1) for x in (found, mixed))
        size = mixed.inputs.abs().flatten(1).sum(1)
        _close(f"{name}: the sum of heads and biases", adds + behind, wanted, size)


def _knock_out(subject: _Subject) -> None:
    """Check that cutting edges equals zeros in the matrices, with padding if it is accepted."""
    layers, mask, inputs = subject.layers, None, subject.wide
    if subject.is_padded("left"):
        layers, mask, inputs = _padded(subject, "left")
    sources, targets = slice(-4, -2), slice(-2, None)
    for layer in _kinds(layers):
        linear, found = layer.linear, list[Any]()
        sent, lost = torch.zeros_like(linear.values), torch.zeros_like(linear.values)
        sent[:, sources] = linear.values[:, sources]
        lost[:, targets] = linear.operator.apply(sent)[:, targets]
        wanted = linear.project(linear.operator.affine(linear.values) - lost)
        changed = _error(wanted, linear.output()) > 10 * _SAME
        assert changed or linear.values.shape[1] < 4, f"{layer.name}: cut edges change nothing"
        keep = functools.partial(_keep, found)
        cut = knock_out(subject.model, Edges(layer.name or 0, sources, targets))
        # hooked last, so that it sees the output without the edges
        with torch.no_grad(), cut, layer.mixer.module.register_forward_hook(keep):
            _run(subject.model, inputs, mask)
        _close(f"{layer.name}, against zeroed entries", layer.in_order(found[-1]), wanted)


def _keep(found: list[Any], module: Any, args: Any, output: Any) -> None:
    found.append(first_tensor(output))


# --- models that are not plain ----------------------------------------------------------------


def _lora(subject: _Subject) -> None:
    peft = optional("peft", "peft", "The clause on LoRA")
    model = copy.deepcopy(subject.model)
    mixers = nn.ModuleList(layer.mixer.module for layer in _layers(model, subject.wide))
    linear = [name for name, x in mixers.named_modules() if type(x) is nn.Linear and "." in name]
    assert linear, "no mixer has a linear layer"
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=linear)
    peft.inject_adapter_in_model(config, mixers)
    for name, parameter in mixers.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    layers = _layers(model.double().eval(), subject.wide)
    for layer in layers:
        _is_the_module(layer)
    changes = max(_error(x.output, y.output) for x, y in zip(layers, subject.layers, strict=True))
    assert changes > _SAME, "LoRA changes no mixer's output"


def _checkpointing(subject: _Subject) -> None:
    model = copy.deepcopy(subject.model)
    assert getattr(model, "supports_gradient_checkpointing", False), "not supported by the model"
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    _explains_the_same(subject, model)


def _offload(subject: _Subject) -> None:
    accelerate = optional("accelerate", "accelerate", "The clause on offloading")
    blocks = [type(x.block or x.mixer.module).__name__ for x in subject.layers]
    model = copy.deepcopy(subject.model)
    model = accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=blocks)
    assert any(x.is_meta for x in model.parameters()), "no weight was offloaded"
    with torch.no_grad():
        wanted, found = (logits_of(_run(x, subject.wide)) for x in (subject.model, model))
    _close("the output of the offloaded model", found, wanted)
    _explains_the_same(subject, model)


def _explains_the_same(subject: _Subject, model: nn.Module) -> None:
    for found, wanted in zip(_layers(model, subject.wide), subject.layers, strict=True):
        _is_same(found, wanted)
    flow = LatimFlow(model).decompose(subject.wide, subject.target, rule="frozen", roles=False)
    _close("the relevance, against the plain model", flow.inputs, subject.decomposition.inputs)


def _copies(subject: _Subject) -> None:
    """Check that a copy of an explained model works, and that operators share no memory with it."""
    assert _hooks(subject.model) == subject.hooks, "hooks are left on the model"
    model = copy.deepcopy(subject.model)
    if subject.pickles:
        model = pickle.loads(pickle.dumps(subject.model))
    layers = _layers(model, subject.wide)
    for found, wanted in zip(layers, subject.layers, strict=True):
        _is_same(found, wanted)
    linear = [layer.linear for layer in layers]
    before = [[x.clone() for x in each.operator.tensors().values()] for each in linear]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for each, kept in zip(linear, before, strict=True):
        assert all(map(torch.equal, each.operator.tensors().values(), kept)), "weights are shared"


# --- helpers ----------------------------------------------------------------------------------


def _hooks(model: nn.Module) -> list[int]:
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [len(getattr(module, kind)) for module in model.modules() for kind in kinds]


def _kinds(layers: list[Layer]) -> Collection[Layer]:
    """Return the last layer of each mixer class."""
    return {type(x.mixer.module): x for x in layers}.values()


def _run(model: Any, inputs: Tensor, mask: Tensor | None = None) -> Any:
    takes = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    return model(inputs, **options, **({} if mask is None else {"attention_mask": mask}))


def _layers(model: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> list[Layer]:
    with torch.no_grad(), trace(model) as record:
        _run(model, inputs, mask)
    return record.layers


def _takes_mask(model: Any) -> bool:
    return "attention_mask" in inspect.signature(model.forward).parameters


def _as(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _close(
    said: str, found: Tensor, wanted: Tensor, size: Tensor | None = None, limit: float = _SAME
) -> None:
    error = _error(found, wanted, size)
    assert error <= limit, f"{said}: off by {error:.1e} > {limit:.1e}"


def _error(found: Tensor, wanted: Tensor, size: Tensor | None = None) -> float:
    """Return max|a - b| / max|b|, or / max|size| if ``size`` is given; infinite for NaN."""
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    found, wanted = found.detach().double(), wanted.detach().double()
    scale = (wanted if size is None else size.detach().double()).abs().max().clamp_min(1e-30)
    return float(((found - wanted).abs().max() / scale).nan_to_num(torch.inf))


def _is_there(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


_NEEDS = {"LoRA": "peft", "offload": "accelerate"}
_OF_SEQUENCES = ("lengths", "left padding", "right padding")
#: The function that checks each clause, by the clause's name.
CLAUSES: Mapping[str, Callable[[_Subject], None]] = MappingProxyType(
    {
        "float32": _reproduces(torch.float32),
        "float64": _reproduces(torch.float64),
        "bfloat16": _reproduces(torch.bfloat16),
        "matrices": _matrices,
        "batches": _batches,
        "lengths": _lengths,
        "left padding": _padding("left"),
        "right padding": _padding("right"),
        "sums": _sums,
        "layers": _at_layers,
        "neurons": _at_neurons,
        "heads": _at_heads,
        "knock-out": _knock_out,
        "LoRA": _lora,
        "checkpointing": _checkpointing,
        "offload": _offload,
        "copy and pickle": _copies,
    }
)
