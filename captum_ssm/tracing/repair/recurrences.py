"""Loops over tokens as transformers runs them on a CPU, with a backward linear in the length.

The loops there read token t as ``x[:, t]`` and write it as ``out[:, t] = ...``; the backward of
either touches a whole tensor for each token.  These take all tokens apart once, and put them
together once.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Numerator, denominator and largest exponent of RWKV's running average, (B, D) each.
Average = list[Tensor]


def rg_lru(
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What RecurrentGemma's ``_rnn_scan`` computes, with the same arguments.

    Args:
        hidden_states: gated inputs (B, L, D).
        recurrent_gate: decays (B, L, D).
        reset: True where a document begins (B, L, 1).
        recurrent_states: the state before the first token (B, D), or None.
        acc_dtype: in which states are kept. Default: float32.
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
    """What RWKV-4's ``rwkv_linear_attention_cpu`` computes, with the same arguments.

    Args:
        time_decay: logarithms of the decay rates (D,).
        time_first: bonus of a token's own key (D,).
        key: (B, L, D).
        value: (B, L, D).
        state: the average before the first token. Default: None, nothing was read.
        return_state: also return the average after the last token. Default: False.
    """
    rate = -torch.exp(time_decay)
    average = _nothing_read(key) if state is None else state
    outputs = []
    for k, v in zip(key.float().unbind(1), value.unbind(1), strict=True):
        numerator, denominator, _ = _joined(average, k + time_first, v)
        outputs.append((numerator / denominator).to(key.dtype))
        average = _joined([*average[:2], average[2] + rate], k, v)
    kept = average if return_state or state is not None else None
    return torch.stack(outputs, 1), kept


def _nothing_read(key: Tensor) -> Average:
    none = torch.zeros_like(key[:, 0], dtype=torch.float32)
    return [none, none, none - 1e38]


def _joined(average: Average, exponent: Tensor, value: Tensor) -> Average:
    """The average with ``value`` of weight exp(exponent) taken in, by exponents at most 0."""
    numerator, denominator, largest = average
    top = torch.maximum(largest, exponent)
    before, here = torch.exp(largest - top), torch.exp(exponent - top)
    return [before * numerator + here * value, before * denominator + here, top]
