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
from .call.given import Reader, called_by_name
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
        shapes = ", ".join(f"{name} {tuple(found.shape)}" for name, found in self.items())
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
        (count, here), (count_before, there) = self._tokens(), before._tokens()
        if list(self) != list(before) or count > 1 or count_before > 1:
            raise InputError(
                f"before has {count_before} examples for {', '.join(before)}, but this result has "
                f"{count} for {', '.join(self)}. Pass one example each, and the same methods."
            )
        if (self.names is None or before.names is None) and here != there:
            raise InputError(
                f"before has {there} tokens and this result has {here}, but they cannot be aligned "
                "without names. Pass tokenizer= to compare(), or call named(tokens) on both."
            )
        names: tuple[Sequence[Any], Sequence[Any]] = (range(there), range(here))
        if self.names is not None and before.names is not None:
            names = (before.names[0], self.names[0])
        places = aligned(*names)
        found: dict[str, Tensor] = {}
        for name, after in self.items():
            old, new = (
                torch.stack([x.new_zeros(()) if i is None else x[0, i] for i in each])[None]
                for x, each in zip((before[name], after), zip(*places, strict=True), strict=True)
            )
            found |= {f"{name}, before": old, name: new, f"{name}, difference": new - old}
        if self.names is None:
            return Comparison(found)
        said = []
        for pair in places:
            both = [n[i] for n, i in zip(names, pair, strict=True) if i is not None]
            said.append(" → ".join(map(str, dict.fromkeys(both))))
        return Comparison(found).named(said)

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
    found: list[tuple[int | None, int | None]] = []
    matcher = SequenceMatcher(None, list(before), list(after), autojunk=False)
    for _, start, end, begin, stop in matcher.get_opcodes():
        found += zip_longest(range(start, end), range(begin, stop))
    return found


@called_by_name
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
    given = {"inputs": inputs, "target": target, "additional_forward_args": additional_forward_args}
    reader = Reader(tokenizer, forward_func, model)
    reader.read(given, {})
    target = given["target"]
    tensor, _ = single_input(given["inputs"])
    additional = as_tuple(given["additional_forward_args"])
    check_batch(tensor, additional)
    checks.flags(per_token=per_token, show_progress=show_progress)
    from .catalogue import DEFAULT, with_rules  # it imports all methods

    methods = DEFAULT if methods is None else methods
    options = with_rules(methods, options)
    named = named_methods(methods)
    made = {name: _made(method, forward_func, model, layers) for name, method in named.items()}
    chosen = _chosen(options, made)
    embedded: dict[str, Tensor] = {}
    for name, method in made.items():
        _check_foreign(name, method, chosen[name])
        if _takes_gradients_at(method, tensor):
            embedded[name] = _embeddings(name, isinstance(named[name], type), forward_func, tensor)
    ours = [method for method in made.values() if isinstance(method, SSMAttribution)]
    foreign = len(ours) < len(made)
    grid = None
    if foreign and tensor.dim() == 4:
        grid = PatchGrid(find_model(forward_func, model))
    parts: dict[str, list[Tensor]] = {name: [] for name in made}
    sums: dict[str, list[Sums]] = {}
    with bar("compare", show_progress):
        for cut in shown(list(batch_parts(len(tensor), internal_batch_size))):
            with _sharing(ours), cut.counting():
                further = cut.target(target), tuple(cut(a) for a in additional)
                for name, method in shown(list(made.items()), list(made)):
                    of_method = {key: _cut(cut, key, value) for key, value in chosen[name].items()}
                    arguments = (cut(embedded.get(name, tensor)), *further)
                    summed = per_token or name in embedded
                    own = isinstance(method, SSMAttribution)
                    expected = _expected(method, of_method, len(arguments[0]))
                    with (
                        nullcontext()
                        if own
                        else counting_runs(find_model(forward_func, model), expected)
                    ):
                        found, its_sums = _relevance(method, arguments, of_method, summed, grid)
                    if not isinstance(found, Tensor):
                        raise OptionError(
                            f"The method {name} returned {type(found).__name__}, not one tensor. "
                            "Leave out options such as return_convergence_delta, and methods of "
                            "several inputs."
                        )
                    parts[name].append(found.detach().to(tensor.device))
                    if its_sums is not None:
                        sums.setdefault(name, []).append(its_sums)
    relevance = {name: torch.cat(found) for name, found in parts.items()}
    named_by = None if reader.codec is None or tensor.dim() != 2 else reader.codec
    names = None if named_by is None else tuple(Tokens.of(named_by, ids) for ids in tensor)
    return Comparison(relevance, names, {name: joined(each) for name, each in sums.items()})


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
        return {name: _checked(method) for name, method in methods.items()}
    named: Named = {}
    for method in map(_checked, methods):
        name, count = method.get_name(), 1
        while (unique := name if count == 1 else f"{name} ({count})") in named:
            count += 1
        named[unique] = method
    return named


