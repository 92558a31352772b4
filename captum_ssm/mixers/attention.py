"""Softmax attention of transformers, in its transformers and in its hybrids.

    alpha = softmax(scaling q k^T + mask)      output = o_proj(gate alpha v)

One adapter serves every class that hands its queries, keys and values to transformers' attention
interface, or, as in transformers 4, to torch's own attention: the recorded call is run again on a
shallow copy of the module, under an attention function that only notes what it receives.
Rotations, norms of queries and keys, latent keys and values and adapters around the projections
are thereby the module's own, whichever attention function (eager, sdpa, flash, flex) the model
itself uses.

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
from ..operators import Chain, Diagonal, Shape
from ..operators.kernels.arithmetic import full_precision, unseen
from ..operators.kernels.truths import are_noted, holds, read_once
from .base import Call, LinearMixer, first_tensor, in_batch
from .parts.common import as_heads, padding_mask, run, widened, working_dtype
from .parts.softmax import read_pairs, seen_pairs, softmax_attention

#: The name under which the attention function that takes notes is registered.
_NOTING = "captum_ssm"
#: What the classes call their output projection; a class that has none leaves it to its parent.
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "proj")
#: Arguments of attention functions that change scores or probabilities in ways not covered here.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "alibi_slopes", "head_mask")


def hf_attention(module: Any, call: Call) -> LinearMixer:
    """The self-attention classes of transformers."""
    _refuse_cache(module, call)
    return _linearize(module, *_replay(module, call))


def _linearize(module: Any, noted: _AttentionCall, factor: Tensor) -> LinearMixer:
    query, key, values = noted.query, noted.key, noted.value.transpose(1, 2)
    pairs, gated = _pairs(module, noted), ("gate", type(module))
    if pairs is not None and are_noted(factor):
        read_pairs(pairs, gated, lambda: (factor == 1).all())
    core, mask = softmax_attention(query, key, values, noted.scaling, pairs)
    operator = core
    if not _is_one(factor, gated):
        gate = as_heads(in_batch(factor), values.shape[2])
        operator = Chain(Diagonal(gate, Shape(*values.shape), "gate", at_rest=0.5), core)
    output = next((getattr(module, n) for n in _OUTPUTS if hasattr(module, n)), None)

    def project(y: Tensor) -> Tensor:
        return y.flatten(2) if output is None else run(output, y.flatten(2))

    return LinearMixer(values, operator, project, mask, end_to_end=noted.end_to_end)


def _is_one(factor: Tensor, kind: Hashable) -> bool:
    """Whether no gate stands behind attention, which on a device is read of one module of a kind.

    Of others it is taken to hold as well if it held there; a gate of ones changes nothing.
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
    if call.argument("head_mask", 1) is not None:  # which stands where others have their mask
        raise _unknown(module, "head_mask")
    linear = hf_attention(module.attention, call)
    return replace(linear, project=lambda y: run(module.output.dense, y.flatten(2)))


def falcon_h1_attention(module: Any, call: Call) -> LinearMixer:
    """FalconH1Attention, whose block scales what it returns."""
    scale = float(module.config.attention_out_multiplier)
    return replace(hf_attention(module, call), branch_scale=scale)


def granite_attention(module: Any, call: Call) -> LinearMixer:
    """GraniteMoeHybridAttention, whose block scales what it returns."""
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
    """Which tokens (B, L) may be read, though an indexer may pick them for nobody."""
    if mask is None:
        return None
    if mask.dim() == 2:
        return padding_mask(mask, call.hidden_states)
    visible = mask if mask.dtype == torch.bool else mask == 0
    return padding_mask(visible.any(-2).any(1), call.hidden_states)


def minimax_attention(module: Any, call: Call) -> LinearMixer:
    """MiniMaxAttention, whose block adds beta times what it returns to alpha times the stream."""
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
    noted, factor = _replay(module, call)
    if module.config._attn_implementation == "sdpa":
        # whose mask is boolean, so that padded tokens read nothing
        noted = replace(noted, mask=noted.mask == 0)
    mask = _real(call.argument("attention_mask", 1), call)
    return replace(_linearize(module, noted, factor), mask=mask)


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
    """What the attention function received, keys and values repeated to the query heads."""

    query: Tensor  # (B, H, L, N)
    key: Tensor  # (B, H, L, N)
    value: Tensor  # (B, H, L, P)
    mask: Any
    scaling: float
    causal: bool
    window: int | None
    by_torch: bool = False  # it is torch's own
    end_to_end: bool = False  # of several images, each of which is an example here


