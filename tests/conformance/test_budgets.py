"""What calls ask of a GPU is what the table says, and grows with nothing that it need not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn
from zoo.adapters import ADAPTERS
from zoo.attention import attention_model

from benchmarks import budgets
from benchmarks.counts import Counts
from benchmarks.stand_in import StandIn
from captum_ssm import (
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)
from captum_ssm.tracing import find_mixers, verification
from tools import speed_page

pytest.importorskip("transformers")

TABLE: dict[str, Any] = json.loads(budgets.FILE.read_text(encoding="utf-8"))
FEW, MANY = map(str, budgets.LENGTHS)
FAMILIES = list(budgets.FAMILIES)
#: Calls that wait for a device once for all that they check.
CHECKED_TOGETHER = ("ImplicitAttentionRollout", "LatimFlow, frozen", "LatimFlow, centred")
#: How often a call may ask a device, beside the model itself; and wait for it at all, where it is
#: no method of vectors, which bring the places of a layer's tokens to the device.
WAITS, WAITS_AT_ALL = 4, 6
#: A call that is in no table, but held to waiting no more often.
LOGIT: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "LatimLogit": lambda model, ids: LatimLogit(model).attribute(ids, budgets.TARGET)
}
#: Others that are made on two devices.
MORE_CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "LatimLogit, projection": lambda model, ids: LatimLogit(model).attribute(
        ids, budgets.TARGET, mixing="projection"
    ),
    "LatimNorm": lambda model, ids: LatimNorm(model).attribute(ids, budgets.TARGET),
    "TransformerAttribution": lambda model, ids: TransformerAttribution(model).attribute(
        ids, budgets.TARGET
    ),
}
#: Calls that make vectors of all pairs of tokens.
OF_VECTORS = ("LatimLogit", "LatimALTI")
#: Kinds of mixers that put tokens in other orders, and some that are given masks.
REORDERING = (
    "vim",
    "vim, shared directions",
    "vmamba without gate",
    "caduceus of one strand",
    "mambapy vision",
    "vit",
    "mistral with attention",
    "recurrent_gemma",
)
#: The methods that are asked of them.
ASKED: list[Any] = [
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
]
#: Launches for 64 tokens and a layer at most; gradients of coefficients take a scan three times.
FOR_A_CHUNK = {"LatimFlow, centred": 80}
#: The same of what makes the vectors of all pairs of tokens, of which some queries are taken at a
#: time.
OF_PAIRS_FOR_A_CHUNK = 256
#: Calls made in half precision, and those that take gradients.
IN_HALF = ("ImplicitAttentionRollout", "MambaAttribution", "LatimFlow, centred")
WITH_GRADIENTS = ("MambaAttribution", "LatimFlow, centred")
#: Sums of logarithms of many tokens, in which errors would add up.
IN_DOUBLE = ("RWKV-4",)


def row(family: str, length: str, call: str) -> dict[str, float]:
    found: dict[str, float] = TABLE["families"][family][length][call]
    return found


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_table(family: str) -> None:
    """If they are fewer, ``python -m benchmarks.budgets`` writes the table anew."""
    found = budgets.of_family(family)
    assert {key: list(calls) for key, calls in found.items()} == {
        key: list(calls) for key, calls in TABLE["families"][family].items()
    }
    for length, calls in found.items():
        for call, counts in calls.items():
            wanted = row(family, length, call)
            assert not budgets.grown(counts, wanted), (family, length, call)
            assert not budgets.grown(wanted, counts), (family, length, call, "write it anew")


@pytest.mark.parametrize("name", ["launches", "synchronisations", "bytes"])
def test_a_twentieth_more_is_too_much(name: str) -> None:
    wanted = {"launches": 100.0, "synchronisations": 1.0, "bytes": 1e6, "flops": 1e6}
    assert budgets.grown({**wanted, name: 1.06 * wanted[name]}, wanted) == [name]
    assert not budgets.grown({**wanted, name: 1.04 * wanted[name]}, wanted)


def test_the_page_shows_the_table() -> None:
    page = (speed_page.DOCS / speed_page.PAGE).read_text(encoding="utf-8")
    assert speed_page.on_a_gpu(TABLE) in page


def test_time_is_of_work_and_of_launches() -> None:
    gpu = budgets.GPU("one", bandwidth=100.0, peak=10.0, launch=2.0)
    assert gpu.seconds({"bytes": 1000.0, "flops": 10.0, "launches": 3.0}) == 10 + 6
    assert gpu.seconds({"bytes": 10.0, "flops": 1000.0, "launches": 0.0}) == 100


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_is_waited_for_a_few_times(family: str) -> None:
    for length in (FEW, MANY):
        own = row(family, length, "f+b")
        for call in TABLE["families"][family][length]:
            found = row(family, length, call)
            assert questions(found) - questions(own) <= WAITS, (length, call)
            if call not in OF_VECTORS:
                more = found["synchronisations"] - own["synchronisations"]
                assert more <= WAITS_AT_ALL, (length, call)


def questions(found: budgets.Row) -> float:
    """How often a call waits for an answer of the device."""
    return found["synchronisations"] - found["uploads"]


def waits(make: Callable[[int], nn.Module], layers: int, call: str) -> tuple[float, float]:
    """How often a call asks the device, or waits for it at all, and the model itself."""
    found = budgets.counted(make(layers), 80, ("f+b", call))
    count = questions if call in OF_VECTORS else (lambda row: row["synchronisations"])
    return count(found[call]), count(found["f+b"])


@pytest.mark.parametrize(
    ("family", "call"),
    [
        *(("Mamba", call) for call in budgets.CALLS),
        # version 4 makes its masks by vmap, whose tensors the stand-in cannot place
        *(pytest.param("softmax", call, marks=pytest.mark.transformers5) for call in OF_VECTORS),
    ],
)
def test_more_layers_are_not_waited_for_more_often(
    family: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "CALLS", budgets.CALLS | LOGIT)
    few, own = waits(budgets.FAMILIES[family], 2, call)
    assert few <= own + WAITS_AT_ALL
    assert few == waits(budgets.FAMILIES[family], 4, call)[0]


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "falcon_h1"])
def test_nor_are_those_whose_attention_is_causal_by_itself(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor blocks that multiply what mixers return: of six, one wait for each would be too many."""
    monkeypatch.setattr(budgets, "CALLS", budgets.CALLS | LOGIT)

    def make(layers: int) -> nn.Module:
        sizes = {"vocab_size": budgets.VOCABULARY, "max_position_embeddings": 128}
        model: nn.Module = attention_model(family, num_hidden_layers=layers, **sizes)
        return model

    for call in ("LatimFlow, frozen", *OF_VECTORS):
        found, own = waits(make, 6, call)
        assert found <= own + WAITS, call


