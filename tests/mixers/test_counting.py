"""Theorem 2 of the hidden-attention paper: one channel of S6 counts in a row, no softmax head can.

Counting in a row (definition 1): at each 1 of a binary sequence, how many ones end there without
a 0 between them; 0 at each 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.hybrid_checks import record_one
from oracles import relative_error
from torch import Tensor
from zoo.mamba import transformers_model

from captum_ssm.operators import (
    Chain,
    Diagonal,
    ElementwiseRecurrence,
    LongConv,
    Mixing,
    SelectiveScan,
    Shape,
)

transformers = pytest.importorskip("transformers")

LENGTHS = [1, 2, 3, 8, 65, 200]
#: SiLU of this is 1.
ONE = 1.2784645427610738


def sequences(tokens: int, batch: int = 3) -> Tensor:
    """Runs of ones from short to long, (B, L) of 0 and 1."""
    share = torch.tensor([0.5, 0.8, 0.97])[:batch, None]
    return (torch.rand(batch, tokens) < share).double()


def windows(bits: Tensor) -> Tensor:
    """(B, L, L): 1 where j is in the run of ones that ends at i."""
    batch, tokens = bits.shape
    out = torch.zeros(batch, tokens, tokens, dtype=torch.float64)
    for b in range(batch):
        for i in range(tokens):
            j = i
            while j >= 0 and bits[b, j] == 1:
                out[b, i, j] = 1
                j -= 1
    return out


def counts(bits: Tensor) -> Tensor:
    """(B, L), by eq. 25."""
    out = torch.zeros_like(bits)
    for b, row in enumerate(bits.tolist()):
        run = 0
        for i, bit in enumerate(row):
            run = run + 1 if bit else 0
            out[b, i] = run
    return out


# --- lemma 1 -------------------------------------------------------------------------------


@torch.no_grad()
def teach_to_count(mixer: Any, dtype: torch.dtype) -> Any:
    """Weights of lemma 1 for a Mamba mixer of one channel and one state.

    The lemma drops the discretisation: A[t] = B[t] = C[t] = x[t].  Here exp(dt A) is 1 at a one,
    where dt is next to nothing, and 0 at a zero, where dt is large; B undoes the dt on the input.
    """
    precise = dtype == torch.float64
    large, rate = (40.0, 20.0) if precise else (20.0, 5.0)
    small = torch.tensor(-large, dtype=torch.float64).exp().log1p().item()  # softplus
    for name, values in {
        "in_proj.weight": [1.0, ONE],  # x = token, z = 0 or what SiLU makes 1
        "conv1d.weight": [0.0, 0.0, ONE],
        "conv1d.bias": [0.0],
        "x_proj.weight": [1.0, 1 / small, 1.0],  # t, B, C
        "dt_proj.weight": [-2 * large],
        "dt_proj.bias": [large],
        "A_log": [torch.tensor(rate).log().item()],
        "D": [0.0],
        "out_proj.weight": [1.0],
    }.items():
        parameter = mixer.get_parameter(name)
        parameter.copy_(torch.tensor(values, dtype=torch.float64).view_as(parameter))
    return mixer.to(dtype).eval()


@pytest.fixture(params=["transformers", "mamba_ssm", "mamba_ssm_fused"])
def counter(request: pytest.FixtureRequest) -> Callable[[torch.dtype], Any]:
    """A maker of real mixers that count."""
    if request.param == "transformers":

        def make() -> Any:
            model = transformers_model(
                "mamba", hidden_size=1, expand=1, state_size=1, time_step_rank=1, conv_kernel=3
            )
            return model.backbone.layers[0].mixer
    else:
        package = request.getfixturevalue(request.param)

        def make() -> Any:
            return package.make_mamba(1, d_state=1, expand=1, dt_rank=1, d_conv=3)

    return lambda dtype: teach_to_count(make().to(dtype), dtype)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_channel_of_mamba_counts(
    counter: Callable[[torch.dtype], Any], dtype: torch.dtype, tokens: int
) -> None:
    """The module counts, and row i of its implicit attention is the window it counts over."""
    mixer, bits = counter(dtype), sequences(tokens)
    bits[:, 0] = 1
    layer = record_one(mixer, bits[..., None].to(dtype))
    # in float64 the packages, too, compute the step size in float32
    assert relative_error(layer.output[..., 0], counts(bits)) <= 1e-5
    assert torch.equal(layer.output[..., 0].round().double(), counts(bits))
    layer.verify(1e-5)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert layer.operator.mixing is Mixing.CONTROLLED
    assert relative_error(layer.operator.dense(), windows(bits)) <= tolerance
    last = layer.operator.rows([-1])[:, 0]
    assert relative_error(last + 1, windows(bits)[:, -1] + 1) <= tolerance
    scan = layer.linear.restrict({"scan"}).operator  # what the lemma speaks of
    assert relative_error(scan.dense(), windows(bits)) <= tolerance


@pytest.mark.parametrize("tokens", [*LENGTHS, 1500])
def test_the_lemmas_recurrence_counts_exactly(tokens: int) -> None:
    """h[t] = x[t] h[t-1] + x[t] x[t], y[t] = x[t] h[t]: eqs. 26 and 27 without discretisation."""
    bits = sequences(tokens).float()
    factor = Diagonal(bits[:, :, None, None], Shape(*bits.shape, 1, 1))
    operator = Chain(factor, ElementwiseRecurrence(bits[..., None]), factor)
    assert torch.equal(operator.apply(bits[:, :, None, None]).flatten(1), counts(bits))
    if tokens <= 200:
        assert torch.equal(operator.dense().double(), windows(bits))


def test_a_decay_that_ignores_the_data_counts_all_ones() -> None:
    """A recurrence that never resets, h[t] = h[t-1] + x[t], does not notice a zero."""
    bits = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    operator = LongConv(torch.ones(1, 1, 5, dtype=torch.float64), Shape(1, 5, 1, 1))
    assert operator.mixing is Mixing.FIXED
    found = operator.apply(bits[:, :, None, None]).flatten()
    assert found.tolist() == pytest.approx([1, 2, 2, 3, 4])
    assert counts(bits)[0].tolist() == [1, 2, 0, 1, 2]


# --- lemma 2 -------------------------------------------------------------------------------


def attention_head(query: float, key: float, value: float) -> Any:
    """A real softmax head of width 1, without positions."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = transformers.GPT2Config(n_embd=1, n_head=1, n_layer=1)
    config._attn_implementation = "sdpa"
    head = GPT2Attention(config, layer_idx=0).eval()
    with torch.no_grad():
        head.c_attn.weight.copy_(torch.tensor([[query, key, value]]))
        head.c_attn.bias.zero_()
        head.c_proj.weight.fill_(1.0)
        head.c_proj.bias.zero_()
    return head