class _Settings:
    """A model's configuration with the attention function exchanged; nothing is written to it."""

    _attn_implementation = _NOTING

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _replay(module: Any, call: Call) -> tuple[_AttentionCall, Tensor]:
    """What the attention function received, and the factor (B, L, H P) put on what it returns."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NOTING, _note)
    dtype = working_dtype(module, call.hidden_states)
    twin = copy.copy(module)
    if hasattr(module, "config"):
        twin.config = _Settings(module.config)
    twin.training = False  # no dropout, and no random numbers drawn for it
    like = call.hidden_states.new_empty(0, dtype=dtype)
    twin._modules = {name: _prepared(name, sub, like) for name, sub in module._modules.items()}
    with full_precision(call.hidden_states.device), _torchs_noted(twin):
        # by the class: neither the module's hooks nor a wrapper around its own forward run
        out = type(module).forward(twin, *_cast(call.args, dtype), **_cast(call.kwargs, dtype))
    noted = twin.__dict__.get("noted")
    if not noted:
        raise UnsupportedMixerError(
            f"{type(module).__name__} uses neither transformers' attention interface nor torch's "
            "attention. In transformers 4, load the model with attn_implementation='sdpa' and ask "
            "for no attentions; else use a newer version."
        )
    return _end_to_end(module, noted, call.hidden_states.shape[1]), first_tensor(out)


def _end_to_end(module: Any, noted: list[_AttentionCall], tokens: int) -> _AttentionCall:
    """What was received at once, or of one image after the other, each then as an example."""
    if len(noted) == 1:
        return noted[0]
    sizes = [each.query.shape[2] for each in noted]
    if sum(sizes) != tokens or any(each.mask is not None or each.causal for each in noted):
        raise UnsupportedMixerError(
            f"{type(module).__name__} calls its attention function {len(noted)} times, and not of "
            "one image after the other without a mask; that is not supported."
        )
    count = torch.tensor(sizes, device=noted[0].query.device)
    step = torch.arange(max(sizes), device=count.device)
    real = step < count[:, None]
    place = torch.where(real, step + (count.cumsum(0) - count)[:, None], tokens)

    def apart(parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts, 2)[0].transpose(0, 1)  # (L, H, N)
        return F.pad(whole, (0, 0, 0, 0, 0, 1))[place].transpose(1, 2)

    return replace(
        noted[0],
        query=apart([each.query for each in noted]),
        key=apart([each.key for each in noted]),
        value=apart([each.value for each in noted]),
        mask=None if len(set(sizes)) == 1 else real[:, None, None],
        end_to_end=True,
    )


def _note(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function that returns ones, so that a gate behind it shows."""
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
    noted = _AttentionCall(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attention_mask,
        width**-0.5 if scaling is None else scaling,
        bool(getattr(module, "is_causal", True) if causal is None else causal),
        kwargs.get("sliding_window"),
    )
    module.noted = [*vars(module).get("noted", ()), noted]
    return query.new_ones(batch, tokens, heads, value.shape[-1]), None


def _unknown(module: Any, name: str) -> UnsupportedMixerError:
    return UnsupportedMixerError(f"{type(module).__name__}: attention with {name}.")


@contextmanager
def _torchs_noted(module: Any) -> Iterator[None]:
    """Have :func:`_note` called in the place of torch's own attention, also where all is unseen."""
    mode = _TorchsNoted(module, hidden=not torch._C._is_torch_function_enabled())
    with torch._C._EnableTorchFunction(), mode:
        yield


class _TorchsNoted(TorchFunctionMode):
    """Sees torch's own attention."""

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
        ones, _ = _note(
            self._module, query, key, value, attn_mask, scaling=scale, is_causal=is_causal
        )
        self._module.noted[-1] = replace(self._module.noted[-1], by_torch=True)
        return ones.transpose(1, 2)


def _pairs(module: Any, noted: _AttentionCall) -> Tensor | None:
    """The mask over pairs of tokens that the module's own attention function would have used.

    Eager attention takes its mask as it is; the other functions apply causality themselves where
    they are given none, and flash attention also the window and a mask of tokens.
    """
    mask, tokens = noted.mask, noted.query.shape[2]
    if hasattr(mask, "mask_mod"):  # flex attention's description of a mask
        from torch.nn.attention.flex_attention import create_mask

        batch = noted.query.shape[0]
        mask = create_mask(mask.mask_mod, batch, 1, tokens, tokens, noted.query.device.type)
    implementation = "sdpa" if noted.by_torch else module.config._attn_implementation or "eager"
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return mask[..., :tokens]
    if mask is None and implementation == "eager":
        return None
    if mask is not None and (implementation == "eager" or mask.dim() != 2):
        raise UnsupportedMixerError(
            f"{type(module).__name__}: an attention mask of shape {tuple(mask.shape)}."
        )
    window = noted.window if "flash" in implementation else None
    device, causal = noted.query.device, noted.causal
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
    """A submodule for the shallow copy: no output projection and dropout, half precision wider."""
    if name in _OUTPUTS or isinstance(submodule, nn.Dropout):
        return nn.Identity()
    return None if submodule is None else widened(submodule, like)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors inside tuples, lists and mappings in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