def _checked(method: Any) -> Attribution | type[Attribution]:
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
    known = issubclass(kind, SSMAttribution) or _required(kind) in (["forward_func"], ["model"])
    if isinstance(method, type) and not known:
        raise OptionError(
            f"methods contains the class {method.__name__}, which needs further arguments. Pass an "
            f"instance, {method.__name__}(...)."
        )
    return method


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of arguments without a default, for a function or a class."""
    parameters = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _made(
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
    make: Callable[..., Attribution] = method
    return make(_Logits(forward_func))


class _Logits(nn.Module):
    """A wrapper that makes forward_func a module with one output tensor, for Captum's methods."""

    def __init__(self, forward_func: Callable[..., Any]) -> None:
        super().__init__()
        self.forward_func = forward_func
        self.train(find_model(forward_func).training)

    def forward(self, inputs: Tensor, *additional: Any) -> Tensor:
        return logits_of(call_model(self.forward_func, inputs, additional))


def _check_foreign(name: str, method: Attribution, options: Mapping[str, Any]) -> None:
    """Raise if a method of Captum needs an argument that is not among its options."""
    if isinstance(method, SSMAttribution):
        return
    missing = [x for x in _required(method.attribute) if x != "inputs" and x not in options]
    if missing:
        raise OptionError(
            f"The method {name} needs the argument {' and '.join(missing)}. Pass "
            f"options={{{name!r}: {{{missing[0]!r}: ...}}}}."
        )


def _takes_gradients_at(method: Attribution, ids: Tensor) -> bool:
    """Return True if a Captum method needs gradients at inputs, but the inputs are token ids."""
    at_inputs = isinstance(method, GradientAttribution) and not isinstance(
        method, InternalAttribution | SSMAttribution
    )
    return at_inputs and not ids.is_floating_point()


def _embeddings(
    name: str, made_here: bool, forward_func: Callable[..., Any], ids: Tensor
) -> Tensor:
    """Return the embeddings of ids; raise if they are not found, or the user made the method."""
    found = embeddings_of(forward_func, ids) if made_here else None
    if found is None:
        raise InputError(
            f"The method {name} needs gradients at inputs, but token ids have none. Pass "
            "embeddings (B, L, E) and a forward_func that takes them, or leave the method out."
        )
    return found


def _sharing(methods: Sequence[SSMAttribution]) -> AbstractContextManager[None]:
    """Return a context in which the methods share one forward run."""
    traced = [method for method in methods if isinstance(method, ImplicitMethod)]
    graph: Graph = "all" if any(method.needs_gradient for method in traced) else "tail"
    return shared_forward(graph, streams=any(method.needs_streams for method in traced))


def _chosen(
    options: Mapping[str, Mapping[str, Any]] | None, names: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Check the argument ``options``, and return the options of each method by name."""
    named: Any = {} if options is None else options
    if not isinstance(named, Mapping) or not all(isinstance(x, Mapping) for x in named.values()):
        raise OptionError(
            f"options={options!r} is not a dict of dicts. Pass the arguments of each method by the "
            "method's name, such as options={'LatimFlow': {'zero_bias': True}}."
        )
    for name in named:
        if name not in names:
            raise OptionError(f"options has the key {name!r}. Pass only keys from {list(names)}.")
    return {name: named.get(name, {}) for name in names}


def _cut(cut: BatchPart, name: str, value: Any) -> Any:
    """Return an option's value for the part of the batch that ``cut`` selects."""
    return cut.target(value) if name == "contrast" else cut(value)


def _expected(method: Attribution, options: Mapping[str, Any], batch: int) -> int | None:
    """Return how many examples Captum's method runs together; None if no option says so."""
    known = inspect.signature(method.attribute).parameters
    for name in ("n_steps", "n_samples", "nt_samples"):
        if name in known:
            count = options.get(name, known[name].default)
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
    named = {"target": target, "additional_forward_args": additional or None}
    if isinstance(method, SSMAttribution):
        return attribute_with_sums(method, inputs, **named, **{"per_token": per_token, **options})
    with nullcontext() if grid is None else grid.watch():
        found, sums = attribute_with_sums(method, inputs, **named, **options)
    if not per_token or not isinstance(found, Tensor) or found.dim() == 2:
        return found, sums
    return found.sum(-1) if grid is None else grid.sums(found), sums
