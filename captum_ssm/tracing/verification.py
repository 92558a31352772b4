"""Check that an operator reproduces its module's output.

The checks compare sums over all tokens with random signs (Freivalds 1979). Such a sum costs one
adjoint of the operator, and an error at any token changes it. Rounding errors of many tokens partly
cancel in a sum, so the tolerance of sums is smaller. If the whole output is computed anyway, its
entries are compared as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ReconstructionError
from ..mixers.base import Call, LinearMixer
from ..mixers.registry import how_to
from ..mixers.table import Architecture
from ..operators import Chain, Operator, Sum
from ..operators.kernels.arithmetic import WITHOUT_DOUBLE, autocast_dtype, sum_tensors
from ..operators.kernels.truths import Ratio, are_noted, at_most, largest, read_once
from .find import Mixer
from .projection import projection_of

T = TypeVar("T")

#: Largest max|a - b| / max|b| that ``verify`` accepts, by the dtype the model computed in.
#: Models in float64 are allowed as much as in float32, to which transformers and mamba_ssm round
#: parts of their recurrences.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 5e-2}
#: The limit for float32 on a GPU, whose kernels may multiply in TF32 with 10 bits.
_TF32 = 5e-3
#: Number of tokens beyond which the tolerance grows in proportion, as the rounding of long sums
#: does, and the largest tolerance that this growth may reach.
_GROWS_FROM, _GROWS_TO = 1024, 1e-3
#: Divisor of the tolerance for sums with random signs, and the number of sums that are compared if
#: one more sum costs almost nothing.
_STRICTER, _DRAWS = 4, 4
#: Factors of a 64-bit hash, as signed integers (Steele, Lea and Flood, Fast Splittable Pseudorandom
#: Number Generators, 2014).
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)


def tolerance_for(output: Tensor, module: nn.Module | None = None) -> float:
    """Return the largest accepted error max|a - b| / max|b| of an operator's output.

    The least precise dtype decides: of the output, the parameters or autocast. The error may grow
    with the number of tokens.

    Args:
        output: the module's output (B, L, E). Call this function in the same autocast context.
        module: the module, whose parameters may be less precise than its output. Default: None.
    """
    parameters = () if module is None else module.parameters()
    dtypes = {output.dtype, *(x.dtype for x in parameters if x.is_floating_point())}
    dtypes.add(autocast_dtype(output.device) or output.dtype)
    limit = max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]) for dtype in dtypes)
    if output.device.type == "cuda" and output.dtype == torch.float32:
        limit = max(limit, _TF32)
    return max(limit, min(limit * output.shape[1] / _GROWS_FROM, _GROWS_TO))


def relative_error(rebuilt: Tensor, real: Tensor) -> float:
    """Return max|a - b| / max|b| for an operator's output a and the module's output b."""
    return float(_largest(rebuilt - real.to(rebuilt), real))


#: An error as a number, or as ratios on a device that are read later; the largest counts.
Error: TypeAlias = float | tuple[Ratio, ...]


class Errors(NamedTuple):
    """Errors of an operator's output, relative to the largest value in the module's output.

    Attributes:
        numbers: largest error of single entries of the output; 0 if none was compared.
        sums: largest error of sums over all tokens with random signs, divided by the square root
            of the number of tokens.
    """

    numbers: Error
    sums: Error

    @property
    def strict(self) -> Error:
        """The larger error, with ``sums`` times 4 because the tolerance of sums is smaller."""
        sums, numbers = self.sums, self.numbers
        if isinstance(sums, tuple):  # numbers, too, or 0.0: nothing was compared
            stricter = (x._replace(factor=_STRICTER * x.factor) for x in sums)
            return (*stricter, *(numbers if isinstance(numbers, tuple) else ()))
        assert not isinstance(numbers, tuple)
        return max(_STRICTER * sums, numbers)  # max keeps a first NaN; sums is NaN if one is


def accepted(error: Error, limit: float) -> bool:
    """Return True if an error is within a limit; ratios on a device may be checked only later."""
    if isinstance(error, tuple):
        return all(ratio.at_most(limit) for ratio in error)
    return error <= limit


def output_errors(rebuilt: Tensor, real: Tensor) -> Errors:
    """Return the errors of ``rebuilt`` (B, L, E) in single entries and sums with random signs."""
    differences = rebuilt - real.to(rebuilt)
    batch, tokens, *_ = real.shape
    signs = _signs(_DRAWS, batch, tokens, rebuilt)  # (draws, B, L)
    sums = (signs[:, :, None] @ differences).squeeze(2)  # (draws, B, E)
    if are_noted(real):
        return Errors(*_ratios(real, differences, sums))
    return Errors(float(_largest(differences, real)), _error_of_sums(sums, real))


def combined_errors(linear: LinearMixer, real: Tensor) -> Errors:
    """Return the errors of sums with random signs, by one adjoint of the operator.

    ``real`` is the module's output (B, L, E), in the operator's token order. With signs s the sum
    over tokens of s y is expected to be (s^T A x) W + (s^T 1) rest, for y = (A x) W + rest.
    """
    operator = linear.operator
    by_channel = all(leaf.per_channel() is leaf for leaf in operator.leaves())
    if linear.end_to_end or not by_channel:  # one adjoint would sum over output channels
        return output_errors(linear.output(), real)
    batch, tokens, *_ = operator.shape
    signs = _signs(1, batch, tokens, linear.values)[0]
    project = projection_of(linear)
    combined = _combined(operator, signs[:, :, None, None].expand(operator.shape), linear.values)
    expected, rest = project.product(combined.flatten(1)), project.rest
    if rest is not None and rest.dim() < 3:  # the same for all tokens
        expected = torch.addcmul(expected, signs.sum(1, keepdim=True), rest)
    elif rest is not None:
        expected = expected + (signs[..., None] * rest).sum(1)
    differences = torch.baddbmm(expected[:, None], signs[:, None], real.to(signs), alpha=-1)
    if are_noted(real):
        return Errors(0.0, _ratios(real, None, differences)[1])
    return Errors(0.0, _error_of_sums(differences, real))


def _error_of_sums(differences: Tensor, real: Tensor) -> float:
    """Return the largest of the sums over L tokens, divided by sqrt(L) and by max|real|."""
    return float(_largest(differences, real) / math.sqrt(real.shape[1]))


def _ratios(
    real: Tensor, differences: Tensor | None, sums: Tensor
) -> tuple[tuple[Ratio, ...], tuple[Ratio, ...]]:
    """Return errors of single entries and of sums as ratios on the device, which are read later.

    ``real`` (B, L, E) is the module's output, which must be finite. ``differences`` are the errors
    of single entries, or None. ``sums`` are the errors of sums.
    """
    size, of_sums, *of_numbers = largest([x for x in (real, sums, differences) if x is not None])
    at_most(size, torch.finfo(size.dtype).max)  # notes the check that ``real`` is finite
    root = math.sqrt(real.shape[1])
    numbers = tuple(Ratio(number, size) for number in of_numbers)
    return numbers, (Ratio(of_sums, size, 1 / root),)


def _largest(differences: Tensor, real: Tensor) -> Tensor:
    """Return max|differences| / max|real| as a tensor, which stays on the device."""
    size = _size(real).to(differences).clamp_min(torch.finfo(real.dtype).tiny)
    return _size(differences) / size


def _size(x: Tensor) -> Tensor:
    """Return the largest absolute value; on a GPU by a single kernel."""
    return x.abs().max() if x.device.type == "cpu" else torch.linalg.vector_norm(x, math.inf)


def _signs(draws: int, batch: int, tokens: int, like: Tensor) -> Tensor:
    """Return random signs (draws, B, L), computed by hashing indices and cached within a call.

    This changes no random generator, and copies nothing to the device.
    """

    def hashed() -> Tensor:
        first, second = _FACTORS  # integers wrap around
        x = torch.arange(1, 1 + draws * batch * tokens, device=like.device) * first
        x = torch.bitwise_xor(x, x >> 31) * second
        random_bits = (x >> 40) & 1
        return random_bits.mul_(2).sub_(1).view(draws, batch, tokens).to(like.dtype)

    return read_once(("signs", draws, batch, tokens, like.device, like.dtype), hashed)


def _combined(operator: Operator, row: Tensor, values: Tensor) -> Tensor:
    """Return the sum over tokens of ``row`` times the operator's output, (B, H, P).

    The output is A x plus offsets, so this is the sum of (A^T row) x, plus ``row`` times offsets.
    """
    common: list[tuple[Tensor, Tensor]] = []  # sums of a row, and offsets common to all tokens
    offset_sums: list[Tensor] = []

    def pull_back(part: Operator, row: Tensor) -> Tensor:
        """Apply the adjoint of ``part`` to ``row``; collect ``row`` times ``part.offset()``."""
        if isinstance(part, Chain):
            for factor in part.parts:  # the last one acts first
                row = pull_back(factor, row)
            return row
        if isinstance(part, Sum) and any(isinstance(factor, Chain) for factor in part.parts):
            return sum_tensors(pull_back(factor, row) for factor in part.parts)
        offset = part.offset()
        if offset is not None and offset.stride(1) == 0:  # expanded along the tokens
            common.append((row.sum(1), offset[:, 0]))
        elif offset is not None:
            offset_sums.append((row * offset).sum(1))
        return part.transpose(row)

    total = sum_tensors([(pull_back(operator, row) * values).sum(1), *offset_sums])
    for factors in common:
        total = torch.addcmul(total, *factors)
    return total


def rounding_explains(mixer: Mixer, call: Call, rebuilt: Tensor, linearize: Linearizer) -> bool:
    """Return True if the module's own rounding error is about as large as an operator's error.

    Both are compared with the module's output in float64. The operator must also reproduce that
    output, in float64 or in its own precision.

    Args:
        rebuilt: the operator's output (B, L, E).
        linearize: a function that builds the operator of a call, here in float64.
    """
    if rebuilt.device.type in WITHOUT_DOUBLE:
        return False
    parameters = {  # by the names that they have in _Inside
        f"module.{name}": x.double() if x.is_floating_point() else x
        for name, x in (*mixer.module.named_parameters(), *mixer.module.named_buffers())
    }
    wide = replace(call, args=_double(call.args), kwargs=_double(call.kwargs))

    def in_double(module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the outputs of module and operator in float64."""
        with torch._C._EnableTorchFunction(), _Widened():  # calls may be hidden
            output = module.forward(*wide.args, **wide.kwargs)
        wide_call = replace(wide, output=output)
        return wide_call.output_tensor, linearize(mixer, wide_call).output()

    try:
        truth, exact = torch.func.functional_call(_Inside(mixer.module), parameters, (in_double,))
    except (RuntimeError, TypeError, NotImplementedError):  # a module of a single dtype
        return False
    if truth.dtype != torch.float64:  # the module converts to another dtype
        return False
    real = call.output_tensor
    is_accepted = any(accepted(output_errors(x, truth).strict, _ROUNDED) for x in (exact, rebuilt))
    return is_accepted and relative_error(rebuilt, truth) <= 4 * relative_error(real, truth)


