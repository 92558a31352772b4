"""Softmax attention of the transformers library, in transformer and hybrid models.

    alpha = softmax(scaling q k^T + mask)      output = o_proj(gate alpha v)

One adapter supports every class that passes queries, keys and values to transformers' attention
interface, or in transformers 4 to torch's attention.  The recorded call runs again on a shallow
copy of the module, with an attention function that only records its arguments.  So the module's own
code computes rotations, norms, latent keys and values and LoRA adapters, for every attention
function (eager, sdpa, flash, flex).

Frozen: the probabilities, and the gate, a sigmoid, if a model has one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedMixerError
from ..operators.kernels.arithmetic import full_precision, unseen
from ..operators.kernels.truths import are_noted, holds, read_once
from .base import Call, LinearMixer, first_tensor, in_batch
from .parts.common import padding_mask, run, widened, working_dtype
from .parts.softmax import read_pairs, seen_pairs
from .path import Path

#: The name under which the attention function that records its arguments is registered.
_RECORDING = "captum_ssm"
#: Names of output projections; if a class has none of them, its parent projects the output.
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "proj")
#: Arguments of attention functions that change scores or probabilities and are not supported.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "alibi_slopes", "head_mask")


def hf_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize a self-attention module of transformers as softmax attention with a gate."""
    _refuse_cache(module, call)
    return _linearize(module, *_replay(module, call))


def _linearize(module: Any, received: _AttentionCall, factor: Tensor) -> LinearMixer:
    """Return the mixer, given the attention function's arguments and the gate (B, L, H P)."""
    pairs, gated = _pairs(module, received), ("gate", type(module))
    if pairs is not None and are_noted(factor):
        read_pairs(pairs, gated, lambda: (factor == 1).all())
    query, key, values = (x.transpose(1, 2) for x in (received.query, received.key, received.value))
    path = Path(values).attend(query, key, received.scaling, pairs)
    if not _is_one(factor, gated):
        path.scale(in_batch(factor), "gate", at_rest=0.5)
    output = next((getattr(module, n) for n in _OUTPUTS if hasattr(module, n)), nn.Identity())
    return path.to(output, end_to_end=received.end_to_end)


def _is_one(factor: Tensor, kind: Hashable) -> bool:
    """Return True if the gate is one everywhere, because the module has no gate.

    On a GPU the result is read only for the first module with this ``kind``.  If that result is
    True, later modules assume True, which is checked at the end of the call.
    """
    ones = (factor == 1).all()
    if not are_noted(factor):
        return bool(ones)
    return read_once(kind, lambda: bool(ones)) and holds(ones)


def gpt2_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize GPT2Attention; refuse its eager attention in transformers 4."""
    if not hasattr(module, "scaling") and module.config._attn_implementation == "eager":
        raise UnsupportedMixerError(
            "GPT2Attention with attn_implementation='eager' in transformers 4 has no adapter. Load "
            "the model with attn_implementation='sdpa', or use transformers 5."
        )
    return hf_attention(module, call)


def vit_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize ViTAttention or DeiTAttention, in transformers 4 or 5."""
    if not hasattr(module, "attention"):
        return hf_attention(module, call)
    if call.argument("head_mask", 1) is not None:  # in the position of the mask
        raise _unknown(module, "head_mask")
    linear = hf_attention(module.attention, call)
    return replace(linear, project=lambda y: run(module.output.dense, y.flatten(2)))


def falcon_h1_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize FalconH1Attention, whose block scales the output."""
    scale = float(module.config.attention_out_multiplier)
    return replace(hf_attention(module, call), branch_scale=scale)


def granite_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize GraniteMoeHybridAttention, whose block scales the output."""
    scale = float(module.config.residual_multiplier)
    return replace(hf_attention(module, call), branch_scale=scale)


def qwen4_exp_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize Qwen4ExpTextAttention, which attends to tokens that an indexer picks."""
    _refuse_cache(module, call)
    mask = call.argument("attention_mask", 2)
    with torch.no_grad():  # in the model's own precision, so that near ties are picked equally
        rotations = call.argument("position_embeddings", 1)
        picked = module.indexer(call.hidden_states, rotations, mask, None)
    module = copy.copy(module)
    module._modules = {**module._modules, "indexer": _Picked(picked)}
    return replace(hf_attention(module, call), mask=_real_tokens(mask, call))


class _Picked(nn.Module):
    """A replacement of an indexer module; it returns the tokens that the indexer picked before."""

    def __init__(self, picked: Tensor) -> None:
        super().__init__()
        self._picked = picked

    def forward(self, *_: Any) -> Tensor:
        return self._picked


def _real_tokens(mask: Tensor | None, call: Call) -> Tensor | None:
    """Return the mask of real tokens (B, L) from the call's mask; None if all are real."""
    if mask is None:
        return None
    if mask.dim() == 2:
        return padding_mask(mask, call.hidden_states)
    visible = mask if mask.dtype == torch.bool else mask == 0
    return padding_mask(visible.any(-2).any(1), call.hidden_states)


