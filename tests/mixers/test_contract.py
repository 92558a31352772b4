"""Every kind of mixer under the whole contract of adapters, on one build of a model each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, get_args

import pytest
import torch
from helpers.contract import PADDING
from oracles import relative_error
from torch import Tensor, nn
from zoo import timm_cpu
from zoo.adapters import ADAPTERS, WITH_ROUTERS
from zoo.architectures import Case, language, pictures
from zoo.language import word_tokenizer
from zoo.mamba import randomise
from zoo.vision_language import TOWERS

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    MambaAttribution,
    SSMLLMAttribution,
    trace,
)
from captum_ssm.errors import CachedStateError, CaptumSSMError, InputError
from captum_ssm.mixers import Architecture, supported_architectures
from captum_ssm.mixers.likeness import PARTS, parts_of
from captum_ssm.mixers.registry import adapter_for, class_path
from captum_ssm.mixers.table import BUILT_IN, TRANSFORMERS_4, Ability
from captum_ssm.testing.adapters import CLAUSES, check_adapter

#: What kinds do not keep: clauses, and how the contract says so.
NO_MASK = dict.fromkeys(PADDING, "the mixer returns no mask")
SHIFTED = {"left padding": "in a batch and by themselves"}  # positions are counted from the left
#: What bfloat16 rounds is not all computed in float32 by the adapter.
ROUNDED = {"bfloat16": "off by"}
REFUSES: dict[str, dict[str, str]] = {
    "recurrent_gemma": NO_MASK,
    "rwkv": NO_MASK,
    "minimax": ROUNDED,  # products of its decays are kept in buffers
    "xlstm blocks": ROUNDED,
    "hyenadna": ROUNDED,
    "striped hyena": ROUNDED | {"offload": "output of the offloaded model"},
    # The model itself does not run in bfloat16.
    "xlstm large": {"bfloat16": "same dtype"},
    "mambapy": {"bfloat16": "same dtype"},
    "mambapy jamba": {"bfloat16": "same dtype"},
    "mambapy vision": {"bfloat16": "same dtype"},
    "mambapy jamba with norms": {"bfloat16": "same dtype"},
    "deeptab": {"bfloat16": "scalar type Float"},
    "deeptab, both directions": {"bfloat16": "scalar type Float"},
    # An operator refers to the mixer's own parameters.
    "vmamba without gate": {"copy and pickle": "weights are shared"},
    "vmamba with gate": {"copy and pickle": "weights are shared"},
    # The function in its convolution's place takes no seq_idx.
    "fla LogLinearMamba2": {
        "left padding": "in a batch and by themselves",
        "checkpointing": "seq_idx",
    },
    # Its n-grams are looked up by hashes of tokens.
    "qwen4_exp with n-grams": {"knock-out": "not found there"},
    "mamba_ssm_fused": {"LoRA": "changes no mixer's output"},
    "torch": {"LoRA": "no mixer has a linear layer"},  # of its own class, which holds the weights
    "fla PaTHAttention": dict.fromkeys(PADDING, "TypeError"),  # of its kernel, given a mask
    "caduceus of one strand": {"LoRA": "off by"},
    "caduceus of both strands": {"LoRA": "off by", "offload": "meta tensor"},
    "mambavision": dict.fromkeys(("layers", "neurons"), "do not come first"),  # windows do
    "bert with attention": SHIFTED,
    "gpt2 with attention": SHIFTED | {"LoRA": "no mixer has a linear layer"},
}

#: What plain pytest runs: one of transformers, one that keeps a state, one of images.
QUICK = ("mamba", "vim")


class Decoder(nn.Module):
    """A language model of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 8), nn.Linear(8, 19)
        layer = nn.TransformerEncoderLayer(8, 2, 10, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).triu(1)
        return self.head(self.layers(self.embed(input_ids), later, is_causal=True))


def of_torch(_: pytest.MonkeyPatch) -> Case:
    return language(randomise(Decoder()))