#: The sequences of the proof; a head's third output should be 2, 1 and 1.
PROOF = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])


def test_one_softmax_head_sees_no_gap() -> None:
    """Its last row is that of (0, 1, 1) with two entries exchanged, whatever the weights."""
    for _ in range(20):
        head = attention_head(*(3 * torch.randn(3)).tolist())
        layer = record_one(head, PROOF[..., None])
        without, _, gap = layer.output[:, -1, 0]
        assert torch.allclose(without, gap, atol=1e-6)
        rows = layer.operator.rows([-1])[:, 0]
        assert torch.allclose(rows[0, [1, 0, 2]], rows[2], atol=1e-6)
        assert float((layer.output[:, -1, 0] - torch.tensor([2.0, 1.0, 1.0])).abs().max()) >= 0.499


def test_the_head_of_the_proof() -> None:
    """exp(W_Q W_K) = 1 and W_V = 3 give the first two outputs, and 2 for 1 at the third."""
    output = record_one(attention_head(0.0, 1.0, 3.0), PROOF[..., None]).output
    assert output[:, -1, 0].tolist() == pytest.approx([2.0, 1.0, 2.0])
    assert counts(PROOF)[:, -1].tolist() == [2, 1, 1]


# --- lemma 3 -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [1, 4])
def test_a_scan_that_never_forgets_is_causal_linear_attention(state: int) -> None:
    q, k = (torch.randn(2, 13, state, dtype=torch.float64) for _ in range(2))
    dt = torch.ones(2, 13, 1, dtype=torch.float64)
    operator = SelectiveScan(dt, torch.zeros(1, state, dtype=torch.float64), k, q)
    assert relative_error(operator.dense(), (q @ k.mT).tril()) <= 1e-12
