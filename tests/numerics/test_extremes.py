"""Large activations in half precision, and step sizes from 1e-8 to 20 beside decays of any size."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from oracles import relative_error
from zoo.extreme import FAMILIES, METHODS, TARGET, in_double, language_model, token_ids
from zoo.extreme import with_extreme_steps as extreme
from zoo.extreme import with_large_activations as enlarged

from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, MambaLRP, trace
from captum_ssm.errors import NonFiniteError, NotLinearError
from captum_ssm.tracing.verification import TOLERANCES

pytestmark = pytest.mark.slow

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", HALF)
def test_operators_are_their_modules(dtype: torch.dtype, family: str) -> None:
    factor = 5 if dtype is torch.float16 else 30
    errors = []
    for _ in range(3):
        model = enlarged(language_model(family), factor).to(dtype)
        with trace(model) as record:
            logits = model(token_ids()).logits
        assert torch.isfinite(logits).all()
        assert record.layers[0].values.abs().max() > factor / 2
        errors += [layer.reconstruction_error() for layer in record.layers]
    assert median(errors) <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("dtype", "method"), [*zip(HALF * 2, ["rollout", "norm", "alti", "flow"], strict=True)]
)
def test_large_embeddings(dtype: torch.dtype, method: str) -> None:
    """Norms take the size away again, so that what is explained is that of the small model."""
    model, ids = language_model("mamba2"), token_ids()
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(2.0**12)
    half = model.to(dtype)
    found, wanted = METHODS[method](half, ids), METHODS[method](in_double(half), ids)
    assert torch.isfinite(found).all()
    assert relative_error(found, wanted) <= 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seed", range(3))
def test_layers_follow_each_other_on_a_large_stream(seed: int, dtype: torch.dtype) -> None:
    """Noise at a layer is seen by the next, however little the layer adds to the stream."""
    torch.manual_seed(seed)
    model, ids = language_model("mamba2"), token_ids()
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(2.0**12)
    half = model.to(dtype)
    found, wanted = METHODS["rollout"](half, ids), METHODS["rollout"](in_double(half), ids)
    assert relative_error(found, wanted) <= 0.002


@pytest.mark.parametrize("method", METHODS)
def test_embeddings_whose_products_underflow(method: str) -> None:
    """The head is that of the embeddings, so that logits are around 1e-39."""
    model, ids = language_model("mamba"), token_ids()
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(1e-20)
    try:
        found = METHODS[method](model, ids)
    except NotLinearError as error:
        assert "torch.float32 underflow" in str(error) and "model.double()" in str(error)
        return
    if method != "norm":  # whose squares are zeros
        wanted = METHODS[method](in_double(model), ids)
        assert relative_error(found, wanted) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("method", METHODS)
def test_activations_outside_the_range(method: str) -> None:
    family = "mamba2"
    model = enlarged(language_model(family), 1e5).half()  # beyond 65504
    with pytest.raises(NonFiniteError, match=r"Layer 'backbone\.layers\.0\.mixer': the values"):
        METHODS[method](model, token_ids())
    for factor in (1e3, 1e6, 1e9, 1e15, 1e30):
        model = enlarged(language_model(family), factor).bfloat16()
        try:
            found = METHODS[method](model, token_ids())
        except NonFiniteError as error:
            assert "backbone.layers." in str(error) or "The model's output" in str(error)
        else:
            assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("method", "contrast"), [(LatimFlow, None), (LatimLogit, (-1, 4)), (MambaLRP, (-1, 4))]
)
def test_an_output_that_overflows(method: type, contrast: object) -> None:
    """The sum of five products of 6e4 is no number of half precision, though each part is one."""
    model, ids = language_model("mamba").half(), token_ids()
    normed = model.backbone(ids).last_hidden_state[0, -1]
    head = torch.nn.Linear(len(normed), 19, bias=False, dtype=torch.float16)
    with torch.no_grad():
        head.weight[3] = 6e4 * normed.sign()
        head.weight[4] = 0
        model.backbone.norm_f.weight *= 4
    model.lm_head = head
    assert torch.isinf(model(ids).logits[0, -1, 3])
    with pytest.raises(NonFiniteError, match=r"output for target=\(-1, 3\) is -?inf in example"):
        method(model).attribute(ids, TARGET, contrast=contrast)
    assert torch.isfinite(ImplicitAttentionRollout(model).attribute(ids)).all()


# --- extreme steps -------------------------------------------------------------------------------

#: Of a single draw in float32.
LIMIT = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_extreme_steps_in_float32(method: str, family: str) -> None:
    model, ids = extreme(language_model(family)), token_ids()
    found, wanted = METHODS[method](model, ids), METHODS[method](in_double(model), ids)
    assert found.dtype == torch.float32 and wanted.dtype == torch.float64
    assert torch.isfinite(wanted).all()
    assert bool(wanted.any())
    assert relative_error(found, wanted) <= LIMIT
