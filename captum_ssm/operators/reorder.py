"""Reorderings of the tokens, and windows within which an operator mixes them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from .base import Operator, Shape
from .kernels.bands import Band
from .kernels.rows import Positions, Strip, by_query, sum_of_lags


class Permute(Operator):
    """y[t] = x[order[t]]: a reordering of the tokens, such as the flip of a backward direction.

    Attributes:
        inverse: the inverse permutation (L,): the output position of each input token.

    Args:
        order: permutation (L,): the input token at each output position. Pass a tensor on the CPU
            if possible, so that it need not be read back from a GPU.
        shape: sizes of the values to map.
        component: name of the mixer's part that it represents. A reordering around a scan that is
            one term of a sum has the scan's name, so both are kept or dropped together. Default:
            None, a structural part.
        device: the device of the values. Default: None, the device of ``order``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Permute, Shape
        >>> flip = Permute(torch.tensor([2, 1, 0]), Shape(batch=1, tokens=3, heads=1, per_head=1))
        >>> flip.apply(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)).flatten().tolist()
        [3.0, 2.0, 1.0]
    """

    data_dependent = False

    def __init__(
        self,
        order: Tensor,
        shape: Shape,
        component: str | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._order = order  # on the device that it was passed on, which may be the CPU
        self.order = order if device is None else order.to(device)
        self.shape = shape
        self.component = component
        self.inverse = torch.argsort(order).to(self.order.device)

    @functools.cached_property
    def on_host(self) -> Tensor:
        """``order`` on the CPU; this waits for a GPU only if ``order`` was passed on a GPU."""
        return self._order.cpu()

    def inverted(self) -> Permute:
        """Return the inverse reordering."""
        inverse = torch.argsort(self._order)
        return Permute(inverse, self.shape, self.component, device=self.order.device)

    def apply(self, v: Tensor) -> Tensor:
        return v.index_select(-3, self.order)

    def transpose(self, u: Tensor) -> Tensor:
        return u.index_select(-3, self.inverse)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def _coefficient_substitute(self) -> Tensor:
        return torch.zeros((), device=self.order.device)

    def select(self, heads: Sequence[int]) -> Operator:
        shape = self.shape._replace(heads=len(heads))
        return Permute(self._order, shape, self.component, device=self.order.device)

    def inner_rows(
        self, positions: Positions, weight: Tensor | None
    ) -> tuple[Positions, Tensor | None]:
        """Express rows of self . inner as rows of inner; see :meth:`.Diagonal.inner_rows`."""
        return self.order[by_query(positions, self.order.device)], weight

    def rows_of(self, matrix: Tensor) -> Tensor:
        """Return the product Permute . matrix, for a matrix (..., L, L)."""
        return matrix.index_select(-2, self.order)

    def columns_of(self, matrix: Tensor) -> Tensor:
        """Return the product matrix . Permute, for a matrix (..., L, L)."""
        return matrix.index_select(-1, self.inverse)

    def input_rows(self, rows: range) -> range | None:
        """Return the input tokens of output ``rows`` as a range; None if the tokens have gaps."""
        return _as_range(self.on_host[rows.start : rows.stop])

    def rows_of_strip(self, strip: Strip, rows: range) -> Strip:
        """Return ``rows`` of the product Permute . matrix.

        Args:
            strip: rows of the matrix, at the tokens that :meth:`input_rows` returns.
            rows: indices of the rows to return.
        """
        inputs = self.order[rows.start : rows.stop] - strip.rows.start
        return Strip(strip.entries.index_select(-2, inputs), rows, strip.columns)

    def columns_of_strip(self, strip: Strip) -> Strip:
        """Return rows of the product matrix . Permute, given the same rows of the matrix."""
        columns = _as_range(self.on_host[strip.columns.start : strip.columns.stop])
        if columns is None:
            tokens = self.shape.tokens
            return Strip(self.columns_of(strip.full(tokens)), strip.rows, range(tokens))
        inputs = self.inverse[columns.start : columns.stop] - strip.columns.start
        return Strip(strip.entries.index_select(-1, inputs), strip.rows, columns)


def flip(shape: Shape, device: torch.device, component: str | None = None) -> Permute:
    """Return the reordering that reverses the tokens."""
    order = torch.arange(shape.tokens - 1, -1, -1, device="cpu")
    return Permute(order, shape, component, device=device)


def _as_range(positions: Tensor) -> range | None:
    """Return distinct positions (Q,) as a range, or None if they have gaps."""
    if not len(positions):
        return range(0)
    first, last = int(positions.min()), int(positions.max())
    return range(first, last + 1) if last - first < len(positions) else None


# --- windows: groups of equal size, within which tokens are mixed ------------------------------


class Windows:
    """A partition of L tokens into W windows of T positions each.

    Attributes:
        places: index of the token at each position of each window (W, T); -1 for padding.
        tokens: number of tokens, L.

    Args:
        places: the attribute ``places``; every token occurs once.
    """

    def __init__(self, places: Tensor) -> None:
        self.places = places
        flat = places.flatten()
        self._padding = flat < 0  # (W T,)
        self.tokens = int((~self._padding).sum())
        self._position_of = flat.argsort()[len(flat) - self.tokens :]  # padding sorts to the front

    def cut(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., B, L, H, P) in windows (..., B W, T, H, P), with zeros as padding."""
        in_windows = x.index_select(-3, self.places.flatten().clamp_min(0))
        return self._as_windows(in_windows.masked_fill(self._padding[:, None, None], 0))

    def merge(self, x: Tensor) -> Tensor:
        """Return the adjoint of :meth:`cut`: (..., B W, T, H, P) to (..., B, L, H, P)."""
        return self._as_sequence(x).index_select(-3, self._position_of)

    def mask(self, mask: Tensor | None, batch: int) -> Tensor | None:
        """Return the mask (B W, T), True for windows' positions with a real token.

        Return None without ``mask`` and without padded positions.

        Args:
            mask: True for real tokens (B, L), or None if all tokens are real.
            batch: number of examples, B.
        """
        if mask is None:
            is_token = ~self._padding.expand(batch, -1)
            all_real = bool(is_token.all())
            return None if all_real else is_token.reshape(-1, self.places.shape[1])
        return self.cut(mask[..., None, None].int())[..., 0, 0].bool()

    def padding(self, x: Tensor) -> Tensor | None:
        """Set ``x`` (..., B W, T, H, P) to zero except at padding; return None without padding."""
        if not bool(self._padding.any()):
            return None
        at_padding = self._as_sequence(x).masked_fill(~self._padding[:, None, None], 0)
        return self._as_windows(at_padding)

    def assemble(self, blocks: Tensor, rows: range) -> Tensor:
        """Return rows (B, R, L) of the matrix over all tokens, from matrices (B W, T, T)."""
        blocks = torch.unflatten(blocks, 0, (-1, len(self.places)))  # (B, W, T, T)
        position = self._position_of[rows.start : rows.stop]
        window = position // self.places.shape[1]  # (R,)
        entries = blocks[:, window, position % self.places.shape[1]]  # (B, R, T)
        # padding, -1, becomes a last column, which is dropped
        out = blocks.new_zeros(len(blocks), len(rows), self.tokens + 1)
        columns = self.places[window] % (self.tokens + 1)  # (R, T)
        return out.scatter_(-1, columns.expand_as(entries), entries)[..., :-1]

    def _as_windows(self, x: Tensor) -> Tensor:
        """Reshape (..., B, W T, H, P) to (..., B W, T, H, P)."""
        return torch.unflatten(x, -3, self.places.shape).flatten(-5, -4)

    def _as_sequence(self, x: Tensor) -> Tensor:
        """Reshape (..., B W, T, H, P) to (..., B, W T, H, P)."""
        return torch.unflatten(x, -4, (-1, len(self.places))).flatten(-4, -3)


