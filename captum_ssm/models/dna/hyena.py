"""HyenaDNA: gated long convolutions, whose filters are computed by a small network."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..perceptron import INIT_STD, perceptron
from .common import Backbone, DNAModel

#: The value to which the released models' windows, which multiply the filters, decay.
_FALLS_TO = 1e-2
#: Decay times of the first and of the last channel's window, in lengths of the longest sequence.
_SLOWEST, _FASTEST = 1.5, 0.3
#: The constant that is added to a window.
_FLOOR = 0.05
#: The lowest frequency of the position features.
_LOWEST = 1e-4


class _Sine(nn.Module):
    """The activation sin(freq * x), with a trained frequency for each channel."""

    def __init__(self, width: int, freq: float) -> None:
        super().__init__()
        self.freq = nn.Parameter(torch.full((1, width), float(freq)))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element of ``x`` (..., width)."""
        return torch.sin(self.freq * x)


class _Positions(nn.Module):
    """Features of each position: time from 0 to 1, and cosines and sines of rising frequencies."""

    t: Tensor

    def __init__(self, features: int, l_max: int) -> None:
        super().__init__()
        bands = (features - 1) // 2
        t = torch.linspace(0, 1, l_max)[None, :, None]  # (1, L, 1)
        angle = 2 * math.pi * torch.arange(l_max)[None, :, None] / l_max
        wave = torch.linspace(_LOWEST, bands - 1, bands) * angle  # (1, L, bands)
        self.z = nn.Parameter(torch.cat([t, torch.cos(wave), -torch.sin(wave)], -1))
        self.register_buffer("t", t)


class _Window(nn.Module):
    """A window exp(-t |delta|) + floor over time t, with a decay rate delta for each filter."""

    deltas: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        slowest, fastest = math.log(_FALLS_TO) / _SLOWEST, math.log(_FALLS_TO) / _FASTEST
        self.register_buffer("deltas", torch.linspace(slowest, fastest, width)[None, None])

    def forward(self, t: Tensor) -> Tensor:
        """Return the window's values (1, L, width) at times ``t`` (1, L, 1)."""
        return torch.exp(-t * self.deltas.abs()) + _FLOOR


class HyenaFilter(nn.Module):
    """Long filters: a network with sine activations maps position features to filter values.

    The values are multiplied by a window. The bias of the convolution is stored here, too.

    Args:
        width: number of filters.
        l_max: length of the filters.
        features: number of features of a position, odd and at least 3. Default: 5.
        filter_order: width of the network. Default: 64.
        inner: layers of the network between the first and the last. Default: 2.
        freq: initial frequency of the sines. Default: 10.

    Example:
        >>> from captum_ssm.models.dna.hyena import HyenaFilter
        >>> HyenaFilter(4, l_max=10).kernel(tokens=7).shape
        torch.Size([4, 7])
    """

    def __init__(
        self,
        width: int,
        l_max: int,
        features: int = 5,
        filter_order: int = 64,
        inner: int = 2,
        freq: float = 10.0,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))
        self.pos_emb = _Positions(features, l_max)
        sine = _Sine(filter_order, freq)  # shared by all layers
        layers: list[nn.Module] = [nn.Linear(features, filter_order), sine]
        for _ in range(inner):
            layers += [nn.Linear(filter_order, filter_order), sine]
        self.implicit_filter = nn.Sequential(*layers, nn.Linear(filter_order, width, bias=False))
        self.modulation = _Window(width)

    def kernel(self, tokens: int) -> Tensor:
        """Return the filter (width, tokens); entry k is the weight of the token k steps back."""
        z, t = self.pos_emb.z[:, :tokens], self.pos_emb.t[:, :tokens]
        filters: Tensor = self.implicit_filter(z) * self.modulation(t)
        return filters[0].T


class HyenaOperator(nn.Module):
    """Hyena's mixer, with the parameter names of the published code.

    With a short convolution conv, the long filter h and x0, x1, v = conv(in_proj(u)), the output is

        out_proj(x0 (h * (x1 v) + b x1 v))

    Higher orders have more gates, each followed by a separate filter.

    Args:
        d_model: width E of the tokens.
        l_max: number of tokens of the longest sequence.
        order: number of gates, 2 or more. Default: 2.
        short_filter_order: kernel size of the short convolution. Default: 3.
        **filter_options: further arguments of :class:`HyenaFilter`.

    Example:
        >>> import torch
        >>> from captum_ssm.models.dna import HyenaOperator
        >>> HyenaOperator(d_model=8, l_max=16)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        order: int = 2,
        short_filter_order: int = 3,
        **filter_options: Any,
    ) -> None:
        super().__init__()
        self.d_model, self.l_max, self.order = d_model, l_max, order
        inner = d_model * (order + 1)
        self.in_proj = nn.Linear(d_model, inner)
        self.out_proj = nn.Linear(d_model, d_model)
        self.short_filter = nn.Conv1d(
            inner, inner, short_filter_order, padding=short_filter_order - 1, groups=inner
        )
        self.filter_fn = HyenaFilter(d_model * (order - 1), l_max, **filter_options)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the mixer's output for tokens (B, L, E), in the same shape.

        Raises:
            InputError: when the sequence has more than ``l_max`` tokens.
        """
        tokens = hidden_states.shape[1]
        if tokens > self.l_max:
            raise InputError(
                f"the input has {tokens} tokens, but the filters have l_max={self.l_max}. Pass at "
                f"most {self.l_max} tokens."
            )
        projected = self.in_proj(hidden_states).mT  # (B, (order + 1) E, L)
        x, *gates, v = self.short_filter(projected)[..., :tokens].split(self.d_model, 1)
        kernels = torch.split(self.filter_fn.kernel(tokens), self.d_model)
        biases = torch.split(self.filter_fn.bias, self.d_model)
        for gate, kernel, bias in zip(reversed(gates), kernels, biases, strict=True):
            v = gate * v
            v = long_conv(v, kernel) + bias[:, None] * v
        out: Tensor = self.out_proj((x * v).mT)
        return out


