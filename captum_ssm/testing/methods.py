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

    def is_real(self, example: int) -> Tensor:
        """Return a mask (L,) of an example's tokens, True for tokens that are not padding."""
        tokens = torch.ones(len(self.inputs[0])) if self.mask is None else self.mask[example]
        return tokens.bool()

    def value(self, value: Any) -> Any:
        """Return an option's value for this case, chosen by kind if it is a :class:`ByKind`."""
        return getattr(value, self.kind) if isinstance(value, ByKind) else value

    def in_bfloat16(self) -> _Case:
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
        self.values_by_option = {name: options[name] for name in self.parameters if name in options}
        self.unknown = [name for name in self.parameters if name not in {"self", *options}]
        self._cached: dict[tuple[str, str], Tensor] = {}
        self._in_bfloat16: dict[str, _Case] = {}
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
            with self.collecting(clause):
                check()
            return
        for kind in self.kinds:
            case = self.cases[kind]
            with self.collecting(f"{clause}, {kind}"):
                check(case)
            for name, tried in self.values_by_option.items() if clause in _BY_OPTION else ():
                for value in map(case.value, tried.differ):
                    with self.collecting(f"{clause}, {kind}, {_option_text(name, value)}"):
                        check(case, **{name: value})

    @contextmanager
    def collecting(self, where: str) -> Iterator[None]:
        """Append an exception raised inside the ``with`` to ``failures``, and continue after it."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            self.failures.append(f"{where}: {kind}{error}")

    def relevance(self, case: _Case, **options: Any) -> Any:
        """Run the method on a case with some options, and return the relevance."""
        return self.method(case.model).attribute(case.inputs, case.target, case.mask, **options)

    def cached(self, case: _Case, options: dict[str, Any]) -> Tensor:
        """Return the method's relevance for a case; results are cached by kind and options."""
        key = (case.kind, repr(options))
        if key not in self._cached:
            self._cached[key] = self.relevance(case, **options)
        return self._cached[key]

    # --- all inputs ------------------------------------------------------------------------------

    def signature(self) -> None:
        """Check the method's class, and the names, kinds and defaults of its arguments."""
        method, parameters = self.method, list(self.parameters.values())
        _require(issubclass(method, Attribution), "the method must subclass Attribution")
        _require(
            not self.unknown, f"no values to try of {self.unknown}: pass options={{name: Values}}"
        )
        first = [x.name for x in parameters[:4]]
        expected = ["self", "inputs", "target", "additional_forward_args"]
        _require(first == expected, f"attribute takes {first} first, but must take {expected}")
        kinds = [x.kind for x in parameters[4:]]
        _require(set(kinds) <= {inspect.Parameter.KEYWORD_ONLY}, "options must be keyword-only")
        lacking = [x.name for x in parameters[2:] if x.default is x.empty]
        _require(not lacking, f"the arguments {lacking} of attribute need defaults")
        obj, name = method(self.cases["ids"].model), method.get_name()
        _require(obj.get_name() == name and name.split() and name == " ".join(name.split()),
                 f"get_name() is {name!r}: return words with single spaces")  # fmt: skip
        _require(callable(obj.forward_func), "forward_func must be callable")
        _require(isinstance(obj.multiplies_by_inputs, bool), "multiplies_by_inputs must be a bool")
        _require(obj.has_convergence_delta() is ("return_convergence_delta" in self.parameters),
                 "has_convergence_delta() and return_convergence_delta differ")  # fmt: skip
        undecorated = getattr(method.attribute, "__wrapped__", None)
        _require(undecorated is not None and not hasattr(undecorated, "__wrapped__"),
                 "attribute must have exactly one decorator")  # fmt: skip

    def delta(self) -> None:
        """Check that convergence deltas are 0, or the difference if relevance is changed."""
        case = self.cases["embeddings"]
        obj = self.method(case.model)
        if not obj.has_convergence_delta():
            with _raises(NotImplementedError, "compute_convergence_delta() raises no error"):
                obj.compute_convergence_delta()
            return
        for kind in self.kinds:
            result, delta = self.relevance(self.cases[kind], return_convergence_delta=True)
            _require(delta.shape == (2,), f"{kind}: the delta has shape {tuple(delta.shape)}")
            _require(bool((delta.abs() <= 1e-5 * result.abs().flatten(1).sum(1)).all()),
                     f"{kind}: the delta is {delta.tolist()}")  # fmt: skip
            plain = self.relevance(self.cases[kind])
            _close(result, plain, f"{kind}: relevance with a delta differs")
        result, change = self.relevance(case), torch.tensor([2.0, -1.0], dtype=torch.float64)
        changed = result + change[:, None, None] / result[0].numel()
        delta = obj.compute_convergence_delta(changed, *case[2:])
        _close(delta, -change, "compute_convergence_delta is not output - attributions - biases")

    def refusals(self) -> None:
        """Check that wrong options, padded targets and missing models raise clear errors."""
        _, model, ids, target, mask = self.cases["ids"]
        assert mask is not None
        arguments = {"inputs": ids, "target": target}
        for name, values in self.values_by_option.items():
            for value in values.refused:
                with self.collecting(f"refusals, {_option_text(name, value)}"):
                    self._require_refused(name, model, **{**arguments, name: value})
        # arguments of Captum's methods, which this method does not accept
        for name in {"baselines", "n_steps", "feature_mask"} - {*self.parameters}:
            self._require_refused(name, model, **arguments, **{name: None})
        all_padded = torch.stack([mask[0], 0 * mask[0]])
        with _raises(PaddedExampleError, "an example with only padding raises no error"):
            self.method(model).attribute(ids, target, all_padded)
        with _raises(CaptumSSMError, "a target at a padded token raises no error"):
            self.method(model).attribute(ids, (0, 3), mask)
        with _raises(CaptumSSMError, "a forward_func without a model raises no error"):
            self.method(lambda x: x)

    def _require_refused(self, name: str, model: nn.Module, **arguments: Any) -> None:
        """Raise unless these arguments raise a CaptumSSMError that names the argument ``name``."""
        try:
            self.method(model).attribute(**arguments)
        except CaptumSSMError as error:
            message = str(error)
            _require(name.rstrip("s") in message, f"the error does not name {name}: {message}")
            _require(message.endswith((".", "?", ")")), f"the error is not a sentence: {message}")
        else:
            raise AssertionError(f"the value of {name} must raise a CaptumSSMError")

    @torch.no_grad()
    def captum(self) -> None:
        """Check that the method works with Captum's own tools, which copy and wrap methods."""
        case = self.cases["embeddings"]
        _, model, inputs, target, mask = case
        obj, expected = self.method(model), self.relevance(case)
        undecorated = obj.attribute.__wrapped__(obj, (inputs,), target, mask)
        _require(isinstance(undecorated, tuple), "a tuple of inputs does not return a tuple")
        _equal(undecorated[0], expected, "attribute without its decorator differs")
        copied = copy.copy(self.method(copy.deepcopy(model)))
        copied.forward_func, copied.model = _forward_func(case), model
        _close(copied.attribute(*case[2:]), expected, "a copy with another forward_func differs")
        noisy = NoiseTunnel(obj).attribute(
            inputs, nt_samples=2, stdevs=1e-12, target=target, additional_forward_args=mask
        )
        _close(noisy, expected, "NoiseTunnel without noise differs", 1e-5)
        change = sensitivity_max(
            obj.attribute, inputs, lambda x, _: x, target=target, additional_forward_args=mask
        )
        _close(change, 0 * change, "sensitivity_max without a change is not 0", 1e-5)

    def options(self) -> None:
        """Check that ``differ`` values change the relevance, and ``same`` values do not."""
        cases = [self.cases[kind] for kind in self.kinds]
        plain = self.cached(cases[0], {})
        for name, values in self.values_by_option.items():
            default = getattr(self.method, f"default_{name}", self.parameters[name].default)
            earlier_options: dict[str, dict[str, Any]] = {f"its default {default!r}": {}}
            for value in values.differ:
                with self.collecting(f"options, {_option_text(name, value)}"):
                    chosen = {name: value}
                    if isinstance(value, str) and value == default:
                        _close(self.cached(cases[0], chosen), plain, "the default by name differs")
                        continue
                    for earlier_text, earlier_choice in earlier_options.items():
                        differs = any(self._differs(case, chosen, earlier_choice) for case in cases)
                        _require(differs, f"gives the same relevance as {earlier_text}")
                    earlier_options[repr(value)] = chosen
            for value in values.same:
                with self.collecting(f"options, {_option_text(name, value)}"), _progress_hidden():
                    relevance = self.relevance(cases[0], **{name: value})
                    _close(relevance, plain, "the relevance differs from the default's")

    def _differs(self, case: _Case, first: dict[str, Any], second: dict[str, Any]) -> bool:
        """Return True if two choices of options give different relevance."""
        relevance, expected = (
            self.cached(case, {name: case.value(value) for name, value in options.items()})
            for options in (first, second)
        )
        return _error(relevance, expected) > 1e-6

    # --- of every kind of input ------------------------------------------------------------------

    def results(self, case: _Case) -> None:
        """Check the relevance's shape, dtype and sums, and that a second call returns the same."""
        result = self.relevance(case)
        _require(type(result) is Tensor and not result.requires_grad, "the result is not detached")
        _require(result.is_contiguous() and result.is_leaf, "the result must be a contiguous leaf")
        _require(result.shape == case.inputs.shape, f"the result has shape {tuple(result.shape)}")
        _require(result.dtype == torch.float64, f"a float64 model gives {result.dtype}")
        _require(bool(result.isfinite().all()), "the result contains NaN or infinity")
        _require(bool(result.flatten(1).any(1).all()), "an example has no relevance")
        first = result.clone()
        result.mul_(2)
        _equal(self.relevance(case), first, "a second call returns a different result")
        (of_tuple,) = self.relevance(
            _Case(case.kind, case.model, (case.inputs,), case.target, case.mask)
        )
        _equal(of_tuple, first, "the input in a tuple gives a different result")
        tokens = self.relevance(case, per_token=True)
        if case.inputs.dim() == 4:
            _require(tokens.shape == (2, 3, 4), f"per_token=True has shape {tuple(tokens.shape)}")
        else:
            expected = first.flatten(2).sum(2) if first.dim() == 3 else first
            _close(tokens, expected, "per_token=True is not the sum over features")
        function = self.method(_forward_func(case), model=case.model)
        _close(function.attribute(*case[2:]), first, "a function that runs the model differs")

    def traces(self, case: _Case) -> None:
        """Check that a call leaves model and torch unchanged, also after an error in the model."""
        model = case.model
        # parameters in every state that a user may have left them in
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index % 3 != 0)
            parameter.grad = torch.ones_like(parameter) if index % 2 else None
        before = _state(model)
        self.relevance(case)
        _require_same(before, _state(model))
        *_, last = (module for module in model.modules() if not list(module.children()))
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))
        for module, error in ((last, ZeroDivisionError), (first, KeyboardInterrupt)):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = module.register_forward_pre_hook(fail)
            before = _state(model)
            with _raises(error, "an error raised in the model is not raised by attribute"):
                self.relevance(case)
            _require_same(before, _state(model))
            handle.remove()
        before = _state(model)
        with _raises(CaptumSSMError, "a target outside of the output raises no error"):
            self.relevance(case._replace(target=(99, 99)))
        _require_same(before, _state(model))
        model.requires_grad_(True).zero_grad()

    def modes(self, case: _Case) -> None:
        """Check that the relevance is the same under no_grad and inference_mode."""
        whole = self.cached(case, {})
        with torch.no_grad():
            _equal(self.relevance(case), whole, "under no_grad the result differs")
            _require(not torch.is_grad_enabled(), "attribute leaves gradients switched on")
        with torch.inference_mode():
            try:
                _equal(self.relevance(case), whole, "under inference_mode the result differs")
            except GradientModeError:
                _require(self.method.needs_gradient, "inference_mode is refused without need")

    # --- of every kind of input, by every option -------------------------------------------------

    def padding(self, case: _Case, **options: Any) -> None:
        """Check that an example by itself has the relevance that it has in its padded batch."""
        whole = self.cached(case, options)
        for example in (1,) if options else (0, 1):  # with options, parts() runs both
            is_real = case.is_real(example)
            single = self.relevance(_single(case, example), **_options_of(options, example))
            _close(whole[example, is_real], single[0], f"example {example} differs by itself")
            if case.mask is not None:
                _require(not whole[example, ~is_real].any(), "padding has nonzero relevance")

    def parts(self, case: _Case, **options: Any) -> None:
        """Check that one example at a time gives the same relevance, under no_grad."""
        with torch.no_grad():
            result = self.relevance(case, internal_batch_size=1, **options)
        _close(result, self.cached(case, options), "with internal_batch_size=1 the result differs")

    def precision(self, case: _Case, **options: Any) -> None:
        """Check that the relevance in bfloat16 is near that in float64."""
        if case.kind not in self._in_bfloat16:
            self._in_bfloat16[case.kind] = case.in_bfloat16()
        result = self.relevance(self._in_bfloat16[case.kind], **options)
        _require(result.dtype in (torch.float32, torch.bfloat16), f"the result is {result.dtype}")
        _close(result, self.cached(case, options), "in bfloat16 the result differs", 0.1)


