"""The package's own kernels: one launch gives what the matrices give, at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.marks import slow_but
from oracles import kernels as naive
from oracles import relative_error, token_loops
from torch import Tensor

from captum_ssm.operators import SelectiveScan, Shape
from captum_ssm.operators.kernels import (
    chunks,
    fused_delta,
    fused_fading,
    fused_heads,
    fused_scan,
    fused_taps,
)

#: Coefficients by name; some may be left out.
Drawn = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel of one launch.

    Attributes:
        draw: sizes to coefficients, which are laid out as views.
        run: called on the coefficients, values (S, B, L, H, P) and whether it is the adjoint.
        matrices: float64 coefficients and (B, L, H, P) to matrices (B, H, L, L).
        sizes: examples, tokens and heads, and what else ``draw`` takes; those of channels last.
        wide: whether it computes in float64.
    """

    draw: Callable[..., Drawn]
    run: Callable[[Drawn, Tensor, bool], Tensor]
    matrices: Callable[[Drawn, Shape], Tensor]
    sizes: list[tuple[Any, ...]]
    wide: bool = False

    def shape(self, size: tuple[Any, ...]) -> Shape:
        return Shape(*size[:3], 1 if self.wide else size[-1])

    def wanted(self, z: Drawn, v: Tensor, transposed: bool) -> Tensor:
        """In float64."""
        exact = {name: None if x is None else x.double() for name, x in z.items()}
        matrices = self.matrices(exact, Shape(*v.shape[1:]))
        matrices = matrices.mT if transposed else matrices
        return torch.einsum("bhij,sbjhp->sbihp", matrices.expand(len(v[0]), -1, -1, -1), v.double())

    def holds(self, z: Drawn, v: Tensor, bound: float = 3e-6) -> None:
        for transposed in (False, True):
            found = self.run(z, v, transposed)
            assert found.dtype == v.dtype and found.is_contiguous()
            assert relative_error(found, self.wanted(z, v, transposed)) <= bound


def looped(loop: token_loops.Loop) -> Callable[[Drawn, Shape], Tensor]:
    return lambda z, shape: token_loops.matrices(loop, SimpleNamespace(**z, shape=shape))


