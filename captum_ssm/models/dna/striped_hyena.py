"""StripedHyena 2, the model of Evo 2: gated convolutions of three lengths, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import OptionError
from .common import DNAModel
from .hyena import long_conv

#: The mixer of a block: short explicit, medium regularized or long implicit filters,
#: or softmax attention.
BlockKind = Literal["se", "mr", "li", "attention"]
KINDS = ("se", "mr", "li", "attention")
#: Explicit filters of this length or more start at lag 0, the current token, and add a skip weight
#: D. The entries of shorter filters are in reverse order, with lag 0 last.
LONG = 128


class _ScaleNorm(nn.Module):
    """A norm: scale * x / (root mean square of x + eps)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x`` (..., width)."""
        root_mean_square = x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        out: Tensor = self.scale * (x / (root_mean_square + self.eps))
        return out


class HyenaCascade(nn.Module):
    """A block's gated convolution, with the parameter names of the published code.

    With a short convolution conv and the block's filter h, the output for the projected input u is

        x2 (h * (x1 v) + D x1 v)        where x2, x1, v = conv(u)

    Channels 3 i, 3 i + 1 and 3 i + 2 of u become x2, x1 and v.

    Args:
        width: width E of the residual stream.
        kind: ``"se"`` (short explicit), ``"mr"`` (medium regularized) or ``"li"`` (long implicit).
        length: length of an explicit filter. Default: 7.
        groups: number of explicit filters, each for adjacent channels. Default: 1.
        state_size: number of exponentials in an implicit filter. Default: 16.
        short_filter_length: kernel size of conv. Default: 3.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import HyenaCascade
        >>> HyenaCascade(8, "li", state_size=4)(torch.zeros(2, 5, 24)).shape
        torch.Size([2, 5, 8])
    """

    h: nn.Parameter | None
    D: nn.Parameter | None

    def __init__(
        self,
        width: int,
        kind: str,
        length: int = 7,
        groups: int = 1,
        state_size: int = 16,
        short_filter_length: int = 3,
    ) -> None:
        super().__init__()
        self.width = width
        self.short_filter_weight = nn.Parameter(torch.randn(3 * width, 1, short_filter_length))
        if kind == "li":
            self.log_poles = nn.Parameter(-torch.rand(width, state_size, 1))
            self.residues = nn.Parameter(torch.randn(width, state_size))
            self.h = None
        else:
            self.h = nn.Parameter(torch.randn(groups, 1, length))
        has_weight = kind == "li" or length >= LONG
        self.register_parameter("D", nn.Parameter(torch.zeros(width)) if has_weight else None)

    def kernel(self, tokens: int) -> Tensor:
        """Return the filter (width, K); entry k is the weight of the token k steps back."""
        if self.h is None:
            time = torch.arange(tokens, device=self.log_poles.device)
            poles = torch.exp(self.log_poles * time)  # (width, state, tokens)
            return (self.residues[..., None] * poles).sum(1)
        taps: Tensor = self.h[:, 0] if self.h.shape[-1] >= LONG else self.h[:, 0].flip(-1)
        return taps.repeat_interleave(self.width // len(taps), 0)[:, :tokens]

    def forward(self, projected: Tensor) -> Tensor:
        """Return the gated convolution (B, L, E) of the projected input (B, L, 3 E)."""
        taps = self.short_filter_weight
        padded = F.pad(projected.mT, (taps.shape[-1] - 1, 0))
        short = F.conv1d(padded, taps, groups=len(taps))
        x2, x1, v = (short[:, i::3] for i in range(3))
        v = x1 * v
        mixed = long_conv(v, self.kernel(v.shape[-1]))
        if self.D is not None:
            mixed = mixed + self.D[:, None] * v
        out: Tensor = x2 * mixed
        return out.mT


class _Rotary(nn.Module):
    """Rotary position embeddings of queries and keys."""

    inv_freq: Tensor

    def __init__(self, width: int, base: float, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        self.register_buffer("inv_freq", frequencies)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate channel pairs (i, i + P / 2) of x (B, L, H, P) by angles of their positions."""
        wide_dtype = torch.promote_types(x.dtype, torch.float32)
        time = torch.arange(x.shape[1], device=x.device).to(wide_dtype) / self.scaling
        angle = time[:, None, None] * self.inv_freq.to(wide_dtype)  # (L, 1, P / 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


