"""What stands between layers, and between the given tokens and those that the model reads.

Relevance lies on the tokens that were given, whatever order the model reads them in.  Layers are
folded as what they are: stages that read one stream, in any order of the tokens; all else is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo.mamba import randomise, transformers_model

import captum_ssm
from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, LatimFlow, LatimLogit, trace
from captum_ssm.errors import InputError

pytestmark = pytest.mark.slow

NAMES = (
    "ImplicitAttention",
    "ImplicitAttentionRollout",
    "LatimALTI",
    "LatimFlow",
    "LatimLogit",
    "LatimNorm",
    "MambaAttribution",
    "MambaLRP",
    "TransformerAttribution",
)
FOLDING = tuple(name for name in NAMES if name not in ("LatimFlow", "MambaLRP"))
TARGET = (-1, 3)


@pytest.fixture(params=NAMES)
def method(request: pytest.FixtureRequest) -> Any:
    return getattr(captum_ssm, request.param)


@pytest.fixture(params=FOLDING)
def folding(request: pytest.FixtureRequest) -> Any:
    return getattr(captum_ssm, request.param)


# --- ids in, ids out -----------------------------------------------------------------------------


def with_bos(ids: Tensor) -> Tensor:
    return torch.cat([torch.full_like(ids[:, :1], 7), ids], 1)


#: What a function makes of the ids, and on which of them the relevance of each that is read lies.
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a token in front": (with_bos, lambda r: r[:, 1:]),
    "a slice": (lambda ids: ids[:, 2:], lambda r: torch.cat([torch.zeros_like(r[:, :2]), r], 1)),
    "reversed": (lambda ids: ids.flip(1), lambda r: r.flip(1)),
    "rolled": (lambda ids: ids.roll(2, 1), lambda r: r.roll(-2, 1)),
    "both": (lambda ids: with_bos(ids.flip(1)), lambda r: r[:, 1:].flip(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_relevance_lies_on_the_given_tokens(method: Any, change: str) -> None:
    model, ids = transformers_model("mamba"), torch.randint(0, 19, (2, 9))
    changed, back = CHANGES[change]
    expected = back(method(model).attribute(changed(ids), target=TARGET))
    found = method(lambda x: model(changed(x)).logits, model).attribute(ids, target=TARGET)
    assert found.shape == ids.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_virtual_tokens_have_no_place(method: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=5, num_layers=2,
        num_attention_heads=1,
    )  # fmt: skip
    model = transformers_model("mamba")
    tuned = peft.get_peft_model(model, config).eval()
    ids = torch.randint(0, 19, (2, 9))
    found = method(tuned).attribute(ids, target=TARGET)
    assert found.shape == ids.shape
    prompts = tuned.get_prompt(batch_size=2).detach()
    read = torch.cat([prompts, model.get_input_embeddings()(ids)], 1).detach()
    expected = method(model).attribute(read, target=TARGET).sum(-1)[:, 3:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return randomise(LlamaForCausalLM(config).eval())


@pytest.mark.parametrize("make", [llama, lambda: transformers_model("mamba")])
def test_a_first_token_that_is_looked_up_by_itself(method: Any, make: Callable[[], Any]) -> None:
    """What the model looks up before the given tokens is a constant, which is met as others are."""
    model, ids = make(), torch.randint(0, 19, (2, 9))
    embed, first = model.get_input_embeddings(), torch.full((2, 1), 7)

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=torch.cat([embed(first), embed(ids)], 1)).logits
        return logits

    found = method(forward, model).attribute(ids, target=TARGET)
    expected = method(model).attribute(torch.cat([first, ids], 1), target=TARGET)[:, 1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("more", [0, 2])
def test_ids_made_up_anew_are_known_by_their_values(method: Any, more: int) -> None:
    model, ids = transformers_model("mamba"), torch.randint(0, 19, (1, 9))
    text = torch.tensor([ids[0].tolist() + [4, 5][:more]])
    found = method(lambda x: model(text.clone()).logits, model).attribute(ids, target=TARGET)
    expected = method(model).attribute(text, target=TARGET)[:, :9]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_ids_made_up_anew_are_refused(folding: Any) -> None:
    model, ids = transformers_model("mamba"), torch.randint(0, 19, (1, 9))
    forward = lambda x: model(torch.tensor(x.flip(1).tolist())).logits  # noqa: E731
    with pytest.raises(InputError, match="make up ids or embeddings anew"):
        folding(forward, model).attribute(ids, target=TARGET)


def test_packed_positions_are_explained_as_they_are_run(method: Any) -> None:
    """With a cache, which transformers uses unless told not to, they are one text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model = randomise(LlamaForCausalLM(config))
    ids = torch.randint(0, 19, (1, 7))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    shown: dict[bool, Any] = {}
    for cached in (True, False):

        def forward(x: Tensor, cached: bool = cached) -> Any:
            return model(x, position_ids=positions, use_cache=cached).logits

        shown[cached] = forward(ids)[:, -1, 3]
        explained = LatimFlow(forward, model).decompose(ids, target=TARGET)
        torch.testing.assert_close(explained.output, shown[cached].detach())
        assert explained.delta.abs().max() < 1e-5
        method(forward, model).attribute(ids, target=TARGET)
    assert (shown[True] - shown[False]).abs().max() > 1e-3


