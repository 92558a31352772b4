"""Comparison of several methods on one input."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from captum.attr import Attribution
from captum.attr._utils.attribution import GradientAttribution, InternalAttribution
from torch import Tensor, nn

from ..errors import InputError, OptionError
from ..tracing import Graph, find_model
from .call import checks
from .call.given import Reader, with_argument_advice
from .call.inputs import (
    BatchPart,
    as_tuple,
    batch_parts,
    call_model,
    check_batch,
    embeddings_of,
    single_input,
)
from .call.layout import PatchGrid
from .call.progress import bar, counting_runs, shown
from .call.targets import logits_of
from .engine.method import ImplicitMethod, SSMAttribution
from .engine.result import NamedTokens, Names
from .engine.run import shared_forward
from .engine.sums import Sums, attribute_with_sums, joined
from .text.tokens import Tokens

#: A method, or the class of a method, or the name of the class.
Method: TypeAlias = Attribution | type[Attribution] | str
#: Methods by unique names.
Named: TypeAlias = dict[str, Attribution | type[Attribution]]


class Comparison(dict[str, Tensor], NamedTokens):
    """Relevance by method name, the result of :func:`compare`.

    A dict with methods to show it in notebooks and to save it.

    Args:
        relevance: the relevance of each method, by name.
        names: names of each example's tokens, shown in the HTML page. Default: None, positions.
        sums: the sum of relevance and its expected value, by name, for methods whose relevance
            should sum to a known number. Default: None, for no method.

    Example:
        >>> import torch
        >>> from captum_ssm.attr import Comparison
        >>> found = Comparison({"one": torch.tensor([[0.5, 2.0]])}).named(["anna", "owns"])
        >>> list(found), found.names
        (['one'], (('anna', 'owns'),))
    """

    def __init__(
        self,
        relevance: Mapping[str, Tensor],
        names: Names | None = None,
        sums: Mapping[str, Sums] | None = None,
    ) -> None:
        super().__init__(relevance)
        self.names = names
        self.sums = dict(sums or {})

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(relevance.shape)}" for name, relevance in self.items())
        return f"Comparison({shapes})"

    def against(self, before: Comparison) -> Comparison:
        """Return the relevance in two runs and the difference, by aligned tokens.

        The runs differ in the prompt, or in the model, such as before and after fine-tuning.
        A replaced token shares its replacement's position. A new token has relevance 0 before.

        Args:
            before: the result of :func:`compare` for the other run, with the same methods.

        Raises:
            InputError: if there are several examples, or if methods or tokens do not correspond.

        Example:
            >>> import torch
            >>> from captum_ssm.attr import Comparison
            >>> one = Comparison({"m": torch.tensor([[1.0, 2.0]])}).named(["the", "kite"])
            >>> other = Comparison({"m": torch.tensor([[1.5, 5.0]])}).named(["the", "lamp"])
            >>> found = other.against(one)
            >>> found.names, found["m, difference"].tolist()
            ((('the', 'kite → lamp'),), [[0.5, 3.0]])
        """
        (count, length), (count_before, old_length) = self._tokens(), before._tokens()
        if list(self) != list(before) or count > 1 or count_before > 1:
            raise InputError(
                f"before has {count_before} examples for {', '.join(before)}, but this result has "
                f"{count} for {', '.join(self)}. Pass one example each, and the same methods."
            )
        if (self.names is None or before.names is None) and length != old_length:
            raise InputError(
                f"before has {old_length} tokens and this result has {length}, but they cannot be "
                "aligned without names. Pass tokenizer= to compare(), or call named(tokens) on "
                "both."
            )
        # tokens without names are aligned by position
        names: tuple[Sequence[Any], Sequence[Any]] = (range(old_length), range(length))
        if self.names is not None and before.names is not None:
            names = (before.names[0], self.names[0])
        pairs = aligned(*names)
        positions_before, positions = zip(*pairs, strict=True)

        def at(x: Tensor, where: Sequence[int | None]) -> Tensor:
            """Return relevance (1, n) at n positions, and 0 for a token that is not in the run."""
            return torch.stack([x.new_zeros(()) if i is None else x[0, i] for i in where])[None]

        out: dict[str, Tensor] = {}
        for name, after in self.items():
            old, new = at(before[name], positions_before), at(after, positions)
            out |= {f"{name}, before": old, name: new, f"{name}, difference": new - old}
        if self.names is None:
            return Comparison(out)
        labels = []
        for pair in pairs:
            texts = [x[i] for x, i in zip(names, pair, strict=True) if i is not None]
            labels.append(" → ".join(map(str, dict.fromkeys(texts))))
        return Comparison(out).named(labels)

    def _state(self) -> dict[str, Any]:
        return {"relevance": dict(self), "names": self.names, "sums": self.sums}

    def _columns(self) -> Mapping[str, Tensor]:
        return self

    def _tokens(self) -> tuple[int, int]:
        first = next(iter(self.values()))
        return first.shape[0], first.shape[1]

    def _with_names(self, names: Names) -> Comparison:
        return Comparison(self, names, self.sums)


def aligned(before: Sequence[Any], after: Sequence[Any]) -> list[tuple[int | None, int | None]]:
    """Align two lists of tokens; return pairs of positions, None for a token without a partner."""
    pairs: list[tuple[int | None, int | None]] = []
    matcher = SequenceMatcher(None, list(before), list(after), autojunk=False)
    for _, start_before, end_before, start_after, end_after in matcher.get_opcodes():
        pairs += zip_longest(range(start_before, end_before), range(start_after, end_after))
    return pairs


@with_argument_advice
def compare(
    forward_func: Callable[..., Any],
    inputs: Any,
    methods: Method | Sequence[Method] | Mapping[str, Method] | None = None,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    model: nn.Module | None = None,
    layers: Sequence[str | nn.Module] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    per_token: bool = True,
    internal_batch_size: int | None = None,
    show_progress: bool = False,
) -> Comparison:
    """Explain the same input and target with several methods.

    The methods share one traced forward run and its gradients; :class:`LatimFlow`,
    :class:`MambaLRP`, :class:`LatimLogit` and Captum's methods run the model themselves. The
    results equal the results of single calls.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); a tuple of one such
            tensor; a tokenizer's result; or with a tokenizer a text.
        methods: a method, a list of methods, or a mapping of your names to methods, in which one
            method may occur several times with different ``options``. A method is a class or its
            name, of this package or of Captum, or an instance if it takes further arguments.
            Captum's gradient methods explain token ids at their embeddings. Default: None,
            LatimFlow with ``rule="balanced"`` (which tokens mattered) and ``rule="frozen"`` (which
            token was copied).
        target: the explained output, in Captum's forms, or with a tokenizer a token's text; see
            :meth:`MambaAttribution.attribute`. Default: None.
        additional_forward_args: further positional arguments of forward_func, for example an
            attention mask. Default: None.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers, for methods passed as classes. Default: None, all.
        options: further arguments of ``attribute`` for each method, by the method's name in the
            result. Default: None.
        tokenizer: the model's tokenizer, if inputs or target are texts. Default: None.
        per_token: return one number per token, (B, L), or for images per patch, (B, h, w), if
            there is a patch grid. False returns the inputs' shape. Default: True.
        internal_batch_size: largest number of examples per run. Default: None, all.
        show_progress: show a progress bar over parts of a batch and methods. Default: False.

    Returns:
        The relevance by method, in the order given, as a dict that can be shown and saved. The
        default names are ``get_name()``; a second method of that name is ``"... (2)"``.

    Raises:
        OptionError: if ``methods`` contains something else, if ``options`` names a method that is
            not compared, or if a method does not return one tensor.
        CaptumSSMError: all errors of the methods.

    Example:
        >>> import torch
        >>> from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution, compare
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> methods = [ImplicitAttentionRollout, MambaAttribution, LatimFlow]
        >>> found = compare(model, ids, methods, target=(-1, 3))
        >>> {name: tuple(relevance.shape) for name, relevance in found.items()}
        {'ImplicitAttentionRollout': (1, 4), 'MambaAttribution': (1, 4), 'LatimFlow': (1, 4)}
    """
    args = {"inputs": inputs, "target": target, "additional_forward_args": additional_forward_args}
    reader = Reader(tokenizer, forward_func, model)
    reader.convert(args, {})
    target = args["target"]
    tensor, _ = single_input(args["inputs"])
    additional = as_tuple(args["additional_forward_args"])
    check_batch(tensor, additional)
    checks.flags(per_token=per_token, show_progress=show_progress)
    from .catalogue import DEFAULT, with_rules  # it imports all methods

    methods = DEFAULT if methods is None else methods
    options = with_rules(methods, options)
    by_name = named_methods(methods)
    instances = {name: _instance_of(x, forward_func, model, layers) for name, x in by_name.items()}
    options_by_method = _options_by_method(options, instances)
    embedded: dict[str, Tensor] = {}
    for name, method in instances.items():
        _check_required(name, method, options_by_method[name])
        if _needs_embeddings(method, tensor):
            embedded[name] = _embed(name, isinstance(by_name[name], type), forward_func, tensor)
    own = [method for method in instances.values() if isinstance(method, SSMAttribution)]
    has_foreign = len(own) < len(instances)
    grid = None
    if has_foreign and tensor.dim() == 4:
        grid = PatchGrid(find_model(forward_func, model))
    results: dict[str, list[Tensor]] = {name: [] for name in instances}
    sums: dict[str, list[Sums]] = {}
    with bar("compare", show_progress):
        for part in shown(list(batch_parts(len(tensor), internal_batch_size))):
            with _shared_run(own), part.counting():
                rest = part.target(target), tuple(part(a) for a in additional)
                for name, method in shown(list(instances.items()), list(instances)):
                    options = {k: _select(part, k, v) for k, v in options_by_method[name].items()}
                    arguments = (part(embedded.get(name, tensor)), *rest)
                    by_token = per_token or name in embedded  # features of ids mean nothing
                    is_own = isinstance(method, SSMAttribution)
                    examples = _examples_to_run(method, options, len(arguments[0]))
                    counting: AbstractContextManager[Any] = nullcontext()
                    if not is_own:  # the model's runs show the progress of Captum's methods
                        counting = counting_runs(find_model(forward_func, model), examples)
                    with counting:
                        scores, its_sums = _relevance(method, arguments, options, by_token, grid)
                    if not isinstance(scores, Tensor):
                        raise OptionError(
                            f"The method {name} returned {type(scores).__name__}, not one tensor. "
                            "Leave out options such as return_convergence_delta, and methods of "
                            "several inputs."
                        )
                    results[name].append(scores.detach().to(tensor.device))
                    if its_sums is not None:
                        sums.setdefault(name, []).append(its_sums)
    relevance = {name: torch.cat(parts) for name, parts in results.items()}
    codec = None if reader.codec is None or tensor.dim() != 2 else reader.codec
    names = None if codec is None else tuple(Tokens.of(codec, ids) for ids in tensor)
    return Comparison(relevance, names, {name: joined(x) for name, x in sums.items()})


def named_methods(methods: Method | Sequence[Method] | Mapping[str, Method]) -> Named:
    """Return methods by unique names; a second method of the same name has the suffix (2)."""
    if isinstance(methods, str | type | Attribution):
        methods = [methods]
    if hasattr(methods, "encode"):
        raise OptionError("methods is a tokenizer. Pass the tokenizer as tokenizer=.")
    if not isinstance(methods, Sequence | Mapping):
        raise OptionError(
            f"methods={methods!r} is not a list of methods. Pass a list, such as "
            "methods=[MambaAttribution, LatimFlow]."
        )
    if not len(methods):
        raise OptionError("methods is empty. Pass at least one method, such as MambaAttribution.")
    if isinstance(methods, Mapping):
        return {name: _check_method(method) for name, method in methods.items()}
    named: Named = {}
    for method in map(_check_method, methods):
        name, count = method.get_name(), 1
        while (unique := name if count == 1 else f"{name} ({count})") in named:
            count += 1
        named[unique] = method
    return named


def _check_method(method: Any) -> Attribution | type[Attribution]:
    """Check a method, its class or its name; return the method or the class."""
    if isinstance(method, str):
        from .catalogue import method_named  # it imports all methods

        method = method_named(method, "methods")
    kind = method if isinstance(method, type) else type(method)
    if not issubclass(kind, Attribution) or not hasattr(kind, "attribute"):
        raise OptionError(
            f"methods contains {method!r}, which is not a Captum Attribution. Pass methods of "
            "captum_ssm or captum.attr that explain one tensor."
        )
    # the class can be constructed from the model alone, by _instance_of
    is_simple = issubclass(kind, SSMAttribution) or _required(kind) in (["forward_func"], ["model"])
    if isinstance(method, type) and not is_simple:
        raise OptionError(
            f"methods contains the class {method.__name__}, which needs further arguments. Pass an "
            f"instance, {method.__name__}(...)."
        )
    return method


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of arguments without a default, for a function or a class."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _instance_of(
    method: Attribution | type[Attribution],
    forward_func: Callable[..., Any],
    model: nn.Module | None,
    layers: Sequence[str | nn.Module] | None,
) -> Attribution:
    """Return an instance of a method; construct it on the model if ``method`` is a class."""
    if not isinstance(method, type):
        return method
    if issubclass(method, SSMAttribution):
        return method(forward_func, model, layers)
    captum_class: Callable[..., Attribution] = method
    return captum_class(_Logits(forward_func))


class _Logits(nn.Module):
    """A wrapper that makes forward_func a module with one output tensor, for Captum's methods."""

    def __init__(self, forward_func: Callable[..., Any]) -> None:
        super().__init__()
        self.forward_func = forward_func
        self.train(find_model(forward_func).training)

    def forward(self, inputs: Tensor, *additional: Any) -> Tensor:
        return logits_of(call_model(self.forward_func, inputs, additional))