def minimax_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize MiniMaxAttention, whose block scales the output and the residual."""
    config = module.config
    scale = float(config.full_attn_beta_factor / config.full_attn_alpha_factor)
    return replace(hf_attention(module, call), branch_scale=scale)


def glm5_next_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize Glm5NextTextAttention, which attends to tokens that an indexer picks."""
    _refuse_cache(module, call)
    if module.indexer is not None:
        picked = _picked(module, call)
        call = replace(call, kwargs={**call.kwargs, "prev_topk_indices": picked})
        module = copy.copy(module)
        module._modules = {**module._modules, "indexer": None}
    received, factor = _replay(module, call)
    if module.config._attn_implementation == "sdpa":
        # sdpa's mask is boolean, so that padded tokens attend to no token
        received = replace(received, mask=received.mask == 0)
    mask = _real_tokens(call.argument("attention_mask", 1), call)
    return replace(_linearize(module, received, factor), mask=mask)


@torch.no_grad()
def _picked(module: Any, call: Call) -> Tensor:
    """Return the tokens that the indexer picks, computed in the model's own precision."""
    hidden, mask = call.hidden_states, call.argument("attention_mask", 1)
    asking = module.q_a_layernorm(module.q_a_proj(hidden))
    picked: Tensor = module.indexer(
        hidden_states=hidden, q_resid=asking, attention_mask=mask, past_key_values=None
    )
    return picked


def _refuse_cache(module: Any, call: Call) -> None:
    """Refuse calls with a cache, because running a call again would update the cache twice."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for name in ("past_key_values", "layer_past"):
        if name in names:
            call.refuse_cache(name, names.index(name))


@dataclass(frozen=True, eq=False)
class _AttentionCall:
    """Arguments of the attention function, with keys and values repeated for all query heads."""

    query: Tensor  # (B, H, L, N)
    key: Tensor  # (B, H, L, N)
    value: Tensor  # (B, H, L, P)
    mask: Any
    scaling: float
    causal: bool
    window: int | None
    by_torch: bool = False  # whether the function is torch's own
    end_to_end: bool = False  # whether images are concatenated; here each is an example


class _Settings:
    """A model's configuration, but with :func:`_record` as the attention function."""

    _attn_implementation = _RECORDING

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _replay(module: Any, call: Call) -> tuple[_AttentionCall, Tensor]:
    """Run the call again; return the attention function's arguments and the gate (B, L, H P)."""
    from transformers import AttentionInterface

    AttentionInterface.register(_RECORDING, _record)
    dtype = working_dtype(module, call.hidden_states)
    twin = copy.copy(module)
    if hasattr(module, "config"):
        twin.config = _Settings(module.config)
    twin.training = False  # no dropout, and no random numbers drawn for it
    like = call.hidden_states.new_empty(0, dtype=dtype)
    twin._modules = {name: _prepared(name, sub, like) for name, sub in module._modules.items()}
    with full_precision(call.hidden_states.device), _recorded_torch_attention(twin):
        # called on the class, so that neither hooks nor a wrapper of forward run
        out = type(module).forward(twin, *_cast(call.args, dtype), **_cast(call.kwargs, dtype))
    received = twin.__dict__.get("received")
    if not received:
        raise UnsupportedMixerError(
            f"{type(module).__name__} uses neither transformers' attention interface nor torch's "
            "attention. In transformers 4, load the model with attn_implementation='sdpa' and pass "
            "output_attentions=False; otherwise use a newer version of transformers."
        )
    return _end_to_end(module, received, call.hidden_states.shape[1]), first_tensor(out)


def _end_to_end(module: Any, received: list[_AttentionCall], tokens: int) -> _AttentionCall:
    """Combine calls of the attention function, one for each image, into one call with a batch."""
    if len(received) == 1:
        return received[0]
    sizes = [each.query.shape[2] for each in received]
    if sum(sizes) != tokens or any(each.mask is not None or each.causal for each in received):
        raise UnsupportedMixerError(
            f"{type(module).__name__} calls its attention function {len(received)} times, which is "
            "supported only for one image each, without a mask. Pass one image at a time."
        )
    count = torch.tensor(sizes, device=received[0].query.device)
    step = torch.arange(max(sizes), device=count.device)
    real = step < count[:, None]
    place = torch.where(real, step + (count.cumsum(0) - count)[:, None], tokens)

    def padded(parts: list[Tensor]) -> Tensor:  # (images, H, longest, N)
        whole = torch.cat(parts, 2)[0].transpose(0, 1)  # (L, H, N)
        return F.pad(whole, (0, 0, 0, 0, 0, 1))[place].transpose(1, 2)

    return replace(
        received[0],
        query=padded([each.query for each in received]),
        key=padded([each.key for each in received]),
        value=padded([each.value for each in received]),
        mask=None if len(set(sizes)) == 1 else real[:, None, None],
        end_to_end=True,
    )


