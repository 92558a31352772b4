"""How layers hang together, found by replays: what passes, what is refused, what is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from oracles import relative_error
from torch import Tensor, nn
from zoo import delta, wrapped
from zoo.mamba import transformers_model

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, LatimALTI, MambaAttribution
from captum_ssm.errors import GradientModeError, InputError, TrainingModeError

Between = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, between: Between, before: Between = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8).double()
        self.a, self.b = wrapped.mixer("mamba"), wrapped.mixer("mamba")
        self.head = nn.Linear(8, 11).double()
        self.between, self.before = between, before

    def forward(self, ids: Tensor) -> Any:
        x = self.before(self.embed(ids))
        x = self.between(x + self.a(x))
        return self.head(x + self.b(x))


def rollout(between: Between, batch: int = 1, tokens: int = 5) -> Tensor:
    with wrapped.never_rounded():
        net = Net(between).eval()
        return ImplicitAttentionRollout(net).attribute(torch.randint(11, (batch, tokens)), query=-1)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Cumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().cumsum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(1).cumsum(1).flip(1)


def attended(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


def beside_massive(x: Tensor) -> Tensor:
    """The tokens behind the first, whose numbers hide theirs, are mixed."""
    return torch.cat([x[:, :1] * 1e6, x[:, 1:] + 1e-3 * x[:, 1:].mean(1, keepdim=True)], 1)


WITHIN: dict[str, Between] = {
    "norm by hand": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3),
    "a function of autograd's": Twice.apply,
    "numpy": lambda x: torch.from_numpy(np.tanh(x.detach().numpy())),
}
MIXING: dict[str, Between] = {
    "sum so far": lambda x: x.cumsum(1) / 3,
    "centered": lambda x: x - x.mean(1, keepdim=True),
    "attention": attended,
    "gate": lambda x: x * torch.sigmoid(x.mean(1, keepdim=True)),
    "centered over the batch": lambda x: x - x.mean(0, keepdim=True) / 2,
    "a function of autograd's": Cumulated.apply,
    "a millionth": lambda x: x + 1e-6 * x.mean(1, keepdim=True),
    "under detach": lambda x: x + x.detach().cumsum(1),
    "beside a massive token": beside_massive,
}


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("between", WITHIN.values(), ids=WITHIN)
def test_parts_within_tokens_pass(between: Between, batch: int, tokens: int) -> None:
    assert rollout(between, batch, tokens).shape == (batch, tokens)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("between", MIXING.values(), ids=MIXING)
def test_parts_that_mix_tokens_are_refused(between: Between, batch: int, tokens: int) -> None:
    if batch == 1 and between is MIXING["centered over the batch"]:
        batch = 2
    with pytest.raises(InputError, match="has mixed"):
        rollout(between, batch, tokens)


def one_of_another(x: Tensor) -> Tensor:
    return x.index_add(1, torch.tensor([3]), x[:, [2]])


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("before", "sizes"),
    [
        pytest.param(lambda x: x + x[:, :1], range(4, 40), marks=pytest.mark.slow),
        (lambda x: x + x[:, -1:], range(4, 40)),
        pytest.param(one_of_another, range(4, 33), marks=pytest.mark.slow),
    ],
    ids=["the first token is in all", "the last token is in all", "one token is in another"],
)
def test_few_tokens_that_reach_others_are_enough(before: Any, sizes: range, batch: int) -> None:
    with wrapped.never_rounded():
        method = ImplicitAttentionRollout(Net(lambda x: x, before).eval())
        for tokens in sizes:
            with pytest.raises(InputError, match="has mixed"):
                method.attribute(torch.randint(11, (batch, tokens)), query=-1)


def test_a_first_token_that_is_replaced_has_no_relevance() -> None:
    with wrapped.never_rounded():
        net, x = Net(lambda x: x).eval(), torch.randn(1, 3, 8).double()
        net.embed = nn.Identity()
        forward = lambda x: net(torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1))  # noqa: E731
        found = ImplicitAttention(forward, net).attribute(x, query=-1, per_token=True)
        assert found[0, 0] == 0 < found[0, 1:].abs().min()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [3, 4, 5, 40])
def test_a_constant_tells_nothing(tokens: int, batch: int, pooled: bool) -> None:
    net, ids = Net(lambda x: x).eval(), torch.randint(11, (batch, tokens))
    with torch.no_grad():
        net.head.weight.zero_()
    forward = lambda x: net(x).mean(1) if pooled else net(x)  # noqa: E731
    with wrapped.never_rounded(), pytest.raises(InputError, match="cannot be determined"):
        ImplicitAttentionRollout(forward, net).attribute(ids, query=0)


def test_entries_that_are_banned_hide_no_order() -> None:
    net, ids = Net(lambda x: x.flip(1)).eval(), torch.randint(11, (2, 5))
    banned = torch.zeros(11).double()
    banned[3] = -torch.inf
    with wrapped.never_rounded():
        found = ImplicitAttentionRollout(lambda x: net(x) + banned, net).attribute(ids, query=0)
        expected = ImplicitAttentionRollout(net).attribute(ids, query=0)
    assert torch.equal(found, expected)


class Bidirectional(Net):
    """One mixer reads the tokens forward and one backward; ``pool`` gets both outputs."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(nn.Identity())
        self.pool = pool

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return self.head(self.pool(self.a(x), self.b(x.flip(1))))


