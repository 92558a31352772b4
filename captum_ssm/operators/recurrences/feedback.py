"""A recurrence whose output is added to its next input: sLSTM.

The channels of a head mix at every step, so the map from token j to token i is a P x P matrix per
head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..base import Operator, Role, Shape
from ..kernels.arithmetic import full_precision, with_graphs
from ..kernels.bands import shift_tokens
from .base import Recurrent
from .own_shares import OwnShares


class FeedbackRecurrence(Recurrent):
    """A recurrence with a state of one scalar per channel, whose output is added to its next input.

    c[t] = decay[t] c[t-1] + write[t] (v[t] + feedback y[t-1]) and y[t] = gate[t] c[t], with zeros
    before the first token.  The map and its adjoint are loops over the tokens.

    Args:
        decay: factors of the state (B, L, H, P).
        write: factors of the input (B, L, H, P).
        gate: factors of the output (B, L, H, P).
        feedback: matrices (H, P, P) from the output channels of a head to its input channels.
        at_rest: value of the gate at zero gate input. Default: 0.
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import FeedbackRecurrence
        >>> none, one = torch.zeros(1, 3, 1, 2), torch.ones(1, 3, 1, 2)
        >>> swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # each channel feeds the other
        >>> scan = FeedbackRecurrence(none, one, one, swap)
        >>> first = torch.tensor([1.0, 0.0]) * torch.tensor([1.0, 0.0, 0.0])[:, None]
        >>> scan.apply(first.view(1, 3, 1, 2)).squeeze().tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """

    roles: Mapping[str, Role] = {"decay": "step", "write": "step", "gate": "gate"}
    fixed = ("feedback",)
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

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Differentiate c[t] = decay[t] c[t-1] + write[t] (v[t] + feedback y[t-1]), y = gate c."""
        with torch.no_grad(), full_precision(values.device):
            states, of_states = self.states(values), self._state_gradients(gradient)
            previous_outputs = shift_tokens(self.gate * states, 1)  # they are fed back
            of_values = self.write * of_states
            inputs = values + self._times(previous_outputs, self.feedback.mT)
            # an output's gradient comes from after the recurrence, and from the next input
            of_outputs = gradient + self._times(shift_tokens(of_values, -1), self.feedback)
            return of_values, {
                "decay": of_states * shift_tokens(states, 1),
                "write": of_states * inputs,
                "gate": of_outputs * states,
            }

    def per_channel(self) -> Operator:
        return OwnShares(self)

    def step(self, states: Tensor, token: int) -> Tensor:
        """Return the states after a token's step with zero input, (B, H, P, ...).

        Args:
            states: states before the token, with any trailing dimensions (B, H, P, ...).
            token: index of the token, at least 1, because the step uses the output before it.
        """
        decay, write = self.decay[:, token, ..., None], self.write[:, token, ..., None]
        output = self.gate[:, token - 1, ..., None] * states
        return decay * states + write * (self.feedback @ output)

    def states(self, values: Tensor) -> Tensor:
        """Return the state c after each token (..., B, L, H, P)."""
        factors = self.decay, self.write, self.gate
        return self._loop(values, *factors, self.feedback.mT, range(self.shape.tokens))

    # --- the map and its adjoint -----------------------------------------------------------

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        return self.write * self._state_gradients(x) if transposed else self.gate * self.states(x)

    def _state_gradients(self, u: Tensor) -> Tensor:
        """Return the gradients of the states, for gradients ``u`` of the outputs."""
        factors = shift_tokens(self.decay, -1), self.gate, self.write
        return self._loop(u, *factors, self.feedback, range(self.shape.tokens)[::-1])

    def _loop(
        self, x: Tensor, decay: Tensor, write: Tensor, read: Tensor, weight: Tensor, order: range
    ) -> Tensor:
        """Return s[t] = decay[t] s' + write[t] (x[t] + (read' s') weight), in the given order.

        s' and read' are the state and the factor ``read`` of the token before t in ``order``.
        """
        stack = x.reshape(-1, *self.shape)
        tokens = stack.permute(2, 3, 0, 1, 4)  # (L, H, S, B, P)
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        factors = [c.permute(1, 2, 0, 3)[:, :, None] for c in (decay, write, read)]
        state, output = torch.zeros_like(out[0]), torch.zeros_like(out[0])
        for t in order:
            decay_t, write_t, read_t = (c[t] for c in factors)  # (H, 1, B, P)
            feedback = (output.flatten(1, 2) @ weight).view_as(output)
            state = torch.addcmul(decay_t * state, write_t, tokens[t] + feedback)
            output = read_t * state
            out[t] = state
        return out.permute(2, 3, 0, 1, 4).reshape(x.shape)

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply each head's channels of ``x`` (B, L, H, P) by the head's matrix (H, P, P)."""
        return (x.transpose(-3, -2) @ weight).transpose(-3, -2)