def timm(_: pytest.MonkeyPatch) -> Case:
    transformer = timm_cpu.timm().models.vision_transformer.VisionTransformer
    small = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    return pictures(randomise(transformer(img_size=12, **small)), (12, 12))


def mambavision(patch: pytest.MonkeyPatch) -> Case:
    timm_cpu.timm()
    package = timm_cpu.mambavision(patch)
    small = {"dim": 4, "in_dim": 6, "depths": [1, 1, 3, 2], "num_heads": [1, 1, 2, 4]}
    model = package.mamba_vision_T(window_size=[8, 8, 3, 3], num_classes=5, **small)
    return pictures(model.eval(), (96, 96))


#: Models whose mixers are those of another one here.
ALIKE = (
    *("falcon_h1 without a norm", "vim, no cls", "vim, two cls"),
    *("qwen3_5_moe with attention", "zamba2"),
)
KNOWN = {**ADAPTERS, **TOWERS, "torch": of_torch}
CASES = {**KNOWN, "timm": timm, "mambavision": mambavision}
OUTSIDE = {"timm": pytest.mark.timm, "mambavision": pytest.mark.timm}
every = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else OUTSIDE.get(name, pytest.mark.slow))
        for name in CASES
        if name not in ALIKE
    ],
)


def refusals(name: str, case: Case) -> dict[str, str]:
    """Those of the kind, and of whatever takes no mask or knows no checkpoints."""
    found = dict(REFUSES.get(name, {}))
    if "attention_mask" not in signature(case.model.forward).parameters:
        found |= dict.fromkeys(PADDING, "takes no attention_mask")
    if not getattr(case.model, "supports_gradient_checkpointing", False):
        found["checkpointing"] = "not supported by the model"
    lengths = case.inputs.dim() < 4
    return {clause: why for clause, why in found.items() if lengths or clause not in PADDING}


@every
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name](monkeypatch)
    clauses = [each for each in CLAUSES if name not in WITH_ROUTERS or each not in INSIDE]
    if name in TOWERS:  # patches of an image, whose number is not free
        clauses = ["float32"]
    else:
        refuses_states(case)
    check_adapter(lambda: case.model, case.inputs, None, refusals(name, case), clauses)
    rows = rows_of(case.model).values()
    for ability, explain in EXPLAINS.items():
        if any(ability in row.lacks for row in rows):
            # those that read no text fail by themselves
            own = (RuntimeError, ValueError) if ability == "generated text" else ()
            with pytest.raises((CaptumSSMError, *own)):
                explain(case)
        elif ability != "generated text" or not is_alone(case):
            explain(case)


#: Arguments that carry a state, or the bounds of packed sequences.
STATES = (
    *("cache", "cache_params", "conv_state", "inference_params", "layer_past"),
    *("past_key_values", "slstm_state", "state"),
)
PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "seqlen")


def refuses_states(case: Case) -> None:
    """By name and by position, whichever argument of a mixer's forward they are."""
    with torch.no_grad(), trace(case.model, operators=False) as record:
        case.model(case.inputs, **without_cache(case.model))
    for layer in {type(x.mixer.module): x for x in record.layers}.values():
        module, call, given = layer.mixer.module, layer.call, torch.zeros(1)
        names = list(signature(module.forward).parameters)
        for place, name in enumerate(names):
            if name not in (*STATES, *PACKED):
                continue
            ahead = tuple(call.argument(other, i) for i, other in enumerate(names[:place]))
            behind = {k: v for k, v in call.kwargs.items() if k not in names[: place + 1]}
            for args, kwargs in (
                (call.args[:place], {**call.kwargs, name: given}),
                ((*ahead, given), behind),
            ):
                error = CachedStateError if name in STATES else InputError
                with pytest.raises(error, match=name):
                    layer.mixer.linearize(module, replace(call, args=args, kwargs=kwargs))