POOLED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mean of both": (lambda a, b: a.mean(1) - b.mean(1), True),
    "last of both": (lambda a, b: a[:, -1] - b[:, 0], True),
    "last of each": (lambda a, b: a[:, -1] - b[:, -1], False),
    "mean and last": (lambda a, b: a.mean(1) - b[:, 0], False),
}


@pytest.mark.parametrize(("pool", "passes"), POOLED.values(), ids=POOLED)
@pytest.mark.parametrize("tokens", [2, 8])
def test_a_pooled_output_reads_parallel_layers_at_the_same_tokens(
    tokens: int, pool: Any, passes: bool
) -> None:
    with wrapped.never_rounded():
        method = ImplicitAttention(Bidirectional(pool).eval())
        refuses = nullcontext() if passes else pytest.raises(InputError, match="different tokens")
        with refuses:
            method.attribute(torch.randint(11, (1, tokens)), target=1)


@pytest.mark.parametrize("reads", ["all", "mean"])
def test_a_layer_that_is_silenced_is_no_part_of_the_last_stage(reads: str) -> None:
    first = wrapped.Residual("mamba", "rms", False, "rms", "none", "behind")
    last = wrapped.Beside(("mamba", "mamba"), "rms", True, True, True)
    net = wrapped.Network([first, last], "rms", reads, False, 0).double().eval()
    net.blocks[0].behind.register_forward_hook(lambda module, args, output: 0 * output)
    refused = pytest.raises(
        InputError, match=r"does not read the output of layer 'blocks\.0\.mixer'"
    )
    with wrapped.never_rounded(), refused:
        ImplicitAttentionRollout(net).attribute(torch.randint(11, (1, 5)))


def test_tokens_that_are_there_twice_are_refused() -> None:
    with pytest.raises(InputError, match="does not read all tokens"):
        rollout(lambda x: x[:, [0, 0, 2, 2, 4]])


