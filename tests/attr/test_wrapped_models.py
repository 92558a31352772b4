"""Models with adapters, shared modules, checkpointing or compilation: the same explanations."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn
from zoo.architectures import ZOO, Case, explain, hook_count

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaLRP,
    TransformerAttribution,
    trace,
)
from captum_ssm.attr.catalogue import METHODS
from captum_ssm.errors import InputError
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

SAME = 1e-6


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ZOO[request.param](monkeypatch)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        yield
    torch._dynamo.reset()


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


# --- adapters ------------------------------------------------------------------------------------

#: mamba_ssm's fused Mamba reads every projection by its raw weight: adapters do nothing there.
ADAPTABLE = ("mamba", "vim", "mamba_ssm", "mamba2_ssm")


def adaptable(model: nn.Module) -> list[str]:
    raw = {"dt_proj", "dt_proj_b"}
    kind = type(find_mixers(model)[0].module)
    if kind.__module__.startswith("mamba_ssm"):
        raw |= {"out_proj"} if kind.__name__ == "Mamba2" else {"in_proj"}
    return [
        f"{mixer.name}.{name}"
        for mixer in find_mixers(model)
        for name, module in mixer.module.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in raw
    ]


@torch.no_grad()
def with_adapters(model: nn.Module, names: list[str], **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    model, targets = copy.deepcopy(model), adaptable(model)
    if hasattr(model, "config"):
        # peft refuses what the fused kernels of some families would pass over
        model.config.model_type = "plain"
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, **options)
    wrapped = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_magnitude" in name:
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
        elif "lora_" in name:
            parameter.copy_(0.3 * torch.randn_like(parameter))
    wrapped.set_adapter(names[-1])
    return wrapped.double().eval()


@pytest.mark.parametrize(
    ("case", "adapters"), [*((name, "two") for name in ADAPTABLE), ("mamba", "DoRA")],
    indirect=["case"],
)  # fmt: skip
def test_adapters_equal_the_merged_model(case: Case, adapters: str) -> None:
    case.model.double()
    if case.inputs.is_floating_point():
        case.inputs = case.inputs.double()
    names = ["first", "second"] if adapters == "two" else ["first"]
    wrapped = with_adapters(case.model, names, use_dora=adapters == "DoRA")
    merged = copy.deepcopy(wrapped).merge_and_unload()
    with torch.no_grad():
        wanted = logits(merged(case.inputs))
        assert relative_error(logits(wrapped(case.inputs)), wanted) <= SAME
    expected = explain(merged, case)
    assert expected.difference(explain(wrapped, case)) <= SAME
    assert explain(case.model, case).difference(expected) > 1e-2, "the adapters do nothing"


@pytest.mark.parametrize("case", ["mamba"], indirect=True)
def test_an_adapter_for_each_example_is_explained_or_refused(case: Case) -> None:
    names = ["first", "second"]
    wrapped = with_adapters(case.model, names)
    before, by_example = hook_count(wrapped), {"adapter_names": names}

    def chosen(x: Tensor) -> Tensor:
        return logits(wrapped(x, **by_example))

    refused = set()
    for entry in METHODS:
        method = entry.method
        try:
            found = method(chosen, model=wrapped).attribute(case.inputs[:2], **case.target)
        except InputError as error:
            assert "set_adapter" in str(error) and "please report" not in str(error)
            with pytest.raises(InputError, match="set_adapter"):
                unverified = {**case.target, "verify": False}
                method(chosen, model=wrapped).attribute(case.inputs[:2], **unverified)
            refused.add(method)
        else:
            for example, name in enumerate(names):
                wrapped.set_adapter(name)
                alone = case.inputs[example : example + 1]
                wanted = method(wrapped).attribute(alone, **case.target)
                assert relative_error(found[example], wanted[0]) <= SAME, method
        assert hook_count(wrapped) == before
    assert not refused & {LatimFlow, MambaLRP, ImplicitAttentionRollout}
    assert refused <= {LatimNorm, LatimLogit, LatimALTI, TransformerAttribution}


# --- gradient checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", ["jamba", "vit"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_gradient_checkpointing(case: Case, reentrant: bool) -> None:
    model = case.model
    expected = explain(model, case)
    model.requires_grad_(reentrant).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before, checkpoints = hook_count(model), checkpoint_functions(model)
    assert checkpoints and all(f.keywords["use_reentrant"] is reentrant for f in checkpoints)
    with trace(model, graph="all") as record:
        model(case.inputs)
    names = [layer.name for layer in record.layers]
    assert names == [mixer.name for mixer in find_mixers(model)], "layers are missing or double"
    # other kernels run where a graph is kept
    assert expected.difference(explain(model, case)) <= 3 * SAME
    assert hook_count(model) == before
    assert all(a is b for a, b in zip(checkpoint_functions(model), checkpoints, strict=True))
    copy.deepcopy(model)  # which a state with a graph forbids


def checkpoint_functions(model: nn.Module) -> list[Any]:
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    return [m._gradient_checkpointing_func for m in modules]


# --- compiled models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "how"),
    [("lfm2", "before a first call"), ("vim", "whole"), ("mamba", "by block")],
    indirect=["case"],
)
def test_compiled(case: Case, how: str, compiler: None) -> None:
    if case.inputs.dim() == 2:
        case.inputs = case.inputs[:, :4]  # loops over tokens are unrolled
    expected, compiled = explain(case.model, case), case.model
    if how == "by block":
        for mixer in find_mixers(case.model):
            for block in mixer.blocks:
                block.compile(backend="eager")
    else:
        backend = "eager" if how == "whole" else "aot_eager"
        compiled = torch.compile(case.model, backend=backend)
    if how != "before a first call":
        # some models do not compile, of which torch says so by asserts, too (LFM2 of transformers
        # 4); what ran before the failure must not matter
        with contextlib.suppress(RuntimeError, AssertionError), torch.no_grad():
            compiled(case.inputs)
    assert expected.difference(explain(compiled, case)) <= SAME