def logs_of(*size: int) -> Tensor:
    """Logarithms of decays from nothing to all, and both."""
    batch, tokens, *others = size
    logs = -(torch.rand(batch, *others, tokens).movedim(-1, 1) * 3).pow(4)
    logs[:, tokens // 2], logs[:, tokens // 3] = -torch.inf, 0
    return logs


def rule(
    batch: int, tokens: int, heads: int, states: int, channels: int, decays: str = "of heads",
    erased: str = "key",
) -> Drawn:  # fmt: skip
    """Keys of unit length, as those of layers are."""
    query, key, erase = torch.randn(batch, tokens, heads, 3 * states).chunk(3, -1)
    logs = logs_of(batch, tokens, heads, states)
    steps = torch.rand(states, batch, heads, tokens).permute(1, 3, 2, 0)
    return {
        "query": query,
        "key": F.normalize(key, dim=-1),
        "beta": torch.rand(batch, heads, tokens).mT,
        "log_decay": {"none": None, "of heads": logs[..., 0], "of channels": logs}[decays],
        "erase": None if erased == "key" else F.normalize(erase, dim=-1),
        "erase_step": steps if erased == "two keys" else None,
    }


def grouped(
    batch: int, tokens: int, heads: int, groups: int, states: int, channels: int,
    scaled: bool = True,
) -> Drawn:  # fmt: skip
    query, key = torch.randn(batch, tokens, groups, 2 * states).chunk(2, -1)
    scale = torch.rand(batch, heads, tokens).mT if scaled else None
    logs = logs_of(batch, tokens, heads)
    return {"query": query, "key": key, "log_decay": logs, "scale": scale}


def steps(batch: int, tokens: int, heads: int, states: int, groups: int | None) -> Drawn:
    """Steps and rates from hardly any to all of the state forgotten."""
    dt = (torch.rand(batch, heads, tokens).mT * 3).square()
    a = -torch.logspace(-3, 1, states).expand(heads, states) * torch.rand(heads, 1)
    shared = (batch, tokens) if groups is None else (batch, tokens, groups)
    b, c = torch.randn(*shared, 2 * states).chunk(2, -1)
    return {"dt": dt, "a": a, "b": b, "c": c}


def decaying(batch: int, tokens: int, heads: int) -> Drawn:
    """Decays from all to nothing."""
    decay = torch.rand(batch, heads, tokens).mT.pow(0.2)
    decay[:, tokens // 2] = 0
    return {"decay": decay}


def of_taps(z: Drawn, shape: Shape) -> Tensor:
    band = {lag: taps[None, None, :, None] for lag, taps in enumerate(z["weight"].T)}
    return naive.band_matrix(band, shape.tokens)[:, :, 0]


def convolve(z: Drawn, v: Tensor, transposed: bool) -> Tensor:
    found = fused_taps.run(z["weight"], v[..., 0].flatten(0, 1), transposed=transposed)
    return found.view(v.shape)


#: Of tokens, states, channels and columns the last block is not whole.
KERNELS = {
    "delta": Kernel(
        rule,
        lambda z, v, transposed: fused_delta.run(*z.values(), v, transposed=transposed),
        looped(token_loops.delta_rule),
        [(2, 1, 4, 3, 5), (2, 15, 2, 16, 3), (1, 17, 1, 17, 9), (1, 63, 1, 5, 3),
         (1, 65, 1, 12, 8), (1, 130, 1, 33, 2), (1, 3, 1, 512, 3)],
    ),
    "heads": Kernel(
        grouped,
        lambda z, v, transposed: fused_heads.run(*z.values(), v, transposed=transposed),
        looped(token_loops.scalar_decay),
        [(1, 1, 1, 1, 3, 5), (2, 63, 4, 2, 16, 8), (1, 64, 2, 2, 17, 1), (1, 65, 3, 1, 3, 64),
         (2, 130, 2, 1, 17, 5), (1, 33, 1, 1, 256, 3)],
    ),
    "scan": Kernel(
        steps,
        lambda z, v, back: fused_scan.run(*z.values(), v[..., 0], transposed=back)[..., None],
        lambda z, _: naive.selective_scan(**z),
        [(1, 1, 3, 16, None), (3, 3, 5, 16, None), (1, 17, 7, 3, None), (2, 33, 6, 5, 3),
         (1, 65, 5, 16, 1), (3, 127, 3, 2, None), (1, 5, 1, 64, None), (1, 9, 130, 1, None)],
        wide=True,
    ),
    "fading": Kernel(
        decaying,
        lambda z, v, back: fused_fading.run(z["decay"], v[..., 0], transposed=back)[..., None],
        lambda z, _: naive.decays_between(z["decay"].mT),
        [(1, 1, 3), (3, 3, 5), (1, 65, 33), (2, 127, 2)],
        wide=True,
    ),
    "taps": Kernel(
        lambda batch, tokens, heads, taps: {"weight": torch.randn(taps, heads).T},
        convolve,
        of_taps,
        [(1, 1, 3, 4), (3, 3, 5, 4), (1, 17, 7, 1), (2, 65, 66, 3), (1, 127, 1, 16)],
        wide=True,
    ),
}  # fmt: skip
#: Whether there are decays of a delta rule, and of what.
DECAYS = ["none", "of heads", "of channels"]
#: Whether the key is erased, or what another finds, or that along channels with steps of their own.
ERASED = ["key", "another", "two keys"]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "delta": [
        {"decays": decays, "erased": erased}
        for decays, erased in zip(DECAYS * 2, ERASED + ERASED[1:] + ERASED[:1], strict=True)
    ],
    "heads": [{"scaled": False}, {"scaled": True}],
}


def rows() -> Iterator[Any]:
    """Interpreted scans take long."""
    for name, kernel in KERNELS.items():
        for place, size in enumerate(kernel.sizes):
            marks = [pytest.mark.slow] if name == "scan" and place > 1 else []
            for options in OPTIONS.get(name, [{}]):
                yield pytest.param(name, size, options, marks=marks)


@pytest.mark.parametrize(("name", "size", "options"), list(rows()))
def test_awkward_sizes(name: str, size: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Of two vectors, of which channels are every other number."""
    kernel = KERNELS[name]
    batch, tokens, heads, channels = kernel.shape(size)
    v = torch.randn(2, batch, tokens, heads, 2 * channels)[..., ::2]
    kernel.holds(kernel.draw(*size, **options), v)


#: Of each kernel a small size.
SMALL: dict[str, tuple[Any, ...]] = {
    "delta": (1, 40, 1, 4, 3),
    "heads": (1, 40, 2, 1, 4, 3),
    "scan": (1, 17, 3, 4, None),
    "fading": (1, 17, 3),
    "taps": (1, 9, 3, 4),
}
BOUNDS = {torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize(("name", "dtype"), [
    (name, dtype) for name, kernel in KERNELS.items() for dtype in BOUNDS
    if kernel.wide or dtype != torch.float64
])  # fmt: skip
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    """Float64 is kept, and half precision computed in float32: only what comes out is rounded."""
    kernel, size = KERNELS[name], SMALL[name]
    z, v = kernel.draw(*size), torch.randn(1, *kernel.shape(size)).to(dtype)
    if dtype == torch.float64:
        z = {name: x.double() for name, x in z.items()}
    kernel.holds(z, v, BOUNDS[dtype])


@pytest.mark.parametrize("name", ["scan", "taps"])
def test_what_is_repeated_is_not_copied(name: str) -> None:
    """Vectors common to all channels, or to all examples."""
    kernel = KERNELS[name]
    z = kernel.draw(2, 9, 4, 3, *([None] if name == "scan" else []))
    for v in (torch.randn(1, 2, 9, 1, 1), torch.randn(1, 1, 9, 4, 1)):
        kernel.holds(z, v.expand(1, 2, 9, 4, 1))


LONGER: dict[str, tuple[int, ...]] = {"delta": (1, 64, 1, 16, 8), "heads": (1, 130, 2, 1, 16, 8)}
longer = pytest.mark.parametrize("name", LONGER)


@longer
@pytest.mark.parametrize("log_decay", [-torch.inf, 0.0, -1e-3, -20.0])
def test_one_decay_for_all_tokens(log_decay: float, name: str) -> None:
    """As of layers that forget all, or nothing; repeated and not copied."""
    kernel, size = KERNELS[name], LONGER[name]
    decays = torch.full((1, 1, 1), log_decay).expand(size[:3])
    v = torch.randn(1, 1, size[1], 1, 8).expand(1, *kernel.shape(size))
    kernel.holds(kernel.draw(*size) | {"log_decay": decays}, v)


@longer
def test_weak_decays_after_strong_ones(name: str) -> None:
    """Quotients of products, or differences of their logarithms, would have lost the weak ones."""
    kernel, size = KERNELS[name], LONGER[name]
    decays = torch.full(size[:3], -1e-3)
    decays[:, :20] = -80
    v = torch.randn(1, *kernel.shape(size))
    kernel.holds(kernel.draw(*size) | {"log_decay": decays}, v)


@pytest.mark.parametrize("decays", DECAYS)
def test_the_key_with_steps_of_channels(decays: str) -> None:
    """It asks the state after its decay."""
    kernel = KERNELS["delta"]
    z, asked = rule(1, 9, 2, 3, 2, decays, "two keys"), 1.0
    if (logs := z["log_decay"]) is not None:
        asked = (logs if logs.dim() == 4 else logs[..., None]).exp()
    v = torch.randn(1, 1, 9, 2, 2)
    for transposed in (False, True):
        wanted = kernel.wanted(z | {"erase": z["key"] * asked}, v, transposed)
        assert relative_error(kernel.run(z | {"erase": None}, v, transposed), wanted) <= 1e-6


# --- the scan's gradients, and states of chunks --------------------------------------------------

#: For gradients the interpreter takes longer: of one run of tokens and several, of channels that
#: one program takes and two.
OF_GRADIENTS = [
    (1, 1, 3, 16, None), (2, 17, 3, 3, None), (1, 33, 4, 5, 2), (1, 17, 1, 64, None),
    (1, 5, 18, 16, 1), (1, 60, 3, 2, None),
]  # fmt: skip


@pytest.mark.parametrize("size", slow_but(OF_GRADIENTS[:2], OF_GRADIENTS))
def test_gradients(size: tuple[int, int, int, int, int | None]) -> None:
    """Of two vectors, each with a B and a C of its own."""
    scan = SelectiveScan(*steps(*size).values())
    x, up = torch.randn(2, 2, *scan.shape)
    own = {"B": scan.b, "C": scan.c}
    moved = {name: torch.randn(2, *shared.shape) for name, shared in own.items()}
    out, pull = scan._vjp_on_gpu(x, moved)
    of_x, found = pull(up)
    given = {"dt": scan.dt, "x": x[..., 0], **moved}
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    each = zip(exact["B"], exact["C"], exact["x"], strict=True)
    wanted = torch.stack([
        (naive.selective_scan(exact["dt"], scan.a.double(), b, c) @ v.mT[..., None])[..., 0].mT
        for b, c, v in each
    ])  # fmt: skip
    assert relative_error(out[..., 0], wanted) <= 1e-6
    gradients = torch.autograd.grad(wanted, list(exact.values()), up[..., 0].double())
    right = dict(zip(exact, gradients, strict=True))
    assert relative_error(of_x[..., 0], right.pop("x")) <= 1e-6
    assert relative_error(found.pop("dt"), right.pop("dt")) <= 1e-6
    for name, of in found.items():
        assert of.shape == own[name].shape
        assert relative_error(of, right[name].sum(0)) <= 1e-6, name


def test_gradients_of_half_precision() -> None:
    """Computed in float32: only what comes out is rounded, and of values alone."""
    scan = SelectiveScan(*steps(1, 17, 3, 4, None).values())
    x, up = torch.randn(2, 1, *scan.shape).bfloat16()
    of_x, found = scan._vjp_on_gpu(x, {})[1](up)
    of_wide, exact = scan._vjp_on_gpu(x.float(), {})[1](up.float())
    assert of_x.dtype == torch.bfloat16 and found["B"].dtype == torch.float32
    assert relative_error(of_x, of_wide) <= 2**-8
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_nan_is_kept() -> None:
    """It goes on to later tokens of its channel, and to no other channel."""
    x = torch.randn(1, 1, 6, 3, 1)
    x[0, 0, 2, 1] = torch.nan
    found = KERNELS["scan"].run(steps(1, 6, 3, 2, None), x, False)[0, 0, ..., 0].isnan()
    assert found[2:, 1].all() and found.sum() == 4


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("carried", [1, 3])
def test_states_of_chunks(carried: int, backwards: bool, begun: bool) -> None:
    """They are those that one chunk after the other leaves, whose carries are numbers or vectors.

    Of two examples, two groups, four chunks, three states, two vectors, two heads, four channels.
    """
    written = torch.randn(2, 2, 4, 3, 2, 2, 4)
    carry = torch.rand(2, 2, 4, carried, 1, 2, 1)
    state = torch.randn(2, 2, 3, 2, 2, 4) if begun else None
    given = written.clone(), carry, state, backwards
    found, wanted = chunks._states_together(*given), chunks._states(written, *given[1:])
    for own, other in zip(found, wanted, strict=True):
        assert relative_error(own, other) <= 1e-6