def _check_required(name: str, method: Attribution, options: Mapping[str, Any]) -> None:
    """Raise if a method of Captum needs an argument that is not among its options."""
    if isinstance(method, SSMAttribution):
        return
    missing = [x for x in _required(method.attribute) if x != "inputs" and x not in options]
    if missing:
        raise OptionError(
            f"The method {name} needs the argument {' and '.join(missing)}. Pass "
            f"options={{{name!r}: {{{missing[0]!r}: ...}}}}."
        )


def _needs_embeddings(method: Attribution, ids: Tensor) -> bool:
    """Return True if a Captum method needs gradients at inputs, but the inputs are token ids."""
    # methods for a layer inside the model take gradients there, and ours embed ids themselves
    takes_gradients = isinstance(method, GradientAttribution) and not isinstance(
        method, InternalAttribution | SSMAttribution
    )
    return takes_gradients and not ids.is_floating_point()


def _embed(name: str, made_here: bool, forward_func: Callable[..., Any], ids: Tensor) -> Tensor:
    """Return the embeddings of ids; raise if they are not found, or the user made the method."""
    embeddings = embeddings_of(forward_func, ids) if made_here else None
    if embeddings is None:
        raise InputError(
            f"The method {name} needs gradients at inputs, but token ids have none. Pass "
            "embeddings (B, L, E) and a forward_func that takes them, or leave the method out."
        )
    return embeddings