class StripedAttention(nn.Module):
    """Causal softmax attention, with the parameter names of the published code.

    The rows of ``Wqkv`` are, for each head, its queries, keys and values, as in the checkpoints.

    Args:
        width: width E of the residual stream.
        heads: number of heads.
        base: base of the rotary frequencies. Default: 1e4.
        scaling: divisor of positions. Default: 1.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import StripedAttention
        >>> StripedAttention(8, heads=2)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, heads: int, base: float = 1e4, scaling: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width)
        self.rotary_emb = _Rotary(width // heads, base, scaling)

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, L, 3 E) into rotated queries, rotated keys, and values, each (B, L, H, P)."""
        query, key, values = qkv.view(*qkv.shape[:2], self.heads, 3, -1).unbind(3)
        return self.rotary_emb(query), self.rotary_emb(key), values

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the mixer's output for tokens (B, L, E), in the same shape."""
        query, key, values = (x.transpose(1, 2) for x in self.parts(self.Wqkv(hidden_states)))
        mixed = F.scaled_dot_product_attention(query, key, values, is_causal=True)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class _GatedMlp(nn.Module):
    """A gated perceptron: l3(act(l1 x) l2 x), where act is GELU or the identity."""

    def __init__(self, width: int, inner: int, has_gelu: bool) -> None:
        super().__init__()
        self.has_gelu = has_gelu
        self.l1 = nn.Linear(width, inner, bias=False)
        self.l2 = nn.Linear(width, inner, bias=False)
        self.l3 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the perceptron to each token of ``x`` (B, L, E)."""
        gate = F.gelu(self.l1(x)) if self.has_gelu else self.l1(x)
        out: Tensor = self.l3(gate * self.l2(x))
        return out


class _StripedBlock(nn.Module):
    """A block: x = x + mixer(norm(x)), then x + mlp(norm(x)), with published parameter names."""

    def __init__(self, mixer: nn.Module, mlp: nn.Module, width: int, eps: float) -> None:
        super().__init__()
        self.pre_norm, self.post_norm = _ScaleNorm(width, eps), _ScaleNorm(width, eps)
        self.mlp = mlp
        self.filter: nn.Module | None = None
        if isinstance(mixer, HyenaCascade):
            self.filter = mixer
            self.projections = nn.Linear(width, 3 * width, bias=False)
            self.out_filter_dense = nn.Linear(width, width)
        else:
            self.inner_mha_cls = mixer

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block, in the shape of ``x`` (B, L, E)."""
        normed = self.pre_norm(x)
        if self.filter is None:
            mixed = self.inner_mha_cls(normed)
        else:
            mixed = self.out_filter_dense(self.filter(self.projections(normed)))
        x = x + mixed
        out: Tensor = x + self.mlp(self.post_norm(x))
        return out


class StripedHyena(DNAModel):
    """A DNA model of gated convolutions and attention, with the parameter names of Evo 2.

    Args:
        layout: the mixer of each block: ``"se"``, ``"mr"``, ``"li"`` or ``"attention"``.
        hidden_size: width E of the residual stream. Default: 4096.
        vocab_size: number of tokens, which are bytes. Default: 512.
        heads: number of attention heads. Default: 32.
        inner_mlp_size: hidden width of the mlps. Default: 11008.
        se_length: length of a short filter (``"se"``). Default: 7.
        mr_length: length of a medium filter (``"mr"``). Default: 128.
        se_groups: number of short filters in a block. Default: 256.
        mr_groups: number of medium filters in a block. Default: 256.
        state_size: number of exponentials in a long filter (``"li"``). Default: 16.
        short_filter_length: kernel size of the convolution after the projection. Default: 3.
        rotary_base: base of the rotary frequencies. Default: 1e4.
        rotary_scaling: divisor of positions in attention. Default: 1.
        eps: epsilon of the norms. Default: 1e-6.

    Raises:
        OptionError: for an unknown mixer, or if ``heads`` or groups do not divide ``hidden_size``.

    Example:
        >>> import torch
        >>> from captum_ssm.models import StripedHyena
        >>> sizes = {"hidden_size": 16, "heads": 2, "inner_mlp_size": 24}
        >>> model = StripedHyena(("se", "mr", "li", "attention"), **sizes, se_groups=4, mr_groups=4)
        >>> model(torch.tensor([list(b"ACGT")])).shape
        torch.Size([1, 4, 512])
    """

    def __init__(
        self,
        layout: Sequence[BlockKind],
        hidden_size: int = 4096,
        vocab_size: int = 512,
        *,
        heads: int = 32,
        inner_mlp_size: int = 11008,
        se_length: int = 7,
        mr_length: int = 128,
        se_groups: int = 256,
        mr_groups: int = 256,
        state_size: int = 16,
        short_filter_length: int = 3,
        rotary_base: float = 1e4,
        rotary_scaling: float = 1.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if not layout or any(kind not in KINDS for kind in layout):
            raise OptionError(f"layout={tuple(layout)!r}: use one of {KINDS} for each block.")
        for name, size in (("heads", heads), ("se_groups", se_groups), ("mr_groups", mr_groups)):
            if size < 1 or hidden_size % size:
                raise OptionError(
                    f"{name}={size} does not divide hidden_size={hidden_size}. Use a divisor."
                )
        length_and_groups = {"se": (se_length, se_groups), "mr": (mr_length, mr_groups)}

        def mixer(kind: str) -> nn.Module:
            if kind == "attention":
                return StripedAttention(hidden_size, heads, rotary_base, rotary_scaling)
            length, groups = length_and_groups.get(kind, (0, 1))
            return HyenaCascade(hidden_size, kind, length, groups, state_size, short_filter_length)

        self.embedding_layer = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            # in Evo 2, only the first block's mlp has a GELU
            _StripedBlock(
                mixer(kind), _GatedMlp(hidden_size, inner_mlp_size, i == 0), hidden_size, eps
            )
            for i, kind in enumerate(layout)
        )
        self.norm = _ScaleNorm(hidden_size, eps)

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that embeds the tokens."""
        return self.embedding_layer

    def _logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x) @ self.embedding_layer.weight.T
        return out
