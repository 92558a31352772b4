"""What each method says of a network of :mod:`zoo.wrapped`, in float64, from dense matrices.

The classes of a network are gone through one by one, so that it is known and not found out which
mixer reads what, in which order of the tokens, and what its output is added to.  Mixers are
:mod:`oracles.frozen_mixers`; nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import wrapped

from oracles.frozen_mixers import Frozen, frozen, gated, straight
from oracles.latim import alti

#: ``"real"``, the network itself; ``"frozen"`` and ``"half"``, linear at its input by either rule;
#: ``"direct"``, with mixers and MLPs cut from what they read.
Mode = Literal["real", "frozen", "half", "direct"]
#: By module, what hooks multiply its output with.
Factors = Mapping[nn.Module, Tensor]


@dataclass
class Call:
    """One call of a mixer.

    Attributes:
        module: the mixer.
        entering: what it was called on (B, L, E).
        order: which of the network's tokens each of its own is (L,).
        stage: calls that read the same stream have the same number.
        stream: what its output is added to (B, L, E), in the network's order; None for nothing.
        left: what it returned, times the factors of hooks (B, L, E).
        factor: those, broadcastable to (B, L, E).
        way: what its block makes of vectors (B, L, ..., E) of what it returned, frozen.
    """

    module: nn.Module
    entering: Tensor
    order: Tensor
    stage: int
    stream: Tensor | None
    left: Tensor
    factor: Tensor
    way: Callable[[Tensor], Tensor] = field(default=lambda vectors: vectors)

    def sorted(self, x: Tensor, dim: int = 1) -> Tensor:
        """Something by the mixer's tokens, in the network's order."""
        return x.index_select(dim, self.order.argsort())

    def matrices(self, x: Tensor) -> Tensor:
        """Matrices (..., L, L), in the network's order."""
        return self.sorted(self.sorted(x, -1), -2)


