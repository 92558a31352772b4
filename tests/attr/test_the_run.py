"""Explanations are of what ``forward_func`` computed, set up as it was when it ran.

Each case is held to the same network set up for good: what a function does for the time of its call
must be explained as if the model had always been so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import METHODS
from torch import Tensor, nn
from torch.func import functional_call
from zoo.mamba import transformers_model
from zoo.mamba2 import make_model

import captum_ssm
from captum_ssm.errors import (
    CaptumSSMError,
    InputError,
    NotLinearError,
    ReconstructionError,
    TargetError,
)

pytestmark = pytest.mark.slow

TARGET = (-1, 3)


@pytest.fixture(params=METHODS, ids=lambda method: method.__name__)
def method(request: pytest.FixtureRequest) -> Any:
    return request.param


def tokens() -> Tensor:
    return torch.randint(0, 19, (2, 9))


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value + 0.3 * torch.randn_like(value)).detach()
        if value.dim() > 1
        else value.detach()
        for name, value in model.named_parameters()
        if "A_log" not in name
    }


def assert_same(method: Any, forward: Callable[[Tensor], Any], model: nn.Module, same: Any) -> None:
    """What the method says of ``forward`` over ``model`` is what it says of ``same``."""
    ids = tokens()
    torch.testing.assert_close(forward(ids), same(ids).logits)
    found = method(forward, model).attribute(ids, target=TARGET)
    expected = method(same).attribute(ids, target=TARGET)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    usual = method(model).attribute(ids, target=TARGET)
    assert (usual - expected).abs().max() > 1e-3 * expected.abs().max()


def test_weights_handed_over_for_the_call(method: Any) -> None:
    model = make_model("mamba2")
    weights = other_weights(model)
    same = copy.deepcopy(model)
    same.load_state_dict(weights, strict=False)
    assert_same(method, lambda ids: functional_call(model, weights, (ids,)).logits, model, same)


@pytest.fixture
def tuned() -> Any:
    """A model with an adapter on the projections of its mixers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers_model("mamba"), config).eval()


def test_an_adapter_switched_off(method: Any, tuned: Any) -> None:
    same = copy.deepcopy(tuned).unload()

    def forward(ids: Tensor) -> Tensor:
        with tuned.disable_adapter():
            return tuned(ids).logits

    assert_same(method, forward, tuned, same)


def test_a_hook_for_the_time_of_the_call(method: Any) -> None:
    model = transformers_model("mamba")
    same = copy.deepcopy(model)
    with torch.no_grad():
        same.backbone.layers[1].mixer.in_proj.weight.mul_(-2)

    def forward(ids: Tensor) -> Tensor:
        projection = model.backbone.layers[1].mixer.in_proj
        handle = projection.register_forward_hook(lambda module, args, out: -2 * out)
        try:
            return model(ids).logits
        finally:
            handle.remove()

    assert_same(method, forward, model, same)


# --- operators are held to their modules by default --------------------------------------------


