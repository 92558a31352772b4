"""LATIM with ALTI: maps are eq. 6, with the stream eq. 4; the rollout is their product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.latim_vectors import all_vectors, record
from oracles import latim as oracle
from oracles import relative_error
from torch import Tensor
from zoo import attention, mamba2
from zoo.mamba import padded_batch, transformers_model
from zoo.small import mamba_lm, mixers_of, token_ids

from captum_ssm import LatimALTI
from captum_ssm.attr.engine.run import Request, traced

pytestmark = pytest.mark.slow

EXACT = 1e-11  # of rows divided by sums of differences


def streams_of(model: Any, inputs: Tensor) -> list[Tensor | None]:
    with torch.no_grad():
        run = traced(Request(model, model, None, inputs, (), streams=True))
    return list(run.streams.values())


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("activation", ["linearized", "silu", "taylor2"])
def test_mamba_1(activation: str, residual: bool) -> None:
    model = transformers_model().double()
    ids, mask = padded_batch([7, 3])
    found = LatimALTI(model, residual=residual, activation=activation).maps(ids, None, None, mask)
    layers = record(model, ids, attention_mask=mask)
    stream = model.get_input_embeddings()(ids).detach()
    for layer, one in zip(layers, found, strict=True):
        mixer = layer.mixer.module
        vectors = oracle.mamba1(mixer, layer.call.hidden_states, activation, mask)
        wanted = oracle.alti(vectors, stream if residual else None)
        wanted[mask == 0] = torch.eye(7).double().expand(2, 7, 7)[mask == 0]
        # where the module rounds parts of its scan to float32, so is the next one's stream
        assert relative_error(one, wanted) <= (1e-6 if residual else EXACT)
        stream = stream + layer.output


def test_rows_of_nothing_stay_with_the_token() -> None:
    model, ids = mamba_lm(), token_ids(2, 5)
    with torch.no_grad():
        mixers_of(model)[1].out_proj.weight.zero_()
    for residual in (False, True):
        found = LatimALTI(model, residual=residual).maps(ids)
        assert torch.equal(found[1], torch.eye(5).expand(2, 5, 5))
        assert not torch.equal(found[0], found[1])


def test_parallel_mixers_have_one_map() -> None:
    model, ids = mamba2.make_model("falcon_h1"), token_ids(2, 7)
    layers, streams = record(model, ids), streams_of(model, ids)
    for residual in (True, False):
        found = LatimALTI(model, residual=residual).maps(ids)
        assert len(found) == 2 and len(layers) == 4
        for at, one in zip((0, 2), found, strict=True):
            pair = layers[at : at + 2]
            vectors = sum(x.linear.branch_scale * all_vectors(x) for x in pair)
            wanted = oracle.alti(vectors, streams[at] if residual else None)
            assert relative_error(one, wanted) <= 1e-5


def fed(vectors: Tensor, stream: Tensor, feeding: Tensor) -> Tensor:
    """The mixing of a mixer fed by another: the stream is one source more, behind the tokens."""
    total = vectors.sum(2) + stream
    sources = torch.cat([vectors, stream[:, :, None]], 2)
    near = total.abs().sum(-1)[..., None] - (total[:, :, None] - sources).abs().sum(-1)
    shares = near.clamp_min(0)
    nothing = shares.sum(-1) == 0  # the stream and the mixer cancel
    shares[..., -1][nothing] = 1
    shares = shares / shares.sum(-1, keepdim=True)
    return shares[..., :-1] @ feeding + torch.diag_embed(shares[..., -1])


@torch.no_grad()
def through_the_rest(block: Any, at: int, layer: Any, vectors: Tensor) -> Tensor:
    """What the norm, MLP and projection of Zamba's block ``at`` make of (B, Q, L, E), frozen."""
    shared = getattr(block, "shared_transf", None) or block.shared_transformer
    norm, mlp, out = shared.pre_ff_layernorm, shared.feed_forward, layer.output.double()
    ratio = norm.weight * (out.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    if hasattr(mlp, "up_proj"):
        up, gate = mlp.up_proj.weight, mlp.gate_proj.weight
    else:
        down, back = mlp.gate_up_proj_adapter_list[mlp.layer_dic[at]]
        gate, up = (mlp.gate_up_proj.weight + back.weight @ down.weight).chunk(2)
    opened = mlp.act_fn(out * ratio @ gate.T)
    sent = (vectors * ratio[:, :, None]) @ up.T * opened[:, :, None]
    return sent @ mlp.down_proj.weight.T @ block.linear.weight.T


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_mixers_that_feed_others(family: str) -> None:
    model, ids = attention.attention_model(family).double(), token_ids(2, 6)
    layers, streams = record(model, ids), streams_of(model, ids)
    found = iter(LatimALTI(model).maps(ids))
    hybrids = iter([(i, x) for i, x in enumerate(model.model.layers) if hasattr(x, "linear")])
    feeding = None
    for layer, stream in zip(layers, streams, strict=True):
        if layer.joins == "feeds":
            at, block = next(hybrids)
            feeding = oracle.alti(through_the_rest(block, at, layer, all_vectors(layer)), stream)
            continue
        vectors = all_vectors(layer)
        wanted = oracle.alti(vectors, stream) if feeding is None else fed(vectors, stream, feeding)
        # its norms round to float32
        assert relative_error(next(found), wanted) <= 1e-6, layer.name
        feeding = None
    assert next(found, None) is None


def product(maps: list[Tensor]) -> Tensor:
    out = torch.eye(maps[0].shape[-1]).expand_as(maps[0])
    for one in maps:
        out = one @ out
    return out


@pytest.mark.parametrize("activation", ["linearized", "silu"])
def test_rollout_and_mean(activation: str) -> None:
    model, ids = mamba_lm(), token_ids(2, 7)
    method = LatimALTI(model, activation=activation)
    maps = method.maps(ids)
    mean = torch.stack(maps).mean(0)
    for aggregate, whole in (("rollout", product(maps)), ("mean", mean)):
        for query, row in [("last", whole[:, -1]), (2, whole[:, 2]), ("mean", whole.mean(1)),
                           ([1, 4], whole[:, [1, 4]].mean(1))]:  # fmt: skip
            found = method.attribute(ids, query=query, aggregate=aggregate)
            assert relative_error(found, row) <= 1e-5
            assert (found.sum(-1) - 1).abs().max() <= 1e-5
    later = method.attribute(ids, query="last", start_layer=1)
    assert relative_error(later, product(maps[1:])[:, -1]) <= 1e-5
    alone = LatimALTI(model, residual=False, activation=activation)
    rows = torch.stack(alone.maps(ids)).mean(0)[:, -1]
    assert relative_error(alone.attribute(ids, query="last", aggregate="mean"), rows) <= 1e-5


def test_a_mixer_alone_has_no_stream() -> None:
    mixer = mixers_of(mamba_lm())[0]
    hidden = torch.randn(2, 5, 10)
    assert streams_of(mixer, hidden) == [None]
    (layer,) = record(mixer, hidden)
    wanted = oracle.alti(all_vectors(layer))
    for options in ({}, {"residual": False}, {"layers": [mixer]}):
        (found,) = LatimALTI(mixer, **options).maps(hidden)
        assert relative_error(found, wanted) <= 1e-5