#: Clauses that are checked for each kind of inputs; and those also checked for each option.
_BY_KIND = ("results", "traces", "modes")
_BY_OPTION = ("padding", "parts", "precision")


def _options_of(value: Any, example: int) -> Any:
    """Select one example from an option's value, which may be a dict of values for all examples."""
    if isinstance(value, dict):
        return {name: _options_of(entry, example) for name, entry in value.items()}
    per_example = isinstance(value, Tensor) and value.dim() > 0 and len(value) == 2
    per_example |= isinstance(value, list) and isinstance(value[0], tuple)
    return value[example : example + 1] if per_example else value


def _single(case: _Case, example: int) -> _Case:
    """Return one example of a case, without padding."""
    inputs = case.inputs[example : example + 1, case.is_real(example)]
    target = case.target[example] if isinstance(case.target, list) else case.target
    return _Case(case.kind, case.model, inputs, target, None)


def _forward_func(case: _Case) -> Callable[..., Any]:
    """Return a function that runs a case's model; embeddings are passed as inputs_embeds."""
    if case.kind == "embeddings":
        return lambda x, mask: case.model(inputs_embeds=x, attention_mask=mask).logits
    return lambda *args: case.model(*args)


def _option_text(name: str, value: Any) -> str:
    return f"{name}={getattr(value, '__name__', None) or repr(value)}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest entry of ``wanted``."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))


def _close(found: Tensor, expected: Tensor, message: str, limit: float = 1e-6) -> None:
    _require(found.shape == expected.shape, f"{message}: it has shape {tuple(found.shape)}")
    size = expected.detach().abs().max().clamp_min(1e-3).double()
    error = float((found.detach() - expected.detach()).abs().max().double() / size)
    _require(error <= limit, f"{message} by {error:.1e} of its largest entry")


def _equal(found: Tensor, expected: Tensor, message: str) -> None:
    _require(torch.equal(found, expected), message)


@contextmanager
def _raises(error: type[BaseException], message: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(message)


@contextmanager
def _progress_hidden() -> Iterator[None]:
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


def _require_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [name for name in before.keys() | after.keys()
               if not _are_equal(before.get(name), after.get(name))]  # fmt: skip
    _require(not changed, f"a call has changed {', '.join(sorted(changed))}")


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b)