class HyenaBlock(nn.Module):
    """A block: x = x + mixer(norm1(x)), then x + mlp(norm2(x)).

    Args:
        mixer: the module that mixes the tokens.
        d_model: width E of the tokens.
        d_inner: hidden width of the mlp.
        eps: epsilon of the norms.
    """

    def __init__(self, mixer: nn.Module, d_model: int, d_inner: int, eps: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm1 = nn.LayerNorm(d_model, eps=eps)
        self.mlp = perceptron(d_model, d_inner, approximate="tanh")
        self.norm2 = nn.LayerNorm(d_model, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block, in the shape of ``x`` (B, L, E)."""
        x = x + self.mixer(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class HyenaDNA(DNAModel):
    """A DNA model of gated long convolutions, with the parameter names of HyenaDNA checkpoints.

    Args:
        d_model: width E of the tokens. Default: 128.
        n_layer: number of blocks. Default: 2.
        d_inner: hidden width of the mlps. Default: None, 4 E.
        vocab_size: number of tokens. Default: 16; the ids of A, C, G, T and N are 7 to 11.
        l_max: number of tokens of the longest sequence. Default: 1026.
        num_classes: number of sequence classes; None for next-token logits. Default: None.
        pool: the classifier's pooling of tokens: ``"last"`` or ``"mean"``. Default: ``"last"``.
        norm_epsilon: epsilon of the norms. Default: 1e-5.
        tie_embeddings: whether the head shares the weights of the embeddings. Default: True.
        **mixer_options: further arguments of :class:`HyenaOperator`.

    Raises:
        OptionError: when ``pool`` is unknown, or a size is below 1.

    Example:
        >>> import torch
        >>> from captum_ssm.models import HyenaDNA
        >>> model = HyenaDNA(d_model=16, l_max=32).eval()
        >>> model(torch.tensor([[7, 8, 9, 10]])).shape
        torch.Size([1, 4, 16])
    """

    def __init__(
        self,
        d_model: int = 128,
        n_layer: int = 2,
        d_inner: int | None = None,
        vocab_size: int = 16,
        l_max: int = 1026,
        *,
        num_classes: int | None = None,
        pool: Literal["last", "mean"] = "last",
        norm_epsilon: float = 1e-5,
        tie_embeddings: bool = True,
        **mixer_options: Any,
    ) -> None:
        super().__init__()
        self._set_pool(("last", "mean"), pool, d_model=d_model, n_layer=n_layer, l_max=l_max)
        inner = 4 * d_model if d_inner is None else d_inner

        def block() -> nn.Module:
            mixer = HyenaOperator(d_model, l_max, **mixer_options)
            return HyenaBlock(mixer, d_model, inner, norm_epsilon)

        embeddings = nn.Embedding(vocab_size, d_model)
        layers = [block() for _ in range(n_layer)]
        backbone = Backbone(embeddings, layers, {"ln_f": nn.LayerNorm(d_model, eps=norm_epsilon)})
        self.hyena: Any = nn.ModuleDict({"backbone": backbone})
        self._initialize(n_layer)
        if num_classes is None:
            self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
            if tie_embeddings:
                self.lm_head.weight = embeddings.weight
        else:
            self.score = nn.Linear(d_model, num_classes, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that embeds the tokens."""
        layer: nn.Module = self.hyena["backbone"].embeddings["word_embeddings"]
        return layer

    def _logits(self, x: Tensor) -> Tensor:
        x = self.hyena["backbone"](x)
        logits: Tensor
        logits = self.score(self._pooled(x)) if hasattr(self, "score") else self.lm_head(x)
        return logits

    @torch.no_grad()
    def _initialize(self, n_layer: int) -> None:
        """Initialize the weights; layers that write to the residual stream get smaller weights."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2 or "filter" in name:  # filters keep their own initial weights
                continue
            writes = name.endswith(("out_proj.weight", "fc2.weight"))
            nn.init.normal_(weight, std=INIT_STD / math.sqrt(2 * n_layer) if writes else INIT_STD)


def long_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """Return the causal convolution of x (B, C, L) with a kernel (C, K) for each channel."""
    tokens = x.shape[-1]
    padded = tokens + kernel.shape[-1]  # with zeros: products of spectra are circular convolutions
    dtype = torch.promote_types(x.dtype, torch.float32)
    spectrum = torch.fft.rfft(x.to(dtype), padded) * torch.fft.rfft(kernel.to(dtype), padded)
    out: Tensor = torch.fft.irfft(spectrum, padded)[..., :tokens]
    return out.to(x.dtype)
