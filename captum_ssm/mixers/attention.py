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
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "alibi_slopes", "head_mask")


def hf_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize a self-attention module of transformers as softmax attention with a gate."""
    _refuse_cache(module, call)
    return _mixer_of(module, *_rerun(module, call))


def _mixer_of(module: Any, inputs: _AttentionCall, gate: Tensor) -> LinearMixer:
    """Return the mixer, given ``inputs`` of the attention function and the gate (B, L, H P)."""
    pairs, gate_key = _visible_pairs(module, inputs), ("gate", type(module))
    if pairs is not None and are_noted(gate):  # on a GPU, read properties of both together
        read_pairs(pairs, gate_key, lambda: (gate == 1).all())
    query, key, values = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
    path = Path(values).attend(query, key, inputs.scaling, pairs)
    if not _is_one_everywhere(gate, gate_key):
        path.scale(in_batch(gate), "gate", at_rest=0.5)
    output = next((getattr(module, n) for n in _OUTPUTS if hasattr(module, n)), nn.Identity())
    return path.to(output, end_to_end=inputs.end_to_end)


def _is_one_everywhere(gate: Tensor, kind: Hashable) -> bool:
    """Return True if the gate is one everywhere, because the module has no gate.

    On a GPU the result is read only for the first module with this ``kind``.  If that result is
    True, later modules assume True, which is checked at the end of the call.
    """
    ones = (gate == 1).all()
    if not are_noted(gate):
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
        raise _unsupported(module, "head_mask")
    mixer = hf_attention(module.attention, call)  # its class has no output projection
    return replace(mixer, project=lambda y: run(module.output.dense, y.flatten(2)))


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
    # in the model's own precision: the rerun in float32 could pick other tokens at near ties
    with torch.no_grad():
        rotations = call.argument("position_embeddings", 1)
        picks = module.indexer(call.hidden_states, rotations, mask, None)
    module = copy.copy(module)
    module._modules = {**module._modules, "indexer": _FixedPicks(picks)}
    return replace(hf_attention(module, call), mask=_real_tokens(mask, call))


class _FixedPicks(nn.Module):
    """A replacement of an indexer module; it returns the tokens that the indexer picked before."""

    def __init__(self, picks: Tensor) -> None:
        super().__init__()
        self._picks = picks

    def forward(self, *_: Any) -> Tensor:
        return self._picks


def _real_tokens(mask: Tensor | None, call: Call) -> Tensor | None:
    """Return the mask of real tokens (B, L) from the call's mask; None if all are real."""
    if mask is None:
        return None
    if mask.dim() == 2:  # of tokens; otherwise of pairs
        return padding_mask(mask, call.hidden_states)
    visible = mask if mask.dtype == torch.bool else mask == 0  # (B, 1 or H, L, L)
    # a token that no query sees is padding
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
        # a layer without an indexer takes its picks as an argument, so the rerun picks none
        picks = _indexer_picks(module, call)
        call = replace(call, kwargs={**call.kwargs, "prev_topk_indices": picks})
        module = copy.copy(module)
        module._modules = {**module._modules, "indexer": None}
    attention, gate = _rerun(module, call)
    if module.config._attn_implementation == "sdpa":
        # sdpa's mask is boolean, unlike the recorded one, so padded tokens attend to no token
        attention = replace(attention, mask=attention.mask == 0)
    mask = _real_tokens(call.argument("attention_mask", 1), call)
    return replace(_mixer_of(module, attention, gate), mask=mask)


@torch.no_grad()
def _indexer_picks(module: Any, call: Call) -> Tensor:
    """Return the tokens that the indexer picks, computed in the model's own precision."""
    hidden, mask = call.hidden_states, call.argument("attention_mask", 1)
    query_states = module.q_a_layernorm(module.q_a_proj(hidden))
    picks: Tensor = module.indexer(
        hidden_states=hidden, q_resid=query_states, attention_mask=mask, past_key_values=None
    )
    return picks


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


class _RecordingConfig:
    """A model's configuration, but with :func:`_record` as the attention function."""

    _attn_implementation = _RECORDING

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)  # self._config may call this method


def _rerun(module: Any, call: Call) -> tuple[_AttentionCall, Tensor]:
    """Run the call again; return the attention function's arguments and the gate (B, L, H P)."""
    from transformers import AttentionInterface

    AttentionInterface.register(_RECORDING, _record)
    dtype = working_dtype(module, call.hidden_states)
    twin = copy.copy(module)
    if hasattr(module, "config"):
        twin.config = _RecordingConfig(module.config)
    twin.training = False  # no dropout, which would draw random numbers
    like = call.hidden_states.new_empty(0, dtype=dtype)
    twin._modules = {name: _replacement(name, sub, like) for name, sub in module._modules.items()}
    with full_precision(call.hidden_states.device), _recording_torch_attention(twin):
        # called on the class, so that neither hooks nor a wrapper of forward run
        out = type(module).forward(twin, *_cast(call.args, dtype), **_cast(call.kwargs, dtype))
    calls = twin.__dict__.get("received")
    if not calls:
        raise UnsupportedMixerError(
            f"{type(module).__name__} uses neither transformers' attention interface nor torch's "
            "attention. In transformers 4, load the model with attn_implementation='sdpa' and pass "
            "output_attentions=False; otherwise use a newer version of transformers."
        )
    # attention returned ones, so the output is the gate, or ones without a gate
    return _join_images(module, calls, call.hidden_states.shape[1]), first_tensor(out)