@pytest.mark.full
@pytest.mark.parametrize("kind", REORDERING)
def test_orders_of_tokens_are_known_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, mixers of several directions, and masks that the model has made."""
    case = ADAPTERS[kind](monkeypatch)
    target = 1 if case.inputs.dim() == 4 else budgets.TARGET
    with StandIn() as device:
        model, inputs = copy.deepcopy(case.model).to("cuda"), case.inputs.to("cuda")
        device.counts = Counts()
        model(inputs)
        own = device.counts.questions
        for method in ASKED:
            if method is LatimLogit and kind.startswith("vmamba"):
                continue  # it is refused
            device.counts = Counts()
            method(model).attribute(inputs, target)
            assert device.counts.questions <= own + WAITS, (method, device.counts.waits)


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_grow_with_chunks_at_most(family: str) -> None:
    chunks = (int(MANY) - int(FEW)) / 64
    for call in CHECKED_TOGETHER:
        more = row(family, MANY, call)["launches"] - row(family, FEW, call)["launches"]
        assert more <= FOR_A_CHUNK.get(call, 32) * budgets.LAYERS * chunks, call


def test_a_gated_delta_net_takes_no_launch_for_a_chunk() -> None:
    for call in CHECKED_TOGETHER:
        few, many = (row("Gated DeltaNet", length, call)["launches"] for length in (FEW, MANY))
        assert few == many, call


@pytest.mark.full
@pytest.mark.parametrize("family", ["Mamba", "RG-LRU"])
def test_pairs_of_tokens_take_no_launch_each(family: str) -> None:
    """Of those, and of tokens, there are four and two times as many."""
    (call,), lengths = budgets.OF_PAIRS, (128, 256)
    few, many = (
        budgets.counted(budgets.FAMILIES[family](budgets.LAYERS), length, (call,))[call]["launches"]
        for length in lengths
    )
    assert many - few <= OF_PAIRS_FOR_A_CHUNK * budgets.LAYERS * (lengths[1] - lengths[0]) / 64


@pytest.mark.full
@pytest.mark.parametrize("call", ["MambaAttribution", "LatimFlow, centred"])
def test_wide_models_take_no_more_launches(call: str) -> None:
    """Small parts, which stay in a processor's cache, would each be a few launches."""
    narrow, wide = (
        budgets.counted(budgets._mamba(width, 2), 512, (call,))[call]["launches"]
        for width in (32, 256)
    )
    assert wide <= 1.05 * narrow


