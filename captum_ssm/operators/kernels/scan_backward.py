"""A selective scan in plain torch whose backward needs little memory and linear time.

It computes the reference scans of transformers and mamba_ssm chunk by chunk.  The reference scans
store the states of all tokens; this scan stores only states between chunks, and its backward
recomputes the others.

Inputs are copied so that channels, not tokens, are contiguous in memory.  Stacked values
may share step sizes.  Then the decays, which cost most, are computed once for the whole stack.

:takes: values and step sizes (B, D, L), decay rates (D, N), vectors B and C (B, N, L); skip
    weights and the bias of the step sizes (D,), and the gate (B, D, L), or None.  All tensors
    except the step sizes may be stacks of S B examples.
:gives: y (B, D, L), and the last state (B, D, N), differentiable by autograd.
:cost: N D exponentials and 3 N D multiplications with additions for a token; backward the same
    again, and 6 N D more.
:literature: Gu and Dao, Mamba, 2023, section 3.3.2 (states are computed again for the backward);
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
:naive version: ``kernels.selective_scan``
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .arithmetic import BINARY, underflow_flushed

#: Number of tokens whose states are in memory together, if there is no stack.
_CHUNK = 32


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the reference scan from the same arguments, and return the outputs (B, D, L).

    Args:
        hidden_states: values (B, D, L).
        dt: step sizes before bias and softplus (B, D, L). If the other tensors have S B examples,
            all S stacked examples use the same step sizes.
        A: decay rates (D, N).
        B: input vectors (B, N, L).
        C: output vectors (B, N, L).
        D: skip weights (D,). Default: None.
        z: gate before SiLU (B, D, L). Default: None.
        delta_bias: bias to add to dt (D,). Default: None.
        delta_softplus: whether to apply a softplus to dt. Default: False.
        return_last_state: whether to also return the last state (B, D, N). Default: False.
        **_: options of the replaced functions that choose an algorithm, such as ``use_mambapy``.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    # time first, (L, B, D) and (L, B, N)
    x, steps, keys, reads = (t.permute(2, 0, 1).to(dtype) for t in (hidden_states, dt, B, C))
    skip, bias = (None if t is None else t.to(dtype) for t in (D, delta_bias))
    gate = None if z is None else z.permute(2, 0, 1).to(dtype)
    inputs = _ScanInputs(A.T.to(dtype), x, steps, keys, reads, skip, bias, gate, delta_softplus)
    out, last = _scan(inputs)
    out_dtype = (
        hidden_states.dtype if z is None else torch.promote_types(hidden_states.dtype, z.dtype)
    )
    out = out.permute(1, 2, 0).to(out_dtype)
    return (out, last.transpose(1, 2)) if return_last_state else out


class _ScanInputs(NamedTuple):
    """The inputs of a scan, time first; optional inputs may be None.

    Attributes:
        A: decay rates (N, D).
        x: values (L, S B, D).
        dt: step sizes (L, B, D), before bias and softplus.
        B: input vectors (L, S B, N).
        C: output vectors (L, S B, N).
        D: skip weights (D,).
        bias: bias of the step sizes (D,).
        z: gate before SiLU (L, S B, D).
        softplus: whether to apply a softplus to the step sizes.
    """

    A: Tensor
    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    bias: Tensor | None
    z: Tensor | None
    softplus: bool

    def steps(self, raw: Tensor) -> Tensor:
        """Return ``raw`` step sizes plus the bias, before the softplus."""
        return raw if self.bias is None else raw + self.bias


def _scan(inputs: _ScanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs (L, S B, D) and the last state (S B, N, D), differentiable by autograd."""
    tensors = (t for t in inputs if isinstance(t, Tensor))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        result: tuple[Tensor, Tensor] = _Scan.apply(*inputs)  # type: ignore[no-untyped-call]
        return result
    chunks = _Chunks(inputs)
    with underflow_flushed():
        out = chunks.outputs()
        return out if inputs.z is None else chunks.gated(out, into=out), chunks.last()