class Windowed(Operator):
    """An operator that mixes tokens only within windows.

    Args:
        within: operator that maps the windows as a batch, (B W, T, H, P).
        windows: the partition of the tokens.
        padding: input of ``within`` at padding (B W, T, H, P), zero elsewhere; it adds a constant
            term to the output. Default: None, zero.
    """

    def __init__(self, within: Operator, windows: Windows, padding: Tensor | None = None) -> None:
        self.within = within
        self.windows = windows
        self._padding = None if padding is None else padding.detach()
        batch = within.shape.batch // len(windows.places)
        self.shape = within.shape._replace(batch=batch, tokens=windows.tokens)

    @property
    def mixes_tokens(self) -> bool:
        return self.within.mixes_tokens

    def apply(self, v: Tensor) -> Tensor:
        return self.windows.merge(self.within.apply(self.windows.cut(v)))

    def inner_input(self, v: Tensor, factor: Tensor) -> Tensor:
        """Return the input of ``within`` (S, B W, T, H, P).

        Args:
            v: values (S, B, L, H, P).
            factor: factors of the input at padding, (S, 1, 1, 1, 1).
        """
        in_windows = self.windows.cut(v)
        return in_windows if self._padding is None else in_windows + factor * self._padding

    def transpose(self, u: Tensor) -> Tensor:
        return self.windows.merge(self.within.transpose(self.windows.cut(u)))

    def offset(self) -> Tensor | None:
        """Return the constants of biases inside, and of the input at padding."""
        padding = self._padding
        constant = self.within.offset() if padding is None else self.within.affine(padding)
        return None if constant is None else self.windows.merge(constant)

    def restrict(self, components: Collection[str]) -> Operator | None:
        within = self.within.restrict(components)
        return None if within is None else Windowed(within, self.windows, self._padding)

    def select(self, heads: Sequence[int]) -> Operator:
        padding = None if self._padding is None else self._padding[:, :, list(heads)]
        return Windowed(self.within.select(heads), self.windows, padding)

    def leaves(self) -> Iterator[Operator]:
        yield from self.within.leaves()

    def per_channel(self) -> Operator:
        return Windowed(self.within.per_channel(), self.windows, self._padding)

    def tensors(self) -> dict[str, Tensor]:
        return self.within.tensors()

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Compute the rows from the whole matrices of all windows, which need little memory."""
        tokens, size = self.shape.tokens, self.windows.places.shape[1]
        row = self.windows.cut(left.expand(self.shape))

        def strip_for(right: Tensor) -> Strip:  # rows of diag(left) . self . diag(right)
            column = self.windows.cut(right.expand(self.shape))
            blocks = self.within.entries(row, {0: column}, range(size), by_head).full(size)
            if by_head:  # (B W, H, T, T) to (B H W, T, T)
                blocks = torch.unflatten(blocks, 0, (self.shape.batch, -1))
                blocks = blocks.transpose(1, 2).flatten(0, 2)
            out = self.windows.assemble(blocks, rows)  # (B, R, L) or (B H, R, L)
            out = torch.unflatten(out, 0, (self.shape.batch, -1)) if by_head else out
            return Strip(out, rows, range(tokens))

        return sum_of_lags(strip_for, band, rows, tokens)
