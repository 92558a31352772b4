"""A recurrence whose outputs are fed back to it: sLSTM.

    c[t] = decay[t] c[t-1] + write[t] (v[t] + R y[t-1]),      y[t] = gate[t] c[t]

with all factors by channel and R a matrix of each head.  The channels of a head mix at every step,
so that what passes from token j to token i is a matrix of P x P numbers for each head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base import Operator, Role, Shape
from ..kernels.arithmetic import full_precision, with_graphs
from ..kernels.bands import shift_tokens
from ..kernels.portions import some_heads
from .base import Recurrent
from .own_shares import OwnShares


class FeedbackRecurrence(Recurrent):
    """A recurrence with one number of state per channel, which its heads' outputs enter anew.

    c[t] = decay[t] c[t-1] + write[t] (v[t] + feedback y[t-1]) and y[t] = gate[t] c[t], whose first
    token finds nothing.  The map and its adjoint are loops over the tokens.

    Args:
        decay: what is kept of the state (B, L, H, P).
        write: factors on what enters it (B, L, H, P).
        gate: factors on what is read of it (B, L, H, P).
        feedback: from the channels of a head's output to those of what enters it (H, P, P).
        at_rest: what the gate is where nothing enters it. Default: 0.
        component: name of the part it stands for. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import FeedbackRecurrence
        >>> none, one = torch.zeros(1, 3, 1, 2), torch.ones(1, 3, 1, 2)
        >>> swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # each channel hears of the other
        >>> scan = FeedbackRecurrence(none, one, one, swap)
        >>> first = torch.tensor([1.0, 0.0]) * torch.tensor([1.0, 0.0, 0.0])[:, None]
        >>> scan.apply(first.view(1, 3, 1, 2)).squeeze().tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """

    roles: Mapping[str, Role] = {"decay": "step", "write": "step", "gate": "gate"}
    at_rest: float

    def __init__(
        self,
        decay: Tensor,
        write: Tensor,
        gate: Tensor,
        feedback: Tensor,
        at_rest: float = 0.0,
        component: str | None = "scan",
    ) -> None:
        self.decay, self.write, self.gate = decay.detach(), write.detach(), gate.detach()
        self.feedback = feedback.detach()
        self.live = with_graphs({"decay": decay, "write": write, "gate": gate})
        self.at_rest = at_rest
        self.component = component
        self.shape = Shape(*decay.shape)

    def tensors(self) -> dict[str, Tensor]:
        named = {"decay": self.decay, "write": self.write, "gate": self.gate}
        return {**named, "feedback": self.feedback}

    def select(self, heads: Sequence[int]) -> Operator:
        return FeedbackRecurrence(
            some_heads(self.decay, heads),
            some_heads(self.write, heads),
            some_heads(self.gate, heads),
            self.feedback[list(heads)],
            self.at_rest,
            self.component,
        )

    def at(self, coefficients: Mapping[str, Tensor]) -> FeedbackRecurrence:
        named = {**self.tensors(), **coefficients}
        factors = named["decay"], named["write"], named["gate"], named["feedback"]
        return FeedbackRecurrence(*factors, self.at_rest, self.component)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad(), full_precision(values.device):
            states, of_states = self.states(values), self._of_states(gradient)
            heard = shift_tokens(self.gate * states, 1)
            of_values = self.write * of_states
            of_heard = shift_tokens(of_values, -1)
            entered = values + self._fed(heard, self.feedback.mT)
            of_read = gradient + self._fed(of_heard, self.feedback)
            return of_values, {
                "decay": of_states * shift_tokens(states, 1),
                "write": of_states * entered,
                "gate": of_read * states,
            }

    def per_channel(self) -> Operator:
        return OwnShares(self)

    def step(self, states: Tensor, token: int) -> Tensor:
        """What a token's step leaves of the states before it, (B, H, P, ...) in either.

        Args:
            states: any number of them side by side.
            token: which one; not the first, which finds none.
        """
        decay, write = self.decay[:, token, ..., None], self.write[:, token, ..., None]
        read = self.gate[:, token - 1, ..., None] * states
        return decay * states + write * (self.feedback @ read)

    def states(self, values: Tensor) -> Tensor:
        """The state after each token, c (..., B, L, H, P)."""
        factors = self.decay, self.write, self.gate
        return self._loop(values, *factors, self.feedback.mT, range(self.shape.tokens))

    # --- the map and its adjoint -----------------------------------------------------------

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        return self.write * self._of_states(x) if transposed else self.gate * self.states(x)

    def _of_states(self, u: Tensor) -> Tensor:
        """The gradients of states, of those ``u`` of the outputs: the same loop, backwards."""
        factors = shift_tokens(self.decay, -1), self.gate, self.write
        return self._loop(u, *factors, self.feedback, range(self.shape.tokens)[::-1])

    def _loop(
        self, x: Tensor, kept: Tensor, enters: Tensor, read: Tensor, weight: Tensor, order: range
    ) -> Tensor:
        """s[t] = kept[t] s + enters[t] (x[t] + (read s) weight), token after token."""
        stack = x.reshape(-1, *self.shape)
        tokens = stack.permute(2, 3, 0, 1, 4)  # (L, H, S, B, P)
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        factors = [c.permute(1, 2, 0, 3)[:, :, None] for c in (kept, enters, read)]
        state, heard = torch.zeros_like(out[0]), torch.zeros_like(out[0])
        for t in order:
            keep, enter, reads = (c[t] for c in factors)  # (H, 1, B, P)
            fed = (heard.flatten(1, 2) @ weight).view_as(heard)
            state = torch.addcmul(keep * state, enter, tokens[t] + fed)
            heard = reads * state
            out[t] = state
        return out.permute(2, 3, 0, 1, 4).reshape(x.shape)

    def _fed(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x.transpose(-3, -2) @ weight).transpose(-3, -2)
