"""Random networks of real mixers, and random functions around them, by what is known of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from oracles.wrapped import Explained
from torch import Tensor, nn
from torch.func import functional_call
from zoo import wrapped

BOS = 7

# --- what is drawn -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A network, what is done around it, and what is asked of it.

    Attributes:
        blocks: classes of :mod:`zoo.wrapped` and their arguments.
        norms: the norm at the end.
        reads: the tokens that the head reads.
        positions: whether the network adds embeddings of positions.
        virtual: how many tokens of its own it puts in front.
        floating: whether embeddings are explained, and not ids.
        prepared: what the function does to its input, in turn.
        weights: whether it runs the network with other weights.
        adapters: ``"on"`` or ``"off"`` in the function, or ``"none"``.
        hooks: places among the modules that take hooks, what each does, whether for the call alone.
        twice: whether the network is run twice in a call.
        batch: examples.
        tokens: of an example.
        target: a position and an entry of the output.
        query: of the methods that ask for one.
        seed: of all numbers.
    """

    blocks: tuple[Any, ...]
    norms: str
    reads: str | int
    positions: bool
    virtual: int
    floating: bool
    prepared: tuple[str, ...]
    weights: bool
    adapters: str
    hooks: tuple[tuple[int, str, bool], ...]
    twice: bool
    batch: int
    tokens: int
    target: tuple[int, int]
    query: int | str | None
    seed: int


#: One in so many networks has branches of layers, which no method folds, or is run twice.
RARE = 20
NORMS = ("layer", "rms", "torch", "none")
#: Mixers that return no more than a multiple of what they are given.
BOUNDED = {"llama", "gpt2", "rwkv"}


def draw(random: Random) -> Drawn:
    """A network that holds a mixer, and all around it."""
    one = random.choice
    blocks = [_block(random) for _ in range(random.randint(0, 3))]
    rare = one(["branches", "twice"]) if random.random() < 1 / RARE else ""
    some = _branches(random) if rare == "branches" else _mixing(random)
    blocks.insert(random.randint(0, len(blocks)), some)
    reads = one(["all", "all", "all", "last", "mean", 1])
    places = random.sample(range(10), one([0, 0, 1, 2]))
    return Drawn(
        blocks=tuple(blocks),
        norms=one(NORMS),
        reads=reads,
        positions=one([False, True]),
        virtual=one([0, 0, 0, 2]),
        floating=one([False, True]),
        prepared=tuple(random.sample(["front", "slice", "flip", "roll"], one([0, 1, 2]))),
        weights=one([False, False, True]),
        adapters=one(["none", "none", "on", "off"]),
        hooks=tuple(
            (place, one(["zero", "scale", "tokens", "features"]), one([False, True]))
            for place in places
        ),
        twice=rare == "twice",
        batch=one([1, 2]),
        tokens=random.randint(3, 7),
        target=(random.randint(-3, 2), random.randrange(wrapped.VOCABULARY)),
        # a position is one of those that the output has
        query=one([None, None, "mean", 0, -2] if reads == "all" else [None, "mean"]),
        seed=random.getrandbits(31),
    )


def _block(random: Random) -> tuple[Any, ...]:
    kind = random.choice(["mixing"] * 6 + ["Backwards", "Twice", "Local", "norm", "Turned"])
    if kind == "mixing":
        return _mixing(random)
    if kind in ("Backwards", "Twice"):
        return kind, _stacked(random)
    if kind == "Local":
        return kind, random.choice(NORMS), random.choice([False, True])
    return (kind, random.choice(NORMS[:-1])) if kind == "norm" else (kind,)


def _mixing(random: Random) -> tuple[Any, ...]:
    one, flags = random.choice, random.choices([False, True], k=3)
    kinds, norms = random.choices(wrapped.KINDS, k=2), one(NORMS)
    if not BOUNDED.issuperset(kinds):  # what is not normalised would grow beyond all bounds
        norms = one(NORMS[:-1])
    name = one(["Residual"] * 5 + ["Beside"] * 3 + ["Pair", "Doubled", "Parts", "Bare"])
    if name == "Residual":
        scales = ["one", "one", "half", "features", "projection", one(NORMS[:-1])]
        scale, mlp = one(scales), one(["none", "plain", "gated"])
        return name, kinds[0], norms, flags[0], scale, mlp, one(["behind", "behind", "beside"])
    if name == "Beside":
        return name, tuple(kinds), norms, *flags
    if name == "Bare":
        return name, kinds[0], norms, flags[0]
    return name, kinds[0] if name == "Parts" else tuple(kinds), norms


