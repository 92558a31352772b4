"""Which mixers are served, and what is said about the others."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from helpers.contract import check, record
from helpers.entry_points import declare
from helpers.rules import frozen_flow
from oracles import relative_error
from torch import Tensor, nn
from zoo.mamba import transformers_model

from captum_ssm import (
    EdgeEffects,
    Edges,
    ImplicitAttentionRollout,
    LatimFlow,
    StateMemory,
    knock_out,
    register_mixer,
    supported_architectures,
    trace,
)
from captum_ssm.errors import InputError, OptionError, UnsupportedMixerError
from captum_ssm.mixers import Call, LinearMixer, registry
from captum_ssm.mixers.table import VERSIONS
from captum_ssm.operators import Chain, Diagonal, Shape, ShortConv


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package whose code registers mixers."""

    def install(code: str) -> None:
        declare(tmp_path, monkeypatch, registry.ENTRY_POINTS, "own = declaring:register", code)
        registry._uncalled_entry_points.cache_clear()

    return install


def test_installed_packages_register_their_mixers(declared: Callable[[str], None]) -> None:
    declared("""
import captum_ssm

def register():
    captum_ssm.register_mixer("declaring.Mixer", lambda module, call: None, family="Declared")
""")
    assert supported_architectures()[-1].family == "Declared"
    del registry._architectures["declaring.Mixer"], registry._adapters["declaring.Mixer"]
    assert supported_architectures()[-1].family != "Declared"  # called once


def test_a_broken_package_is_named(declared: Callable[[str], None]) -> None:
    declared("raise OSError('no such file')")
    with pytest.warns(UserWarning, match=r"own = declaring:register.*no such file.*uninstall"):
        assert supported_architectures()