@dataclass
class Walk:
    """One run through a network, part by part.

    Attributes:
        network: the network.
        factors: what hooks do.
        mode: what is kept of the graph.
        calls: of mixers, in their order.
        locals: of every MLP: its output with its graph cut, in its order of tokens; that order;
            how many stages it comes behind.
        entry: what entered the first block that holds a mixer, or the input itself where the
            network calls the block's parts, and the order of its tokens among the network's.
    """

    network: wrapped.Network
    factors: Factors
    mode: Mode
    calls: list[Call] = field(default_factory=list)
    locals: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    entry: tuple[Tensor, Tensor] | None = None
    order: Tensor = field(default_factory=lambda: torch.arange(0))
    stage: int = 0

    def run(self, embeddings: Tensor) -> Tensor:
        """The output for (B, L, E), of all tokens."""
        x, network = embeddings, self.network
        virtual = 0 if network.virtual is None else len(network.virtual)
        if self.mode == "direct" and isinstance(_first(network.blocks), wrapped.Parts):
            x = x.detach().requires_grad_()
            self.entry = x, virtual + torch.arange(x.shape[1])
        if network.virtual is not None:
            x = torch.cat([network.virtual.detach().expand(len(x), -1, -1), x], 1)
        if network.positions is not None:
            x = x + network.positions.detach()[: x.shape[1]]
        self.order = torch.arange(x.shape[1])
        for block in network.blocks:
            x = self.block(block, x)
        x = self.norm(network.norm, x)
        return network.read(x) @ network.head.weight.detach().T + network.head.bias.detach()

    # --- blocks ------------------------------------------------------------------------------

    def block(self, block: Any, x: Tensor) -> Tensor:
        if isinstance(
            block, (wrapped.Residual, wrapped.Pair, wrapped.Beside, wrapped.Doubled, wrapped.Bare)
        ):
            x = self.entered(x)
        go = {
            wrapped.Residual: self.residual, wrapped.Parts: self.parts, wrapped.Bare: self.bare,
            wrapped.Doubled: self.doubled, wrapped.Pair: self.pair, wrapped.Beside: self.beside,
            wrapped.Local: self.local, wrapped.Backwards: self.backwards,
            wrapped.Turned: self.turned, wrapped.Twice: self.twice, wrapped.Branches: self.branches,
        }.get(type(block))  # fmt: skip
        return self.norm(block, x) if go is None else go(block, x) * self.factors.get(block, 1)

    def entered(self, x: Tensor) -> Tensor:
        if self.mode == "direct" and self.entry is None:
            x = x.detach().requires_grad_()
            self.entry = x, self.order
        return x

    def residual(self, block: Any, x: Tensor) -> Tensor:
        h = self.norm(block.norm, x)
        module = block.mixer.inner if isinstance(block.mixer, wrapped.Held) else block.mixer
        self.stage += 1
        out = self.behind(block, self.mix(module, h, x))
        if block.mlp is None:
            return x + out
        if block.mlp_norm is None:
            return x + out + self.mlp(block.mlp, h, self.stage - 1)
        x = x + out
        return x + self.mlp(block.mlp, self.norm(block.mlp_norm, x), self.stage)

    def behind(self, block: Any, out: Tensor) -> Tensor:
        """What stands between the mixer and the stream; the latest call learns of it."""
        call = self.calls[-1]
        if block.scale is not None:
            scale = block.scale.detach() if isinstance(block.scale, Tensor) else block.scale
            call.way = lambda vectors: vectors * scale
            out = scale * out
        if isinstance(block.behind, nn.Linear):
            weight = block.behind.weight.detach()
            call.way = lambda vectors: vectors @ weight.T
            return out @ weight.T + block.behind.bias.detach()
        if block.behind is None:
            return out
        norm, centres = block.behind, isinstance(block.behind, nn.LayerNorm)

        def centred(x: Tensor) -> Tensor:
            return x - x.mean(-1, keepdim=True) if centres else x

        size = (centred(out.detach()).square().mean(-1, keepdim=True) + wrapped.EPS).sqrt()
        gain = norm.weight.detach() * self.factors.get(norm, 1)
        call.way = lambda vectors: (
            centred(vectors) / size[:, :, None] * (gain if gain.dim() < 3 else gain[:, :, None])
        )
        return self.norm(norm, out)

    def bare(self, block: Any, x: Tensor) -> Tensor:
        self.stage += 1
        h = self.norm(block.norm, x)
        out = self.mix(block.mixer, h, None)
        if block.gate is None:
            return out
        z = h @ block.gate.weight.detach().T + block.gate.bias.detach()
        return self.product(out, z)

    def parts(self, block: Any, x: Tensor) -> Tensor:
        self.stage += 1
        return x + self.mix(block.mixer, self.norm(block.norm, x), x)

    def doubled(self, block: Any, x: Tensor) -> Tensor:
        self.stage += 1
        one = self.mix(block.one, self.norm(block.norm, x), 2 * x)
        other = self.mix(block.other, self.norm(block.other_norm, x), 2 * x)
        return 2 * x + one + other

    def pair(self, block: Any, x: Tensor) -> Tensor:
        for norm, module in ((block.norm, block.first), (block.other_norm, block.second)):
            self.stage += 1
            x = x + self.mix(module, self.norm(norm, x), x)
        return x

    def beside(self, block: Any, x: Tensor) -> Tensor:
        h = self.norm(block.norm, x)
        pair = block.pair if block.held else block
        self.stage += 1
        one = self.mix(pair.one, h, x)
        if not pair.backwards:
            return x + one + self.mix(pair.other, h, x)
        self.order = self.order.flip(0)
        other = self.mix(pair.other, h.flip(1), x.flip(1)).flip(1)
        self.order = self.order.flip(0)
        return x + one + other

    def local(self, block: Any, x: Tensor) -> Tensor:
        return x + self.mlp(block.mlp, self.norm(block.norm, x), self.stage)

    def turned(self, block: Any, x: Tensor) -> Tensor:
        self.order = self.order.flip(0)
        return x.flip(1)

    def backwards(self, block: Any, x: Tensor) -> Tensor:
        return self.turned(None, self.block(block.block, self.turned(None, x)))

    def twice(self, block: Any, x: Tensor) -> Tensor:
        return self.block(block.block, self.block(block.block, x))

    def branches(self, block: Any, x: Tensor) -> Tensor:
        one, other = x, x
        for part in block.one:
            one = self.block(part, one)
        for part in block.other:
            other = self.block(part, other)
        return one + other

    # --- parts -------------------------------------------------------------------------------

    def mix(self, module: nn.Module, h: Tensor, stream: Tensor | None) -> Tensor:
        if self.mode in ("frozen", "half"):
            out = frozen(module, h, half=self.mode == "half").output
        else:
            out = wrapped.mixed(module, h)
        if self.mode == "direct":
            out = out.detach().requires_grad_()
        factor = self.factors.get(module, torch.ones(1, 1, 1))
        left = (out * factor).requires_grad_()
        call = Call(module, h.detach(), self.order, self.stage, stream, left, factor)
        if stream is not None:
            call.stream = call.sorted(stream.detach())
        self.calls.append(call)
        return left

    def mlp(self, module: Any, h: Tensor, stages: int) -> Tensor:
        up = h @ module.up.weight.detach().T + module.up.bias.detach()
        if module.gate is None:
            up = F.gelu(up) if self.mode == "real" else straight(F.gelu, up)
        else:
            up = self.product(up, h @ module.gate.weight.detach().T + module.gate.bias.detach())
        out = up @ module.down.weight.detach().T + module.down.bias.detach()
        if self.mode == "direct":
            out = out.detach().requires_grad_()
            self.locals.append((out, self.order, stages))
        return out * self.factors.get(module, 1)

    def product(self, x: Tensor, z: Tensor) -> Tensor:
        """Numbers and a gate."""
        if self.mode == "real":
            return x * F.silu(z)
        return gated(x, straight(F.silu, z), self.mode == "half")

    def norm(self, module: Any, x: Tensor) -> Tensor:
        if isinstance(module, nn.Identity):
            return x * self.factors.get(module, 1)
        centred = x - x.mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else x
        size = (centred.square().mean(-1, keepdim=True) + wrapped.EPS).sqrt()
        size = size if self.mode == "real" else size.detach()
        out = centred / size * module.weight.detach()
        if isinstance(module, nn.LayerNorm):
            out = out + module.bias.detach()
        return out * self.factors.get(module, 1)


