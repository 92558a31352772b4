"""The selective scan of Mamba-1, with a separate decay for every channel and state index.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

so that alpha[i, j] = sum over n of C[i, n] exp(A[n] sum of dt[j+1..i]) dt[j] B[j, n]
(hidden-attention paper, eqs. 14 and 17).

Read ``__init__``, ``tensors``, ``select`` and ``at`` first; the other methods are fast algorithms.
``apply`` and ``transpose`` are in :mod:`.base` and call ``_run``.  Strips of rows are computed from
``cut``, ``reads``, ``writes``, ``entering``, ``fades`` and ``by_memory``, which ``Fading`` in
``kernels.pivot_strip`` documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..base import Pull, Role, Shape
from ..kernels import fused_scan
from ..kernels.arithmetic import BINARY, Scratch, with_graphs
from ..kernels.bands import Band
from ..kernels.pivot_strip import Fades, from_pivot
from ..kernels.pivot_tree import BandFactors, semiseparable_strip
from ..kernels.portions import (
    Heads,
    at_a_time,
    evenly,
    gather_heads,
    some_heads,
    vectors_of_heads,
)
from ..kernels.rows import Strip
from ..kernels.scan_backward import selective_scan
from ..kernels.token_loop import ScanSteps
from .base import TREE_ELEMENTS, TREE_LEAST, FadingRecurrence

#: Largest numbers of tokens, and of elements of states, that the loop over tokens computes
#: together: states and decays, 2 MiB each in float32, then stay in a CPU's cache.
_SCAN_TOKENS = 32
_SCAN_ELEMENTS = 2**19
#: Smallest number of tokens computed together, so that copying the last state costs little.
_SCAN_LEAST = 4
#: Smallest number of tokens for which heads are sorted by how fast their states decay.
_ORDERED = 1024
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
        chosen = list(heads)
        b, c = self.b, self.c
        if b.dim() == 4:
            b, c = (vectors_of_heads(x, self.shape.heads)[:, :, chosen] for x in (b, c))
        dt = some_heads(self.dt, heads)
        return SelectiveScan(dt, self.a[chosen], b, c, self.component)

    def cut(self, tokens: slice) -> SelectiveScan:
        dt, b, c = (x[:, tokens] for x in (self.dt, self.b, self.c))
        return SelectiveScan(dt, self.a, b, c, self.component)

    def at(self, coefficients: Mapping[str, Tensor]) -> SelectiveScan:
        named = {**self.tensors(), **coefficients}
        return SelectiveScan(named["dt"], self.a, named["B"], named["C"], self.component)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_values, found = self.vjp(values[None], {})[1](gradient[None])
        return of_values[0], found

    def vjp(self, values: Tensor, coefficients: Mapping[str, Tensor]) -> tuple[Tensor, Pull]:
        if values.is_cuda and fused_scan.serves(self):
            return self._vjp_on_gpu(values, coefficients)
        stack, batch = values.shape[:2]
        groups = self.b.shape[2] if self.b.dim() == 4 else 1
        inputs = {"dt": self.dt, "x": values.flatten(0, 1).squeeze(-1)}  # by channel
        for name, own in (("B", self.b), ("C", self.c)):
            vectors = coefficients.get(name, own).expand(stack, *own.shape)
            inputs[name] = vectors.reshape(stack * batch, own.shape[1], -1)
        with torch.enable_grad():
            leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
            each = (t.chunk(groups, -1) for t in (leaves["x"], leaves["dt"], self.a.T))
            pairs = (leaves[name].chunk(groups, -1) for name in ("B", "C"))
            out = list[Tensor]()  # of each group of heads, which share B and C
            for x, dt, rates, b, c in zip(*each, *pairs, strict=True):
                scanned = selective_scan(x.mT, dt.mT, rates.T, b.mT, c.mT)
                assert isinstance(scanned, Tensor)
                out.append(scanned.mT)
            whole = torch.cat(out, -1) if groups > 1 else out[0]

        def pull(gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            up = gradient.reshape(whole.shape)
            found = torch.autograd.grad(whole, list(leaves.values()), up, retain_graph=True)
            of = dict(zip(leaves, found, strict=True))
            for name, own in (("B", self.b), ("C", self.c)):
                of[name] = of[name].view(stack, *own.shape).sum(0)
            return of.pop("x").view(values.shape), of

        return whole.detach().view(values.shape), pull

    def _vjp_on_gpu(
        self, values: Tensor, coefficients: Mapping[str, Tensor]
    ) -> tuple[Tensor, Pull]:
        """Compute :meth:`vjp` with the GPU kernels of :mod:`.fused_scan`."""
        x, owns = values.detach().squeeze(-1), {"B": self.b, "C": self.c}
        each = (coefficients.get(name, own[None]).detach() for name, own in owns.items())
        # one for each vector and group, (S, B, L, G, N)
        b, c = (t[..., None, :] if t.dim() == 4 else t for t in each)

        def pull(gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            up = gradient.detach().squeeze(-1).expand(x.shape)
            of_dt, *of_shared, of_x = fused_scan.gradients(self.dt, self.a, b, c, x, up)
            pairs = zip(owns.items(), of_shared, strict=True)
            found = {name: of.view(own.shape) for (name, own), of in pairs}
            return of_x[..., None], {"dt": of_dt, **found}

        return fused_scan.run(self.dt, self.a, b, c, x, transposed=False)[..., None], pull

    # --- reads, writes, carry --------------------------------------------------------------

    def reads(self, tokens: slice, heads: Heads) -> Tensor:
        return vectors_of_heads(self.c[:, tokens], self.shape.heads, heads).mT

    def writes(self, tokens: slice, heads: Heads) -> Tensor:
        return vectors_of_heads(self.b[:, tokens], self.shape.heads, heads).mT

    def entering(self, values: Tensor) -> Tensor:
        return self.dt * values

    def fades(self, token: int, tokens: int, heads: Heads) -> Fades:
        # products of fades are exponentials of the steps' sums
        elapsed = from_pivot(gather_heads(self.dt[:, :tokens], heads), token, product=False)
        elapsed = elapsed.to(self.dt)
        rate = (BINARY * self.a[heads].T).contiguous()  # (N, H)
        return lambda part: (elapsed[:, part, None] * rate).exp2_()

    def by_memory(self, tokens: slice) -> Tensor:
        return (self.dt[:, tokens].sum((0, 1)) * self.a.sum(1)).argsort()

    # --- the map and its adjoint -----------------------------------------------------------

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        stacked, tokens = x.squeeze(-1).reshape(-1, *self.shape[:3]), self.shape.tokens
        if x.is_cuda and fused_scan.serves(self):
            coefficients = self.dt, self.a, self.b, self.c
            return fused_scan.run(*coefficients, stacked, transposed=transposed).view(x.shape)
        out = x.new_empty(stacked.shape)
        elements = len(out) * self.shape.batch * self.a.numel()  # of the states of a token
        most = min(_SCAN_TOKENS, max(_SCAN_LEAST, _SCAN_ELEMENTS // elements))
        steps = ScanSteps(self, len(out), min(most, tokens), transposed)
        steps(stacked, slice(0, tokens), out)
        return out.view(x.shape)

    # --- its matrices ----------------------------------------------------------------------

    def _by_head(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return :meth:`entries` per head, (B, H, R, W).

        The tree gets each head as an example of its own, with its N states as channels, and a
        column factor for each lag from the least to the largest, zero for lags without a band.
        """
        heads, until = self.shape.heads, slice(rows.stop)
        b, c = (vectors_of_heads(x[:, until], heads).transpose(1, 2) for x in (self.b, self.c))
        dt = self.dt[:, until].transpose(1, 2)[..., None]  # (B, H, L, 1)
        keys, none = dt * b, dt.new_zeros(1, 1, 1, 1)
        factors = (band.get(lag, none).expand(self.shape)[:, until] for lag in _lags(band))
        columns = [(x.transpose(1, 2) * keys).flatten(0, 1) for x in factors]  # (B H, L, N)
        decay = (dt * (BINARY * self.a[:, None])).exp2_().flatten(0, 1)  # exp(dt A)
        u = (left.expand(self.shape)[:, until].transpose(1, 2) * c)[:, :, rows.start :]
        examples, tokens = len(decay), self.shape.tokens
        blocks = [(decay, u.flatten(0, 1), columns)]
        strip = semiseparable_strip(blocks, examples, tokens, rows, min(band))
        return strip._replace(entries=torch.unflatten(strip.entries, 0, (-1, heads)))

    def _tree_blocks(self, left: Tensor, band: Band, rows: range) -> Iterator[BandFactors]:
        heads, states = self.a.shape
        batch, some, until = self.shape.batch, slice(rows.start, rows.stop), slice(rows.stop)
        row = left.expand(self.shape)[:, some, :, 0]  # (B, R, H)
        columns = {lag: x.expand(self.shape)[:, until, :, 0] for lag, x in band.items()}
        scratch = Scratch(self.dt)
        order = self.by_memory(until) if rows.stop >= _ORDERED else None
        for place, groups in _blocks(heads, states, batch * rows.stop, self.device):
            part, width = place if order is None else order[place], place.stop - place.start
            # contiguous, because a factor common to all channels would be multiplied one by one
            dt = gather_heads(self.dt[:, until], part, scratch("dt", batch, rows.stop, width))
            row_part = gather_heads(row, part, scratch("row", batch, len(rows), width))
            sent = {
                lag: gather_heads(x, part, scratch(("sent", lag), *dt.shape)).mul_(dt)
                for lag, x in columns.items()
            }
            b, c = (
                vectors_of_heads(x, heads, part).mT for x in (self.b, self.c)
            )  # (B, L, N, 1 or h)
            for chosen in groups:
                rate = (BINARY * self.a[part, chosen].T).contiguous()  # (n, h)
                count = rate.numel()
                decay = scratch("decay", batch, rows.stop, count)  # a column is a head and a state
                u = scratch("u", batch, len(rows), count)
                v = [scratch(("v", lag), *decay.shape) for lag in _lags(band)]
                _outer(dt, rate, decay).exp2_()
                _outer(row_part, c[:, some, chosen], u)
                for lag, factor in zip(_lags(band), v, strict=True):
                    if lag in sent:
                        _outer(sent[lag], b[:, until, chosen], factor)
                    else:
                        factor.zero_()
                yield decay, u, v


def _outer(channels: Tensor, states: Tensor, out: Tensor) -> Tensor:
    """Write channels[b, t, h] states[..., n, h] to ``out`` (B, T, n h), and return ``out``."""
    count = channels.shape[-1]
    torch.mul(channels[:, :, None], states, out=torch.unflatten(out, -1, (-1, count)))
    return out


def _blocks(
    heads: int, states: int, tokens: int, device: torch.device
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield a slice of heads and slices of states; each pair of slices is a block of the tree.

    Args:
        heads, states: number of heads and of states.
        tokens: number of rows of a factor, that is, tokens of all examples.
        device: device of the factors.
    """
    # number of columns of a factor, each a head and a state, that fit into memory and cache
    width = max(TREE_LEAST, at_a_time(TREE_ELEMENTS, device) // tokens)
    width = min(at_a_time(_TREE_MOST, device), width)
    each = evenly(heads, width)
    some = min(states, max(1, width // each))
    for head in range(0, heads, each):
        groups = [slice(state, min(state + some, states)) for state in range(0, states, some)]
        yield slice(head, min(head + each, heads)), groups


def _lags(band: Band) -> range:
    return range(min(band), max(band) + 1)
