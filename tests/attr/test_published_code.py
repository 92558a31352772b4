"""recipe="published_code": the maps of the authors' scripts, and their equations once more.

Of each layer only the query's row counts. It is added to every row of the identity, rows are
divided by their sums, the layers' matrices are multiplied, and of the query's row of the product
the query's own entry is removed and what is negative set to zero.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles import scripts
from oracles.dense import UNIFIED, Run, double, error, min_max
from safetensors.torch import load_file
from zoo.mamba2 import make_model
from zoo.small import falcon_lm, mamba_lm, token_ids

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution
from captum_ssm.models import VisionMamba

pytestmark = pytest.mark.slow
METHODS = {
    "raw": ImplicitAttention,
    "rollout": ImplicitAttentionRollout,
    "attribution": MambaAttribution,
}
MAPS = {
    "hidden_attention.raw": (ImplicitAttention, "s6"),
    "hidden_attention.rollout": (ImplicitAttentionRollout, "s6"),
    "hidden_attention.attribution": (MambaAttribution, "s6"),
    "unified.attribution": (MambaAttribution, "unified"),
}


@pytest.mark.parametrize("start_layer", [0, 2])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("number", [0, 1])
def test_the_maps_that_the_scripts_gave(number: int, name: str, start_layer: int) -> None:
    saved = load_file(Path(__file__).parent / "published_maps" / f"vim_{number}.safetensors")
    options = {"depth": 5, "embed_dim": 16, "num_classes": 6, "d_state": 4}
    model = VisionMamba(**options).eval()  # type: ignore[arg-type]
    weights = {k.removeprefix("weights."): v for k, v in saved.items() if k.startswith("weights.")}
    model.load_state_dict(weights)
    picture = saved["image"].double()
    logits = model.double()(picture)
    assert error(logits, saved["logits"]) <= 1e-12
    method, components = MAPS[name]
    asked = {"components": components, "recipe": "published_code", "start_layer": start_layer}
    found = method(model).attribute(picture, int(logits.argmax()), per_token=True, **asked)
    assert error(found.flatten(), saved[f"start_layer_{start_layer}.{name}"].flatten()) <= 1e-12


def layer_rows(run, variant, example, query):
    """Of each layer, the query's row of every channel, (C, L)."""
    if variant == "unified":  # also for mixers of other kinds
        alphas = run.alphas(UNIFIED, reduce=lambda alpha: alpha)
        return [alpha[example, :, query] for alpha in alphas]
    return [
        scripts.rows(mixer, hidden[example], query, variant)
        for mixer, hidden in zip(run.mixers, run.inputs, strict=True)
    ]


def attribution_row(channel_rows, gradient, variant):
    """The query's row weighted by the gradient, (L,)."""
    strength = gradient * (gradient > 0)  # (L, E)
    strength = min_max(strength.max(-1).values)
    positive = channel_rows * (channel_rows > 0)
    if variant == "s6":
        return min_max(positive).mean(0) * strength
    return min_max(positive.mean(0) * strength)


def expected(name, rows, query, gradients=None, variant="unified"):
    """What a method says, from the rows (C, L) of the layers used."""
    if name == "raw":
        return finish(sum(min_max(row).mean(0) for row in rows) / len(rows), query)
    if name == "rollout":
        return broadcast_rollout([row.mean(0) for row in rows], query)
    weighted = [attribution_row(*of, variant) for of in zip(rows, gradients, strict=True)]
    return broadcast_rollout(weighted, query)


def broadcast_rollout(rows, query):
    """Every row of a layer's matrix is that of the identity plus the one row."""
    tokens = len(rows[0])
    product = torch.eye(tokens).double()
    for row in rows:
        matrix = torch.eye(tokens).double() + row.expand(tokens, tokens)
        matrix = matrix / matrix.sum(1, keepdim=True)
        product = matrix @ product
    return finish(product[query], query)


def finish(row, query):
    row = row.clone()
    row[query] = 0
    return row * (row > 0)


CASES = [(mamba_lm, "s6"), (mamba_lm, "unified"), (falcon_lm, "unified")]


@pytest.mark.parametrize("start_layer", [0, 1])
@pytest.mark.parametrize(("make", "variant"), CASES)
@pytest.mark.parametrize("name", METHODS)
def test_language_models(name, make, variant, start_layer):
    model, ids = make(), token_ids(3, 9)
    queries = [6, 8, 0]
    run = Run(double(model), ids, select=lambda logits: logits[range(3), queries, 4])
    gradients = run.output_gradients[start_layer:]
    wanted = []
    for example, query in enumerate(queries):
        rows = layer_rows(run, variant, example, query)[start_layer:]
        of_layers = [gradient[example] for gradient in gradients]
        wanted.append(expected(name, rows, query, of_layers, variant))
    options = {"components": variant, "recipe": "published_code", "start_layer": start_layer}
    target = [(query, 4) for query in queries]
    found = METHODS[name](model).attribute(ids, target=target, **options)
    assert error(found, torch.stack(wanted)) <= 1e-4
    exact = METHODS[name](model.double()).attribute(ids, target=target, **options)
    # a minimum and a maximum may amplify transformers' float32 norms; s6 rounds to float32
    assert error(exact, torch.stack(wanted)) <= (1e-6 if variant == "s6" else 1e-10)


def test_one_layer_by_hand():
    model, ids = mamba_lm(num_hidden_layers=1).double(), token_ids(1, 2)
    alpha = Run(model, ids).alphas(UNIFIED)[0][0]
    first, last = alpha[1].tolist()
    expected = max(0.0, first / (1 + first + last))
    found = ImplicitAttentionRollout(model).attribute(ids, query=1, recipe="published_code")
    torch.testing.assert_close(
        found, torch.tensor([[expected, 0.0]]).double(), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("method", METHODS.values())
def test_the_script_of_scans_knows_no_other_mixer(method):
    model, ids = make_model("mamba2"), token_ids(2, 5)
    with pytest.raises(ValueError, match=r"components='s6'.*needs selective scans.*'unified'"):
        method(model).attribute(ids, target=(-1, 0), components="s6", recipe="published_code")