class _Scan(torch.autograd.Function):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t], y[t] = (C[t] . h[t] + D x[t]) silu(z[t]).

    Arguments are as in :class:`_ScanInputs`; states are (S B, N, D).  Gradients of x, dt and z have
    the same memory layout as x, dt and z.  Step sizes after the softplus and gates after SiLU, each
    as large as x, are not stored; the backward recomputes them.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = _ScanInputs(*arguments)
        chunks, starts = _Chunks(inputs), list[Tensor]()
        with underflow_flushed():
            out = chunks.outputs(starts)
            gated = out if inputs.z is None else chunks.gated(out, into=torch.empty_like(out))
        ctx.softplus = inputs.softplus
        # the tensors; the outputs before the gate, which the gate's gradient needs; states
        ctx.save_for_backward(*inputs[:-1], None if inputs.z is None else out, *starts)
        return gated, chunks.last()

    @staticmethod
    @once_differentiable
    @underflow_flushed()
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of :class:`_ScanInputs`, computed from the last chunk to the first.

        For each chunk, ``of_states`` are the states' gradients, and ``passed`` are these times the
        decays: the part that reaches the states before.
        """
        A, x, dt, B, C, D, bias, z, out, *starts = ctx.saved_tensors
        scan = _ScanInputs(A, x, dt, B, C, D, bias, z, ctx.softplus)
        chunks = _Chunks(scan)
        grad_x, grad_dt = torch.empty_like(x), torch.empty_like(dt)
        grad_B, grad_C = (t.new_empty(t.shape) for t in (B, C))
        grad_A, grad_D, grad_bias = (
            torch.zeros_like(t) if ctx.needs_input_grad[i] else None
            for i, t in ((0, A), (5, D), (6, bias))  # places in _ScanInputs
        )
        grad_z = torch.empty_like(z) if ctx.needs_input_grad[7] else None
        memory = torch.empty_like(chunks.states[1:])
        no_stack = memory.shape == chunks.decays.shape  # S = 1: the result overwrites decays
        passed_memory = chunks.decays if no_stack else torch.empty_like(memory)
        passed_memory = chunks.stacked(passed_memory)
        carried = chunks.stacked(grad_last[None])[0]
        for part, start in zip(reversed(chunks.parts), reversed(starts), strict=True):
            decays, states = chunks.run(part, start)
            values, raw, steps, keys, written = chunks.current
            of_states, of_out = memory[: len(decays)], time_first(grad_out[part])
            if z is not None:
                of_out, of_z = _gate_backward(of_out, out[part], time_first(z[part]))
                if grad_z is not None:
                    grad_z[part] = of_z
            _times_columns(states[1:], of_out, into=grad_C[part])
            torch.mul(C[part, :, :, None], of_out[:, :, None], out=of_states)
            passed = passed_memory[: len(decays)]
            tensors = chunks.stacked(of_states), decays[:, None], passed
            # from the last token to the first; ``target`` receives the part that is carried on
            for of_state, decay, target in zip(*(x.unbind()[::-1] for x in tensors), strict=True):
                of_state.add_(carried)
                carried = torch.mul(of_state, decay, out=target)
            carried = carried.clone()  # the next chunk overwrites ``passed``
            _times_columns(of_states, written, into=grad_B[part])
            of_written = _times_rows(keys, of_states, into=torch.empty_like(written))
            of_x = chunks.stacked(of_written).mul(steps[:, None]).flatten(1, 2)
            if D is not None:
                of_x.addcmul_(of_out, D)
            if grad_D is not None:
                grad_D += (of_out * values).sum((0, 1))
            grad_x[part] = of_x
            # the gradient of dt A: the decay's gradient times the decay
            exponent = passed.mul_(chunks.stacked(states[:-1]))
            exponent = exponent[:, 0] if no_stack else exponent.sum(1)
            if grad_A is not None:
                by_rate = of_states[:, : exponent.shape[1]]  # memory that is no longer needed
                grad_A += torch.mul(exponent, steps[:, :, None], out=by_rate).sum((0, 1))
            of_dt = exponent.mul_(A).sum(2) + chunks.stacked(of_written * values).sum(1)
            if scan.softplus:
                of_dt.mul_(scan.steps(raw).sigmoid())
            if grad_bias is not None:
                grad_bias += of_dt.sum((0, 1))
            grad_dt[part] = of_dt
        return grad_A, grad_x, grad_dt, grad_B, grad_C, grad_D, grad_bias, grad_z, None


class _Chunks:
    """The states of a scan, computed one chunk of tokens at a time, in reused memory.

    Allocating memory for every chunk would take longer than the arithmetic.

    Attributes:
        parts: the slices of tokens of the chunks.
        decays: decays of the chunk that ran last, (tokens, B, N, D).
        states: state before the chunk that ran last, then its states, (1 + tokens, S B, N, D).
        current: x, raw dt, dt, B and dt x of the chunk that ran last, contiguous.
    """

    def __init__(self, inputs: _ScanInputs) -> None:
        A, x = inputs.A, inputs.x
        self._inputs = inputs
        self._rates = (BINARY * A).contiguous()
        tokens, batch, channels = x.shape
        size = min(max(_CHUNK * inputs.dt.shape[1] // max(batch, 1), 1), tokens)
        self.parts = [slice(t, min(t + size, tokens)) for t in range(0, tokens, size)]
        self.decays = x.new_empty(size, inputs.dt.shape[1], len(A), channels)
        self.states = x.new_zeros(size + 1, batch, len(A), channels)
        self.current: tuple[Tensor, ...] = ()

    def run(self, part: slice, start: Tensor) -> tuple[Tensor, Tensor]:
        """Run one chunk; return the decays, and the states including the state before the chunk.

        h[t] = exp(dt[t] A) h[t-1] + B[t] (dt[t] x[t]).  The next run overwrites these tensors.

        Args:
            part: slice of the chunk's tokens.
            start: state before the chunk (S B, N, D).
        """
        inputs = self._inputs
        x, raw, keys = (time_first(t[part]) for t in (inputs.x, inputs.dt, inputs.B))
        dt = inputs.steps(raw)
        dt = F.softplus(dt) if inputs.softplus else dt
        written = self.stacked(x).mul(dt[:, None]).flatten(1, 2)
        self.current = x, raw, dt, keys, written
        decays, states = self.decays[: len(x)], self.states[: len(x) + 1]
        torch.mul(dt[:, :, None], self._rates, out=decays).exp2_()
        torch.mul(keys[..., None], written[:, :, None], out=states[1:])
        states[0] = start
        state, *later_states = self.stacked(states).unbind()
        for out, decay in zip(later_states, decays.unbind(), strict=True):
            state = out.addcmul_(decay, state)
        return decays, states

    def stacked(self, x: Tensor) -> Tensor:
        """Return a view (T, S, B, ...) of a tensor (T, S B, ...)."""
        return torch.unflatten(x, 1, (-1, self.decays.shape[1]))

    def outputs(self, starts: list[Tensor] | None = None) -> Tensor:
        """Return C[t] . h[t] + D x[t] (L, S B, D) of all tokens; write the last h to ``states[0]``.

        Args:
            starts: list to which the state before each chunk is appended. Default: None, no list.
        """
        C, D = self._inputs.C, self._inputs.D
        out = C.new_empty(*C.shape[:2], self.states.shape[-1])
        for part in self.parts:
            if starts is not None:
                starts.append(self.states[0].clone())
            _, states = self.run(part, self.states[0])
            _times_rows(C[part].contiguous(), states[1:], into=out[part])
            if D is not None:
                out[part].addcmul_(self.current[0], D)
            self.states[0] = states[-1]
        return out

    def gated(self, out: Tensor, into: Tensor) -> Tensor:
        """Write the outputs (L, S B, D) times silu(z) to ``into``, and return it."""
        z = self._inputs.z
        assert z is not None
        for part in self.parts:
            torch.mul(out[part], F.silu(time_first(z[part])), out=into[part])
        return into

    def last(self) -> Tensor:
        """Return the state after all tokens (S B, N, D); call :meth:`outputs` first."""
        return self.states[0].clone()


def _gate_backward(grad: Tensor, out: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``out`` and ``z``, given the gradient of out * silu(z)."""
    sigmoid = z.sigmoid()
    gate = sigmoid * z
    slope = torch.addcmul(sigmoid, gate, 1 - sigmoid)  # the derivative of z sigmoid(z)
    return gate.mul_(grad), slope.mul_(grad).mul_(out)


