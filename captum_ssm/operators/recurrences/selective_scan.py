"""The selective scan of Mamba-1, with a separate decay for every channel and state index.

Read ``__init__``, ``tensors``, ``select`` and ``at`` first; the other methods are fast algorithms.
``apply`` and ``transpose`` are in :mod:`.base` and call ``_run``.  Rows are computed from the
factors that ``_blocks`` yields.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from ..base import Pull, Role, Shape
from ..kernels import fused_scan
from ..kernels.arithmetic import BINARY, Scratch, doubled, with_graphs
from ..kernels.bands import Band, lags_of
from ..kernels.portions import at_a_time, even_size, some_heads, vectors_of_heads
from ..kernels.rows import Strip
from ..kernels.scan_backward import selective_scan
from ..kernels.token_loop import ScanSteps
from ..kernels.triangle import Block, block_width, semiseparable_strip
from .base import FadingRecurrence

#: Largest numbers of tokens, and of elements of states, that the loop over tokens computes
#: together: states and decays, 2 MiB each in float32, then stay in a CPU's cache.
_SCAN_TOKENS = 32
_SCAN_ELEMENTS = 2**19
#: Smallest number of tokens computed together, so that copying the last state costs little.
_SCAN_LEAST = 4
#: Largest number of channels times states of a block of the tree, so that it fits into the cache.
_TREE_MOST = 4096


class SelectiveScan(FadingRecurrence):
    """The selective scan of Mamba-1: a diagonal state-space recurrence with data-dependent steps.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t] and y[t] = C[t] . h[t], so that alpha[i, j] is the
    sum over n of C[i, n] exp(A[n] sum of dt[j+1..i]) dt[j] B[j, n] for j <= i (hidden-attention
    paper, eqs. 14 and 17).

    Args:
        dt: step sizes (B, L, H), not negative.
        a: continuous-time decay rates (H, N), not positive.
        b: input vectors (B, L, N) for all heads, or (B, L, G, N) if H / G neighboring heads share a
            vector.
        c: output vectors, in the shape of ``b``.
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import SelectiveScan
        >>> dt, b, c = torch.ones(1, 3, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 1)
        >>> a = -torch.tensor([[2.0]]).log()  # a step halves the state
        >>> scan = SelectiveScan(dt, a, b, c)
        >>> expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]])
        >>> torch.allclose(scan.dense(), expected[None])
        True
    """

    quick_heads = True
    few_rows = 3
    roles: Mapping[str, Role] = {"dt": "step", "B": "key", "C": "query"}

    def __init__(
        self, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, component: str | None = "scan"
    ) -> None:
        self.dt, self.a, self.b, self.c = (t.detach() for t in (dt, a, b, c))
        self.live = with_graphs({"dt": dt, "B": b, "C": c})
        self.component = component
        self.shape = Shape(dt.shape[0], dt.shape[1], dt.shape[2], 1)

    def tensors(self) -> dict[str, Tensor]:
        return {"dt": self.dt, "A": self.a, "B": self.b, "C": self.c}

    def select(self, heads: Sequence[int]) -> SelectiveScan:
        """Restrict the scan to some heads."""
        head_list = list(heads)
        b, c = self.b, self.c
        if b.dim() == 4:  # one vector per head from now on: the heads may split a group
            b, c = (vectors_of_heads(x, self.shape.heads)[:, :, head_list] for x in (b, c))
        dt = some_heads(self.dt, heads)  # a view for neighboring heads, because dt is large
        return SelectiveScan(dt, self.a[head_list], b, c, self.component)

    def cut(self, tokens: slice) -> SelectiveScan:
        """Restrict the scan to neighboring tokens."""
        dt, b, c = (x[:, tokens] for x in (self.dt, self.b, self.c))
        return SelectiveScan(dt, self.a, b, c, self.component)

    def at(self, coefficients: Mapping[str, Tensor]) -> SelectiveScan:
        named = {**self.tensors(), **coefficients}
        return SelectiveScan(named["dt"], self.a, named["B"], named["C"], self.component)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        _, pull = self.vjp(values[None], {})
        of_values, of_coefficients = pull(gradient[None])
        return of_values[0], of_coefficients

    def vjp(self, values: Tensor, coefficients: Mapping[str, Tensor]) -> tuple[Tensor, Pull]:
        """Map S stacked values by :mod:`.scan_backward`, with the stack as further examples."""
        if values.is_cuda and fused_scan.serves(self):
            return self._vjp_on_gpu(values, coefficients)
        stack, batch = values.shape[:2]
        groups = self.b.shape[2] if self.b.dim() == 4 else 1  # of heads that share B and C
        inputs = {"dt": self.dt, "x": values.flatten(0, 1).squeeze(-1)}  # by channel
        for name, unstacked in (("B", self.b), ("C", self.c)):
            vectors = coefficients.get(name, unstacked).expand(stack, *unstacked.shape)
            inputs[name] = vectors.reshape(stack * batch, unstacked.shape[1], -1)
        with torch.enable_grad():
            leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
            by_channel = (t.chunk(groups, -1) for t in (leaves["x"], leaves["dt"], self.a.T))
            by_state = (leaves[name].chunk(groups, -1) for name in ("B", "C"))
            out_of_groups = list[Tensor]()
            for x, dt, rates, b, c in zip(*by_channel, *by_state, strict=True):
                scanned = selective_scan(x.mT, dt.mT, rates.T, b.mT, c.mT)
                assert isinstance(scanned, Tensor)
                out_of_groups.append(scanned.mT)
            outputs = torch.cat(out_of_groups, -1) if groups > 1 else out_of_groups[0]

        def pull(gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            """Return the values' gradient, and coefficients' gradients, summed over the stack."""
            up = gradient.reshape(outputs.shape)
            # the graph is kept, because ``pull`` may be called again
            of_leaves = torch.autograd.grad(outputs, list(leaves.values()), up, retain_graph=True)
            gradients = dict(zip(leaves, of_leaves, strict=True))
            for name, unstacked in (("B", self.b), ("C", self.c)):
                gradients[name] = gradients[name].view(stack, *unstacked.shape).sum(0)
            return gradients.pop("x").view(values.shape), gradients

        return outputs.detach().view(values.shape), pull

    def _vjp_on_gpu(
        self, values: Tensor, coefficients: Mapping[str, Tensor]
    ) -> tuple[Tensor, Pull]:
        """Compute :meth:`vjp` with the GPU kernels of :mod:`.fused_scan`."""
        x, own = values.detach().squeeze(-1), {"B": self.b, "C": self.c}
        stacked = (coefficients.get(name, t[None]).detach() for name, t in own.items())
        # one for each vector and group, (S, B, L, G, N); without groups, the one group is all heads
        b, c = (t[..., None, :] if t.dim() == 4 else t for t in stacked)

        def pull(gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            """Return the values' gradient, and coefficients' gradients, summed over the stack."""
            up = gradient.detach().squeeze(-1).expand(x.shape)
            of_dt, *of_shared, of_x = fused_scan.gradients(self.dt, self.a, b, c, x, up)
            pairs = zip(own.items(), of_shared, strict=True)
            of_vectors = {name: gradient.view(t.shape) for (name, t), gradient in pairs}
            return of_x[..., None], {"dt": of_dt, **of_vectors}

        return fused_scan.run(self.dt, self.a, b, c, x, transposed=False)[..., None], pull

    # --- the map and its adjoint -----------------------------------------------------------

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        """Return alpha x, or alpha-transposed x, for ``x`` (..., B, L, H, 1)."""
        stacked, tokens = x.squeeze(-1).reshape(-1, *self.shape[:3]), self.shape.tokens
        if x.is_cuda and fused_scan.serves(self):
            coefficients = self.dt, self.a, self.b, self.c
            return fused_scan.run(*coefficients, stacked, transposed=transposed).view(x.shape)
        out = x.new_empty(stacked.shape)
        elements = len(out) * self.shape.batch * self.a.numel()  # of the states of a token
        longest = min(_SCAN_TOKENS, max(_SCAN_LEAST, _SCAN_ELEMENTS // elements))
        # the states of so many tokens are in memory together
        steps = ScanSteps(self, len(out), min(longest, tokens), transposed)
        steps(stacked, slice(0, tokens), out)
        return out.view(x.shape)

    # --- its matrices ----------------------------------------------------------------------

    def _strip_by_head(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return :meth:`entries` per head (B, H, R, W); each is an example with N channels."""
        heads, tokens = self.shape.heads, self.shape.tokens
        b, c = (vectors_of_heads(x, heads).transpose(1, 2) for x in (self.b, self.c))
        dt = self.dt.transpose(1, 2)[..., None]  # (B, H, L, 1)
        lags, zero = lags_of(band), dt.new_zeros(1, 1, 1, 1)
        row = left.expand(self.shape).transpose(1, 2)
        factors = [band.get(lag, zero).expand(self.shape).transpose(1, 2) for lag in lags]
        rate = BINARY * self.a[:, None]

        def columns(part: slice) -> list[Tensor]:
            """Return the column factors dt B right of each lag."""
            keys = dt[:, :, part] * b[:, :, part]
            return [(x[:, :, part] * keys).flatten(0, 1) for x in factors]  # (B H, T, N)

        block = Block(
            rows=lambda: (row * c)[:, :, rows.start : rows.stop].flatten(0, 1),
            columns=columns,
            decays=lambda part: (dt[:, :, part] * rate).exp2_().flatten(0, 1),
        )
        strip = semiseparable_strip([block], self.shape.batch * heads, tokens, rows, lags)
        return strip._replace(entries=torch.unflatten(strip.entries, 0, (-1, heads)))

    def _blocks(self, left: Tensor, band: Band, rows: range) -> Iterator[Block]:
        """Yield blocks of heads and states; each of a block's K channels is a head and a state."""
        heads, states = self.a.shape
        own, sources, scratch = slice(rows.start, rows.stop), slice(rows.stop), Scratch(self.dt)
        zero = self.dt.new_zeros(1, 1, 1, 1)
        factors = [self.dt[:, sources], left.expand(self.shape)[:, own, :, 0]]
        for lag in lags_of(band):
            factors.append(band.get(lag, zero).expand(self.shape)[:, sources, :, 0])
        width = block_width(self.shape.batch, rows, self.device)
        for part, state_parts in _heads_and_states(heads, states, width, self.device):
            # contiguous, because a factor common to all channels would be multiplied one by one
            dt, row, *columns = (
                scratch(("of heads", i), *x[..., part].shape).copy_(x[..., part])
                for i, x in enumerate(factors)
            )
            columns = [x.mul_(dt) for x in columns]
            pair = self.b[:, sources], self.c[:, own]
            b, c = (vectors_of_heads(x, heads, part).mT for x in pair)  # (B, T, N, 1 or h)
            elapsed = cache(partial(_elapsed_after, dt))  # the same for all states
            outer = partial(_outer, scratch)
            block = partial(
                _block_of_pairs, outer=outer, row=row, columns=columns, dt=dt, elapsed=elapsed
            )
            for n in state_parts:
                rate = (BINARY * self.a[part, n].T).contiguous()  # (n, h)
                yield block(rate=rate, b=b[:, :, n], c=c[:, :, n])