# --- what methods say, of the network's tokens (B, L) --------------------------------------------


@dataclass
class Explained:
    """A network at an input, and an output that is asked about.

    Attributes:
        network: the network, with hooks taken off and adapters settled.
        factors: what hooks do.
        embeddings: its input (B, L', E), without virtual tokens.
        select: of the output, the number of each example.
        weights: the query over the network's tokens (B, L).
    """

    network: wrapped.Network
    factors: Factors
    embeddings: Tensor
    select: Callable[[Tensor], Tensor]
    weights: Tensor

    def walk(self, mode: Mode) -> tuple[Walk, Tensor]:
        """A run, and the selected numbers."""
        walk = Walk(self.network, self.factors, mode)
        with torch.enable_grad():
            return walk, self.select(walk.run(self.embeddings))

    def check(self) -> Tensor:
        """The output; every mode computes the same."""
        outputs = []
        for mode in ("real", "frozen", "half", "direct"):
            outputs.append(self.walk(mode)[1].detach())
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], rtol=1e-9, atol=1e-9)
        return outputs[0]

    # --- by gradient ---------------------------------------------------------------------------

    def flow(self, mode: Mode = "frozen") -> Tensor:
        start = self.embeddings.detach().requires_grad_()
        walk = Walk(self.network, self.factors, mode)
        number = self.select(walk.run(start)).sum()
        (gradient,) = torch.autograd.grad(number, start)
        relevance = (gradient * start).detach().sum(-1)
        own = self.weights.shape[1] - relevance.shape[1]  # virtual tokens are constants
        return F.pad(relevance, (own, 0))

    def lrp(self) -> Tensor:
        return self.flow("half")

    # --- by folding ----------------------------------------------------------------------------

    def _calls(self) -> list[tuple[Call, Frozen]]:
        walk, _ = self.walk("real")
        return [(call, frozen(call.module, call.entering, half=False)) for call in walk.calls]

    def implicit_attention(self) -> Tensor:
        rows = [
            _times(self.weights, call.matrices(parts.unified.mean(1)))
            for call, parts in self._calls()
        ]
        return torch.stack(rows).mean(0)

    def rollout(self) -> Tensor:
        return self._folded([(c, c.matrices(p.unified.mean(1))) for c, p in self._calls()])

    def mamba_attribution(self) -> Tensor:
        walk, number = self.walk("real")
        gradients = torch.autograd.grad(number.sum(), [call.left for call in walk.calls])
        found = []
        for call, gradient in zip(walk.calls, gradients, strict=True):
            alpha = frozen(call.module, call.entering, half=False).unified.mean(1)
            weighted = (gradient.mean(-1, keepdim=True) * alpha).clamp(min=0)
            found.append((call, call.matrices(weighted)))
        return self._folded(found)

    def transformer_attribution(self) -> Tensor:
        (walk, number), (lower, below) = self.walk("real"), self.walk("half")
        real = torch.autograd.grad(number.sum(), [call.left for call in walk.calls])
        linear = torch.autograd.grad(below.sum(), [call.left for call in lower.calls])
        found = []
        for call, gradient, coefficient in zip(walk.calls, real, linear, strict=True):
            parts = frozen(call.module, call.entering, half=False)
            upper, g = ((x * call.factor) @ parts.weight.T for x in (gradient, coefficient))
            upper, g, v = (x.unflatten(-1, (parts.heads, -1)) for x in (upper, g, parts.values))
            alpha = parts.unified.unflatten(1, v.shape[2:])
            relevance = torch.einsum("bihp,bhpij,bjhp->bhij", g, alpha, v)
            weighted = torch.einsum("bihp,bjhp->bhij", upper, v) * relevance
            found.append((call, call.matrices(weighted.clamp(min=0).mean(1))))
        return self._folded(found)

    def _folded(self, added: list[tuple[Call, Tensor]]) -> Tensor:
        """The query's row of the product of what the calls of each stage add to their stream."""
        row = self.weights
        for stage in sorted({call.stage for call, _ in added}, reverse=True):
            matrices = [(call, matrix) for call, matrix in added if call.stage == stage]
            kept = torch.zeros_like(row) if matrices[0][0].stream is None else row
            row = kept + sum(_times(row, matrix) for _, matrix in matrices)
        return row.detach()

    # --- by vectors ----------------------------------------------------------------------------

    def latim_norm(self) -> Tensor:
        rows = [
            _times(self.weights, _vectors(call, parts, joined=True).norm(dim=-1))
            for call, parts in self._calls()
        ]
        return torch.stack(rows).mean(0)

    def latim_alti(self) -> Tensor:
        row = self.weights
        for mixing in reversed(self._mixings()):
            row = _times(row, mixing)
        return row

    def latim_logit(self) -> Tensor:
        walk, number = self.walk("direct")
        assert walk.entry is not None
        sources = [call.left for call in walk.calls] + [out for out, *_ in walk.locals]
        sources.append(walk.entry[0])
        found = torch.autograd.grad(number.sum(), sources, allow_unused=True)
        gradients = [
            torch.zeros_like(x) if g is None else g for g, x in zip(found, sources, strict=True)
        ]
        mixings = self._mixings()
        # by the number of stages that what they read has passed
        read: list[Tensor] = [torch.zeros_like(self.weights) for _ in range(len(mixings) + 1)]
        for call, gradient in zip(walk.calls, gradients, strict=False):
            parts = frozen(call.module, call.entering, half=False)
            read[call.stage - 1] += torch.einsum(
                "bije,bie->bj", _vectors(call, parts), call.sorted(gradient)
            )
        for (out, order, stages), gradient in zip(
            walk.locals, gradients[len(walk.calls) :], strict=False
        ):
            read[stages] += (gradient * out).sum(-1)[:, order.argsort()].detach()
        entry, order = walk.entry
        row = torch.zeros_like(self.weights)
        for stage in range(len(mixings), -1, -1):
            row = row if stage == len(mixings) else _times(row, mixings[stage])
            row = row + read[stage]
        return row.index_add(1, order, (gradients[-1] * entry).sum(-1).detach())

    def _mixings(self) -> list[Tensor]:
        """ALTI's of every stage, (B, L, L)."""
        stages: dict[int, Tensor] = {}
        streams: dict[int, Tensor | None] = {}
        for call, parts in self._calls():
            joined = _vectors(call, parts, joined=call.stream is not None)
            stages[call.stage] = stages.get(call.stage, 0) + joined
            streams[call.stage] = call.stream
        return [alti(stages[at], streams[at]) for at in sorted(stages)]


def _first(blocks: Iterable[nn.Module]) -> nn.Module:
    """The first block that holds a mixer."""
    within = wrapped.Local, wrapped.Turned, *wrapped.NORMS
    return next(block for block in blocks if not isinstance(block, within))


def _vectors(call: Call, parts: Frozen, *, joined: bool = False) -> Tensor:
    """T of a call (B, L queries, L sources, E), in the network's order; or as it joins a stream."""
    vectors = torch.einsum("bcij,bjc,ce->bije", parts.exact, parts.values, parts.weight)
    vectors = vectors * call.factor[:, :, None]
    vectors = call.way(vectors) if joined else vectors
    return call.sorted(call.sorted(vectors, 1), 2).detach()


def _times(row: Tensor, matrix: Tensor) -> Tensor:
    return torch.einsum("bi,bij->bj", row, matrix)
