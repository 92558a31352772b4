"""Check an explanation method: Captum's interface, and every option on every kind of input."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution, NoiseTunnel
from captum.metrics import sensitivity_max
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from ..errors import CaptumSSMError, GradientModeError, PaddedExampleError
from .options import OPTIONS, TARGET, ByKind, Values
from .small import Vision, padded_ids, randomized
from .small import language as small_language

#: The clauses (requirements of a method), in the order in which they are checked.
CLAUSES = (
    "signature", "results", "options", "padding", "parts", "modes", "precision", "delta", "traces",
    "refusals", "captum",
)  # fmt: skip
#: Kinds of inputs: token ids, embeddings of token ids, and images.
KINDS = ("ids", "embeddings", "images")


def check_method(
    method: Any,
    *,
    options: Mapping[str, Values] | None = None,
    clauses: Collection[str] = CLAUSES,
    kinds: Collection[str] = KINDS,
    language: Callable[[], Any] | None = None,
    seed: int = 0,
) -> None:
    """Check that an explanation method keeps all promises of Captum and this package.

    Every value of every option of ``attribute`` is tried on a padded batch. The result is compared
    with the result for a single example, for parts of the batch under ``torch.no_grad()``, and for
    bfloat16. The inputs are token ids, embeddings and images.

    Args:
        method: the method's class, called as ``method(model)``.
        options: values to try for new options, or instead of the known values, by option name.
            Default: None.
        clauses: the names of the clauses to check. Default: :data:`CLAUSES`, all.
        kinds: the kinds of inputs. Default: :data:`KINDS`, all.
        language: a function that builds the language model, with 19 tokens and two layers of 16
            channels, whose second argument is the attention mask. Default: None, a small Mamba
            from transformers.
        seed: the seed of the models and inputs. Default: 0.

    Raises:
        AssertionError: when a clause does not hold; the message names failed clauses and options.

    Example:
        >>> from captum_ssm import LatimNorm
        >>> from captum_ssm.testing.methods import check_method
        >>> check_method(LatimNorm, clauses=["signature", "padding"], kinds=["ids"])
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        checker = _Checker(method, {**OPTIONS, **(options or {})}, kinds, language)
        for clause in clauses:
            checker.run(clause)
    if checker.failures:
        raise AssertionError(
            f"{len(checker.failures)} checks of {checker.name} failed. Correct the method:\n"
            + "\n".join(f"- {failure}" for failure in checker.failures)
        )


class _Case(NamedTuple):
    """A model with inputs of one kind, a target for each example, and an attention mask."""

    kind: str
    model: Any
    inputs: Any
    target: Any
    mask: Tensor | None

    def real(self, example: int) -> Tensor:
        """Return a mask (L,) of an example's tokens, True for tokens that are not padding."""
        tokens = torch.ones(len(self.inputs[0])) if self.mask is None else self.mask[example]
        return tokens.bool()

    def value(self, value: Any) -> Any:
        """Return an option's value for this case, chosen by kind if it is a :class:`ByKind`."""
        return getattr(value, self.kind) if isinstance(value, ByKind) else value

    def halved(self) -> _Case:
        """Return the case with weights and inputs converted to bfloat16, without rounding."""
        x, model = self.inputs, copy.deepcopy(self.model).bfloat16()
        return self._replace(model=model, inputs=x.bfloat16() if x.is_floating_point() else x)