def _block_of_pairs(
    outer: Callable[[Hashable, Tensor, Tensor], Tensor],
    row: Tensor,
    columns: Sequence[Tensor],
    dt: Tensor,
    elapsed: Callable[[int, int], Tensor],
    rate: Tensor,
    b: Tensor,
    c: Tensor,
) -> Block:
    """Return some heads and states as a block, whose channels are pairs of them.

    Args:
        outer: :func:`_outer` with memory for its results.
        row: row factors of the heads (B, R, h).
        columns: column factors of the heads times step sizes, for each lag (B, L, h).
        dt: the heads' step sizes (B, L, h).
        elapsed: function that returns :func:`_elapsed_after` of tokens ``start`` to ``stop``.
        rate: exponents of the decays per step size (n, h).
        b: input vectors of the heads and states (B, L, n, 1 or h).
        c: output vectors of the rows (B, R, n, 1 or h).
    """
    return Block(
        rows=lambda: outer("row", row, c),
        columns=lambda part: [outer(i, x[:, part], b[:, part]) for i, x in enumerate(columns)],
        decays=lambda part: outer("decay", dt[:, part], rate).exp2_(),
        after=lambda part: outer("decay", elapsed(part.start, part.stop), rate).exp2_(),
    )


def _elapsed_after(dt: Tensor, start: int, stop: int) -> Tensor:
    """Return the sum of the slice's step sizes after each token, (B, T, h)."""
    sums = doubled(dt[:, start:stop].mT).cumsum(-1)
    return (sums[..., -1:] - sums).to(dt).mT.contiguous()


def _outer(scratch: Scratch, name: Hashable, channels: Tensor, states: Tensor) -> Tensor:
    """Return channels[b, t, h] states[..., n, h] as (B, T, n h)."""
    out = scratch(name, *channels.shape[:2], *states.shape[-2:-1], channels.shape[2])
    return torch.mul(channels[:, :, None], states, out=out).flatten(2)


def _heads_and_states(
    heads: int, states: int, width: int, device: torch.device
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield a slice of heads, and slices of states; each pair of slices is a block of ``width``."""
    # number of columns of a factor, each a head and a state, that fit into memory and cache
    width = min(at_a_time(_TREE_MOST, device), width)
    head_count = even_size(heads, width)
    state_count = min(states, max(1, width // head_count))
    for head in range(0, heads, head_count):
        starts = range(0, states, state_count)
        state_parts = [slice(start, min(start + state_count, states)) for start in starts]
        yield slice(head, min(head + head_count, heads)), state_parts