def _times_rows(rows: Tensor, matrices: Tensor, into: Tensor) -> Tensor:
    """Write rows (T, B, N) times matrices (T, B, N, D) to ``into`` (T, B, D), and return it."""
    out = into.view(-1, 1, into.shape[-1])
    torch.bmm(rows.view(-1, 1, rows.shape[-1]), matrices.flatten(0, 1), out=out)
    return into


def _times_columns(matrices: Tensor, columns: Tensor, into: Tensor) -> None:
    """Write matrices (T, B, N, D) times columns (T, B, D) to ``into`` (T, B, N)."""
    # as rows, which is several times as fast
    out = into.view(-1, 1, into.shape[-1])
    torch.bmm(columns.view(-1, 1, columns.shape[-1]), matrices.flatten(0, 1).mT, out=out)


def time_first(x: Tensor) -> Tensor:
    """Return a tensor (T, B, D) as contiguous memory.

    torch copies a strided tensor element by element, which takes five times as long.
    """
    if x.stride(0) != 1 or not x.numel():  # tokens are not contiguous: a plain copy is fast
        return x.contiguous()
    out = x.new_empty(x.shape)
    for example, out_of_example in zip(x.unbind(1), out.unbind(1), strict=True):
        rows = example.T.contiguous()  # (D, T), in one run
        out_of_example.copy_(rows.T.contiguous())
    return out