def without_cache(model: Any) -> dict[str, bool]:
    takes = "use_cache" in signature(model.forward).parameters
    return {"use_cache": False} if takes else {}


#: Clauses on activations, of which blocks with routers return several.
INSIDE = ("layers", "neurons", "heads")


def rows_of(model: Any) -> dict[str, Architecture]:
    found = (adapter_for(module) for module in model.modules())
    return {each[0].class_path: each[0] for each in found if each is not None}


def is_alone(case: Case) -> bool:
    return adapter_for(case.model) is not None


def target_of(case: Case) -> Any:
    scored = case.inputs.dim() == 4 or "Classification" in type(case.model).__name__
    return 1 if scored else (-1, 3)


def folded(case: Case) -> None:
    for matrices in ImplicitAttention(case.model).matrices(case.inputs):
        assert bool(matrices.isfinite().all() and matrices.any())
    rolled = ImplicitAttentionRollout(case.model).attribute(case.inputs)
    weighted = MambaAttribution(case.model).attribute(case.inputs, target_of(case))
    assert bool(rolled.isfinite().all() and rolled.any())
    assert bool(weighted.isfinite().all())  # nothing where the stream ends in a LayerNorm


def generated(case: Case) -> None:
    """Two tokens behind an example, as the model writes them, are decomposed like any target."""
    explain = SSMLLMAttribution(LatimFlow(case.model), word_tokenizer())
    if case.inputs.is_floating_point():
        explain.attribute([1, 2, 3], target=[4, 5])
    prompt, text = case.inputs[0], case.inputs[0]
    for _ in range(2):
        with torch.no_grad():
            logits = case.model(text[None], **without_cache(case.model))
        text = torch.cat([text, getattr(logits, "logits", logits)[0, -1:].argmax(-1)])
    found = explain.attribute(prompt.tolist(), target=text[-2:].tolist())
    own = LatimFlow(case.model).attribute(text[None, :-1], (-1, int(text[-1])), per_token=True)
    assert relative_error(found.token_attr[1], own[0, : len(prompt)]) <= 1e-5


#: That LatimFlow explains a model is a clause of the contract.
EXPLAINS: dict[Ability, Callable[[Case], None]] = {
    "fold methods": folded,
    "generated text": generated,
}


@pytest.mark.slow
def test_every_row_is_known_by_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a row does not lack, by one none of whose other rows lacks it either.

    Parts of every class that is proposed for them are those of instances.
    """
    shown: dict[str, set[Ability | str]] = {}
    parts = set()
    for make in KNOWN.values():
        case = make(monkeypatch)
        rows = rows_of(case.model)
        has = {x for x in get_args(Ability) if not any(x in row.lacks for row in rows.values())}
        for path in rows:
            shown.setdefault(path, set()).update(has | ({"alone"} if is_alone(case) else {"whole"}))
        for module in case.model.modules():
            if adapter_for(module) is not None:
                parts.add((parts_of(module), class_path(type(module))))
    for row in supported_architectures():
        if row.package in ("timm", "mambavision") or row.tested_version == TRANSFORMERS_4:
            continue  # which need an environment of their own
        if "images" in row.lacks.get("fold methods", ""):
            continue  # towers: tests/models/test_vision_language.py runs them beside their texts
        assert row.class_path in shown, row.class_path
        assert ("whole" not in shown[row.class_path]) == row.alone, row.class_path
        assert set(get_args(Ability)) - set(row.lacks) <= shown[row.class_path], row.class_path
    for row, names in PARTS.items():
        for name in names.split():
            outside = name in ("Attention", "MambaVisionMixer")
            known = {path for own, path in parts if own == set(row.split())}
            assert outside or any(f".{path}".endswith(f".{name}") for path in known), (row, name)


def test_reasons_are_given_for_what_a_row_can_lack() -> None:
    for line in BUILT_IN:
        assert set(line.lacks) <= set(get_args(Ability)) and all(line.lacks.values()), line