def _branches(random: Random) -> tuple[Any, ...]:
    one, other = random.choice([(2, 1), (2, 2), (1, 2)])
    stacks = ([_stacked(random) for _ in range(count)] for count in (one, other))
    return "Branches", *map(tuple, stacks)


def _stacked(random: Random) -> tuple[Any, ...]:
    """A block that others may hold."""
    found = _mixing(random)
    return found if found[0] != "Parts" else _stacked(random)


# --- what is made of it --------------------------------------------------------------------------


@dataclass
class Case:
    """A function over a network, and what is known of it.

    Attributes:
        forward: what is explained.
        network: the network that it runs.
        inputs: token ids (B, L), or embeddings (B, L, E).
        target: the output that is asked about.
        query: of the methods that ask for one.
        runs: of the network: which of the given tokens each of the network's is (L',), -1 for
            others; what is known; its sign.
    """

    forward: Callable[[Tensor], Tensor]
    network: wrapped.Network
    inputs: Tensor
    target: Any
    query: int | str | None
    runs: list[tuple[Tensor, Explained, int]]

    def expected(self, method: str) -> tuple[Tensor, float]:
        """What a method says of the given tokens (B, L), and the largest it says of any."""
        out, largest = torch.zeros(self.inputs.shape[:2]).double(), 0.0
        for given, explained, sign in self.runs:
            row = getattr(explained, method)()
            known = given >= 0
            out.index_add_(1, given[known], sign * row[:, known])
            largest = max(largest, float(row.abs().max()))
        return out, largest

    def check(self) -> None:
        """The network that is known is the one that runs."""
        wanted = sum(sign * explained.check() for _, explained, sign in self.runs)
        output = self.forward(self.inputs).detach()
        found = self.runs[0][1].select(output)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def made(drawn: Drawn) -> Case:
    """The case that was drawn."""
    torch.manual_seed(drawn.seed)
    blocks = [_made(spec) for spec in drawn.blocks]
    network = wrapped.Network(blocks, drawn.norms, drawn.reads, drawn.positions, drawn.virtual)
    _vary(network)
    if drawn.adapters != "none":
        wrapped.adapt(network)
    inputs = torch.randint(0, wrapped.VOCABULARY, (drawn.batch, drawn.tokens))
    if drawn.floating:
        inputs = torch.randn(drawn.batch, drawn.tokens, wrapped.WIDTH, dtype=torch.float64)

    settled, weights = copy.deepcopy(network), None
    if drawn.weights:
        weights = {name: _nearby(x) for name, x in network.named_parameters()}
        settled.load_state_dict(weights, strict=False)  # of shared ones one name
    wrapped.settle(settled, drawn.adapters == "on")
    given = _prepared(drawn, torch.arange(drawn.tokens)[None], -1)[0]
    given = torch.cat([torch.full((drawn.virtual,), -1), given])
    factors, around = _hooks(drawn, network, settled, len(given))

    def once(x: Tensor) -> Tensor:
        handles = [module.register_forward_hook(hook) for module, hook in around]
        try:
            with wrapped.switched(network, drawn.adapters == "on"):
                arguments = (_prepared(drawn, x, BOS),)
                if weights is None:
                    out: Tensor = network(*arguments)
                    return out
                return functional_call(network, weights, arguments)
        finally:
            for handle in handles:
                handle.remove()

    def forward(x: Tensor) -> Tensor:
        return once(x) - once(x.flip(1)) if drawn.twice else once(x)

    tokens, (position, entry) = len(given), drawn.target
    position = max(-tokens, min(position, tokens - 1))
    by_token = drawn.reads == "all"

    def select(output: Tensor) -> Tensor:
        return output[:, position, entry] if by_token else output[:, entry]

    def explained(x: Tensor) -> Explained:
        read = _prepared(drawn, x, BOS)
        embeddings = read if drawn.floating else settled.embed(read).detach()
        return Explained(settled, factors, embeddings, select, _weights(drawn, tokens, position))

    runs = [(given, explained(inputs), 1)]
    if drawn.twice:
        mirrored = torch.where(given < 0, -1, drawn.tokens - 1 - given)
        runs.append((mirrored, explained(inputs.flip(1)), -1))
    target = (position, entry) if by_token else entry
    return Case(forward, network, inputs, target, drawn.query, runs)