class _Widened(TorchFunctionMode):
    """Replaces float32 by float64 in torch calls, since many modules compute parts in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        options = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **options)


def _wide(value: Any) -> Any:
    """Return float64 for the dtype float32, such as an argument of ``to``, else ``value``."""
    return torch.float64 if value is torch.float32 else value


#: Builds the linear form of a mixer for one recorded call.
Linearizer = Callable[[Mixer, Call], LinearMixer]
#: Largest error in float64: arguments of a module, such as rotations, may be in float32.
_ROUNDED = 2e-6


class _Inside(nn.Module):
    """Passes a module to a function, so that ``functional_call`` can replace the parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module], T]) -> T:
        return function(self.module)


def _double(value: Any) -> Any:
    """Convert the floating tensors in nested tuples, lists and mappings to float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _double(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_double, value))
    return value


def require_same(name: str, architecture: Architecture, error: Error, limit: float) -> None:
    """Raise unless an operator reproduces its module's output."""
    if accepted(error, limit):
        return
    complaint = (
        f"Layer {name!r} ({architecture.family}): the operator reproduces the module's output with "
        f"an error of {error:.1e}, more than {limit:.0e}."
    )
    if architecture.like:
        raise ReconstructionError(
            f"{complaint} {architecture.class_path} is served with like={architecture.like!r}, but "
            f"computes something else. Pass register_mixer() a custom adapter; {how_to()} shows "
            "how to write one."
        )
    raise ReconstructionError(
        f"{complaint} The module differs from its adapter. If the adapter is yours, correct it; "
        "else please report this with the model's configuration. For a module that is random, or "
        "computes in a lower precision than its dtype, pass a larger tolerance, as in verify=1e-2."
    )


def require_as_it_was(name: str, error: Error, limit: float) -> None:
    """Raise unless an operator built after the run still reproduces the mixer's output."""
    if not accepted(error, limit):
        raise ReconstructionError(
            f"Layer {name!r}: there was no memory to keep its operator, and the operator built "
            f"after the run has an error of {error:.1e}, more than {limit:.0e}, because the mixer "
            "has changed. If forward_func switches adapters or weights, switch them outside "
            "forward_func, or explain fewer examples at a time with internal_batch_size."
        )