def _record(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record attention's arguments; return ones as output, so that the module returns its gate."""
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise _unknown(module, name)
    batch, heads, tokens, width = query.shape
    if key.shape[-2] != tokens:
        raise UnsupportedMixerError(
            f"{type(module).__name__}: {tokens} queries attend to {key.shape[-2]} keys, which is "
            "not supported. Pass the whole sequence in one call, without a cache."
        )
    causal = kwargs.get("is_causal")
    groups = heads // key.shape[1]
    call = _AttentionCall(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attention_mask,
        width**-0.5 if scaling is None else scaling,
        bool(getattr(module, "is_causal", True) if causal is None else causal),
        kwargs.get("sliding_window"),
    )
    module.received = [*vars(module).get("received", ()), call]
    return query.new_ones(batch, tokens, heads, value.shape[-1]), None


def _unknown(module: Any, name: str) -> UnsupportedMixerError:
    kind = type(module).__name__
    remedy = f"Use a model, or a call of the model, without {name}."
    return UnsupportedMixerError(f"{kind} with {name} is not supported. {remedy}")


@contextmanager
def _recorded_torch_attention(module: Any) -> Iterator[None]:
    """Return a context in which :func:`_record` replaces torch's attention function."""
    mode = _RecordTorchAttention(module, hidden=not torch._C._is_torch_function_enabled())
    with torch._C._EnableTorchFunction(), mode:
        yield


class _RecordTorchAttention(TorchFunctionMode):
    """A torch function mode that calls :func:`_record` instead of torch's attention."""

    def __init__(self, module: Any, hidden: bool) -> None:
        super().__init__()
        self._module = module
        self._hidden = hidden

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        with unseen() if self._hidden else nullcontext():
            return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        ones, _ = _record(
            self._module, query, key, value, attn_mask, scaling=scale, is_causal=is_causal
        )
        self._module.received[-1] = replace(self._module.received[-1], by_torch=True)
        return ones.transpose(1, 2)


def _pairs(module: Any, received: _AttentionCall) -> Tensor | None:
    """Return the mask over pairs of tokens that the module's attention function would use.

    Eager attention uses its mask unchanged.  The other functions apply causality themselves if they
    get no mask; flash attention also applies the window and a mask of tokens.
    """
    mask, tokens = received.mask, received.query.shape[2]
    if hasattr(mask, "mask_mod"):  # flex attention's description of a mask
        from torch.nn.attention.flex_attention import create_mask

        batch, kind = received.query.shape[0], received.query.device.type
        mask = create_mask(mask.mask_mod, batch, 1, tokens, tokens, kind)
    implementation = "sdpa" if received.by_torch else module.config._attn_implementation or "eager"
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return mask[..., :tokens]
    if mask is None and implementation == "eager":
        return None
    if mask is not None and (implementation == "eager" or mask.dim() != 2):
        raise UnsupportedMixerError(
            f"{type(module).__name__}: an attention mask of shape {tuple(mask.shape)} is not "
            "supported. Pass attention_mask as (B, L), or as (B, H, L, L)."
        )
    window = received.window if "flash" in implementation else None
    device, causal = received.query.device, received.causal
    pairs = seen_pairs(tokens, device, causal=causal, window=window)
    if mask is None:
        return pairs

    def masked() -> Tensor | None:
        keep = mask.bool()[:, None]
        real = keep[..., None] & keep[..., None, :]
        found = real if pairs is None else pairs & real
        return None if bool(found.all()) else found

    return read_once(("pairs of tokens", device, causal, window), masked, of=mask)


def _prepared(name: str, submodule: nn.Module | None, like: Tensor) -> nn.Module | None:
    """Return the submodule to use when the recorded call runs again, in the dtype of ``like``.

    Output projections and dropout are replaced with the identity.
    """
    if name in _OUTPUTS or isinstance(submodule, nn.Dropout):
        return nn.Identity()
    return None if submodule is None else widened(submodule, like)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors inside tuples, lists and mappings to ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