def _shared_run(methods: Sequence[SSMAttribution]) -> AbstractContextManager[None]:
    """Return a context in which the methods share one run, with the graph that they need."""
    implicit = [method for method in methods if isinstance(method, ImplicitMethod)]
    graph: Graph = "all" if any(method.needs_gradient for method in implicit) else "tail"
    return shared_forward(graph, streams=any(method.needs_streams for method in implicit))


def _options_by_method(
    options: Mapping[str, Mapping[str, Any]] | None, methods: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Check the argument ``options``, and return the options of each method by name."""
    dicts: Any = {} if options is None else options
    if not isinstance(dicts, Mapping) or not all(isinstance(x, Mapping) for x in dicts.values()):
        raise OptionError(
            f"options={options!r} is not a dict of dicts. Pass the arguments of each method by the "
            "method's name, such as options={'LatimFlow': {'zero_bias': True}}."
        )
    for name in dicts:
        if name not in methods:
            raise OptionError(f"options has the key {name!r}. Pass only keys from {list(methods)}.")
    return {name: dicts.get(name, {}) for name in methods}


def _select(part: BatchPart, name: str, value: Any) -> Any:
    """Return an option's value for the ``part`` of the batch."""
    return part.target(value) if name == "contrast" else part(value)


def _examples_to_run(method: Attribution, options: Mapping[str, Any], batch: int) -> int | None:
    """Return how many examples Captum's method runs for a batch (for progress); None if unknown."""
    parameters = inspect.signature(method.attribute).parameters
    for name in ("n_steps", "n_samples", "nt_samples"):
        if name in parameters:
            count = options.get(name, parameters[name].default)
            return batch * count if isinstance(count, int) else None
    return None


def _relevance(
    method: Attribution,
    arguments: tuple[Tensor, Any, tuple[Any, ...]],
    options: Mapping[str, Any],
    per_token: bool,
    grid: PatchGrid | None,
) -> tuple[Any, Sums | None]:
    """Call a method; return relevance (per token, for Captum's methods too) and :class:`.Sums`."""
    inputs, target, additional = arguments
    kwargs = {"target": target, "additional_forward_args": additional or None}
    if isinstance(method, SSMAttribution):  # the user's options may have another per_token
        return attribute_with_sums(method, inputs, **kwargs, **{"per_token": per_token, **options})
    with nullcontext() if grid is None else grid.watch():
        relevance, sums = attribute_with_sums(method, inputs, **kwargs, **options)
    if not per_token or not isinstance(relevance, Tensor) or relevance.dim() == 2:
        return relevance, sums
    return relevance.sum(-1) if grid is None else grid.sums(relevance), sums
