"""Estimate the memory of a :class:`~captum_ssm.LatimFlow` call without running the model.

A language model is built from its configuration and explained with fake tensors, which have a shape
and a dtype but no memory.  This takes seconds to minutes for a model of any size.  The bytes of the
tensors that exist at the same time are counted.  They grow linearly with the number of tokens, with
the tokens of a chunk and with the number of chunks (eager attention: with products of tokens), so
long runs are extrapolated from short ones.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._optional import optional
from ..attr import LatimFlow
from ..attr.call import checks
from ..errors import CaptumSSMError, OptionError
from ..linear import Rule

#: Tokens of the shortest run, unless the kernels' own chunks are longer. Other runs have multiples.
_STEP = 128


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of a call.

    Attributes:
        weights: bytes of the model's parameters and buffers.
        activations: largest number of bytes that a call adds to the weights.

    Example:
        >>> from captum_ssm.explain.estimate import Estimate
        >>> Estimate(weights=6 * 2**30, activations=2 * 2**30).fits(10)
        True
    """

    weights: int
    activations: int

    def fits(self, gib: float) -> bool:
        """Return True if weights and activations take at most 95 % of ``gib`` GiB of memory."""
        return self.weights + self.activations <= 0.95 * gib * 2**30


def estimate_memory(
    config: Any,
    tokens: int,
    *,
    rule: Rule = "balanced",
    recompute: bool = False,
    chunk_tokens: int | None = None,
) -> Estimate:
    """Estimate the memory of a call of LatimFlow with one example.

    Args:
        config: the configuration of a transformers language model, with its ``dtype``.
        tokens: the number of tokens of the example.
        rule, recompute, chunk_tokens: the options of :class:`~captum_ssm.LatimFlow`, with the same
            defaults.

    Raises:
        OptionError: if the model's code depends on values of activations, or an option is refused.

    Example:
        >>> from transformers import MambaConfig
        >>> from captum_ssm.explain.estimate import estimate_memory
        >>> config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)
        >>> found = estimate_memory(config, 1000)
        >>> estimate_memory(config, 2000).activations > 1.5 * found.activations
        True
    """
    if tokens < 1:
        raise OptionError(f"tokens={tokens!r} is below 1. Pass a number of at least 1.")
    chunk_tokens = checks.count("chunk_tokens", chunk_tokens)
    transformers = optional("transformers", "transformers", "An estimate")
    # a model without attention sets it in its configuration, too
    attends = getattr(config, "num_attention_heads", None)
    is_eager = bool(attends) and getattr(config, "_attn_implementation", None) == "eager"
    config = copy.deepcopy(config)  # models may change their configuration
    dtype = getattr(config, "dtype", None) or torch.float32
    full_run = _Run(tokens, min(tokens, chunk_tokens or tokens))
    chunk_sizes = [x for name, x in vars(config).items() if name.endswith("chunk_size") and x]
    runs = full_run.shorter_runs(max([_STEP, *chunk_sizes]), is_eager)
    with (
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", 8),  # values of a target are kept
        fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
        torch.random.fork_rng(devices=[]),
    ):
        # class names, because other packages replace the entries of transformers' Auto classes
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        # a class of transformers, or None for a class of a different package
        kind = getattr(transformers, names.get(config.model_type, ""), None)
        build = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config
        model = build(config, dtype=dtype).eval()
        model.requires_grad_(False)
        in_chunks = chunk_tokens is not None
        forward_func = model if in_chunks else partial(_last_logits, model)
        peaks = []
        for run in runs:
            chunk = run.chunk if in_chunks else None
            explain = LatimFlow(
                forward_func, model, rule=rule, recompute=recompute, chunk_tokens=chunk
            )
            peaks.append(_peak_bytes(explain, model, run.tokens))
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}.values()
        weights = sum(x.numel() * x.element_size() for x in tensors)
    rows, row = ([run.terms(is_eager) for run in group] for group in (runs, [full_run]))
    # bytes per term; the pseudoinverse divides them among equal terms, without effect on the result
    shares = torch.linalg.pinv(_as_matrix(rows), rtol=1e-9) @ _as_matrix([[peak] for peak in peaks])
    return Estimate(weights, int(_as_matrix(row) @ shares))


@dataclass(frozen=True)
class _Run:
    """The tokens of a run, and the largest number of tokens in a chunk."""

    tokens: int
    chunk: int

    def shorter_runs(self, step: int, is_eager: bool) -> list[_Run]:
        """Return runs of a few times ``step`` tokens, at least one for each of this run's terms."""
        if self.tokens <= 2 * step:
            return [self]
        if self.tokens <= self.chunk:
            lengths = [max(step, 2 * _STEP) * n for n in (1, 2, 3)[: 2 + is_eager]]
            return [_Run(length, length) for length in lengths]
        if self.chunk <= 2 * step:
            return [_Run(self.chunk * n, self.chunk) for n in (3, 4)]
        sizes = (3, 1), (4, 1), (6, 2), (8, 2), (9, 3)  # with chunks between the first and last
        return [_Run(step * n, step * m) for n, m in sizes[: 4 + is_eager]]

    def terms(self, is_eager: bool) -> list[float]:
        """Return numbers that parts of the memory are proportional to, such as a chunk's tokens."""
        chunks = -(-self.tokens // self.chunk)
        tokens = self.tokens / _STEP  # of the size of the other terms
        size = tokens / chunks
        squares = [size * tokens] if is_eager else []
        return [1.0, size, *squares, *([tokens, chunks] if chunks > 1 else [])]


def _last_logits(model: nn.Module, embeddings: Tensor) -> Tensor:
    """Return the logits of the last token only; all tokens' logits would need more memory."""
    logits: Tensor = model(inputs_embeds=embeddings, logits_to_keep=1).logits
    return logits


def _as_matrix(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _peak_bytes(explain: LatimFlow, model: nn.Module, tokens: int) -> int:
    """Return the largest number of bytes that a call with ``tokens`` tokens adds to the weights."""
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    inputs = torch.zeros(1, tokens, width, dtype=next(model.parameters()).dtype)
    memory = _LiveFakes()
    try:
        with memory:
            explain.attribute(inputs, target=(-1, 0), verify=False)
    except CaptumSSMError:
        raise
    except RuntimeError as error:
        raise OptionError(
            f"The memory of {type(model).__name__} cannot be estimated, because the code depends "
            f"on values of activations: {error} Measure a call with a few tokens instead."
        ) from error
    return memory.peak


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors created inside the ``with`` that are not freed yet.

    Attributes:
        peak: the largest number of bytes at the same time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the outputs that do not share memory with an input."""
        kwargs = kwargs or {}
        arguments = tree_leaves((args, kwargs))
        input_storages = {x.untyped_storage()._cdata for x in arguments if isinstance(x, Tensor)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or storage._cdata in input_storages or storage._cdata in self._sizes:
                continue
            self._sizes[storage._cdata] = storage.nbytes()
            self._live_bytes += storage.nbytes()
            weakref.finalize(storage, self._release, storage._cdata)
        self.peak = max(self.peak, self._live_bytes)
        return out

    def _release(self, key: int) -> None:
        self._live_bytes -= self._sizes.pop(key)


class _LiveFakes(Live):  # type: ignore[no-untyped-call]
    """Counts the bytes of fake tensors; values that are not known are read as 0 or True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].constant is not None:  # a number of Python code, such as a position
                return args[0].constant.item()
            return True if args[0].dtype == torch.bool else 0
        if func is torch.ops.aten.equal.default:
            return True
        return super().__torch_dispatch__(func, types, args, kwargs)
