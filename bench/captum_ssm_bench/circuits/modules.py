"""The weights of circuits, set in the modules of transformers.

Embeddings have one length, so the norm in front of a first mixer is a constant factor.  Each SiLU
is given the value at which it returns the wanted number.  Steps, gates of writing and decays are
constants, or saturated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from .games import ANSWER, KEYS, VALUES, WIDTH, Words

#: The logit of a saturated gate.
HARD = 8.0
#: The value of a feature behind the first norm.
FIRST = math.sqrt(WIDTH / 2)
#: The input of SiLUs that let a feature pass, and the length of dense vectors behind SiLUs, whose
#: entries SiLU can return: it is never below -0.278.
_OPEN, _DENSE = 2.0, 0.25
#: The smallest argument of SiLU's rising branch.
_LOWEST = -1.2784


@dataclass(frozen=True)
class Wire:
    """A feature of the residual stream that a mixer reads.

    Attributes:
        feature: its place.
        channel: the letter that it stands for in the mixer.
        lag: from how many tokens before. Default: 0.
    """

    feature: int
    channel: int
    lag: int = 0


@dataclass(frozen=True)
class Layer:
    """The wiring of one mixer.

    Attributes:
        query, key, value: wires.
        open: the feature at which the output gate is open.
        write: the feature at which the state is written.
        out: where the output is written in the residual stream. Default: :data:`.ANSWER`.
        scale: the value of features behind the norm in front. Default: :data:`FIRST`.
    """

    query: Sequence[Wire]
    key: Sequence[Wire]
    value: Sequence[Wire]
    open: int
    write: int
    out: int = ANSWER
    scale: float = FIRST


@dataclass(frozen=True)
class MambaLayer:
    """The wiring of a Mamba mixer.

    Attributes:
        value: wires.
        gates: the input of the output gate, by feature.
        passes: whether values go by the state, in the skip connection. Default: False.
        state: the channels that make B and C, and the size of C; None for no state. Default: None.
        decay: of the state. Default: nearly none.
        erase: a channel, and how much longer the step is there. Default: None.
        out: where the output is written. Default: :data:`.ANSWER`.
    """

    value: Sequence[Wire]
    gates: Mapping[int, float]
    passes: bool = False
    state: tuple[int, int, float] | None = None
    decay: float = 1e-6
    erase: tuple[int, float] | None = None
    out: int = ANSWER


@dataclass(frozen=True)
class Dense:
    """Whether letters are dense vectors in a mixer, and features are in the residual stream.

    Attributes:
        seed: of the rotations; None for letters that are single channels. Default: None.
    """

    seed: int | None = None
    _known: dict[str, Tensor] = field(default_factory=dict)

    def rotation(self, name: str, size: int) -> Tensor:
        """Return a random orthogonal matrix, or the identity."""
        if name not in self._known:
            found = np.eye(size)
            if self.seed is not None:
                generator = np.random.default_rng([self.seed, *name.encode()])
                for row in generator.normal(size=(size, size)):  # a product of reflections
                    found = found - 2 * np.outer(found @ row, row) / (row @ row)
            self._known[name] = torch.from_numpy(found).float()
        return self._known[name]

    def entering(self, name: str, size: int) -> Tensor:
        """Return the input of SiLUs (size, letters) behind which each letter is a vector."""
        if self.seed is None:
            return _OPEN * torch.eye(size)
        wanted = _DENSE * self.rotation(name, size)
        return wanted.clone().apply_(inverse_silu)


#: Letters are single channels.
PLAIN = Dense()


def silu(x: float) -> float:
    """x times its sigmoid."""
    return x / (1 + math.exp(-x))


def inverse_silu(y: float) -> float:
    """The number above SiLU's lowest point at which SiLU is ``y``."""
    low, high = _LOWEST, abs(y) + 2.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if silu(middle) < y else (low, middle)
    return (low + high) / 2


def _connect(
    projection: Tensor, conv: Tensor, wires: Sequence[Wire], entering: Tensor, scale: float
) -> None:
    """Let channels of a projection (D, E) and its convolution (D, 1, width) read features."""
    for wire in wires:
        projection[: len(entering), wire.feature] = entering[:, wire.channel] / scale
        conv[: len(entering), 0, conv.shape[-1] - 1 - wire.lag] = 1


