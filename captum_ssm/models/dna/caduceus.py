"""Caduceus: a bidirectional Mamba for DNA, which reads one strand or both strands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import OptionError
from ..perceptron import INIT_STD
from ..vim import VimMixer
from .common import Backbone, DNAModel, on_both

#: For each token id, the id of its complement on the opposite strand. In the tokenizers of Caduceus
#: and HyenaDNA, A, C, G, T and N are 7 to 11; the other tokens are their own complements.
COMPLEMENTS = (0, 1, 2, 3, 4, 5, 6, 10, 9, 8, 7, 11, 12, 13, 14, 15)

#: A classifier's pooling of the tokens.
Pool = Literal["mean", "max", "first", "last"]
POOLS = ("mean", "max", "first", "last")


class BiMamba(nn.Module):
    """Two Mambas with shared input and output projections, one for each reading direction.

    The output is fwd(h) + flip(rev(flip(h))), where flip reverses the order of the tokens.

    Args:
        d_model: width E of the tokens.
        **mixer_options: further arguments of :class:`~captum_ssm.models.vim.VimMixer`.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import BiMamba
        >>> BiMamba(d_model=16)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, d_model: int, **mixer_options: Any) -> None:
        super().__init__()
        self.mamba_fwd = VimMixer(d_model, bimamba_type="none", **mixer_options)
        self.mamba_rev = VimMixer(d_model, bimamba_type="none", **mixer_options)
        self.mamba_rev.in_proj = self.mamba_fwd.in_proj
        self.mamba_rev.out_proj = self.mamba_fwd.out_proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the mixer's output for tokens (B, L, E), in the same shape."""
        out: Tensor = self.mamba_fwd(hidden_states)
        back: Tensor = self.mamba_rev(hidden_states.flip(1))
        return out + back.flip(1)


class StrandsMixer(nn.Module):
    """Apply one mixer to both strands, each in one half of the channels.

    The second half of the channels represents the reverse complement. Its tokens and channels are
    reversed before the mixer and after the mixer.

    Args:
        submodule: the mixer of one strand.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import BiMamba, StrandsMixer
        >>> mixer, x = StrandsMixer(BiMamba(d_model=8)), torch.randn(1, 5, 16)
        >>> torch.allclose(mixer(x.flip(1, 2)), mixer(x).flip(1, 2), atol=1e-6)
        True
    """

    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the mixer's output for both strands (B, L, 2 E), in the same shape."""
        strand, complement = hidden_states.chunk(2, -1)
        # both strands in one batch: one call takes half the time of two
        strand, complement = self.submodule(torch.cat([strand, complement.flip(1, 2)])).chunk(2)
        return torch.cat([strand, complement.flip(1, 2)], -1)


class StrandsNorm(nn.Module):
    """Apply one norm to both strands, with the parameter names of models without fused norms.

    Args:
        submodule: the norm of one strand.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import StrandsNorm
        >>> StrandsNorm(torch.nn.RMSNorm(8))(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each half of the channels of ``x`` (B, L, 2 E) separately."""
        return on_both(self.submodule, x)


