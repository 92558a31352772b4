"""What is measured: the quantities of the table, at one length of one family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bounds, models, textbook
from captum_ssm import (
    EdgeEffects,
    Edges,
    ImplicitAttentionRollout,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    LayerLatimFlow,
    MambaAttribution,
    attribution_graph,
    knock_out,
    trace,
)
from captum_ssm.attr.call.components import PRESETS
from captum_ssm.attr.engine.strips import Budget, in_strips
from captum_ssm.attr.vectors.contributions import Contributions, tiles
from captum_ssm.operators import Chain, Operator, SelectiveScan
from captum_ssm.tracing import find_mixers, repaired_scans

#: Longest inputs for what takes far longer than the rest.
TEXTBOOK_UP_TO, EXPONENTIALS_UP_TO, PRECISE_UP_TO = 197, 512, 1024
ALL_TOKENS_UP_TO, ALTI_UP_TO, AS_IT_IS_UP_TO = 1024, 256, 256
#: A pass forward and backward with the scan of transformers, whose time grows with the square of
#: the length.
AS_IT_IS = "f+b, scan as it is"
TARGETS = 16

Call = Callable[[], Any]


@dataclass(frozen=True)
class Quantity:
    """One thing to measure.

    Attributes:
        name: what it is.
        call: computes it.
        work: the least that it takes, if it is known.
        precise: the same in float64, if that is affordable.
        others: slower ways to the same, by name.
        layers: how many layers ``call`` computes it for.
        long: whether it takes far longer than the rest.
    """

    name: str
    call: Call
    work: bounds.Work | None = None
    precise: Call | None = None
    others: dict[str, Call] = field(default_factory=dict)
    layers: int = 1
    long: bool = False


def quantities(family: str, model: nn.Module, x: Tensor) -> Iterator[Quantity]:
    """All quantities of a model at an input."""
    with torch.no_grad(), repaired_scans(), trace(model) as record:
        model(x)
    linear = [layer.linear for layer in record.layers]
    for name, preset in (("scan", "s6"), ("unified", "unified")):
        found = [layer.restrict(PRESETS[preset]).operator.per_channel() for layer in linear]
        yield from of_operators(name, found)
    yield from _of_contributions(model, x)
    yield from of_calls(family, model, x)


def of_operators(name: str, operators: list[Operator]) -> Iterator[Quantity]:
    """Those of the operators of a model's layers.

    Args:
        name: what parts of the layers they are.
        operators: one for each layer.
    """
    first = operators[0]
    tokens = first.shape.tokens
    precise = [textbook.in_float64(o) for o in operators] if tokens <= PRECISE_UP_TO else []
    yield Quantity(
        f"rollout row, {name}",
        lambda: fold(operators),
        bounds.row(first),
        (lambda: fold(precise)) if precise else None,
        layers=len(operators),
    )
    yield Quantity(
        f"mean matrix, {name}",
        lambda: first.dense("mean"),
        bounds.matrix(first),
        (lambda: precise[0].dense("mean")) if precise else None,
        _slower(first),
    )
    if name == "unified":
        row, budget = torch.rand(first.shape[:2]).to(first.device), Budget.parse(None)
        clamped = in_strips(first, "mean", budget, lambda strip: strip.entries.clamp_min(0))
        yield Quantity("clamped row, unified", lambda: clamped.rmatvec(row), bounds.matrix(first))


def _slower(operator: Operator) -> dict[str, Call]:
    """The obvious ways to the mean matrix, where they end within minutes."""
    scan = operator.parts[0] if isinstance(operator, Chain) else operator
    if not isinstance(scan, SelectiveScan):
        return {}
    others: dict[str, Call] = {}
    if scan.shape.tokens <= TEXTBOOK_UP_TO:
        others["textbook"] = lambda: textbook.mean_matrix(scan)
    if scan.shape.tokens <= EXPONENTIALS_UP_TO:
        others["exponentials"] = lambda: textbook.by_exponentials(scan)
    return others


def _of_contributions(model: nn.Module, x: Tensor) -> Iterator[Quantity]:
    """LATIM's vectors of the first layer, given its operator."""
    with torch.no_grad(), repaired_scans(), trace(model) as record:
        model(x)
    layer = Contributions(record.layers[0])
    batch, tokens = layer.shape[:2]
    directions = len(bounds.cores(record.layers[0].linear.operator))
    pairs = directions * batch * tokens * (tokens + 1) / 2
    every = bounds.Work(products=pairs * layer.weight.numel())
    direction = torch.zeros(1, batch, tokens, layer.weight.shape[1], device=x.device)
    direction[:, :, -1] = torch.randn(layer.weight.shape[1])
    last = torch.full((batch, 1), tokens - 1, device=x.device)
    yield Quantity("norms, last token", lambda: norms(layer, last))
    yield Quantity("T . U, last token", lambda: layer.toward(direction))
    if tokens <= ALL_TOKENS_UP_TO:
        maps = LatimNorm(model, layers=[record.layers[0].name]).maps
        yield Quantity("LatimNorm of a layer, all tokens", lambda: maps(x), every, long=True)