def _made(spec: tuple[Any, ...]) -> nn.Module:
    name, *options = spec
    if name == "norm":
        return wrapped.norm(*options)
    if name in ("Backwards", "Twice"):
        options = [_made(options[0])]
    if name == "Branches":
        options = [[_made(part) for part in branch] for branch in options]
    block: nn.Module = getattr(wrapped, name)(*options)
    return block


@torch.no_grad()
def _vary(network: wrapped.Network) -> None:
    """Nothing has a trivial value outside of the mixers, either."""
    network.double().eval()
    for module in network.modules():
        if isinstance(module, wrapped.NORMS):
            module.weight.copy_(1 + 0.3 * torch.randn_like(module.weight))
            if isinstance(module, nn.LayerNorm):
                module.bias.copy_(0.4 * torch.randn_like(module.bias))


def _nearby(x: Tensor) -> Tensor:
    return (x + 0.2 * torch.randn_like(x)).detach() if x.dim() == 2 else x.detach()


def _prepared(drawn: Drawn, x: Tensor, front: int) -> Tensor:
    """What the function makes of its input, (B, L) or (B, L, E)."""
    for change in drawn.prepared:
        if change == "front":
            x = torch.cat([torch.full_like(x[:, :1], front), x], 1)
        else:
            x = {"slice": x[:, 1:].contiguous(), "flip": x.flip(1), "roll": x.roll(2, 1)}[change]
    return x


def _hooks(
    drawn: Drawn, network: nn.Module, settled: nn.Module, tokens: int
) -> tuple[dict[nn.Module, Tensor], list[tuple[nn.Module, Any]]]:
    """The factors of hooks by module, and the hooks that live as long as a call."""
    names = [name for name, module in network.named_modules() if _takes_hooks(module)]
    factors: dict[nn.Module, Tensor] = {}
    around = []
    for name, (_, kind, inside) in {names[h[0] % len(names)]: h for h in drawn.hooks}.items():
        factor = {
            "zero": torch.zeros(1, 1, 1),
            "scale": torch.full((1, 1, 1), -1.5),
            "tokens": torch.linspace(-1, 2.2, tokens)[None, :, None],  # 0 for none of them
            "features": (torch.arange(wrapped.WIDTH) % 3 > 0)[None, None],
        }[kind].double()

        def hook(module: nn.Module, args: Any, out: Any, factor: Tensor = factor) -> Any:
            return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

        factors[settled.get_submodule(name)] = factor
        if inside:
            around.append((network.get_submodule(name), hook))
        else:
            network.get_submodule(name).register_forward_hook(hook)
    return factors, around


def _takes_hooks(module: nn.Module) -> bool:
    kinds = wrapped.MLP, wrapped.Local, wrapped.Residual, *wrapped.NORMS
    return isinstance(module, kinds) or wrapped.is_mixer(module)


def _weights(drawn: Drawn, tokens: int, position: int) -> Tensor:
    """The query over the network's tokens (B, L)."""
    if drawn.query == "mean" or (drawn.query is None and drawn.reads == "mean"):
        return torch.full((drawn.batch, tokens), 1 / tokens).double()
    order = torch.arange(tokens)
    for spec in drawn.blocks:
        order = order.flip(0) if spec[0] == "Turned" else order
    read = {"all": position, "last": -1}.get(drawn.reads, drawn.reads)  # type: ignore[arg-type]
    weights = torch.zeros(drawn.batch, tokens).double()
    weights[:, order[read if drawn.query is None else drawn.query]] = 1
    return weights