class _Checker:
    """Runs the clauses on one method, and collects the failures in ``failures``."""

    def __init__(
        self,
        method: Any,
        options: Mapping[str, Values],
        kinds: Collection[str],
        language: Callable[[], Any] | None,
    ) -> None:
        self.method, self.kinds, self.failures = method, kinds, list[str]()
        self.name = getattr(method, "__name__", repr(method))
        self.parameters = inspect.signature(method.attribute).parameters
        self.taken = {name: options[name] for name in self.parameters if name in options}
        self.unknown = [name for name in self.parameters if name not in {"self", *options}]
        self._wholes: dict[tuple[str, str], Tensor] = {}
        self._halved: dict[str, _Case] = {}
        # Weights and inputs that bfloat16 holds exactly: precision compares with the same numbers.
        model, (ids, mask) = (language or small_language)().bfloat16().double(), padded_ids()
        vision = randomized(Vision()).bfloat16().double()
        embedded = model.get_input_embeddings()(ids).detach()
        pictures = torch.randn(2, 3, 12, 12).bfloat16().double()
        self.cases = {
            "ids": _Case("ids", model, ids, TARGET.ids, mask),
            "embeddings": _Case("embeddings", model, embedded, TARGET.embeddings, mask),
            "images": _Case("images", vision, pictures, TARGET.images, None),
        }

    def run(self, clause: str) -> None:
        """Check one clause, and add all failures of the clause to ``failures``."""
        if clause not in CLAUSES:
            raise ValueError(f"clauses names {clause!r}. Use names from {', '.join(CLAUSES)}.")
        check = getattr(self, clause)
        if clause not in (*_BY_KIND, *_BY_OPTION):
            with self.noted(clause):
                check()
            return
        for kind in self.kinds:
            case = self.cases[kind]
            with self.noted(f"{clause}, {kind}"):
                check(case)
            for name, values in self.taken.items() if clause in _BY_OPTION else ():
                for value in map(case.value, values.differ):
                    with self.noted(f"{clause}, {kind}, {_shown(name, value)}"):
                        check(case, **{name: value})

    @contextmanager
    def noted(self, where: str) -> Iterator[None]:
        """Append an exception raised inside the ``with`` to ``failures``, and continue after it."""
        try:
            yield
        except Exception as error:
            what = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            self.failures.append(f"{where}: {what}{error}")

    def found(self, case: _Case, **options: Any) -> Any:
        """Run the method on a case with some options, and return the relevance."""
        return self.method(case.model).attribute(case.inputs, case.target, case.mask, **options)

    def whole(self, case: _Case, options: dict[str, Any]) -> Tensor:
        """Return the method's relevance for a case; results are cached by kind and options."""
        key = (case.kind, repr(options))
        if key not in self._wholes:
            self._wholes[key] = self.found(case, **options)
        return self._wholes[key]

    # --- all inputs ------------------------------------------------------------------------------

    def signature(self) -> None:
        method, parameters = self.method, list(self.parameters.values())
        _require(issubclass(method, Attribution), "the method must subclass Attribution")
        _require(
            not self.unknown, f"no values to try of {self.unknown}: pass options={{name: Values}}"
        )
        names = [each.name for each in parameters[:4]]
        first = ["self", "inputs", "target", "additional_forward_args"]
        _require(names == first, f"attribute takes {names} first, but must take {first}")
        kinds = [each.kind for each in parameters[4:]]
        _require(set(kinds) <= {inspect.Parameter.KEYWORD_ONLY}, "options must be keyword-only")
        lacking = [each.name for each in parameters[2:] if each.default is each.empty]
        _require(not lacking, f"the arguments {lacking} of attribute need defaults")
        made, name = method(self.cases["ids"].model), method.get_name()
        _require(made.get_name() == name and name.split() and name == " ".join(name.split()),
                 f"get_name() is {name!r}: return words with single spaces")  # fmt: skip
        _require(callable(made.forward_func), "forward_func must be callable")
        _require(isinstance(made.multiplies_by_inputs, bool), "multiplies_by_inputs must be a bool")
        _require(made.has_convergence_delta() is ("return_convergence_delta" in self.parameters),
                 "has_convergence_delta() and return_convergence_delta differ")  # fmt: skip
        beneath = getattr(method.attribute, "__wrapped__", None)
        _require(beneath is not None and not hasattr(beneath, "__wrapped__"),
                 "attribute must have exactly one decorator")  # fmt: skip

    def delta(self) -> None:
        case = self.cases["embeddings"]
        made = self.method(case.model)
        if not made.has_convergence_delta():
            with _raises(NotImplementedError, "compute_convergence_delta() raises no error"):
                made.compute_convergence_delta()
            return
        for kind in self.kinds:
            found, delta = self.found(self.cases[kind], return_convergence_delta=True)
            _require(delta.shape == (2,), f"{kind}: the delta has shape {tuple(delta.shape)}")
            _require(bool((delta.abs() <= 1e-5 * found.abs().flatten(1).sum(1)).all()),
                     f"{kind}: the delta is {delta.tolist()}")  # fmt: skip
            _close(found, self.found(self.cases[kind]), f"{kind}: relevance with a delta differs")
        found, shift = self.found(case), torch.tensor([2.0, -1.0], dtype=torch.float64)
        moved = found + shift[:, None, None] / found[0].numel()
        again = made.compute_convergence_delta(moved, *case[2:])
        _close(again, -shift, "compute_convergence_delta is not output - attributions - biases")

    def refusals(self) -> None:
        _, model, ids, target, mask = self.cases["ids"]
        assert mask is not None
        given = {"inputs": ids, "target": target}
        for name, values in self.taken.items():
            for value in values.refused:
                with self.noted(f"refusals, {_shown(name, value)}"):
                    self._refused(name, model, **{**given, name: value})
        for name in {"baselines", "n_steps", "feature_mask"} - {*self.parameters}:
            self._refused(name, model, **given, **{name: None})
        hidden = torch.stack([mask[0], 0 * mask[0]])
        with _raises(PaddedExampleError, "an example with only padding raises no error"):
            self.method(model).attribute(ids, target, hidden)
        with _raises(CaptumSSMError, "a target at a padded token raises no error"):
            self.method(model).attribute(ids, (0, 3), mask)
        with _raises(CaptumSSMError, "a forward_func without a model raises no error"):
            self.method(lambda x: x)

    def _refused(self, name: str, model: nn.Module, **given: Any) -> None:
        try:
            self.method(model).attribute(**given)
        except CaptumSSMError as error:
            message = str(error)
            _require(name.rstrip("s") in message, f"the error does not name {name}: {message}")
            _require(message.endswith((".", "?", ")")), f"the error is not a sentence: {message}")
        else:
            raise AssertionError(f"the value of {name} must raise a CaptumSSMError")

    @torch.no_grad()
    def captum(self) -> None:
        case = self.cases["embeddings"]
        _, model, inputs, target, mask = case
        made, expected = self.method(model), self.found(case)
        beneath = made.attribute.__wrapped__(made, (inputs,), target, mask)
        _require(isinstance(beneath, tuple), "a tuple of inputs does not return a tuple")
        _equal(beneath[0], expected, "attribute without its decorator differs")
        other = copy.copy(self.method(copy.deepcopy(model)))
        other.forward_func, other.model = _function(case), model
        _close(other.attribute(*case[2:]), expected, "a copy with another forward_func differs")
        noisy = NoiseTunnel(made).attribute(
            inputs, nt_samples=2, stdevs=1e-12, target=target, additional_forward_args=mask
        )
        _close(noisy, expected, "NoiseTunnel without noise differs", 1e-5)
        still = sensitivity_max(
            made.attribute, inputs, lambda x, _: x, target=target, additional_forward_args=mask
        )
        _close(still, 0 * still, "sensitivity_max without a change is not 0", 1e-5)

    def options(self) -> None:
        cases = [self.cases[kind] for kind in self.kinds]
        plain = self.whole(cases[0], {})
        for name, values in self.taken.items():
            default = getattr(self.method, f"default_{name}", self.parameters[name].default)
            seen: dict[str, dict[str, Any]] = {f"its default {default!r}": {}}
            for value in values.differ:
                with self.noted(f"options, {_shown(name, value)}"):
                    given = {name: value}
                    if isinstance(value, str) and value == default:
                        _close(self.whole(cases[0], given), plain, "the default by name differs")
                        continue
                    for other, earlier in seen.items():
                        differs = any(self._differs(case, given, earlier) for case in cases)
                        _require(differs, f"gives the same relevance as {other}")
                    seen[repr(value)] = given
            for value in values.same:
                with self.noted(f"options, {_shown(name, value)}"), _silent():
                    found = self.found(cases[0], **{name: value})
                    _close(found, plain, "the relevance differs from the default's")

    def _differs(self, case: _Case, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return True if two choices of options give different relevance."""
        found, wanted = (
            self.whole(case, {name: case.value(value) for name, value in given.items()})
            for given in (one, other)
        )
        return _off(found, wanted) > 1e-6

    # --- of every kind of input ------------------------------------------------------------------

    def results(self, case: _Case) -> None:
        found = self.found(case)
        _require(type(found) is Tensor and not found.requires_grad, "the result is not detached")
        _require(found.is_contiguous() and found.is_leaf, "the result must be a contiguous leaf")
        _require(found.shape == case.inputs.shape, f"the result has shape {tuple(found.shape)}")
        _require(found.dtype == torch.float64, f"a float64 model gives {found.dtype}")
        _require(bool(found.isfinite().all()), "the result contains NaN or infinity")
        _require(bool(found.flatten(1).any(1).all()), "an example has no relevance")
        first = found.clone()
        found.mul_(2)
        _equal(self.found(case), first, "a second call returns a different result")
        (in_tuple,) = self.found(
            _Case(case.kind, case.model, (case.inputs,), case.target, case.mask)
        )
        _equal(in_tuple, first, "the input in a tuple gives a different result")
        tokens = self.found(case, per_token=True)
        if case.inputs.dim() == 4:
            _require(tokens.shape == (2, 3, 4), f"per_token=True has shape {tuple(tokens.shape)}")
        else:
            wanted = first.flatten(2).sum(2) if first.dim() == 3 else first
            _close(tokens, wanted, "per_token=True is not the sum over features")
        function = self.method(_function(case), model=case.model)
        _close(function.attribute(*case[2:]), first, "a function that runs the model differs")

    def traces(self, case: _Case) -> None:
        model = case.model
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index % 3 != 0)
            parameter.grad = torch.ones_like(parameter) if index % 2 else None
        before = _state(model)
        self.found(case)
        _same(before, _state(model))
        *_, last = (module for module in model.modules() if not list(module.children()))
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))
        for module, error in ((last, ZeroDivisionError), (first, KeyboardInterrupt)):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = module.register_forward_pre_hook(fail)
            before = _state(model)
            with _raises(error, "an error raised in the model is not raised by attribute"):
                self.found(case)
            _same(before, _state(model))
            handle.remove()
        before = _state(model)
        with _raises(CaptumSSMError, "a target outside of the output raises no error"):
            self.found(case._replace(target=(99, 99)))
        _same(before, _state(model))
        model.requires_grad_(True).zero_grad()

    def modes(self, case: _Case) -> None:
        whole = self.whole(case, {})
        with torch.no_grad():
            _equal(self.found(case), whole, "under no_grad the result differs")
            _require(not torch.is_grad_enabled(), "attribute leaves gradients switched on")
        with torch.inference_mode():
            try:
                _equal(self.found(case), whole, "under inference_mode the result differs")
            except GradientModeError:
                _require(self.method.needs_gradient, "inference_mode is refused without need")

    # --- of every kind of input, by every option -------------------------------------------------

    def padding(self, case: _Case, **options: Any) -> None:
        whole = self.whole(case, options)
        for example in (1,) if options else (0, 1):  # parts have each option of both
            real = case.real(example)
            alone = self.found(_alone(case, example), **_of(options, example))
            _close(whole[example, real], alone[0], f"example {example} differs by itself")
            if case.mask is not None:
                _require(not whole[example, ~real].any(), "padding has nonzero relevance")

    def parts(self, case: _Case, **options: Any) -> None:
        with torch.no_grad():
            parts = self.found(case, internal_batch_size=1, **options)
        _close(parts, self.whole(case, options), "with internal_batch_size=1 the result differs")

    def precision(self, case: _Case, **options: Any) -> None:
        if case.kind not in self._halved:
            self._halved[case.kind] = case.halved()
        found = self.found(self._halved[case.kind], **options)
        _require(found.dtype in (torch.float32, torch.bfloat16), f"the result is {found.dtype}")
        _close(found, self.whole(case, options), "in bfloat16 the result differs", 0.1)


_BY_KIND = ("results", "traces", "modes")
_BY_OPTION = ("padding", "parts", "precision")


def _of(value: Any, example: int) -> Any:
    """Select one example from an option's value, which may be a dict of values for all examples."""
    if isinstance(value, dict):
        return {name: _of(each, example) for name, each in value.items()}
    one_each = isinstance(value, Tensor) and value.dim() > 0 and len(value) == 2
    one_each |= isinstance(value, list) and isinstance(value[0], tuple)
    return value[example : example + 1] if one_each else value


def _alone(case: _Case, example: int) -> _Case:
    """Return one example of a case, without padding."""
    inputs = case.inputs[example : example + 1, case.real(example)]
    target = case.target[example] if isinstance(case.target, list) else case.target
    return _Case(case.kind, case.model, inputs, target, None)


def _function(case: _Case) -> Callable[..., Any]:
    """Return a function that runs a case's model; embeddings are passed as inputs_embeds."""
    if case.kind == "embeddings":
        return lambda x, mask: case.model(inputs_embeds=x, attention_mask=mask).logits
    return lambda *args: case.model(*args)


def _shown(name: str, value: Any) -> str:
    return f"{name}={getattr(value, '__name__', None) or repr(value)}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest entry of ``wanted``."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))