def test_mamba_takes_few_launches() -> None:
    """A layer of those of a deep model, in which what a call takes once counts for little."""
    layers = budgets.LARGE[1]
    most = {"ImplicitAttentionRollout": 50, "LatimFlow, frozen": 120, "LatimFlow, centred": 150}
    for call, launches in most.items():
        assert TABLE["large"][call]["launches"] <= launches * layers, call


@pytest.mark.parametrize(
    ("call", "most"), [("ImplicitAttentionRollout", 1.2), ("LatimFlow, frozen", 1.5)]
)
def test_a_large_mamba_takes_little_more_than_a_pass(call: str, most: float) -> None:
    large = TABLE["large"]
    assert budgets.H100.seconds(large[call]) <= most * budgets.H100.seconds(large["f+b"])


# --- without float64 ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_without_float64(family: str) -> None:
    """What needs it is computed on the host, and nothing else is."""
    model = budgets.FAMILIES[family](budgets.LAYERS)
    ids = torch.arange(80)[None] % budgets.VOCABULARY
    for name, call in list(budgets.CALLS.items())[1:]:
        wanted = call(model, ids)
        with StandIn(counted=False, kind="mps") as device:
            found = call(model.to("mps"), ids.to("mps"))
            model.to("cpu")
        assert not device.lacking, name
        assert relative_error(found.cpu(), wanted) <= 1e-5, name


