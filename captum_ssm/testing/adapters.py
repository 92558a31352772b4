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
_LIMIT = 1e-5
#: Errors up to this multiple of a module's own rounding error are accepted as well.
_ROUNDING = 32
_ALL = slice(None)
#: Largest error of an operator compared with a formula, by the formula's dtype.
_FORMULA_LIMIT = {torch.float64: 1e-9, torch.float32: 2e-6}


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
    names = [name for name in CLAUSES if clauses is None or name in clauses]
    if unknown := {*refuses, *(clauses or ())} - set(CLAUSES):
        raise ValueError(f"Unknown clauses {sorted(unknown)}. Use names from {list(CLAUSES)}.")
    if clauses is None:
        names = [name for name in names if _is_installed(_PACKAGES.get(name))]
    if inputs.dim() == 4:
        names = [name for name in names if name not in _NOT_FOR_IMAGES]
    subject = _Subject(make().eval(), inputs, formula, refuses)
    for name in names:
        try:
            with torch.random.fork_rng(devices=[]):
                CLAUSES[name](subject)
        except Exception as error:
            message = f"{name}: {type(error).__name__}: {error}"
            if name not in refuses:
                if isinstance(error, ImportError):
                    raise
                advice = "Correct the adapter, or name the clause in refuses."
                raise AssertionError(f"{message.rstrip('.')}. {advice}") from error
            if not re.search(refuses[name], message):
                raise AssertionError(f"{message} (refuses expects {refuses[name]!r})") from error
        else:
            assert name not in refuses, f"{name}: the clause holds, so remove it from refuses"
    return names


class _Subject:
    """The checked model in its own precision and in float64, with the input and traced layers."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, formula: Formula | None, refuses: Collection[str]
    ) -> None:
        self.original, self.inputs, self.formula, self.refuses = model, inputs, formula, refuses
        self.model: Any = copy.deepcopy(model).double()
        self.inputs64: Tensor = _cast(inputs, torch.float64)
        self._at_layers: dict[tuple[str, bool], Any] = {}
        self.hooks, self.can_pickle = _hook_counts(self.model), True
        try:
            pickle.dumps(self.model)
        except Exception:  # a class defined in a function, for example
            self.can_pickle = False
        self.layers = _traced(self.model, self.inputs64)
        assert self.layers, "the model ran no mixer: pass a model that calls a supported mixer"
        self.names = [layer.name for layer in self.layers]
        with torch.no_grad():
            output = logits_of(_run(self.model, self.inputs64))
        self.target: Any = 1 if output.dim() == 2 else (-1, min(3, output.shape[-1] - 1))

    @functools.cached_property
    def decomposition(self) -> Any:
        """Return LatimFlow's decomposition of the float64 model's output."""
        flow = LatimFlow(self.model, rule="frozen")
        return flow.decompose(self.inputs64, self.target, features=True)

    def decompose_at(self, name: str, at_input: bool) -> Any:
        """Return the decomposition of the float64 model's output at a layer, cached."""
        if (name, at_input) not in self._at_layers:
            method = LayerLatimFlow(self.model, name, rule="frozen")
            result = method.decompose(self.inputs64, self.target, None, at_input)
            self._at_layers[name, at_input] = result
        return self._at_layers[name, at_input]

    def accepts_padding(self, side: str) -> bool:
        """Return True if the mixers accept a batch that is padded on ``side``."""
        accepts = self.inputs.dim() < 4 and _accepts_mask(self.model)
        return accepts and f"{side} padding" not in self.refuses

    @property
    def module_sides(self) -> list[tuple[str, bool]]:
        """The first and the last module of each class of blocks and mixers, to be explained.

        Each is a pair: the first module's name with True, for the module's input, or the last
        module's name with False, for the output. Modules that run several times are left out.
        """
        names = {module: name for name, module in self.model.named_modules()}
        ran = [x for layer in self.layers for x in (layer.block, layer.mixer.module) if x in names]
        by_class: dict[type, list[str]] = {}
        for module in ran:
            if ran.count(module) == 1 and names[module]:
                by_class.setdefault(type(module), []).append(names[module])
        return [end for ends in by_class.values() for end in ((ends[0], True), (ends[-1], False))]


# --- the operator is the module ---------------------------------------------------------------