class StrandsEmbedding(nn.Module):
    """Embed each token and its complement, in the two halves of the channels.

    The channels of the complement's embedding are reversed.

    Args:
        vocab_size: number of tokens.
        d_model: width E of one strand.
        complements: the id of the complement, for each token id.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import COMPLEMENTS, StrandsEmbedding
        >>> embedding, a, t = StrandsEmbedding(16, 8, COMPLEMENTS), *torch.tensor([[[7]], [[10]]])
        >>> torch.equal(embedding(t), embedding(a).flip(-1))
        True
    """

    complement_map: Tensor

    def __init__(self, vocab_size: int, d_model: int, complements: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("complement_map", torch.tensor(complements))
        self.embedding = nn.Embedding(vocab_size, d_model)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return embeddings (B, L, 2 E) of token ids (B, L)."""
        weight = self.embedding.weight
        # one lookup, because explanations expect one embedding layer
        table = torch.cat([weight, weight[self.complement_map].flip(-1)], -1)
        return F.embedding(input_ids, table)


class StrandsHead(nn.Module):
    """Compute a token's logit as its logit on one strand plus its complement's on the other strand.

    Args:
        d_model: width E of one strand.
        vocab_size: number of tokens.
        complements: the id of the complement, for each token id.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import COMPLEMENTS, StrandsHead
        >>> StrandsHead(8, 16, COMPLEMENTS)(torch.zeros(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    complement_map: Tensor

    def __init__(self, d_model: int, vocab_size: int, complements: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("complement_map", torch.tensor(complements))
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, L, V) for the last hidden states (B, L, 2 E)."""
        strand, complement = x.chunk(2, -1)
        weight = self.lm_head.weight
        complement_logits = F.linear(complement.flip(-1), weight[self.complement_map])
        return F.linear(strand, weight) + complement_logits


class CaduceusBlock(nn.Module):
    """A residual block: x + mixer(norm(x)); with ``exchange`` the strands in x are swapped before.

    Args:
        norm: the norm of one strand, or a :class:`StrandsNorm`.
        mixer: the module that mixes the tokens.
        exchange: whether to swap the halves of the channels, as the published code does for models
            of both strands with fused norms. Default: False.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import BiMamba, CaduceusBlock
        >>> block = CaduceusBlock(torch.nn.RMSNorm(16), BiMamba(d_model=16))
        >>> block(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, norm: nn.Module, mixer: nn.Module, exchange: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block, in the shape of ``x``, (B, L, E or 2 E)."""
        if not self.exchange:
            out: Tensor = x + self.mixer(self.norm(x))
            return out
        x = torch.cat([*reversed(x.chunk(2, -1))], -1)
        out = x + self.mixer(on_both(self.norm, x))
        return out


class Caduceus(DNAModel):
    """A bidirectional Mamba model of DNA, with the parameter names of Caduceus checkpoints.

    Both variants are bidirectional. Caduceus-Ph reads one strand. Caduceus-PS (``rcps=True``) reads
    a strand and its reverse complement with the same weights, so it is equivariant to the reverse
    complement.

    Args:
        d_model: width E of one strand. Default: 256.
        n_layer: number of blocks. Default: 16.
        vocab_size: number of tokens. Default: 16; the ids of A, C, G, T and N are 7 to 11.
        rcps: whether the model reads both strands. Default: True.
        num_classes: number of sequence classes; None for logits of masked tokens. Default: None.
        pool: the classifier's pooling of tokens: ``"mean"``, ``"max"``, ``"first"`` or ``"last"``.
            Default: ``"mean"``.
        fused: whether the model was trained with fused norms, as the released models were. The
            published code then swaps the strands in each block. Default: True.
        rms_norm: RMSNorm if True, else LayerNorm. Default: True.
        norm_epsilon: epsilon of the norms. Default: 1e-5.
        complements: the id of the complement, for each token id. Default: :data:`COMPLEMENTS`.
        **mixer_options: further arguments of :class:`BiMamba`.

    Raises:
        OptionError: when ``pool`` is unknown, a size is below 1, or ``complements`` does not have
            ``vocab_size`` entries.

    Example:
        >>> import torch
        >>> from captum_ssm.models import Caduceus
        >>> model = Caduceus(d_model=16, n_layer=2).eval()
        >>> model(torch.tensor([[7, 8, 9, 10]])).shape
        torch.Size([1, 4, 16])
    """

    def __init__(
        self,
        d_model: int = 256,
        n_layer: int = 16,
        vocab_size: int = 16,
        *,
        rcps: bool = True,
        num_classes: int | None = None,
        pool: Pool = "mean",
        fused: bool = True,
        rms_norm: bool = True,
        norm_epsilon: float = 1e-5,
        complements: Sequence[int] = COMPLEMENTS,
        **mixer_options: Any,
    ) -> None:
        super().__init__()
        self._set_pool(POOLS, pool, d_model=d_model, n_layer=n_layer, vocab_size=vocab_size)
        if rcps and len(complements) != vocab_size:
            raise OptionError(
                f"complements has {len(complements)} entries, but vocab_size={vocab_size}. Pass "
                "the id of the complement for each token id."
            )
        self.rcps = rcps

        def norm() -> nn.Module:
            return (nn.RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon)

        def for_strands(norm: nn.Module) -> nn.Module:
            return StrandsNorm(norm) if rcps and not fused else norm

        def block() -> nn.Module:
            strand_mixer = BiMamba(d_model, **mixer_options)
            with torch.no_grad():  # mamba_rev has the same out_proj
                strand_mixer.mamba_fwd.out_proj.weight /= math.sqrt(n_layer)
            mixer = StrandsMixer(strand_mixer) if rcps else strand_mixer
            return CaduceusBlock(for_strands(norm()), mixer, exchange=rcps and fused)

        embeddings: Any = nn.Embedding(vocab_size, d_model)
        if rcps:
            embeddings = StrandsEmbedding(vocab_size, d_model, complements)
        layers = [block() for _ in range(n_layer)]
        last_norm = {"norm_f": for_strands(norm())}
        backbone = Backbone(embeddings, layers, last_norm, by_strand=rcps and fused)
        self.caduceus: Any = nn.ModuleDict({"backbone": backbone})
        token_embedding = embeddings.embedding if rcps else embeddings
        nn.init.normal_(token_embedding.weight, std=INIT_STD)
        if num_classes is not None:
            self.score = nn.Linear(d_model, num_classes, bias=False)
            nn.init.normal_(self.score.weight, std=INIT_STD)
        elif rcps:
            self.lm_head: Any = StrandsHead(d_model, vocab_size, complements)
            self.lm_head.lm_head.weight = token_embedding.weight
        else:
            self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
            self.lm_head.weight = token_embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that embeds the tokens."""
        layer: nn.Module = self.caduceus["backbone"].embeddings["word_embeddings"]
        return layer

    def _logits(self, x: Tensor) -> Tensor:
        x = self.caduceus["backbone"](x)
        logits: Tensor
        if not hasattr(self, "score"):
            logits = self.lm_head(x)
        elif not self.rcps:
            logits = self.score(self._pooled(x))
        else:
            strand, complement = x.chunk(2, -1)
            logits = self.score(self._pooled(strand) + self._pooled(complement.flip(1, 2))) / 2
        return logits