class Shift(nn.Module):
    """out(gate(h) * (w0 x[t] + w1 x[t - 1])), x = read(h)"""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.read, self.gate, self.out = (nn.Linear(width, width) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(width, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.read(hidden)
        earlier = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        mixed = self.weight[:, 0] * x + self.weight[:, 1] * earlier
        return self.out(self.gate(hidden).sigmoid() * mixed)


class SlightlyDifferentShift(Shift):
    pass


class OtherMixer(Shift):
    """No mixer of this name has an adapter."""


class AroundMixer(nn.Module):
    """It looks like a mixer by its name alone."""


def linearize_shift(module: Any, call: Call) -> LinearMixer:
    x = module.read(call.hidden_states)[..., None]
    shape = Shape(*x.shape)
    gate = module.gate(call.hidden_states).sigmoid()[..., None]
    operator = Chain(
        Diagonal(gate, shape, "gate"), ShortConv(module.weight.detach()[:, None], shape)
    )
    return LinearMixer(x, operator, lambda y: module.out(y.flatten(2)))


class Net(nn.Module):
    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(self, hidden: Tensor) -> Tensor:
        for mixer in self.mixers:
            out = mixer(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return hidden


def test_a_registered_mixer_is_served_and_so_are_subclasses() -> None:
    register_mixer(Shift, linearize_shift, family="Token shift")
    layers = record(Net(Shift(), nn.Tanh(), SlightlyDifferentShift()), torch.randn(2, 5, 4))
    assert [(layer.name, layer.architecture) for layer in layers] == [
        ("mixers.0", "Token shift"),
        ("mixers.2", "Token shift"),
    ]
    for layer in layers:
        check(layer)
        gate = layer.mixer.module.gate(layer.call.hidden_states).sigmoid()  # (B, L, C)
        own, earlier = layer.mixer.module.weight.T
        matrices = layer.operator.dense(None)
        diagonal = matrices.diagonal(dim1=-2, dim2=-1).mT
        below = matrices.diagonal(-1, dim1=-2, dim2=-1).mT
        assert relative_error(diagonal, gate * own) <= 1e-6
        assert relative_error(below, gate[:, 1:] * earlier) <= 1e-6
    register_mixer(SlightlyDifferentShift, linearize_shift, family="own")
    layers = record(Net(Shift(), SlightlyDifferentShift()), torch.randn(1, 3, 4))
    assert [layer.architecture for layer in layers] == ["Token shift", "own"]


@pytest.mark.parametrize(
    ("mixer", "linearize"), [("NoDots", linearize_shift), (Shift, None), ("a.B", "not callable")]
)
def test_bad_registrations_are_refused(mixer: Any, linearize: Any) -> None:
    before = supported_architectures()
    with pytest.raises(OptionError, match="register_mixer"):
        register_mixer(mixer, linearize)
    assert supported_architectures() == before


def test_registered_names_are_real_and_mamba_ssm_has_no_others(mamba_ssm: Any) -> None:
    """In the newest versions; a class that mixes tokens and is new there is found here."""
    for architecture in supported_architectures():
        newest = architecture.tested_version == VERSIONS.get(architecture.package)
        if newest and architecture.package in ("transformers", "mamba-ssm"):
            module, name = architecture.class_path.rsplit(".", 1)
            assert issubclass(getattr(import_module(module), name), nn.Module)
    folder, found = import_module("mamba_ssm.modules"), set()
    for each in iter_modules(folder.__path__, "mamba_ssm.modules."):
        kinds = [x for x in vars(import_module(each.name)).values() if isinstance(x, type)]
        found |= {x for x in kinds if issubclass(x, nn.Module) and x.__module__ == each.name}
    served = {a.class_path for a in supported_architectures()}
    others = {kind.__name__ for kind in found if registry.class_path(kind) not in served}
    assert others == {"Block", "GatedMLP"} and len(found) == 7


# --- refusals ------------------------------------------------------------------------------------


def assert_refused(model: nn.Module, name: str, class_path: str) -> None:
    """Of its mixers none is known, so that it is refused before it runs."""
    with pytest.raises(UnsupportedMixerError) as caught, trace(model):
        pass
    assert "layers=" not in str(caught.value)
    first, how, served = re.split(r"\.(?: |$)", str(caught.value))[:3]
    assert repr(name) in first and class_path in first and "no adapter" in first
    assert "docs/howto/adding_an_architecture.md" in how and "register_mixer()" in how
    assert served.startswith("Supported families are Mamba, Falcon Mamba, ")
    assert isinstance(caught.value, TypeError)


def test_what_is_refused_before_it_runs() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model = Net(nn.Linear(4, 4), kind(4, 4, batch_first=True))
        assert_refused(model, "mixers.1", f"torch.nn.modules.rnn.{kind.__name__}")
    for name in ("MHA", "mLSTMCell", "sLSTMLayer", "LSTMCell", "Mamba4"):  # copies, by their names
        assert_refused(Net(type(name, (Shift,), {})()), "mixers.0", name)
    assert_refused(Net(OtherMixer()), "mixers.0", f"{__name__}.OtherMixer")


def test_a_run_of_an_unknown_mixer_is_refused() -> None:
    model = transformers_model("mamba", num_hidden_layers=3)
    model.backbone.layers[1].mixer = OtherMixer(5)
    ids = torch.randint(19, (1, 4))
    runs: list[Callable[[], Any]] = [
        lambda: frozen_flow(model).attribute(ids, (-1, 3)),
        lambda: ImplicitAttentionRollout(model).attribute(ids),
        lambda: list(StateMemory(model).of(ids)),
        lambda: EdgeEffects(model).attribute(ids, (-1, 3)),
        lambda: record(model, ids),
        *(functools.partial(_without_edges, model, ids, layers) for layers in (0, "ssm", "mamba")),
    ]
    for run in runs:
        with pytest.raises(UnsupportedMixerError) as caught:
            run()
        message = str(caught.value)
        assert message.startswith(f"The module 'backbone.layers.1.mixer' of class {__name__}.Other")
        assert (
            "has no adapter, and it ran. " in message
            and "adding_an_architecture.md shows" in message
        )
        assert message.endswith("name the mixers to use with layers=[...].")
    assert not any(module._forward_pre_hooks for module in model.modules())


def _without_edges(model: Any, ids: Tensor, layers: Any) -> None:
    with knock_out(model, Edges(layers, sources=1)):
        model(ids)


def test_what_did_not_run_is_no_reason_to_refuse() -> None:
    """Such as the vision tower of a model that is given a text alone.

    Nor is a mixer that is known and comes last.
    """
    register_mixer(Shift, linearize_shift)
    model = transformers_model("mamba")
    ids = torch.randint(19, (1, 4))
    methods: list[Any] = [LatimFlow, ImplicitAttentionRollout]
    wanted = [method(model).attribute(ids, target=(-1, 3)) for method in methods]
    with knock_out(model, Edges(layers=0, sources=1)), torch.no_grad():
        without = model(ids).logits
    model.tower = nn.ModuleList([OtherMixer(5), nn.LSTM(4, 2), Shift()])
    for method, relevance in zip(methods, wanted, strict=True):
        assert torch.equal(method(model).attribute(ids, target=(-1, 3)), relevance)
    with knock_out(model, Edges(layers=0, sources=1)), torch.no_grad():
        assert torch.equal(model(ids).logits, without)


class Sideways(nn.Module):
    """Calls an unknown mixer past its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.last = Shift(), MeanMixer(), Shift()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mean.forward(self.first(x)))


class MeanMixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) + 0.5 * x


def test_no_unknown_mixer_is_overlooked_that_is_called_past_its_hooks() -> None:
    register_mixer(Shift, linearize_shift)
    model, x = Sideways().double(), torch.randn(2, 5, 4).double()
    with pytest.raises(InputError, match="mixed after layer 'first'"):
        ImplicitAttentionRollout(model).attribute(x, query="last")
    with torch.no_grad():
        for shift in (model.first, model.last):
            shift.gate.weight.zero_()  # so that the model is linear
    start = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(start)[:, -1, 2].sum(), start)
    assert torch.allclose(frozen_flow(model).attribute(x, (-1, 2)), gradient * x)


def test_parts_of_a_served_mixer_are_not_strangers() -> None:
    """What looks like a mixer inside or around a served one belongs to it."""
    register_mixer(Shift, linearize_shift)
    inner, around = Shift(), AroundMixer()
    inner.add_module("part", OtherMixer())
    around.add_module("core", Shift())
    for model, name in ((Net(inner), "mixers.0"), (Net(around), "mixers.0.core")):
        with torch.no_grad(), trace(model) as t:
            model.get_submodule(name)(torch.randn(1, 3, 4))
        assert [layer.name for layer in t.layers] == [name]


class Held(nn.Module):
    """A registered mixer that calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden)
        return out


def test_a_served_mixer_inside_another_counts_once() -> None:
    register_mixer(Shift, linearize_shift)
    register_mixer(Held, lambda module, call: linearize_shift(module.inner, call))
    shift, x = Shift(), torch.randn(2, 5, 4)
    plain, held = Net(shift, shift), Net(Held(shift), Held(shift))
    for method in (ImplicitAttentionRollout, LatimFlow):
        expected = method(plain).attribute(x, target=(-1, 2))
        torch.testing.assert_close(method(held).attribute(x, target=(-1, 2)), expected)
    with torch.no_grad(), trace(held) as t:
        held(x)
    assert [layer.name for layer in t.layers] == ["mixers.0", "mixers.1"]