def _check_output_in(dtype: torch.dtype) -> Callable[[_Subject], None]:
    """Return the check that operators reproduce the modules' outputs in this dtype."""

    def check(subject: _Subject) -> None:
        model, inputs = copy.deepcopy(subject.original).to(dtype), _cast(subject.inputs, dtype)
        with torch.no_grad():
            before = logits_of(_run(model, inputs))
            with trace(model) as record:
                traced = logits_of(_run(model, inputs))
        if dtype != torch.bfloat16:
            _close("the output while it is traced", traced, before)
        for layer in record.layers:
            _check_output(layer)

    return check


def _check_output(layer: Layer) -> None:
    """Check that the operator reproduces the output; of bfloat16 modules it is in float32."""
    linear, output = layer.linear, layer.in_order(layer.output)
    expected = torch.float64 if output.dtype == torch.float64 else torch.float32
    by_operator = linear.output()
    for dtype in (linear.values.dtype, linear.operator.dtype, by_operator.dtype):
        assert dtype == expected, f"{layer.name}: linearized in {dtype}; compute in {expected}"
    limit = _LIMIT
    if output.dtype == torch.bfloat16:
        layer.verify()
        output = layer.in_order(_rerun(layer, torch.float32))
    if expected == torch.float32 and _error(by_operator, output) > limit:
        # the module may enlarge rounding errors, too
        limit = max(limit, _ROUNDING * _error(output, layer.in_order(_rerun(layer, torch.float64))))
    _close(f"{layer.name} ({layer.architecture})", by_operator, output, limit=limit)


def _rerun(layer: Layer, dtype: torch.dtype) -> Tensor:
    """Run a layer's module again on the recorded input in a different dtype; return the output."""
    module = copy.deepcopy(layer.mixer.module).to(dtype)
    args, kwargs = tree_map(lambda x: _cast(x, dtype), (layer.call.args, dict(layer.call.kwargs)))
    with torch.no_grad(), trace(module, operators=False) as record:
        module(*args, **kwargs)
    return record.layers[0].output


def _check_matrices(subject: _Subject) -> None:
    """Check the matrices of all mixers, and compare them with the user's formula."""
    for layer in subject.layers:
        _check_operator(layer)
    if subject.formula is None:
        return
    batches, checked = [subject.layers], 0
    padded_sides = [side for side in ("left", "right") if subject.accepts_padding(side)]
    batches += [_run_padded(subject, side)[0] for side in padded_sides]
    for layer in (layer for layers in batches for layer in layers):
        call = layer.call
        result = subject.formula(layer.mixer.module, call.hidden_states, call.kwargs)
        if result is None:
            continue
        checked += 1
        for name, exact in (result if isinstance(result, Mapping) else {"exact": result}).items():
            part = layer.linear.restrict(parse_components(name)).operator.per_channel()
            label, limit = f"{layer.name}: {name}, against the formula", _FORMULA_LIMIT[exact.dtype]
            _close(label, part.dense(None), exact, limit=limit)
            _close(label, part.dense("mean"), exact.mean(1), exact, limit)
            _close(label, part.rows([-1, 0], None), exact[:, :, [-1, 0]], exact, limit)
    assert checked, "the formula returns None for all mixers: return matrices for one of them"


def _check_operator(layer: Layer) -> None:
    """Check that an operator, its adjoint and its reductions agree with its matrices."""
    linear, name = layer.linear, layer.name
    operator, channels = linear.operator, linear.operator.per_channel()
    matrices = channels.dense(None)
    _close(f"{name}: the mean over channels", channels.dense("mean"), matrices.mean(1), matrices)
    u, v = torch.randn_like(linear.values), torch.randn_like(linear.values)
    mapped = u * operator.apply(v)
    terms = mapped.abs().sum()  # of all terms, which may cancel
    _close(f"{name}: the adjoint", (operator.transpose(u) * v).sum(), mapped.sum(), terms)
    for tensor in operator.tensors().values():
        assert not tensor.requires_grad, f"{name}: a coefficient requires grad; detach it"
    if channels is operator:
        product = torch.einsum("bcij,bjc->bic", matrices, linear.values.flatten(2))
        by_operator = operator.affine(linear.values).flatten(2)
        _close(f"{name}: matrices, values and bias", product + linear.bias.flatten(2), by_operator)


# --- the same tokens in other company ---------------------------------------------------------


def _check_batches(subject: _Subject) -> None:
    row = len(subject.inputs) - 1
    for alone, layer in _pairs(subject, subject.inputs64[row:], subject.layers):
        _check_same(alone, layer, slice(row, row + 1))


def _check_lengths(subject: _Subject) -> None:
    causal = not any(_matrices_of(x).triu(1).any() for x in subject.layers)
    for length in sorted({1, subject.inputs.shape[1] - 1}):
        for alone, layer in _pairs(subject, subject.inputs64[:, :length], subject.layers):
            _check_output(alone)
            if causal:
                _check_same(alone, layer, tokens=slice(length))