# --- layers --------------------------------------------------------------------------------------


def mixer(index: int = 0) -> nn.Module:
    config = MambaConfig(hidden_size=6, num_hidden_layers=2, state_size=3, vocab_size=11)
    return randomise(MambaMixer(config, index))


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back = mixer(0), mixer(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ahead(x) + self.back(x.flip(1)).flip(1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(6), mixer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Flipping(nn.Module):
    """Every second layer reads the tokens from the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x.flip(1)).flip(1) if i % 2 else block(x)
        return x


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = mixer(0), mixer(1), Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.one(x) + self.other(x))


class DeepBidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bidirectional() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NETWORKS = (Bidirectional, Flipping, Parallel, DeepBidirectional)


def matrix_of(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """The implicit attention of a mixer alone, (B, L, L)."""
    (found,) = ImplicitAttention(module).matrices(x, **options)
    return found.double()


def stages(network: nn.Module, x: Tensor) -> list[Tensor]:
    """What each stage adds to the identity, by a run of the network of our own."""
    found: list[Tensor] = []
    if isinstance(network, Bidirectional):
        return [matrix_of(network.ahead, x) + matrix_of(network.back, x.flip(1)).flip(1, 2)]
    if isinstance(network, Parallel):
        found = [matrix_of(network.one, x) + matrix_of(network.other, x)]
        x = x + network.one(x) + network.other(x)
        return [*found, matrix_of(network.last.mixer, network.last.norm(x))]
    for i, block in enumerate(network.blocks):  # type: ignore[union-attr,arg-type]
        if isinstance(block, Bidirectional):
            found += stages(block, x)
            x = block(x)
        elif i % 2:
            found.append(matrix_of(block.mixer, block.norm(x.flip(1))).flip(1, 2))
            x = block(x.flip(1)).flip(1)
        else:
            found.append(matrix_of(block.mixer, block.norm(x)))
            x = block(x)
    return found


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("normalize_rows", [False, True])
@pytest.mark.parametrize("query", [0, 3, -1])
@torch.no_grad()
def test_rollout(kind: Any, query: int, normalize_rows: bool) -> None:
    network, x = kind().double().eval(), torch.randn(2, 7, 6, dtype=torch.float64)
    product = torch.eye(7, dtype=torch.float64).expand(2, 7, 7)
    for matrix in stages(network, x):
        matrix = matrix + torch.eye(7, dtype=torch.float64)
        if normalize_rows:
            matrix = matrix / matrix.sum(-1, keepdim=True)
        product = matrix @ product
    found = ImplicitAttentionRollout(network).attribute(
        x, query=query, per_token=True, normalize_rows=normalize_rows
    )
    torch.testing.assert_close(found, product[:, query], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", NETWORKS)
def test_an_output_is_the_sum_of_its_parts(kind: Any) -> None:
    network, x = kind().double().eval(), torch.randn(2, 7, 6, dtype=torch.float64)
    for mixing in ("alti", "projection"):
        relevance, delta = LatimLogit(network).attribute(
            x, target=(2, 4), mixing=mixing, per_token=True, return_convergence_delta=True
        )
        assert delta.abs().max() < 1e-7  # transformers' scan rounds some of its terms to float32
        if kind is Bidirectional:  # one stage: all paths are direct
            flow = LatimFlow(network).attribute(x, target=(2, 4), per_token=True)
            torch.testing.assert_close(relevance, flow)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_reversed_as_a_whole(kind: Any, name: str) -> None:
    """A network between two flips is explained as itself, between two flips."""
    network, x = kind().double().eval(), torch.randn(2, 7, 6, dtype=torch.float64)
    method = getattr(captum_ssm, name)
    options = {"target": (2, 4), "per_token": True}
    if name in ("ImplicitAttention", "ImplicitAttentionRollout", "LatimALTI", "LatimNorm"):
        options["query"] = 2
    expected = method(network).attribute(x, **options)
    found = method(lambda y: network(y.flip(1)), network).attribute(x.flip(1), **options)
    torch.testing.assert_close(found, expected.flip(1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["LatimALTI", "LatimNorm"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_maps_say_which_tokens_are_read(kind: Any, name: str) -> None:
    """Sources with any relevance for a query are those that its output depends on."""
    network, x = kind().double().eval(), torch.randn(1, 6, 6, dtype=torch.float64)
    rows = [
        getattr(captum_ssm, name)(network).attribute(x, query=q, per_token=True)[0]
        for q in range(6)
    ]
    depends = torch.autograd.functional.jacobian(lambda y: network(y)[0].sum(-1), x)
    depends = depends[:, 0].abs().sum(-1)
    read = torch.stack(rows) > 0
    assert not bool((read & (depends == 0)).any())
    assert bool((read.sum(-1) > 1).any())


class Overlooked(nn.Module):
    """Attention under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.mT).softmax(-1) @ v


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT).mT


class Pooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.mean(1, keepdim=True))


@pytest.mark.parametrize("stranger", [Overlooked, Convolved, Pooling])
@pytest.mark.parametrize("last", [False, True])
def test_what_mixes_tokens_is_found_by_what_it_does(
    folding: Any, stranger: Any, last: bool
) -> None:
    if last and stranger is Pooling:
        return  # behind the last layer it could be the head
    parts = [Residual(), stranger()] if last else [stranger(), Residual()]
    network = nn.Sequential(*parts).eval()
    number = "1" if last else "0"
    with pytest.raises(InputError, match=rf"mixed in module '{number}.*register_mixer"):
        folding(network).attribute(torch.randn(1, 5, 6), target=(2, 4))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(Residual(), Residual())
        self.other = nn.Sequential(Residual(), Residual())

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def test_branches_of_layers_are_refused(folding: Any) -> None:
    with pytest.raises(InputError, match=r"branches of layers.*LatimFlow"):
        folding(Branches().eval()).attribute(torch.randn(1, 5, 6), target=(2, 4))


def test_two_runs_in_one_call(method: Any) -> None:
    model, ids = transformers_model("mamba").double(), torch.randint(0, 19, (2, 7))

    def twice(x: Tensor) -> Tensor:
        return model(x).logits - model(x.flip(1)).logits

    if method.__name__ in FOLDING:
        with pytest.raises(InputError, match="runs several times"):
            method(twice, model).attribute(ids, target=TARGET)
        return
    found = method(twice, model).attribute(ids, target=TARGET)
    back = method(model).attribute(ids.flip(1), target=TARGET).flip(1)
    torch.testing.assert_close(found, method(model).attribute(ids, target=TARGET) - back)


def test_a_mixer_that_holds_mixers_counts_once() -> None:
    from captum_ssm.mixers import registry

    network, x = nn.Sequential(Bidirectional()).eval(), torch.randn(1, 5, 6)

    def adapter(module: Any, call: Any) -> Any:
        linear = registry.adapter_for(module.ahead)
        assert linear is not None
        return linear[1](module.ahead, call)

    captum_ssm.register_mixer(Bidirectional, adapter)
    with torch.no_grad(), trace(network, operators=False) as t:
        network(x)
    assert [layer.name for layer in t.layers] == ["0"]