def _blank(model: Any) -> Any:
    """Return a model in evaluation mode whose matrices are 0: nothing is left to chance."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.zero_()
    return model.eval()


def _read_out(head: Tensor, words: Words, gain: float = 4.0) -> None:
    for letter, word in enumerate(words.ids("value")):
        head[word, ANSWER + letter] = gain


def _turn(readers: Sequence[Tensor], writers: Sequence[Tensor], rotation: Tensor) -> None:
    """Turn the residual stream: weights that read it (D, E) or hold its vectors, and write it."""
    for weight in readers:
        weight.copy_(weight @ rotation.T)
    for weight in writers:
        weight.copy_(rotation @ weight)


@dataclass(frozen=True)
class SoftmaxLayer:
    """The wiring of softmax attention.

    Attributes:
        query, key, value: features by letter.
        open: the feature at which the output gate is open.
        scale: the value of features behind the norm where values are. Default: :data:`FIRST`.
        sharpness: factor on the scores.
    """

    query: Sequence[int]
    key: Sequence[int]
    value: Sequence[int]
    open: int
    scale: float
    sharpness: float = 2.0


@torch.no_grad()
def delta_rule(
    words: Words,
    layers: Sequence[Layer],
    *,
    softmax: SoftmaxLayer | None = None,
    erased_by: int | None = None,
    hard: float = HARD,
    dense: Dense = PLAIN,
) -> Any:
    """Return Qwen3-Next with layers of the gated delta rule, and perhaps softmax attention on top.

    Args:
        words: the vocabulary.
        layers: the wiring.
        softmax: the wiring of a last layer. Default: None, there is none.
        erased_by: the feature that clears the state. Default: None.
        hard: the logit of gates of writing and of decays.
        dense: whether letters and features are dense.
    """
    kinds = ["linear_attention"] * len(layers) + ["full_attention"] * (softmax is not None)
    config = Qwen3NextConfig(
        vocab_size=words.size,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=len(kinds),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=KEYS,
        linear_value_head_dim=VALUES,
        linear_conv_kernel_dim=4,
        num_experts=0,
        use_cache=False,
        layer_types=kinds,
    )
    model = _blank(Qwen3NextForCausalLM(config))
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    table.copy_(words.embeddings())
    _read_out(head, words)
    readers, writers = [table, head], []
    turned = dense.rotation("value", VALUES)
    for block, layer in zip(model.model.layers, layers, strict=False):
        mixer = block.linear_attn
        wide, narrow = mixer.in_proj_qkvz.weight, mixer.in_proj_ba.weight
        conv, out = mixer.conv1d.weight, mixer.out_proj.weight
        parts = zip((layer.query, layer.key, layer.value), (0, KEYS, 2 * KEYS), strict=True)
        for place, (wires, start) in enumerate(parts):
            entering = dense.entering("key" if place < 2 else "value", KEYS)
            _connect(wide[start:], conv[start:], wires, entering, layer.scale)
        wide[2 * KEYS + VALUES :, layer.open] = _OPEN / layer.scale
        for kind in words.kinds:
            narrow[0, words.kind(kind)] = -hard / layer.scale
        narrow[0, layer.write] = hard / layer.scale  # the gate of writing
        mixer.dt_bias.fill_(-hard)
        mixer.A_log.fill_(math.log(3.0))
        if erased_by is not None:
            narrow[1, erased_by] = 2 * hard / layer.scale  # of the step: exp(-3 softplus(hard))
        out[layer.out : layer.out + VALUES] = turned.T / (math.sqrt(VALUES) * silu(_OPEN))
        readers += [wide, narrow]
        writers.append(out)
    if softmax is not None:
        attention = model.model.layers[-1].self_attn
        size = config.head_dim
        for letter in range(KEYS):  # the first two channels carry positions
            attention.q_proj.weight[2 + letter, softmax.query[letter]] = 1
            attention.k_proj.weight[2 + letter, softmax.key[letter]] = 1
        attention.q_proj.weight[size:, softmax.open] = HARD / FIRST
        attention.q_norm.weight.fill_(softmax.sharpness - 1)
        for letter in range(VALUES):
            attention.v_proj.weight[letter, softmax.value[letter]] = 1 / softmax.scale
            attention.o_proj.weight[ANSWER + letter, letter] = 1
        readers += [getattr(attention, f"{name}_proj").weight for name in "qkv"]
        writers.append(attention.o_proj.weight)
    _turn(readers, writers, dense.rotation("stream", WIDTH))
    return model


@torch.no_grad()
def mamba2(words: Words, layer: Layer, dense: Dense = PLAIN) -> Any:
    """Return Mamba-2 with one layer, whose state adds up all that is written."""
    config = Mamba2Config(
        vocab_size=words.size,
        hidden_size=WIDTH,
        num_heads=1,
        head_dim=WIDTH,
        state_size=KEYS,
        expand=1,
        n_groups=1,
        num_hidden_layers=1,
        chunk_size=16,
        pad_token_id=0,
    )
    model = _blank(Mamba2ForCausalLM(config))
    table, head = model.backbone.embeddings.weight, model.lm_head.weight
    table.copy_(words.embeddings())
    _read_out(head, words)
    mixer = model.backbone.layers[0].mixer
    wide, conv, out = mixer.in_proj.weight, mixer.conv1d.weight, mixer.out_proj.weight
    for vector in (mixer.conv1d.bias, mixer.D):
        vector.zero_()
    channels = {"value": 0, "key": WIDTH, "query": WIDTH + KEYS}
    for name, start in channels.items():
        entering = dense.entering("value" if name == "value" else "key", KEYS)
        wires = getattr(layer, name)
        _connect(wide[WIDTH + start :], conv[start:], wires, entering, layer.scale)
    wide[:VALUES, layer.open] = _OPEN / layer.scale
    mixer.A_log.fill_(-20.0)
    mixer.dt_bias.fill_(-HARD)
    wide[2 * WIDTH + 2 * KEYS, layer.write] = (HARD + 1) / layer.scale
    turned = dense.rotation("value", VALUES)
    out[layer.out : layer.out + VALUES, :VALUES] = turned.T / math.sqrt(WIDTH)
    _turn([table, head, wide], [out], dense.rotation("stream", WIDTH))
    return model


@torch.no_grad()
def mamba(words: Words, layers: Sequence[MambaLayer], gain: float = 4.0) -> Any:
    """Return Mamba, whose features keep the same length through all layers but the last."""
    config = MambaConfig(
        vocab_size=words.size,
        hidden_size=WIDTH,
        state_size=1,
        num_hidden_layers=len(layers),
        expand=1,
        time_step_rank=1,
        conv_kernel=4,
        tie_word_embeddings=False,
    )
    model = _blank(MambaForCausalLM(config))
    model.backbone.embeddings.weight.copy_(words.embeddings())
    _read_out(model.lm_head.weight, words, gain)
    for depth, (block, layer) in enumerate(zip(model.backbone.layers, layers, strict=True)):
        mixer, scale = block.mixer, FIRST
        wide, conv, narrow = mixer.in_proj.weight, mixer.conv1d.weight, mixer.x_proj.weight
        for vector in (mixer.conv1d.bias, mixer.D):
            vector.zero_()
        for wire in layer.value:
            wide[wire.channel, wire.feature] = _OPEN / scale
            conv[wire.channel, 0, 3 - wire.lag] = 1
        for feature, gate in layer.gates.items():  # an earlier layer has added one feature
            wide[WIDTH : WIDTH + VALUES, feature] = gate * math.sqrt(1 + depth / 2) / scale
        mixer.dt_proj.bias.fill_(math.log(math.e - 1))  # a step of 1
        mixer.A_log.fill_(math.log(layer.decay))
        if layer.state is not None:
            of_b, of_c, size = layer.state
            narrow[1, of_b], narrow[2, of_c] = 1 / silu(_OPEN), size / silu(_OPEN) ** 2
        if layer.erase is not None:
            channel, longer = layer.erase
            narrow[0, channel] = longer / silu(_OPEN)
            mixer.dt_proj.weight.fill_(1.0)
        if layer.passes:
            mixer.D[:VALUES] = 1 / silu(_OPEN) ** 2
        for letter in range(VALUES):
            mixer.out_proj.weight[layer.out + letter, letter] = 1
    return model


@torch.no_grad()
def rwkv(words: Words, mark: int, sharpness: float = 6.0) -> Any:
    """Return RWKV-4 whose first layer averages values, above all those behind a mark.

    The second layer does nothing.

    Args:
        words: the vocabulary.
        mark: the feature of the mark.
        sharpness: the key behind a mark; others have 0.
    """
    config = RwkvConfig(
        vocab_size=words.size,
        hidden_size=WIDTH,
        attention_hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=2,  # one alone cannot be initialized
        context_length=16,
        tie_word_embeddings=False,
    )
    model = _blank(RwkvForCausalLM(config))
    model.rwkv.embeddings.weight.copy_(words.embeddings(centered=True))
    _read_out(model.head.weight, words)
    mixer, scale = model.rwkv.blocks[0].attention, math.sqrt(WIDTH / 4)
    mixer.time_decay.fill_(-20.0)
    mixer.time_first.zero_()
    mixer.time_mix_value.fill_(1.0)  # keys read the token before
    mixer.time_mix_receptance.fill_(1.0)
    mixer.key.weight[:VALUES, mark] = sharpness / scale
    mixer.receptance.weight[:VALUES, words.kind("query")] = HARD / scale
    for letter, word in enumerate(words.ids("value")):
        mixer.value.weight[letter, word] = 1.0
        mixer.output.weight[ANSWER + letter, letter] = 1.0
    return model