# --- half precision ------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    """Nothing is computed in float64, and no more than a layer's weights are copied at a time."""
    layers = 4
    model = budgets.FAMILIES[family](layers).to(dtype)
    single = 4 * sum(x.numel() for x in model.parameters())
    for call in IN_HALF:
        with StandIn() as device, budgets.fused(device):
            model.to("cuda")
            ids = torch.zeros(1, 20, dtype=torch.long, device="cuda")
            device.watch(model)
            device.counts = Counts()
            budgets.CALLS[call](model, ids)
        assert bool(device.counts.wide) == (family in IN_DOUBLE), call
        assert device.copied <= single / layers, call


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family: str, dtype: torch.dtype) -> None:
    """What is copied beside what the model's own run leaves in its graph is less than a layer."""
    layers = 4
    model, ids = budgets.FAMILIES[family](layers), torch.arange(20)[None]
    single = 4 * sum(x.numel() for x in model.parameters())
    own = 0
    for call in ("f+b", *IN_HALF):
        with StandIn() as device, budgets.fused(device):
            model.to("cuda")
            device.watch(model)
            device.counts = Counts()
            with torch.autocast("cuda", dtype=dtype):
                found = budgets.CALLS[call](model, ids.to("cuda"))
            model.to("cpu")
        if call == "f+b":
            own = device.copied
            assert 0 < own < single
            continue
        wanted = budgets.CALLS[call](model, ids)
        assert found.dtype == torch.float32
        assert relative_error(found, wanted) <= verification.TOLERANCES[dtype], call
        assert bool(device.counts.wide) == (family in IN_DOUBLE), call
        assert device.copied <= own + single / layers, call


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "by_blocks"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_brought_to_the_device_as_modules_run(
    family: str, dtype: torch.dtype, by_blocks: bool
) -> None:
    """Results are those of the host, and of the weights no more than two layers' are there at once.

    Methods that take gradients leave more of them in the graph, as a model's own backward run does.
    """
    accelerate = pytest.importorskip("accelerate")
    calls, ids = budgets.CALLS | LOGIT, torch.arange(20)[None]
    limit = 1e-5 if dtype == torch.float32 else verification.TOLERANCES[dtype]
    for call in (*IN_HALF, "LatimALTI", *LOGIT):
        wanted = calls[call](budgets.FAMILIES[family](4).to(dtype), ids)
        with StandIn() as device, budgets.fused(device):
            model = budgets.FAMILIES[family](4).to(dtype)
            device.watch(model)
            single = 4 * sum(x.numel() for x in model.parameters())
            classes = [type(x).__name__ for mixer in find_mixers(model) for x in mixer.blocks]
            accelerate.cpu_offload(
                model,
                execution_device=torch.device("cuda:0"),
                preload_module_classes=classes if by_blocks else None,
            )
            device.counts = Counts()
            found = calls[call](model, ids.to("cuda"))
            assert found.is_cuda and all(x.is_meta for x in find_weights(model)), call
        assert relative_error(found, wanted) <= limit, call
        # Mamba's vectors of pairs of tokens are of products of decays from each token to all
        in_double = family in IN_DOUBLE or (family == "Mamba" and call in OF_VECTORS)
        assert bool(device.counts.wide) == in_double, call
        if call not in WITH_GRADIENTS:
            assert device.copied <= single / 2, call


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_two_devices(family: str) -> None:
    """Results are those of one, and no operation has met tensors of both."""
    accelerate = pytest.importorskip("accelerate")
    calls, ids = budgets.CALLS | LOGIT | MORE_CALLS, torch.arange(20)[None]
    for call in list(calls)[1:]:
        wanted = calls[call](budgets.FAMILIES[family](4), ids)
        with StandIn() as device, budgets.fused(device):
            model = budgets.FAMILIES[family](4)
            accelerate.dispatch_model(model, over_two(model), main_device="cuda:0")
            assert {x.get_device() for x in find_weights(model)} == {0, 1}
            found = calls[call](model, ids.to("cuda"))
        assert relative_error(found, wanted) <= 1e-5, call


def over_two(model: nn.Module) -> dict[str, str]:
    """A map of devices: half of the blocks on the second, all else on the first."""
    modules = dict(model.named_modules())
    holders = {block for mixer in find_mixers(model) for block in mixer.blocks}
    blocks = [name for name, module in modules.items() if module in holders]
    found = {name: f"cuda:{2 * at // len(blocks)}" for at, name in enumerate(blocks)}
    for name, module in modules.items():
        if not any(f"{name}.".startswith(f"{block}.") for block in blocks):
            own = [name] if not list(module.children()) else []
            own += [] if own else [f"{name}.{x}" for x in (*module._parameters, *module._buffers)]
            found |= dict.fromkeys(own, "cuda:0")
    return found


def find_weights(model: nn.Module) -> list[Tensor]:
    """The weights of a model's mixers."""
    return [x for mixer in find_mixers(model) for x in mixer.module.parameters()]