def _check_padding(side: str) -> Callable[[_Subject], None]:
    """Return the check of a batch that is padded on a side, ``"left"`` or ``"right"``."""

    def check(subject: _Subject) -> None:
        layers, mask, inputs = _run_padded(subject, side)
        for layer in layers:
            _check_output(layer)
            mixer_mask = layer.linear.mask
            assert mixer_mask is not None, f"{layer.name}: the mixer returns no mask"
            assert torch.equal(mixer_mask, mask.bool()), f"{layer.name}: returns a different mask"
            weights = _matrices_of(layer).abs().sum((1, 2))  # (B, L), of each source
            assert not weights[mask == 0].any(), f"{layer.name}: padded tokens are read"
        for row in range(1, len(mask)):
            real = mask[row].bool()
            for alone, layer in _pairs(subject, inputs[row : row + 1, real], layers):
                _check_same(alone, layer, slice(row, row + 1), real)

    return check


def _run_padded(subject: _Subject, side: str) -> tuple[list[Layer], Tensor, Tensor]:
    """Run three examples with all, half and two real tokens; return layers, mask and inputs."""
    assert _accepts_mask(subject.model), "the model's forward takes no attention_mask"
    inputs = subject.inputs64[[0, 1, 0]]
    tokens = inputs.shape[1]
    mask = torch.zeros(3, tokens, dtype=torch.long)
    for row, count in enumerate((tokens, tokens // 2 + 1, 2)):
        mask[row, tokens - count if side == "left" else 0 :][:count] = 1
    return _traced(subject.model, inputs, mask), mask, inputs


def _pairs(subject: _Subject, inputs: Tensor, layers: list[Layer]) -> Iterator[tuple[Layer, Layer]]:
    """Run the model on other inputs; yield each layer of this run with its match in ``layers``."""
    return zip(_traced(subject.model, inputs), layers, strict=True)


def _check_same(alone: Layer, batch: Layer, rows: Any = _ALL, tokens: Any = _ALL) -> None:
    """Check that a layer has the matrices, values and bias of these rows and tokens of a batch."""
    matrices, batch_matrices = _matrices_of(alone), _matrices_of(batch)
    own, larger = alone.linear, batch.linear
    part = batch_matrices[rows][:, :, tokens][..., tokens]
    _close(f"{alone.name}: matrices in a batch and by themselves", matrices, part, batch_matrices)
    for name in ("values", "bias"):
        matrices, part = getattr(own, name), getattr(larger, name)[rows, tokens]
        _close(f"{alone.name}: {name} in a batch and by themselves", matrices, part, larger.values)


def _matrices_of(layer: Layer) -> Tensor:
    """Return the matrices of all channels (B, H * P, L, L), cached as long as the layer exists."""
    if layer not in _MATRICES:
        _MATRICES[layer] = layer.operator.per_channel().dense(None)
    return _MATRICES[layer]


_MATRICES: weakref.WeakKeyDictionary[Layer, Tensor] = weakref.WeakKeyDictionary()


# --- methods on adapters ----------------------------------------------------------------------


def _check_sums(subject: _Subject) -> None:
    """Check that LatimFlow's relevance sums to the output, by token and role, also if padded."""
    centered = LatimFlow(subject.model).decompose(subject.inputs64, subject.target, rule="centered")
    for rule, result in (("frozen", subject.decomposition), ("centered", centered)):
        assert result.roles is not None
        _check_sum(f"LatimFlow, rule={rule!r}", result)
        if subject.inputs.dim() < 4:  # an image's tokens are patches
            _close("the sum of roles", torch.stack([*result.roles.values()]).sum(0), result.tokens)
    if subject.accepts_padding("left"):
        _, mask, inputs = _run_padded(subject, "left")
        flow = LatimFlow(lambda x, m: _run(subject.model, x, m), subject.model)
        result = flow.decompose(inputs, subject.target, mask, roles=False)
        _check_sum("LatimFlow of a padded batch", result)
        assert not result.tokens[mask == 0].any(), "padded tokens have relevance"


def _check_sum(name: str, result: Any) -> None:
    """Check that the relevance and biases of a decomposition sum to its output."""
    size = result.inputs.abs().flatten(1).sum(1) + result.output.abs()
    if result.past is not None:
        size = size + result.past.abs().flatten(1).sum(1)
    error = result.delta / size.clamp_min(1e-30)
    _close(f"{name}: the sum of relevance and biases", 1 + error, torch.ones_like(error))


def _check_layers(subject: _Subject) -> None:
    mixers = dict(zip(subject.names, subject.decomposition.mixers, strict=True))
    for name, at_input in subject.module_sides:
        result = subject.decompose_at(name, at_input)
        _check_sum(name, result)
        if name in mixers and not at_input:
            relevance = result.inputs[..., : result.sizes[0]]
            _close(f"{name}, against the whole decomposition", relevance, mixers[name])


def _check_neurons(subject: _Subject) -> None:
    """Check that the relevance of a neuron in the middle of each activation sums to its value."""
    module_sides = subject.module_sides
    for name, at_input in [*module_sides[:1], *(side for side in module_sides[1:] if not side[1])]:
        activations: list[Tensor] = []

        def neuron(activation: Any, activations: list[Tensor] = activations) -> Tensor:
            activation = first_tensor(activation)
            activations.append(activation.detach())
            middle = [size // 2 for size in activation.shape[1:-1]]
            value: Tensor = activation[(slice(None), *middle, 1)]
            return value

        method = NeuronLatimFlow(subject.model, name)
        explained = method.decompose(subject.inputs64, neuron, None, at_input)
        _check_sum(name, explained)
        last = activations[-1]
        _close(f"{name}: the neuron's own value", explained.output, neuron(last), last)


def _check_heads(subject: _Subject) -> None:
    """Check that relevance of heads and the biases after them sum to the relevance of mixers."""
    for layer in _last_by_class(subject.layers):
        name = layer.name
        if not name or subject.names.count(name) > 1:  # a mixer alone, or one that runs again
            continue
        at_output = subject.decompose_at(name, False)
        at_heads = subject.decompose_at(f"{name}.heads", False)
        _check_sum(f"{name}.heads", at_heads)
        biases = sum(bias for key, bias in at_heads.biases.items() if key.startswith(name))
        of_heads, of_mixer = (x.inputs.flatten(1).sum(1) for x in (at_heads, at_output))
        size = at_output.inputs.abs().flatten(1).sum(1)
        _close(f"{name}: the sum of heads and biases", of_heads + biases, of_mixer, size)


def _check_knock_out(subject: _Subject) -> None:
    """Check that cutting edges equals zeros in the matrices, with padding if it is accepted."""
    layers, mask, inputs = subject.layers, None, subject.inputs64
    if subject.accepts_padding("left"):
        layers, mask, inputs = _run_padded(subject, "left")
    sources, targets = slice(-4, -2), slice(-2, None)
    for layer in _last_by_class(layers):
        linear, outputs = layer.linear, list[Any]()
        sent, lost = torch.zeros_like(linear.values), torch.zeros_like(linear.values)
        sent[:, sources] = linear.values[:, sources]
        lost[:, targets] = linear.operator.apply(sent)[:, targets]
        expected = linear.project(linear.operator.affine(linear.values) - lost)
        changed = _error(expected, linear.output()) > 10 * _LIMIT
        assert changed or linear.values.shape[1] < 4, f"{layer.name}: cut edges change nothing"
        append = functools.partial(_append_output, outputs)
        cut = knock_out(subject.model, Edges(layer.name or 0, sources, targets))
        # hooked last, so that it sees the output without the edges
        with torch.no_grad(), cut, layer.mixer.module.register_forward_hook(append):
            _run(subject.model, inputs, mask)
        _close(f"{layer.name}, against zeroed entries", layer.in_order(outputs[-1]), expected)


def _append_output(outputs: list[Any], module: Any, args: Any, output: Any) -> None:
    outputs.append(first_tensor(output))


# --- models that are not plain ----------------------------------------------------------------


def _check_lora(subject: _Subject) -> None:
    peft = optional("peft", "peft", "The clause on LoRA")
    model = copy.deepcopy(subject.model)
    mixers = nn.ModuleList(layer.mixer.module for layer in _traced(model, subject.inputs64))
    linear = [name for name, x in mixers.named_modules() if type(x) is nn.Linear and "." in name]
    assert linear, "no mixer has a linear layer"
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=linear)
    peft.inject_adapter_in_model(config, mixers)
    for name, parameter in mixers.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    layers = _traced(model.double().eval(), subject.inputs64)
    for layer in layers:
        _check_output(layer)
    changes = max(_error(x.output, y.output) for x, y in zip(layers, subject.layers, strict=True))
    assert changes > _LIMIT, "LoRA changes no mixer's output"


def _check_checkpointing(subject: _Subject) -> None:
    model = copy.deepcopy(subject.model)
    assert getattr(model, "supports_gradient_checkpointing", False), "not supported by the model"
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    _check_same_relevance(subject, model)


def _check_offload(subject: _Subject) -> None:
    accelerate = optional("accelerate", "accelerate", "The clause on offloading")
    blocks = [type(x.block or x.mixer.module).__name__ for x in subject.layers]
    model = copy.deepcopy(subject.model)
    model = accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=blocks)
    assert any(x.is_meta for x in model.parameters()), "no weight was offloaded"
    with torch.no_grad():
        expected, output = (logits_of(_run(x, subject.inputs64)) for x in (subject.model, model))
    _close("the output of the offloaded model", output, expected)
    _check_same_relevance(subject, model)


def _check_same_relevance(subject: _Subject, model: nn.Module) -> None:
    for layer, plain in zip(_traced(model, subject.inputs64), subject.layers, strict=True):
        _check_same(layer, plain)
    flow = LatimFlow(model).decompose(subject.inputs64, subject.target, rule="frozen", roles=False)
    _close("the relevance, against the plain model", flow.inputs, subject.decomposition.inputs)


def _check_copies(subject: _Subject) -> None:
    """Check that a copy of an explained model works, and that operators share no memory with it."""
    assert _hook_counts(subject.model) == subject.hooks, "hooks are left on the model"
    model = copy.deepcopy(subject.model)
    if subject.can_pickle:
        model = pickle.loads(pickle.dumps(subject.model))
    layers = _traced(model, subject.inputs64)
    for layer, original in zip(layers, subject.layers, strict=True):
        _check_same(layer, original)
    mixers = [layer.linear for layer in layers]
    before = [[x.clone() for x in mixer.operator.tensors().values()] for mixer in mixers]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for mixer, saved in zip(mixers, before, strict=True):
        assert all(map(torch.equal, mixer.operator.tensors().values(), saved)), "weights are shared"


# --- helpers ----------------------------------------------------------------------------------


def _hook_counts(model: nn.Module) -> list[int]:
    """Return the number of hooks of each kind, of each module."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [len(getattr(module, kind)) for module in model.modules() for kind in kinds]


def _last_by_class(layers: list[Layer]) -> Collection[Layer]:
    """Return the last layer of each mixer class."""
    return {type(x.mixer.module): x for x in layers}.values()


def _run(model: Any, inputs: Tensor, mask: Tensor | None = None) -> Any:
    """Run a model with the options that its forward accepts: no cache, and the mask if passed."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    return model(inputs, **options, **({} if mask is None else {"attention_mask": mask}))


def _traced(model: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> list[Layer]:
    """Run a model, and return the layers of its trace."""
    with torch.no_grad(), trace(model) as record:
        _run(model, inputs, mask)
    return record.layers


def _accepts_mask(model: Any) -> bool:
    return "attention_mask" in inspect.signature(model.forward).parameters


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Convert floating tensors to ``dtype``; return everything else unchanged."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _close(
    label: str, found: Tensor, expected: Tensor, size: Tensor | None = None, limit: float = _LIMIT
) -> None:
    """Raise unless the relative error is at most ``limit``; ``label`` begins the message."""
    error = _error(found, expected, size)
    assert error <= limit, f"{label}: off by {error:.1e} > {limit:.1e}"


def _error(found: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Return max|a - b| / max|b|, or / max|size| if ``size`` is given; infinite for NaN."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    scale = (expected if size is None else size.detach().double()).abs().max().clamp_min(1e-30)
    return float(((found - expected).abs().max() / scale).nan_to_num(torch.inf))


def _is_installed(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


_PACKAGES = {"LoRA": "peft", "offload": "accelerate"}
_NOT_FOR_IMAGES = ("lengths", "left padding", "right padding")
#: The function that checks each clause, by the clause's name.
CLAUSES: Mapping[str, Callable[[_Subject], None]] = MappingProxyType(
    {
        "float32": _check_output_in(torch.float32),
        "float64": _check_output_in(torch.float64),
        "bfloat16": _check_output_in(torch.bfloat16),
        "matrices": _check_matrices,
        "batches": _check_batches,
        "lengths": _check_lengths,
        "left padding": _check_padding("left"),
        "right padding": _check_padding("right"),
        "sums": _check_sums,
        "layers": _check_layers,
        "neurons": _check_neurons,
        "heads": _check_heads,
        "knock-out": _check_knock_out,
        "LoRA": _check_lora,
        "checkpointing": _check_checkpointing,
        "offload": _check_offload,
        "copy and pickle": _check_copies,
    }
)
