"""A selective scan whose CPU backward is linear in the length, for the time of a ``with``.

The reference scan of transformers slices tensors of shape (B, D, L, N) inside its loop over
tokens, and the backward of each slice writes a whole tensor of zeros: quadratic in L, and minutes
per layer at a few hundred tokens.  The scan here computes the same numbers with a backward of its
own, which keeps the state at the chunks' ends only and recomputes the rest.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Module globals that hold such a scan, all of one signature.
_REFERENCE_SCANS = (
    ("transformers.models.mamba.modeling_mamba", "mamba_selective_scan"),
    ("transformers.models.falcon_mamba.modeling_falcon_mamba", "mamba_selective_scan"),
    ("transformers.models.jamba.modeling_jamba", "mamba_selective_scan"),
    ("transformers.models.zamba.modeling_zamba", "mamba_selective_scan"),
)
#: Tokens whose states are held at a time.
_CHUNK = 32

_lock = threading.Lock()
_users = 0
_originals: dict[tuple[str, str], Callable[..., Any]] = {}


@contextmanager
def repaired_scans() -> Iterator[None]:
    """Replace the reference scans of packages that are imported, until the last user leaves."""
    global _users
    with _lock:
        if _users == 0:
            _replace()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore()


def _replace() -> None:
    for place in _REFERENCE_SCANS:
        module = sys.modules.get(place[0])
        original = getattr(module, place[1], None)
        if original is not None:
            _originals[place] = original
            setattr(module, place[1], _on_cpu(original))


def _restore() -> None:
    for (module, name), original in _originals.items():
        setattr(sys.modules[module], name, original)
    _originals.clear()


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # compiled, the reference is an associative scan; mambapy has an algorithm of its own
        other_algorithm = torch.compiler.is_compiling() or kwargs.get("use_mambapy")
        if hidden_states.device.type != "cpu" or other_algorithm:
            return original(hidden_states, *args, **kwargs)
        return selective_scan(hidden_states, *args, **kwargs)

    return scan


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
    """What the reference scan computes, with the same arguments.

    Args:
        hidden_states: values (B, D, L).
        dt: step sizes before bias and softplus (B, D, L).
        A: decay rates (D, N).
        B: input vectors (B, N, L).
        C: output vectors (B, N, L).
        D: skip weights (D,). Default: None.
        z: gate before SiLU (B, D, L). Default: None.
        delta_bias: added to dt (D,). Default: None.
        delta_softplus: whether dt passes a softplus. Default: False.
        return_last_state: also return the last state (B, D, N). Default: False.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    steps = dt.permute(2, 0, 1).to(dtype)  # (L, B, D): time first
    written = steps * hidden_states.permute(2, 0, 1)
    keys, reads = (x.permute(2, 0, 1).to(dtype) for x in (B, C))
    out, last = _Scan.apply(steps, written, A.T.to(dtype), keys, reads)  # type: ignore[no-untyped-call]
    out = out.permute(1, 2, 0).to(hidden_states.dtype)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, last.transpose(1, 2)) if return_last_state else out


class _Scan(torch.autograd.Function):
    """h[t] = exp(dt[t] A) h[t-1] + B[t] w[t], y[t] = C[t] . h[t].

    Shapes, time first: dt and w (L, B, D), A (N, D), B and C (L, B, N), states (B, N, D).
    """

    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, w: Tensor, A: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = w.new_zeros(w.shape[1], A.shape[0], w.shape[2])
        starts, out = [], torch.empty_like(w)
        for begin in range(0, len(w), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            starts.append(state)
            states = _states(dt[part], w[part], A, B[part], state)[1]
            out[part] = torch.einsum("tbn,tbnd->tbd", C[part], states)
            state = states[-1].clone()
        ctx.save_for_backward(dt, w, A, B, C, *starts)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor, ...]:
        dt, w, A, B, C, *starts = ctx.saved_tensors
        grad_dt, grad_w = torch.empty_like(dt), torch.empty_like(w)
        grad_A, grad_B, grad_C = torch.zeros_like(A), torch.empty_like(B), torch.empty_like(C)
        carried = grad_last
        for k in reversed(range(len(starts))):
            part = slice(k * _CHUNK, (k + 1) * _CHUNK)
            decays, states = _states(dt[part], w[part], A, B[part], starts[k])
            grad_C[part] = torch.einsum("tbd,tbnd->tbn", grad_out[part], states)
            grads = C[part, :, :, None] * grad_out[part, :, None, :]
            for grad, decay in zip(grads.unbind()[::-1], decays.unbind()[::-1], strict=True):
                grad += carried
                carried = grad * decay
            grad_w[part] = torch.einsum("tbnd,tbn->tbd", grads, B[part])
            grad_B[part] = torch.einsum("tbnd,tbd->tbn", grads, w[part])
            before = torch.cat([starts[k][None], states[:-1]])
            exponent = grads * decays * before  # the decay's gradient times the decay itself
            grad_dt[part] = torch.einsum("tbnd,nd->tbd", exponent, A)
            grad_A += torch.einsum("tbnd,tbd->nd", exponent, dt[part])
        return grad_dt, grad_w, grad_A, grad_B, grad_C


def _states(dt: Tensor, w: Tensor, A: Tensor, B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Decays and states of a chunk, each (tokens, B, N, D)."""
    decays = (dt[:, :, None, :] * A).exp_()
    states = B[..., None] * w[:, :, None, :]
    for current, decay in zip(states.unbind(), decays.unbind(), strict=True):
        state = current.addcmul_(decay, state)
    return decays, states