def of_calls(family: str, model: nn.Module, x: Tensor) -> Iterator[Quantity]:
    """Whole calls, with the runs of the model that they need."""
    target = models.target(family)
    asked = {"target": target, "per_token": True}
    rollout, weighted, flow = (
        kind(model) for kind in (ImplicitAttentionRollout, MambaAttribution, LatimFlow)
    )
    yield Quantity(
        "ImplicitAttentionRollout", lambda: rollout.attribute(x, query=-1, per_token=True)
    )
    yield Quantity("MambaAttribution", lambda: weighted.attribute(x, **asked))
    yield Quantity("LatimFlow", lambda: flow.attribute(x, **asked))
    if family == "Mamba" and x.shape[1] <= AS_IT_IS_UP_TO:
        own = torch.enable_grad()(lambda: models.gradient(model, x, repaired=False))
        yield Quantity(AS_IT_IS, own, long=True)
    centred = {**asked, "rule": "centred"}
    yield Quantity("LatimFlow, centred", lambda: flow.attribute(x, **centred))
    yield from _of_edges(model, x, target)
    yield from _of_inside(model, x, target)
    if isinstance(target, tuple):
        several = [(-1 - k, models.WORD) for k in range(TARGETS)]
        logit = LatimLogit(model)
        yield Quantity(
            f"LatimFlow, {TARGETS} targets", lambda: flow.attribute_each(x, several), long=True
        )
        for mixing in ("projection", "alti") if x.shape[1] <= ALTI_UP_TO else ("projection",):
            options = {**asked, "mixing": mixing}
            yield Quantity(
                f"LatimLogit, {mixing}",
                lambda o=options: logit.attribute(x, **o),
                long=mixing == "alti",
            )


def _of_edges(model: nn.Module, x: Tensor, target: Any) -> Iterator[Quantity]:
    """Cutting messages in all layers, and what cutting them will do."""
    tokens, effects = x.shape[1] if x.dim() < 4 else None, EdgeEffects(model)
    source = 1 if tokens is None else tokens // 2

    @torch.no_grad()
    def cut() -> None:
        with knock_out(model, Edges(sources=source, targets=-1)):
            model(x)

    @torch.no_grad()
    def as_it_is() -> None:
        with trace(model, operators=False):  # which keeps no cache
            model(x)

    def of_one() -> list[Tensor]:
        found = effects.attribute(x, target)
        return [found.rows([-1], layer) for layer in range(len(found.layers))]

    yield Quantity("forward run", as_it_is)
    yield Quantity("knock_out, all layers", cut)
    yield Quantity("EdgeEffects, last token", of_one)
    yield Quantity("EdgeEffects, all edges", lambda: effects.attribute(x, target).top(1))


def _of_inside(model: nn.Module, x: Tensor, target: Any) -> Iterator[Quantity]:
    """What activations inside the model add, and the graph of some of them."""
    mixers = [mixer.name for mixer in find_mixers(model)]
    layer = LayerLatimFlow(model, mixers[0])
    options: dict[str, Any] = {"nodes": mixers, "top": TARGETS, "keep": None}
    yield Quantity("LayerLatimFlow, a mixer", lambda: layer.attribute(x, target))
    graph = f"attribution_graph, {TARGETS} nodes"
    yield Quantity(graph, lambda: attribution_graph(model, x, target, **options), long=True)


@torch.no_grad()
def norms(layer: Contributions, index: Tensor) -> Tensor:
    """The l2 norms of the vectors of queries ``index`` (B, Q) from all tokens, (B, Q, L)."""
    out = torch.zeros(*index.shape, layer.shape.tokens, device=index.device)
    for tile in tiles([layer], index):
        out[:, tile.queries, tile.sources] = tile.vectors.norm(dim=-1)
    return out


@torch.no_grad()
def fold(operators: list[Operator]) -> Tensor:
    """The last row of the product of I + mean matrix, matrix-free."""
    first = operators[0]
    row = torch.zeros(first.shape[:2], dtype=first.dtype, device=first.device)
    row[:, -1] = 1
    for operator in reversed(operators):
        row = row + operator.mean_rmatvec(row)
    return row
