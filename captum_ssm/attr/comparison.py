"""Several methods on one input, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from captum.attr import Attribution
from captum.attr._utils.attribution import GradientAttribution, InternalAttribution
from torch import Tensor, nn

from ..errors import InputError, OptionError
from ..tracing import Graph, find_model
from .call import checks
from .call.inputs import (
    BatchPart,
    as_tuple,
    batch_parts,
    call_model,
    check_batch,
    single_input,
)
from .call.layout import PatchGrid
from .call.targets import logits_of
from .engine.method import ImplicitMethod, SSMAttribution
from .engine.sharing import shared_forward

#: A method, a class of methods to be made on the compared model, or such a class of ours by name.
Method: TypeAlias = Attribution | type[Attribution] | str


def compare(
    forward_func: Callable[..., Any],
    methods: Sequence[Method] | Mapping[str, Method],
    inputs: Tensor | tuple[Tensor, ...],
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    model: nn.Module | None = None,
    layers: Sequence[str | nn.Module] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    per_token: bool = True,
    internal_batch_size: int | None = None,
) -> dict[str, Tensor]:
    """What several methods say of the same input and target.

    The model runs once for all methods that read one traced forward run, and each gradient is taken
    once; nothing of it is left when the call returns.  Methods that run the model under rules of
    their own (:class:`LatimFlow`, :class:`MambaLRP`, :class:`LatimLogit`, Captum's) run it
    themselves.  The results are those of the single calls.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        methods: classes of this package or their names, made as
            ``method(forward_func, model, layers)``; classes of Captum that take nothing but the
            forward_func, made on one that returns the logits; or instances, for methods with
            arguments of their own.  A mapping gives them names of your choice, under which one
            method may stand several times, with ``options`` of its own under each.
        inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
            one such tensor.
        target: what is explained, in Captum's forms; see :meth:`MambaAttribution.attribute`.
            Default: None.
        additional_forward_args: further positional arguments of forward_func, for example an
            attention mask. Default: None.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers that classes are to use. Default: None, all of them.
        options: further arguments of ``attribute`` for each method, by the method's name in the
            result. Default: None.
        per_token: one number per token, (B, L), or for images the patch grid (B, h, w) where
            there is one; else the inputs' shape. Default: True.
        internal_batch_size: run at most so many examples at a time. Default: None, all.

    Returns:
        The relevance by method, in the order given.  Without names of your choice a method is
        called what its ``get_name()`` says, the second of that name ``"... (2)"``.

    Raises:
        OptionError: for methods that are none, options of methods that are not compared, or a
            method that returns something else than one tensor.
        CaptumSSMError: what the methods raise.

    Example:
        >>> import torch
        >>> from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution, compare
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> methods = [ImplicitAttentionRollout, MambaAttribution, LatimFlow]
        >>> found = compare(model, methods, ids, target=(-1, 3))
        >>> {name: tuple(relevance.shape) for name, relevance in found.items()}
        {'Implicit Attention Rollout': (1, 4), 'Mamba Attribution': (1, 4), 'LATIM Flow': (1, 4)}
    """
    tensor, _ = single_input(inputs)
    additional = as_tuple(additional_forward_args)
    check_batch(tensor, additional)
    checks.flags(per_token=per_token)
    made = {
        name: _made(method, forward_func, model, layers) for name, method in named(methods).items()
    }
    chosen = _chosen(options, made)
    for name, method in made.items():
        _check_foreign(name, method, tensor, chosen[name])
    ours = [method for method in made.values() if isinstance(method, SSMAttribution)]
    foreign = len(ours) < len(made)
    grid = None
    if foreign and tensor.dim() == 4:
        grid = PatchGrid(find_model(forward_func, model))
    parts: dict[str, list[Tensor]] = {name: [] for name in made}
    for cut in batch_parts(len(tensor), internal_batch_size):
        with _sharing(ours), cut.counting():
            given = cut(tensor), cut.target(target), tuple(cut(a) for a in additional)
            for name, method in made.items():
                own = {key: _cut(cut, key, value) for key, value in chosen[name].items()}
                found = _relevance(method, given, own, per_token, grid)
                if not isinstance(found, Tensor):
                    raise OptionError(
                        f"{name} returned {type(found).__name__} in place of one tensor. Leave out "
                        "options such as return_convergence_delta, and methods of several inputs."
                    )
                parts[name].append(found.detach().to(tensor.device))
    return {name: torch.cat(found) for name, found in parts.items()}


def named(
    methods: Sequence[Method] | Mapping[str, Method],
) -> dict[str, Attribution | type[Attribution]]:
    """The methods by names of which no two are the same."""
    if isinstance(methods, str | type) or not isinstance(methods, Sequence | Mapping):
        raise OptionError(
            f"methods={methods!r} must be a list of methods, for example "
            "methods=[MambaAttribution, LatimFlow]."
        )
    if not len(methods):
        raise OptionError("methods is empty. Name at least one, such as MambaAttribution.")
    if isinstance(methods, Mapping):
        return {name: _checked(method) for name, method in methods.items()}
    named: dict[str, Attribution | type[Attribution]] = {}
    for method in map(_checked, methods):
        name, count = method.get_name(), 1
        while (unique := name if count == 1 else f"{name} ({count})") in named:
            count += 1
        named[unique] = method
    return named


def _checked(method: Any) -> Attribution | type[Attribution]:
    """A method or a class that can be made, a class of ours also by its name."""
    if isinstance(method, str):
        from .catalogue import METHODS  # which methods do without

        ours = {entry.name: entry.method for entry in METHODS}
        if method not in ours:
            raise OptionError(
                f"methods names {method!r}. Use one of {', '.join(map(repr, ours))}, or a class or "
                "an instance of a Captum attribution."
            )
        return ours[method]
    kind = method if isinstance(method, type) else type(method)
    if not issubclass(kind, Attribution) or not hasattr(kind, "attribute"):
        raise OptionError(
            f"methods holds {method!r}, which is no Captum attribution. Use methods of "
            "captum_ssm or captum.attr that explain one tensor."
        )
    known = issubclass(kind, SSMAttribution) or _required(kind) == ["forward_func"]
    if isinstance(method, type) and not known:
        raise OptionError(
            f"methods holds the class {method.__name__}. Make an instance of it: what its "
            "arguments are, only you know."
        )
    return method


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a function or a class cannot do without."""
    parameters = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _made(
    method: Attribution | type[Attribution],
    forward_func: Callable[..., Any],
    model: nn.Module | None,
    layers: Sequence[str | nn.Module] | None,
) -> Attribution:
    if not isinstance(method, type):
        return method
    if issubclass(method, SSMAttribution):
        return method(forward_func, model, layers)

    def run(inputs: Tensor, *additional: Any) -> Tensor:
        return logits_of(call_model(forward_func, inputs, additional))

    make: Callable[..., Attribution] = method
    return make(run)


def _check_foreign(
    name: str, method: Attribution, inputs: Tensor, options: Mapping[str, Any]
) -> None:
    """Raise for a method of Captum's that cannot be called on these inputs, with these options."""
    if isinstance(method, SSMAttribution):
        return
    missing = [x for x in _required(method.attribute) if x != "inputs" and x not in options]
    if missing:
        raise OptionError(
            f"{name} needs {' and '.join(missing)}. Pass options={{{name!r}: "
            f"{{{missing[0]!r}: ...}}}}."
        )
    at_inputs = isinstance(method, GradientAttribution) and not isinstance(
        method, InternalAttribution
    )
    if at_inputs and not inputs.is_floating_point():
        raise InputError(
            f"{name} takes gradients at the inputs, and token ids have none. Compare on embeddings "
            "(B, L, E), with a forward_func that takes them, or leave the method out."
        )


def _sharing(methods: Sequence[SSMAttribution]) -> AbstractContextManager[None]:
    """A context in which the methods share a forward run that serves them all."""
    traced = [method for method in methods if isinstance(method, ImplicitMethod)]
    graph: Graph = "all" if any(method.needs_gradient for method in traced) else "tail"
    return shared_forward(graph, streams=any(method.needs_streams for method in traced))


def _chosen(
    options: Mapping[str, Mapping[str, Any]] | None, names: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The options of each method."""
    given: Any = {} if options is None else options
    if not isinstance(given, Mapping) or not all(isinstance(x, Mapping) for x in given.values()):
        raise OptionError(
            f"options={options!r} must be a dict of dicts: the arguments of each method by its "
            "name, for example options={'LATIM Flow': {'zero_bias': True}}."
        )
    for name in given:
        if name not in names:
            raise OptionError(f"options names {name!r}, but the methods are {list(names)}.")
    return {name: given.get(name, {}) for name in names}


def _cut(cut: BatchPart, name: str, value: Any) -> Any:
    """An option, for the examples of the cut alone."""
    return cut.target(value) if name == "contrast" else cut(value)


def _relevance(
    method: Attribution,
    given: tuple[Tensor, Any, tuple[Any, ...]],
    options: Mapping[str, Any],
    per_token: bool,
    grid: PatchGrid | None,
) -> Any:
    """What the method says, by token if asked for; Captum's own know no tokens."""
    inputs, target, additional = given
    if isinstance(method, SSMAttribution):
        return method.attribute(
            inputs, target, additional or None, **{"per_token": per_token, **options}
        )
    with nullcontext() if grid is None else grid.watch():
        found = method.attribute(
            inputs, target=target, additional_forward_args=additional or None, **options
        )
    if not per_token or not isinstance(found, Tensor) or found.dim() == 2:
        return found
    return found.sum(-1) if grid is None else grid.sums(found)