class Backwards(nn.Module):
    """A mixer that reads its tokens from the other end, too, which its class does not tell."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        kind = type(mixer)

        def forward(own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plain = kind.forward(own, hidden_states, *args, **kwargs)
            return plain + kind.forward(own, hidden_states.flip(1), *args, **kwargs).flip(1)

        mixer.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def test_a_subclass_is_held_to_its_own_output(method: Any) -> None:
    model = transformers_model("mamba")
    Backwards(model.backbone.layers[0].mixer)
    with pytest.raises(ReconstructionError, match=r"layers\.0\.mixer"):
        method(model).attribute(tokens(), target=TARGET)


def test_held_to_their_modules_unless_told_otherwise(method: Any) -> None:
    model = make_model("mamba2")
    Backwards(model.backbone.layers[1].mixer)
    method(model).attribute(tokens(), target=TARGET, verify=False)


def test_the_logit_is_held_to_its_parts() -> None:
    """A function of its own in the head is nothing that direct paths see."""
    model = transformers_model("mamba")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x + 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    def forward(ids: Tensor) -> Tensor:
        found: Tensor = Doubled.apply(model(ids).logits)  # type: ignore[no-untyped-call]
        return found

    for name in ("LatimFlow", "LatimLogit"):
        with pytest.raises(NotLinearError):
            getattr(captum_ssm, name)(forward, model).attribute(tokens()[:1], target=TARGET)


# --- hooks of the user's -------------------------------------------------------------------------


def zeroed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return torch.zeros_like(out)


def doubled_here(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    factor = torch.ones(1, out.shape[1], 1)
    factor[:, 2::3] = -2
    return out * factor


def steered(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + torch.linspace(-1, 1, out.shape[-1])


@pytest.mark.parametrize("inside", [True])
def test_a_mixer_ablated_by_a_hook_is_one_without_output(method: Any, inside: bool) -> None:
    model, ids = transformers_model("mamba"), tokens()
    same = copy.deepcopy(model)
    same.backbone.layers[1].mixer.out_proj.weight.data.zero_()
    if same.backbone.layers[1].mixer.out_proj.bias is not None:
        same.backbone.layers[1].mixer.out_proj.bias.data.zero_()
    mixer = model.backbone.layers[1].mixer

    def forward(x: Tensor) -> Any:
        if not inside:
            return model(x).logits
        handle = mixer.register_forward_hook(zeroed)
        try:
            return model(x).logits
        finally:
            handle.remove()

    if not inside:
        mixer.register_forward_hook(zeroed)
    torch.testing.assert_close(forward(ids), same(ids).logits)
    found = method(forward, model).attribute(ids, target=TARGET)
    expected = method(same).attribute(ids, target=TARGET)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    if method.__name__ in ("LatimLogit", "LatimFlow"):
        _, delta = method(forward, model).attribute(
            ids, target=TARGET, return_convergence_delta=True
        )
        assert delta.abs().max() < 1e-5


def test_a_hook_that_scales_tokens(method: Any) -> None:
    """As a block that scales what the mixer returns, which sums tell from one that does not."""
    model, ids = transformers_model("mamba"), tokens()
    model.backbone.layers[0].mixer.register_forward_hook(doubled_here)
    found = method(model).attribute(ids, target=TARGET)
    assert bool(found.isfinite().all())
    if method.__name__ in ("LatimLogit", "LatimFlow"):
        _, delta = method(model).attribute(ids, target=TARGET, return_convergence_delta=True)
        assert delta.abs().max() < 1e-5
    if method.__name__ in ("LatimALTI", "LatimNorm"):
        maps = method(model).maps(ids)[0]
        plain = transformers_model("mamba")
        plain.load_state_dict(model.state_dict())
        expected = method(plain).maps(ids)[0]
        if method.__name__ == "LatimNorm":
            expected[:, 2::3] *= 2
            torch.testing.assert_close(maps, expected)
        else:
            kept = torch.arange(9) % 3 != 2
            torch.testing.assert_close(maps[:, kept], expected[:, kept])
            assert (maps - expected)[:, ~kept].abs().max() > 1e-3


def test_a_hook_that_adds_is_explained_or_refused_by_name(method: Any) -> None:
    model, ids = transformers_model("mamba"), tokens()
    model.backbone.layers[0].mixer.register_forward_hook(steered)
    vectors = ("LatimALTI", "LatimLogit", "LatimNorm", "TransformerAttribution")
    if method.__name__ not in vectors:
        method(model).attribute(ids, target=TARGET)
        return
    with pytest.raises(InputError, match=r"layers\.0\.mixer': a forward hook .* LatimFlow"):
        method(model).attribute(ids, target=TARGET)


FOLLOW = ("LatimFlow", "MambaLRP")
#: What hooks make of a mixer's output besides scaling it, and the refusal of what folds layers.
MOVES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "flip": (lambda out: out.flip(1), "in another order of the tokens"),
    "shift": (lambda out: out.roll(1, 1), "in another order of the tokens"),
    "centre": (lambda out: out - out.mean(1, keepdim=True), r"mean has mixed .*layers\.\d\.mixer"),
    "sums": (lambda out: out.cumsum(1), r"cumsum has mixed .*layers\.\d\.mixer"),
}


@pytest.mark.parametrize(("where", "move"), [(0, "flip"), (1, "shift"), (0, "centre"), (1, "sums")])
def test_a_hook_that_moves_tokens_is_followed_or_refused(
    method: Any, move: str, where: int
) -> None:
    model, ids = transformers_model("mamba"), tokens()
    change, complaint = MOVES[move]
    model.backbone.layers[where].mixer.register_forward_hook(lambda module, args, out: change(out))
    if method.__name__ in FOLLOW:
        found = method(model).decompose(ids, TARGET)
        torch.testing.assert_close(found.output, model(ids).logits[:, -1, 3])
        assert found.delta.abs().max() < 1e-5
        return
    if method.__name__ == "LatimLogit" and where == 1 and "order" in complaint:
        # of the last mixer it reads no more than gradients, which pass the hook
        _, delta = method(model).attribute(ids, target=TARGET, return_convergence_delta=True)
        assert delta.abs().max() < 1e-5
        return
    with pytest.raises(InputError, match=complaint):
        method(model).attribute(ids, target=TARGET)


def test_a_hook_that_drops_some_tokens_is_not_taken_for_one_that_moves_them(method: Any) -> None:
    model, ids = transformers_model("mamba"), tokens()
    same = copy.deepcopy(model)

    def put_together(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(out[:, :3]), out[:, 3:]], 1)

    def multiplied(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * (torch.arange(out.shape[1]) >= 3)[None, :, None]

    model.backbone.layers[0].mixer.register_forward_hook(put_together)
    same.backbone.layers[0].mixer.register_forward_hook(multiplied)
    found, expected = (method(m).attribute(ids, target=TARGET) for m in (model, same))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_hook_that_writes_to_the_output(method: Any) -> None:
    """Nobody remembers what the mixer had returned."""
    model, ids = transformers_model("mamba"), tokens()
    same = copy.deepcopy(model)

    def silenced(module: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(0)

    model.backbone.layers[1].mixer.register_forward_hook(silenced)
    same.backbone.layers[1].mixer.register_forward_hook(zeroed)
    torch.testing.assert_close(model(ids).logits, same(ids).logits)
    if method.__name__ in ("LatimALTI", "LatimNorm", "TransformerAttribution"):
        with pytest.raises(InputError, match=r"layers\.1\.mixer.*in place.*let the hook return"):
            method(model).attribute(ids, target=TARGET)
        return
    found, expected = (method(m).attribute(ids, target=TARGET) for m in (model, same))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --- models that write to their tensors --------------------------------------------------------


class Written(nn.Module):
    """A Mamba whose blocks add in place: the stream to the output, or the output to the stream."""

    def __init__(self, onto: str) -> None:
        super().__init__()
        self.model, self.onto = transformers_model("mamba"), onto

    def forward(self, ids: Tensor) -> Tensor:
        backbone = self.model.backbone
        x = backbone.embeddings(ids).clone()
        for block in backbone.layers:
            out = block.mixer(block.norm(x))
            if self.onto == "output":
                out += x
                x = out
            else:
                x += out
        logits: Tensor = self.model.lm_head(backbone.norm_f(x))
        return logits


def test_sums_in_place_are_explained_or_refused_with_the_remedy(method: Any) -> None:
    ids = tokens()
    for onto in ("output", "stream"):
        model = Written(onto).eval()
        expected = method(model.model).attribute(ids, target=TARGET)
        try:
            found = method(model).attribute(ids, target=TARGET)
        except CaptumSSMError as error:
            assert method.__name__ not in FOLLOW
            assert "Use the out-of-place form" in str(error)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- ids that forward_func makes up --------------------------------------------------------------

#: What a function makes of rows of ids, as lists.
LISTS: dict[str, Callable[[list[int]], list[int]]] = {
    "reversed": lambda row: row[::-1],
    "with a first token": lambda row: [1, *row],
    "cut": lambda row: row[2:],
}


def test_ids_made_of_lists_are_refused(method: Any) -> None:
    """Nothing tells which of the given tokens each of them is."""
    model = transformers_model("mamba")
    for change in LISTS.values():

        def forward(ids: Tensor, change: Any = change) -> Tensor:
            found: Tensor = model(torch.tensor([change(row) for row in ids.tolist()])).logits
            return found

        with pytest.raises(InputError, match="make up ids"):
            method(forward, model).attribute(tokens(), target=TARGET)


def test_the_same_ids_made_of_a_list_are_those_given(method: Any) -> None:
    model, ids = transformers_model("mamba"), tokens()
    found = method(lambda x: model(torch.tensor(x.tolist())), model).attribute(ids, target=TARGET)
    torch.testing.assert_close(found, method(model).attribute(ids, target=TARGET))


# --- what cannot be explained ------------------------------------------------------------------


def test_a_random_model_is_sent_to_eval(method: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3, target_modules=["in_proj"], lora_dropout=0.5, init_lora_weights=False
    )
    model = peft.get_peft_model(transformers_model("mamba"), config)
    with pytest.raises(CaptumSSMError, match=r"lora_dropout.*model\.eval\(\)"):
        method(model.train()).attribute(tokens(), target=TARGET)
    method(model.eval()).attribute(tokens(), target=TARGET)


@pytest.mark.parametrize("name", FOLLOW)
def test_examples_that_mix_are_not_blamed_on_functions(name: str) -> None:
    model = transformers_model("mamba")

    def centred(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids).logits
        return logits - logits.mean(0, keepdim=True)

    with pytest.raises(NotLinearError, match=r"examples of the batch mix.*one by one") as refused:
        getattr(captum_ssm, name)(centred, model).attribute(tokens(), target=TARGET)
    assert "functions of its own" not in str(refused.value)


def test_a_target_at_padding_names_the_remedy(method: Any) -> None:
    """Mixers of transformers are told of padding; on the right the last position is none."""
    model, ids = transformers_model("mamba"), tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with pytest.raises(TargetError, match=r"padded token of example 1.*\[\(8, 3\), \(5, 3\)\]"):
        method(model).attribute(ids, target=TARGET, additional_forward_args=(mask,))
    found = method(model).attribute(ids, [(8, 3), (5, 3)], additional_forward_args=(mask,))
    alone = method(model).attribute(ids[1:, :6], target=(5, 3))
    torch.testing.assert_close(found[1:, :6], alone, rtol=1e-4, atol=1e-5)