def _join_images(module: Any, calls: list[_AttentionCall], total_tokens: int) -> _AttentionCall:
    """Combine calls of the attention function, one per image, into one with a batch; pad images."""
    if len(calls) == 1:
        return calls[0]
    lengths = [call.query.shape[2] for call in calls]
    if sum(lengths) != total_tokens or any(call.mask is not None or call.causal for call in calls):
        raise UnsupportedMixerError(
            f"{type(module).__name__} calls its attention function {len(calls)} times, which is "
            "supported only for one image each, without a mask. Pass one image at a time."
        )
    length = torch.tensor(lengths, device=calls[0].query.device)
    position = torch.arange(max(lengths), device=length.device)
    is_real = position < length[:, None]
    # index of each token in the joined images; padding reads the row of zeros after them
    index = torch.where(is_real, position + (length.cumsum(0) - length)[:, None], total_tokens)

    def padded(tensors: list[Tensor]) -> Tensor:
        """Return one tensor (1, H, T, N) per image as a batch (images, H, longest, N)."""
        joined = torch.cat(tensors, 2)[0].transpose(0, 1)  # (L, H, N)
        return F.pad(joined, (0, 0, 0, 0, 0, 1))[index].transpose(1, 2)

    return replace(
        calls[0],
        query=padded([call.query for call in calls]),
        key=padded([call.key for call in calls]),
        value=padded([call.value for call in calls]),
        mask=None if len(set(lengths)) == 1 else is_real[:, None, None],
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
    """Append the arguments to ``module.received``; return ones, so that the output is the gate."""
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise _unsupported(module, name)
    batch, heads, tokens, width = query.shape
    if key.shape[-2] != tokens:
        raise UnsupportedMixerError(
            f"{type(module).__name__}: {tokens} queries attend to {key.shape[-2]} keys, which is "
            "not supported. Pass the whole sequence in one call, without a cache."
        )
    is_causal = kwargs.get("is_causal")  # passed, or the module's; by default True
    queries_per_key = heads // key.shape[1]
    call = _AttentionCall(
        query=query,
        key=key.repeat_interleave(queries_per_key, 1),
        value=value.repeat_interleave(queries_per_key, 1),
        mask=attention_mask,
        scaling=width**-0.5 if scaling is None else scaling,
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        window=kwargs.get("sliding_window"),
    )
    module.received = [*vars(module).get("received", ()), call]
    return query.new_ones(batch, tokens, heads, value.shape[-1]), None


def _unsupported(module: Any, name: str) -> UnsupportedMixerError:
    class_name = type(module).__name__
    remedy = f"Use a model, or a call of the model, without {name}."
    return UnsupportedMixerError(f"{class_name} with {name} is not supported. {remedy}")


@contextmanager
def _recording_torch_attention(module: Any) -> Iterator[None]:
    """Return a context, effective also in :func:`.unseen`, that records torch's attention."""
    mode = _RecordTorchAttention(module, hidden=not torch._C._is_torch_function_enabled())
    with torch._C._EnableTorchFunction(), mode:
        yield


class _RecordTorchAttention(TorchFunctionMode):
    """A torch function mode that calls :func:`_record` instead of torch's attention."""

    def __init__(self, module: Any, hidden: bool) -> None:
        super().__init__()
        self._module = module
        self._hidden = hidden  # whether to hide other functions from other modes

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
        return ones.transpose(1, 2)  # (B, H, L, P), as torch returns it


def _visible_pairs(module: Any, attention: _AttentionCall) -> Tensor | None:
    """Return the mask over pairs of tokens that the attention function would use; None: no mask.

    Eager attention uses its mask unchanged.  The other functions apply causality themselves if they
    get no mask; flash attention also applies the window and a mask of tokens.
    """
    mask, tokens = attention.mask, attention.query.shape[2]
    if hasattr(mask, "mask_mod"):  # flex attention's description of a mask
        from torch.nn.attention.flex_attention import create_mask

        batch, device_type = attention.query.shape[0], attention.query.device.type
        mask = create_mask(mask.mask_mod, batch, 1, tokens, tokens, device_type)
    implementation = "sdpa" if attention.by_torch else module.config._attn_implementation or "eager"
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return mask[..., :tokens]  # without the columns of a cache's unused places
    if mask is None and implementation == "eager":
        return None
    if mask is not None and (implementation == "eager" or mask.dim() != 2):
        raise UnsupportedMixerError(
            f"{type(module).__name__}: an attention mask of shape {tuple(mask.shape)} is not "
            "supported. Pass attention_mask as (B, L), or as (B, H, L, L)."
        )
    window = attention.window if "flash" in implementation else None
    device, causal = attention.query.device, attention.causal
    pairs = seen_pairs(tokens, device, causal=causal, window=window)
    if mask is None:
        return pairs

    def real_pairs() -> Tensor | None:  # None if all pairs are visible
        is_real = mask.bool()[:, None]
        both_real = is_real[..., None] & is_real[..., None, :]
        visible = both_real if pairs is None else pairs & both_real
        return None if bool(visible.all()) else visible

    return read_once(("pairs of tokens", device, causal, window), real_pairs, of=mask)


def _replacement(name: str, submodule: nn.Module | None, like: Tensor) -> nn.Module | None:
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