def _close(found: Tensor, wanted: Tensor, message: str, limit: float = 1e-6) -> None:
    _require(found.shape == wanted.shape, f"{message}: it has shape {tuple(found.shape)}")
    size = wanted.detach().abs().max().clamp_min(1e-3).double()
    off = float((found.detach() - wanted.detach()).abs().max().double() / size)
    _require(off <= limit, f"{message} by {off:.1e} of its largest entry")


def _equal(found: Tensor, wanted: Tensor, message: str) -> None:
    _require(torch.equal(found, wanted), message)


@contextmanager
def _raises(error: type[BaseException], message: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(message)


@contextmanager
def _silent() -> Iterator[None]:
    """Hide progress bars inside the ``with``, by capturing stderr."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_pre_hooks", "_forward_hooks_always_called",
)  # fmt: skip


def _state(model: nn.Module) -> dict[str, Any]:
    """Return the state of the model and of torch, which an explanation method must not change."""
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        gradient = None if tensor.grad is None else tensor.grad.clone()
        state[name] = (tensor.detach().clone(), gradient, tensor.requires_grad, tensor._version)
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind)) for kind in _HOOKS]
        state[f"{name}: module"] = (hooks, type(module), module.training, sorted(vars(module)))
    state["random numbers"] = (torch.get_rng_state(), random.getstate())
    state["modes"] = (torch.is_grad_enabled(), _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return state


def _same(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [name for name in before.keys() | after.keys()
               if not _alike(before.get(name), after.get(name))]  # fmt: skip
    _require(not changed, f"a call has changed {', '.join(sorted(changed))}")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
