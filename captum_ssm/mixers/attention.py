"""Softmax attention of transformers, in its transformers and in its hybrids.

    alpha = softmax(scaling q k^T + mask)      output = o_proj(gate alpha v)

One adapter serves every class that passes its queries, keys and values to transformers' attention
interface, or, in transformers 4, to torch's own attention.  The recorded call runs again on a
shallow copy of the module, under an attention function that only records its arguments.  So
rotations, norms, latent keys and values and adapters are the module's own, whichever attention
function (eager, sdpa, flash, flex) the model uses.

Frozen: the probabilities, and the gate, a sigmoid, where a model has one.
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
#: Names of output projections; a class that has none leaves it to its parent.
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "proj")
#: Arguments of attention functions that change scores or probabilities in ways not covered here.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "alibi_slopes", "head_mask")


def hf_attention(module: Any, call: Call) -> LinearMixer:
    """The self-attention classes of transformers."""
    _refuse_cache(module, call)
    return _linearize(module, *_replay(module, call))


def _linearize(module: Any, received: _AttentionCall, factor: Tensor) -> LinearMixer:
    """Return the mixer, from its attention function's arguments and its gate (B, L, H P)."""
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
    """Return True if the gate is one everywhere: there is none.

    On a device this is read for the first module of a kind; if it holds there, it is noted for the
    others.  A gate of ones changes nothing.
    """
    ones = (factor == 1).all()
    if not are_noted(factor):
        return bool(ones)
    return read_once(kind, lambda: bool(ones)) and holds(ones)


def gpt2_attention(module: Any, call: Call) -> LinearMixer:
    """GPT2Attention, whose eager attention scales and masks by itself in transformers 4."""
    if not hasattr(module, "scaling") and module.config._attn_implementation == "eager":
        raise UnsupportedMixerError(
            "GPT2Attention with eager attention in transformers 4 has no adapter: load the model "
            "with attn_implementation='sdpa', or use transformers 5."
        )
    return hf_attention(module, call)


def vit_attention(module: Any, call: Call) -> LinearMixer:
    """ViTAttention and DeiTAttention; in transformers 4, a module of attention and projection."""
    if not hasattr(module, "attention"):
        return hf_attention(module, call)
    if call.argument("head_mask", 1) is not None:  # in the mask's place
        raise _unknown(module, "head_mask")
    linear = hf_attention(module.attention, call)
    return replace(linear, project=lambda y: run(module.output.dense, y.flatten(2)))


def falcon_h1_attention(module: Any, call: Call) -> LinearMixer:
    """FalconH1Attention, whose block scales its output."""
    scale = float(module.config.attention_out_multiplier)
    return replace(hf_attention(module, call), branch_scale=scale)


def granite_attention(module: Any, call: Call) -> LinearMixer:
    """GraniteMoeHybridAttention, whose block scales its output."""
    scale = float(module.config.residual_multiplier)
    return replace(hf_attention(module, call), branch_scale=scale)


def qwen4_exp_attention(module: Any, call: Call) -> LinearMixer:
    """Qwen4ExpTextAttention, which reads the tokens that an indexer picks."""
    _refuse_cache(module, call)
    mask = call.argument("attention_mask", 2)
    with torch.no_grad():  # in the model's own precision: a close call stays one
        rotations = call.argument("position_embeddings", 1)
        picked = module.indexer(call.hidden_states, rotations, mask, None)
    module = copy.copy(module)
    module._modules = {**module._modules, "indexer": _Picked(picked)}
    return replace(hf_attention(module, call), mask=_real(mask, call))


class _Picked(nn.Module):
    """An indexer that has picked already."""

    def __init__(self, picked: Tensor) -> None:
        super().__init__()
        self._picked = picked

    def forward(self, *_: Any) -> Tensor:
        return self._picked


def _real(mask: Tensor | None, call: Call) -> Tensor | None:
    """Return the mask of real tokens (B, L), which may be read even if no indexer picks them."""
    if mask is None:
        return None
    if mask.dim() == 2:
        return padding_mask(mask, call.hidden_states)
    visible = mask if mask.dtype == torch.bool else mask == 0
    return padding_mask(visible.any(-2).any(1), call.hidden_states)


def minimax_attention(module: Any, call: Call) -> LinearMixer:
    """MiniMaxAttention, whose block adds beta times its output to alpha times the stream."""
    config = module.config
    scale = float(config.full_attn_beta_factor / config.full_attn_alpha_factor)
    return replace(hf_attention(module, call), branch_scale=scale)


