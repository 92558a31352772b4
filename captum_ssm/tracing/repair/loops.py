"""Replace packages' CPU loops by loops whose backward pass is linear in the length.

Packages contain kernels for GPUs and, for CPUs, loops over tokens in plain torch. Most of these
loops slice a tensor of all tokens, and the backward pass of each slice writes a whole tensor of
zeros. This is quadratic in L, and takes minutes per layer at a few hundred tokens. Loops of
selective scans also keep the states of all tokens at once. The functions here compute the same
results, but split and stack the tokens only once.

If fla is installed, transformers calls fla's kernels on a CPU or on MPS as well, which the kernels
do not support. There transformers' own function replaces the kernels.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...operators.kernels.scan_backward import selective_scan
from ..changes import Shared, Undo, lasting

Function = Callable[..., Any]
#: A function to replace: its module, the path in it, and a function that wraps the original.
Repair: TypeAlias = tuple[str, str, Callable[[Function], Function]]
#: Numerator, denominator and largest exponent of RWKV's running average, (B, D) each.
Average = list[Tensor]


@contextmanager
def repaired_scans() -> Iterator[None]:
    """Replace slow CPU loops over tokens in imported packages, until the last nested context exits.

    Results are the same up to rounding. Contexts may be nested, and entered by several threads.

    Example:
        >>> import torch
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.tracing import repaired_scans
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with repaired_scans():
        ...     logits = model(ids).logits
        >>> torch.allclose(logits, model(ids).logits, atol=1e-4)
        True
    """
    with lasting(_repairs.enter):
        yield


def replacing(repairs: Iterable[Repair]) -> Undo:
    """Replace functions of packages that are imported; return a function that puts them back."""
    originals: list[tuple[Any, str, Function, bool]] = []  # True: an attribute of the holder itself
    for name, path, repaired in repairs:
        holder: Any = sys.modules.get(name)
        *outer, attribute = path.split(".")
        for name_in_path in outer:
            holder = getattr(holder, name_in_path, None)
        original = None if holder is None else getattr(holder, attribute, None)
        if original is not None:
            originals.append((holder, attribute, original, attribute in vars(holder)))
            setattr(holder, attribute, repaired(original))

    def restore() -> None:
        for holder, attribute, original, is_own in originals:
            if is_own:
                setattr(holder, attribute, original)
            else:  # a base class has it
                delattr(holder, attribute)

    return restore


_repairs = Shared(lambda: replacing(_REPAIRS))


def _of_transformers(original: Function) -> Function:
    """Replace transformers' mamba_selective_scan on CPUs, whose backward is quadratic in L."""

    @functools.wraps(original)
    def scan(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # compiled, the reference is an associative scan; mambapy has another algorithm
        other_algorithm = torch.compiler.is_compiling() or kwargs.get("use_mambapy")
        if hidden_states.device.type != "cpu" or other_algorithm:
            return original(hidden_states, *args, **kwargs)
        return selective_scan(hidden_states, *args, **kwargs)

    return scan


def _of_mamba_ssm(original: Function) -> Function:
    """Replace mamba_ssm's selective scan on CPUs, also where other modules import it."""

    @functools.wraps(original)
    def scan(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **options: Any
    ) -> Any:
        in_groups_or_fixed = B.dim() != 3 or C.dim() != 3
        if u.device.type != "cpu" or A.is_complex() or in_groups_or_fixed:
            return original(u, delta, A, B, C, *rest, **options)
        wide = torch.promote_types(u.dtype, torch.float32)  # the result alone is rounded
        result = selective_scan(u.to(wide), delta.to(wide), A, B, C, *rest, **options)
        if isinstance(result, Tensor):
            return result.to(u.dtype)
        return result[0].to(u.dtype), result[1]

    return scan


def _of_griffin(original: Function) -> Function:
    """Replace RecurrentGemma's ``_rnn_scan`` on CPUs by :func:`rg_lru`."""

    @functools.wraps(original)
    def scan(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.device.type != "cpu" or hidden_states.shape[1] == 1:  # no loop
            return original(module, hidden_states, *args, **kwargs)
        return rg_lru(hidden_states, *args, **kwargs)

    return scan


def _of_rwkv(_: Function) -> Function:
    """Replace RWKV-4's ``rwkv_linear_attention_cpu`` by :func:`wkv`."""
    return wkv


def rg_lru(
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Compute RecurrentGemma's ``_rnn_scan``, h_t = a_t h_{t-1} + x_t, with the same arguments.

    Args:
        hidden_states: gated inputs (B, L, D).
        recurrent_gate: decays (B, L, D).
        reset: True where a document begins (B, L, 1).
        recurrent_states: the state before the first token (B, D), or None.
        acc_dtype: the dtype of the states. Default: float32.
    """
    decays = (recurrent_gate * ~reset).to(acc_dtype)
    inputs = hidden_states.to(acc_dtype)
    state = inputs.new_zeros(inputs[:, 0].shape) if recurrent_states is None else recurrent_states
    states = []
    for decay, entering in zip(decays.unbind(1), inputs.unbind(1), strict=True):
        state = decay * state.to(decay.device) + entering
        states.append(state)
    return torch.stack(states, 1).to(hidden_states.dtype), state


def wkv(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Average | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Average | None]:
    """Compute RWKV-4's ``rwkv_linear_attention_cpu``, with the same arguments.

    y_t is the mean of v_1, ..., v_t with weights exp(k_s - (t - 1 - s) r) for s < t, and
    exp(k_t + ``time_first``), with the decay rate r.

    Args:
        time_decay: logarithms of the decay rates (D,).
        time_first: bonus of a token's own key (D,).
        key, value: the keys and the values (B, L, D).
        state: the average before the first token. Default: None, no earlier tokens.
        return_state: whether to return the average after the last token. Default: False.
    """
    rate = -torch.exp(time_decay)
    zeros = torch.zeros_like(key[:, 0], dtype=torch.float32)
    average = [zeros, zeros, zeros - 1e38] if state is None else state
    outputs = []
    for k, v in zip(key.float().unbind(1), value.unbind(1), strict=True):
        numerator, denominator, _ = _joined(average, k + time_first, v)  # not stored
        outputs.append((numerator / denominator).to(key.dtype))
        average = _joined([*average[:2], average[2] + rate], k, v)
    state_after = average if return_state or state is not None else None
    return torch.stack(outputs, 1), state_after


def _joined(average: Average, exponent: Tensor, value: Tensor) -> Average:
    """Add ``value`` with weight exp(exponent) to RWKV's running average, without overflow."""
    numerator, denominator, largest = average
    maximum = torch.maximum(largest, exponent)
    old, new = torch.exp(largest - maximum), torch.exp(exponent - maximum)  # weights, at most 1
    return [old * numerator + new * value, old * denominator + new, maximum]


def _without_kernel(kernel: Function) -> Function:
    """Wrap fla's kernel so that calls on a CPU or MPS run transformers' own function."""
    reference = inspect.unwrap(kernel)

    @functools.wraps(kernel)
    def rule(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_supported = query.device.type not in ("cpu", "mps")
        return (kernel if is_supported else reference)(query, *args, **kwargs)

    return rule


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


#: The functions to replace, and their wrappers.
_REPAIRS: tuple[Repair, ...] = (
    (_modeling("mamba"), "mamba_selective_scan", _of_transformers),
    (_modeling("falcon_mamba"), "mamba_selective_scan", _of_transformers),
    (_modeling("jamba"), "mamba_selective_scan", _of_transformers),
    (_modeling("zamba"), "mamba_selective_scan", _of_transformers),
    (_modeling("recurrent_gemma"), "RecurrentGemmaRglru._rnn_scan", _of_griffin),
    (_modeling("rwkv"), "rwkv_linear_attention_cpu", _of_rwkv),
    *(
        (_modeling(name), "torch_chunk_gated_delta_rule", _without_kernel)
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid")
    ),
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_ref", _of_mamba_ssm),
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _of_mamba_ssm),
    ("mamba_ssm.modules.mamba_simple", "selective_scan_fn", _of_mamba_ssm),
    ("mambavision.models.mamba_vision", "selective_scan_fn", _of_mamba_ssm),
)