def test_a_part_at_random_is_refused() -> None:
    with pytest.raises(TrainingModeError, match=r"'b' reads different values when the model runs"):
        rollout(lambda x: nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("tokens", [5, 60])
@pytest.mark.parametrize(("one", "other"), [(1, 2), (0, 4)])
def test_two_tokens_that_change_places(one: int, other: int, tokens: int) -> None:
    places = torch.arange(tokens)
    places[one], places[other] = other, one
    net, straight = Net(lambda x: x[:, places]).eval(), Net(lambda x: x).eval()
    ids = torch.randint(11, (1, tokens))
    with wrapped.never_rounded():
        first, second = ImplicitAttention(net).matrices(ids)
        found = ImplicitAttentionRollout(net).attribute(ids, query=4)
        unmoved = ImplicitAttentionRollout(straight).attribute(ids, query=4)
    eye = torch.eye(tokens)
    expected = ((eye + second) @ (eye + first))[:, places[4]]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert relative_error(found, unmoved) > 1e-4


def test_the_first_stream_may_be_added_again() -> None:
    first: list[Tensor] = []
    net = Net(lambda x: 0.8 * x + 0.2 * first[-1], lambda x: first.append(x) or x).eval()
    ids = torch.randint(11, (2, 6))
    with wrapped.never_rounded():
        one, other = ImplicitAttention(net).matrices(ids)
        found = ImplicitAttentionRollout(net).attribute(ids, query=-1)
    eye = torch.eye(6)
    expected = ((eye + other) @ (eye + one))[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_one_token_that_is_silenced() -> None:
    """A layer that writes nothing to one token is no branch beside the next one."""
    blocks = [wrapped.Residual("mamba", "rms", False, "rms", "none", "behind") for _ in range(2)]
    net, ids = wrapped.Network(blocks, "rms", "mean", False, 0).double().eval(), torch.arange(3)
    method, ids, eye = ImplicitAttentionRollout(net), ids[None], torch.eye(3)
    for token in range(3):
        on = (torch.arange(3) != token).double()[:, None]
        silence = lambda module, args, output, on=on: on * output  # noqa: E731
        with blocks[0].behind.register_forward_hook(silence), wrapped.never_rounded():
            first, second = ImplicitAttention(net).matrices(ids)
            found = method.attribute(ids, query="mean", per_token=True)
        expected = ((eye + second) @ (eye + first)).mean(1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        refused = pytest.raises(InputError, match="does not read all tokens of its stream")
        with blocks[0].norm.register_forward_hook(silence), refused:
            method.attribute(ids)


# --- kernels that write out of torch's sight ---------------------------------------------------


def filled(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A sum and its norm, written to empty tensors, as a Triton kernel does."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    s = x.detach().numpy() + residual.detach().numpy()
    total.numpy()[...] = s
    scale = np.sqrt(np.square(s).mean(-1, keepdims=True) + 1e-5)
    normed.numpy()[...] = s / scale * weight.detach().numpy()
    return normed, total


def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight, total


class OfKernels(nn.Module):
    """Blocks that hand on the stream and the last mixer's output apart, as mamba_ssm's do."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        mamba = transformers_model("mamba", num_hidden_layers=3)
        width = mamba.config.hidden_size
        self.embed, self.blocks = nn.Embedding(19, width), nn.ModuleList()
        for block in mamba.backbone.layers:
            self.blocks.append(Handing(block.mixer, norm))
        self.weight, self.norm, self.head = (
            nn.Parameter(torch.ones(width)),
            norm,
            nn.Linear(width, 19),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        logits: Tensor = self.head(self.norm(x, residual, self.weight)[0])
        return logits


class Handing(nn.Module):
    def __init__(self, mixer: nn.Module, norm: Any) -> None:
        super().__init__()
        width = mixer.in_proj.in_features
        self.mixer, self.norm, self.weight = mixer, norm, nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual, self.weight)
        return self.mixer(x), residual


@pytest.mark.parametrize("method", [ImplicitAttentionRollout, LatimALTI, MambaAttribution])
def test_models_whose_norms_are_kernels(method: Any) -> None:
    ids = torch.randint(19, (2, 9))
    twin, model = OfKernels(plain).eval(), OfKernels(filled).eval()
    if method is MambaAttribution:
        with pytest.raises(GradientModeError):
            method(model).attribute(ids, target=(-1, 3))
        return
    found = method(model).attribute(ids, target=(-1, 3), query=-1)
    assert relative_error(found, method(twin).attribute(ids, target=(-1, 3), query=-1)) < 1e-4
    if method is LatimALTI:  # a block may read the output beside the stream
        model = OfKernels(lambda x, *y: (plain(x, *y)[0] + x, plain(x, *y)[1])).eval()
        model.norm = plain
        with pytest.raises(InputError, match="cannot be followed"):
            method(model).attribute(ids, target=(-1, 3))


def test_experts_that_are_given_another_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)  # with noise, an expert is given 14 tokens
    model = delta.Family("qwen4_exp", monkeypatch).model(attention_bias=True)
    with pytest.raises(InputError, match="cannot be followed"):
        LatimALTI(model).attribute(torch.randint(13, (2, 9)))


# --- what stays, and what is kept --------------------------------------------------------------


def test_modules_are_left_as_they_were() -> None:
    net = Net(attended).eval()
    net.a.forward = own = net.a.forward
    with pytest.raises(InputError, match="has mixed"), wrapped.never_rounded():
        ImplicitAttentionRollout(net).attribute(torch.randint(11, (1, 5)))
    assert net.a.forward is own and "forward" not in vars(net.b)


@pytest.mark.slow
def test_another_thread_runs_the_model_meanwhile() -> None:
    model, ids = transformers_model("mamba"), torch.randint(19, (1, 9))
    with torch.no_grad():
        expected = model(ids).logits
    done, found = threading.Event(), list[bool]()

    def run() -> None:
        while not done.is_set():
            with torch.no_grad():
                found.append(torch.allclose(model(ids).logits, expected, atol=1e-5))

    other = threading.Thread(target=run)
    other.start()
    try:
        for tokens in range(2, 12):
            ImplicitAttentionRollout(model).attribute(ids.repeat(1, 2)[:, :tokens])
    finally:
        done.set()
        other.join()
    assert found and all(found)


def test_a_finding_is_kept_until_the_model_is_changed() -> None:
    model, ids = transformers_model("mamba"), torch.randint(19, (1, 9))
    method = ImplicitAttentionRollout(model)
    block, runs = model.backbone.layers[1], list[int]()
    block.norm.register_forward_hook(lambda *_: runs.append(1))

    def asks() -> bool:
        runs.clear()
        method.attribute(torch.randint(19, ids.shape))
        return len(runs) > 1

    assert asks() and not asks()
    with torch.no_grad():
        block.mixer.in_proj.weight.mul_(1.1)
    assert asks() and not asks()
    hook = block.register_forward_hook(lambda module, args, output: None)
    assert asks() and not asks()
    hook.remove()
    block.another = 1
    assert asks() and not asks()
    ids = ids[:, :5]
    assert asks() and not asks()


def test_a_finding_is_not_kept_of_a_users_function() -> None:
    model, ids = transformers_model("mamba"), torch.randint(19, (1, 9))
    flips = [False]

    def forward(x: Tensor) -> Tensor:
        x = x.flip(1) if flips[0] else x
        return model(x).logits  # type: ignore[no-any-return]

    method = ImplicitAttentionRollout(forward, model)
    method.attribute(ids, query=-1)
    flips[0] = True
    found = method.attribute(ids, query=-1)
    expected = ImplicitAttentionRollout(model).attribute(ids.flip(1), query=-1).flip(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_finding_keeps_no_model() -> None:
    model = transformers_model("mamba")
    ImplicitAttentionRollout(model).attribute(torch.randint(19, (1, 9)))
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_positions_between_layers_move_no_token() -> None:
    """Rolling the tokens on would say so; their numbers, bit by bit, do not."""
    positions = torch.randn(1, 40, 8).double()
    assert rollout(lambda x: x + positions, 2, 40).shape == (2, 40)


def test_a_text_that_is_padded_is_asked_at_its_real_tokens() -> None:
    model = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=19, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1,
            state_size=4, chunk_size=8,
        )
    ).eval()  # fmt: skip
    ids, mask = torch.randint(19, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    method = ImplicitAttentionRollout(lambda x, m: model(x, attention_mask=m).logits, model)
    found = method.attribute(ids, additional_forward_args=mask)
    alone = ImplicitAttentionRollout(model).attribute(ids[1:, 7:])
    torch.testing.assert_close(found[1:, 7:], alone, rtol=1e-4, atol=1e-6)