def glm5_next_attention(module: Any, call: Call) -> LinearMixer:
    """Glm5NextTextAttention, which reads the tokens that an indexer picks."""
    _refuse_cache(module, call)
    if module.indexer is not None:
        picked = _picked(module, call)
        call = replace(call, kwargs={**call.kwargs, "prev_topk_indices": picked})
        module = copy.copy(module)
        module._modules = {**module._modules, "indexer": None}
    received, factor = _replay(module, call)
    if module.config._attn_implementation == "sdpa":
        # its mask is boolean, so that padded tokens read nothing
        received = replace(received, mask=received.mask == 0)
    mask = _real(call.argument("attention_mask", 1), call)
    return replace(_linearize(module, received, factor), mask=mask)


@torch.no_grad()
def _picked(module: Any, call: Call) -> Tensor:
    """The tokens that the indexer picks, in the model's own precision: a close call stays one."""
    hidden, mask = call.hidden_states, call.argument("attention_mask", 1)
    asking = module.q_a_layernorm(module.q_a_proj(hidden))
    picked: Tensor = module.indexer(
        hidden_states=hidden, q_resid=asking, attention_mask=mask, past_key_values=None
    )
    return picked


def _refuse_cache(module: Any, call: Call) -> None:
    """Raise if there is a cache, to which running the call again would add a second time."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for name in ("past_key_values", "layer_past"):
        if name in names:
            call.refuse_cache(name, names.index(name))


@dataclass(frozen=True, eq=False)
class _AttentionCall:
    """Arguments of the attention function; keys and values are repeated to the query heads."""

    query: Tensor  # (B, H, L, N)
    key: Tensor  # (B, H, L, N)
    value: Tensor  # (B, H, L, P)
    mask: Any
    scaling: float
    causal: bool
    window: int | None
    by_torch: bool = False  # whether the function is torch's own
    end_to_end: bool = False  # whether the module reads images end to end; here each is an example


class _Settings:
    """A view of a model's configuration with another attention function."""

    _attn_implementation = _RECORDING

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _replay(module: Any, call: Call) -> tuple[_AttentionCall, Tensor]:
    """Run the call again; return its attention function's arguments and the gate (B, L, H P)."""
    from transformers import AttentionInterface

    AttentionInterface.register(_RECORDING, _record)
    dtype = working_dtype(module, call.hidden_states)
    twin = copy.copy(module)
    if hasattr(module, "config"):
        twin.config = _Settings(module.config)
    twin.training = False  # no dropout, and no random numbers drawn for it
    like = call.hidden_states.new_empty(0, dtype=dtype)
    twin._modules = {name: _prepared(name, sub, like) for name, sub in module._modules.items()}
    with full_precision(call.hidden_states.device), _torchs_recorded(twin):
        # by the class: neither the module's hooks nor a wrapper around its own forward run
        out = type(module).forward(twin, *_cast(call.args, dtype), **_cast(call.kwargs, dtype))
    received = twin.__dict__.get("received")
    if not received:
        raise UnsupportedMixerError(
            f"{type(module).__name__} uses neither transformers' attention interface nor torch's "
            "attention. In transformers 4, load the model with attn_implementation='sdpa' and ask "
            "for no attentions; else use a newer version."
        )
    return _end_to_end(module, received, call.hidden_states.shape[1]), first_tensor(out)


def _end_to_end(module: Any, received: list[_AttentionCall], tokens: int) -> _AttentionCall:
    """Combine the calls of an attention function, one for each image, with images as examples."""
    if len(received) == 1:
        return received[0]
    sizes = [each.query.shape[2] for each in received]
    if sum(sizes) != tokens or any(each.mask is not None or each.causal for each in received):
        raise UnsupportedMixerError(
            f"{type(module).__name__} calls its attention function {len(received)} times, and not "
            "of one image after the other without a mask; that is not supported."
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
    """Record the arguments of an attention function; return ones, so that a gate on it shows."""
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise _unknown(module, name)
    batch, heads, tokens, width = query.shape
    if key.shape[-2] != tokens:
        raise UnsupportedMixerError(
            f"{type(module).__name__}: {tokens} queries read {key.shape[-2]} keys; only "
            "self-attention of a whole sequence is supported."
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
    return UnsupportedMixerError(f"{type(module).__name__}: attention with {name}.")


@contextmanager
def _torchs_recorded(module: Any) -> Iterator[None]:
    """Call :func:`_record` in place of torch's own attention, also where torch's modes are off."""
    mode = _TorchsRecorded(module, hidden=not torch._C._is_torch_function_enabled())
    with torch._C._EnableTorchFunction(), mode:
        yield


class _TorchsRecorded(TorchFunctionMode):
    """Replaces torch's own attention by :func:`_record`; ``hidden`` keeps other calls unseen."""

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

    Eager attention takes its mask as it is; the other functions apply causality themselves if they
    get no mask, and flash attention also the window and a mask of tokens.
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
            f"{type(module).__name__}: an attention mask of shape {tuple(mask.shape)}."
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
    """Return the shallow copy's submodule: the identity for output projections and dropout."""
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
