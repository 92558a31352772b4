"""Delta rules with decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention, RWKV-7.

    S[t] = decay[t] S[t-1] - f[t] (e[t] . S[t-1]) + beta[t] k[t] v[t],   y[t] = q[t] . S[t]

Each step reads the state with the vector e, and subtracts the result along f.  In most of these
models the key reads the decayed state, so the step moves the state's entry at the key towards the
value.  Then e = decay k and f = beta k, or

    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t])

The matrix is (Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), with E the products of
decays.  RWKV-7 has a separate key e for erasing; f is e times a step size for each channel.  With
frozen coefficients all these maps are linear in v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..base import Role, Shape
from ..kernels.arithmetic import exponential, with_graphs
from ..kernels.attention_backward import gradients
from ..kernels.bands import shift_tokens
from ..kernels.chunks import Chunk, in_chunks
from ..kernels.ut_transform import delta_chunk
from .base import ChunkedHeads

#: Queries and gradients of the outputs, or keys and values.
Pair = tuple[Tensor, Tensor]


class Correction(NamedTuple):
    """Vectors k, e and f of steps that add k v to the decayed state and subtract f (e . S).

    Attributes:
        key: key k times the step size beta (B, L, H, N).
        erase: vector e, which reads the state S before its decay (B, L, H, N).
        subtract: vector f, along which the reading is subtracted (B, L, H, N).
    """

    key: Tensor
    erase: Tensor
    subtract: Tensor


class DeltaRule(ChunkedHeads):
    """A linear attention whose steps correct the state: each step replaces the value at its key.

    S[t] = decay[t] S[t-1], then S[t] += beta[t] k[t] (v[t] - k[t] . S[t]), and y[t] = q[t] . S[t].
    The matrix is (Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), where E contains the
    products of decays.  With a separate erasing key e, and step sizes a for the channels of e,

    S[t] = decay[t] S[t-1] - a[t] e[t] (e[t] . S[t-1]) + beta[t] k[t] v[t].

    Args:
        query: queries (B, L, H, N).
        key: keys (B, L, H, N).
        beta: step sizes (B, L, H).
        log_decay: logarithms of the decays, per head (B, L, H) or per key channel (B, L, H, N);
            None for no decay.
        per_head: number of value channels of a head, P.
        component: name of the mixer's part that it represents. Default: ``"scan"``.
        erase: erasing key e, which reads the state before its decay (B, L, H, N). Default: None,
            the key times the decay.
        erase_step: step sizes a of the channels of ``erase`` (B, L, H, N). Default: None, the
            reading is subtracted along ``beta * key``, where the value is added.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import DeltaRule
        >>> key = torch.ones(1, 3, 1, 1)  # with equal keys, each value replaces the last
        >>> memory = DeltaRule(key, key, torch.ones(1, 3, 1), None, per_head=1)
        >>> torch.allclose(memory.dense(), torch.eye(3))
        True
    """

    roles: Mapping[str, Role] = {
        "query": "query",
        "key": "key",
        "beta": "step",
        "log_decay": "step",
        "erase": "key",
        "erase_step": "step",
    }

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        per_head: int,
        component: str | None = "scan",
        erase: Tensor | None = None,
        erase_step: Tensor | None = None,
    ) -> None:
        self.query, self.key, self.beta = query.detach(), key.detach(), beta.detach()
        self.log_decay = None if log_decay is None else log_decay.detach()
        self.erase = None if erase is None else erase.detach()
        self.erase_step = None if erase_step is None else erase_step.detach()
        self.component = component
        coefficients = query, key, beta, log_decay, erase, erase_step
        self.live = with_graphs(dict(zip(self.roles, coefficients, strict=True)))
        self.shape = Shape(beta.shape[0], beta.shape[1], beta.shape[2], per_head)

    def corrections(self, part: slice = slice(None), decays: Tensor | None = None) -> Correction:
        """Return the vectors k, e and f of some tokens.

        Args:
            part: slice of the tokens. Default: all tokens.
            decays: the tokens' decays from :meth:`_decays`. Default: None, they are computed.
        """
        key = self.key[:, part]
        added = key * self.beta[:, part, :, None]
        if self.erase is not None:
            erase = self.erase[:, part]
        elif self.log_decay is None:
            erase = key
        else:
            erase = key * (self._decays(part) if decays is None else decays)
        steps = self.erase_step
        return Correction(added, erase, added if steps is None else erase * steps[:, part])

    def _decays(self, part: slice = slice(None)) -> Tensor:
        """Return the decays to multiply keys by: (B, L, H, 1), or (B, L, H, N) per key channel."""
        assert self.log_decay is not None
        logs = self.log_decay[:, part]
        return exponential(logs if logs.dim() == 4 else logs[..., None])

    # --- its dependence on its coefficients ------------------------------------------------

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of linear attention over the writes k v and -f (e . S)."""
        # without a separate e, k reads the state after its decay
        reads_decayed = self.erase is None and self.log_decay is not None
        decays = self._decays() if reads_decayed else None
        key, erase, subtract = self.corrections(decays=decays)
        # e reads the state before a step like a query of the token before
        erase_query = shift_tokens(erase, -1)
        readings = shift_tokens(self.at({"query": erase_query}).apply(values), 1)  # e . S
        of_values = self.transpose(gradient)
        if self.erase_step is None:
            of_subtract_values, writes = of_values, [(key, values - readings)]
        else:
            # f in the place of k: the gradients of the values that would be added along f
            along_subtract = DeltaRule(
                query=self.query, key=subtract, beta=torch.ones_like(self.beta),
                log_decay=self.log_decay, per_head=self.shape.per_head, component=None,
                erase=erase, erase_step=self.erase_step,
            )  # fmt: skip
            of_subtract_values = along_subtract.transpose(gradient)
            writes = [(key, values), (subtract, -readings)]
        # for fixed readings e . S, outputs and readings are linear attention over all writes, with
        # the queries and the erasing keys as queries; a reading's gradient is minus the gradient of
        # a value that is added along f
        reads = [(self.query, gradient), (erase_query, -shift_tokens(of_subtract_values, -1))]
        of_queries, of_keys, of_logs = self._attention_gradients(reads, writes)
        (of_query, of_erase_query), (of_key, *of_subtract) = of_queries, of_keys
        of_erase = shift_tokens(of_erase_query, 1)
        by_name = {
            "query": of_query,
            "key": of_key * self.beta[..., None],
            "beta": (of_key * self.key).sum(-1),
        }
        if self.log_decay is not None:
            by_name["log_decay"] = of_logs
        if self.erase_step is not None:
            by_name["erase_step"] = of_subtract[0] * erase
            of_erase = of_erase + of_subtract[0] * self.erase_step
        if self.erase is not None:
            by_name["erase"] = of_erase
        elif decays is None:  # e = k
            by_name["key"] += of_erase
        else:
            by_name["key"].addcmul_(of_erase, decays)
            of_log, by_erase = by_name["log_decay"], of_erase * erase  # e = decay k
            of_log += by_erase if of_log.dim() == 4 else by_erase.sum(-1)
        return of_values, by_name

    def _attention_gradients(
        self, reads: Sequence[Pair], writes: Sequence[Pair]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Return gradients of queries, keys and log decays in linear attention over all writes.

        Args:
            reads: pairs of queries and the gradients of their outputs.
            writes: pairs of keys and their values.
        """
        logs = torch.zeros_like(self.beta) if self.log_decay is None else self.log_decay
        (queries, of_outputs), (keys, values) = (zip(*x, strict=True) for x in (reads, writes))
        by_channel = logs if logs.dim() == 4 else logs[..., None]
        result = gradients(queries, keys, by_channel, values, of_outputs)
        return result.queries, result.keys, result.log_decay.view(logs.shape)

    # --- reads, writes, carry --------------------------------------------------------------

    def chunk(self, part: slice, length: int) -> Chunk:
        """Return the chunks of the tokens ``part``, from :func:`.delta_chunk`."""

        def cut(x: Tensor) -> Tensor:
            return in_chunks(x[:, part], length)

        # without a separate e, k reads the state after its decay
        log_decay, decayed = self.log_decay, self.erase is None
        if log_decay is not None:
            log_decay = cut(log_decay if log_decay.dim() == 4 else log_decay[..., None])
        query, key, beta = cut(self.query), cut(self.key), cut(self.beta[..., None])
        erase = key if self.erase is None else cut(self.erase)
        subtract = None  # beta k
        if self.erase_step is not None:
            subtract = in_chunks(self.corrections(part).subtract, length)
        return delta_chunk(part, query, beta * key, erase, subtract, log_decay, decayed=decayed)
