"""RWKV-7: embeddings, residual blocks with a mixer and a feed-forward layer, a norm and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import OptionError
from ...mixers.rwkv import delta_to_previous
from ..checkpoints import check_sizes
from .mixer import RWKV7TimeMix


class RWKV7FeedForward(nn.Module):
    """The feed-forward layer W_v relu(W_k x)^2, where x mixes each token with its predecessor.

    Args:
        width: width E of the residual stream.
        inner: hidden width. Default: None, four times the width.

    Example:
        >>> import torch
        >>> from captum_ssm.models.rwkv7 import RWKV7FeedForward
        >>> RWKV7FeedForward(8)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = 4 * width if inner is None else inner
        self.x_k = nn.Parameter(torch.full((1, 1, width), 0.5))
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for tokens ``x`` (B, L, E), in the same shape."""
        out: Tensor = self.value(F.relu(self.key(x + delta_to_previous(x) * self.x_k)).square())
        return out


class RWKV7Block(nn.Module):
    """A block: x = x + att(ln1(x)), then x + ffn(ln2(x)); the first block normalizes its input.

    Args:
        width: width E of the residual stream.
        is_first: whether this is the model's first block.
        inner: hidden width of the feed-forward layer. Default: None, four times the width.
        **mixer_options: arguments of :class:`~captum_ssm.models.rwkv7.RWKV7TimeMix`.

    Example:
        >>> import torch
        >>> from captum_ssm.models.rwkv7 import RWKV7Block
        >>> x, values = RWKV7Block(16, is_first=True, head_size=8)(torch.zeros(2, 5, 16))
        >>> x.shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, width: int, is_first: bool, inner: int | None = None, **mixer_options: int
    ) -> None:
        super().__init__()
        if is_first:
            self.ln0 = nn.LayerNorm(width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.att = RWKV7TimeMix(width, is_first=is_first, **mixer_options)
        self.ffn = RWKV7FeedForward(width, inner)

    def forward(self, x: Tensor, v_first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the block's output, and the first block's mixer values, both (B, L, E)."""
        x = self.ln0(x) if self.att.is_first else x
        out, v_first = self.att(self.ln1(x), v_first)
        x = x + out
        return x + self.ffn(self.ln2(x)), v_first


class RWKV7(nn.Module):
    """An RWKV-7 language model, with the parameter names of ``RWKV-x070`` checkpoints.

    States are computed in float32 or wider, everything else in the dtype of the weights. Padding is
    not accepted: explain texts of different lengths one by one.

    Args:
        vocab_size: number of tokens. Default: 65536.
        width: width E of the residual stream. Default: 768.
        depth: number of blocks. Default: 12.
        head_size: channels of a head. Default: 64.
        inner: hidden width of feed-forward layers. Default: None, four times the width.
        **ranks: ranks of :class:`~captum_ssm.models.rwkv7.RWKV7TimeMix`, such as ``gate_rank``.

    Raises:
        OptionError: when the width is not a multiple of the head's size, or a size is below 1.

    Example:
        >>> import torch
        >>> from captum_ssm.models import RWKV7
        >>> model = RWKV7(vocab_size=20, width=16, depth=2, head_size=8)
        >>> model(torch.tensor([[3, 1, 4]])).shape
        torch.Size([1, 3, 20])
    """

    def __init__(
        self,
        vocab_size: int = 65536,
        width: int = 768,
        depth: int = 12,
        head_size: int = 64,
        inner: int | None = None,
        **ranks: int,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, width=width, depth=depth, head_size=head_size)
        if width % head_size:
            raise OptionError(
                f"width={width} is not a multiple of head_size={head_size}. Use a multiple."
            )
        self.emb = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            RWKV7Block(width, index == 0, inner, head_size=head_size, **ranks)
            for index in range(depth)
        )
        self.ln_out = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding layer of the token ids."""
        return self.emb

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, L, V) for token ids (B, L) or embeddings (B, L, E)."""
        x = ids if ids.is_floating_point() else self.emb(ids)
        v_first = None
        for block in self.blocks:
            x, v_first = block(x, v_first)
        logits: Tensor = self.head(self.ln_out(x))
        return logits
