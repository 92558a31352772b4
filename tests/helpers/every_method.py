"""Every public method called on a model and an input, as functions that other processes find."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import architectures
from zoo.language import word_tokenizer

from captum_ssm import ImplicitAttention, LatimLogit, LatimNorm, SSMLLMAttribution, compare, report
from captum_ssm.attr import catalogue
from helpers.pages import read_page

#: The model, its input and the target in; what is found out.
Call = Callable[[nn.Module, Tensor, Any], list[Tensor]]

METHODS: list[Any] = [entry.method for entry in catalogue.METHODS]


def explained(method: Any, model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return [method(model).attribute(inputs, target=target)]


def matrices(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return ImplicitAttention(model).matrices(inputs)


def norms(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return LatimNorm(model).maps(inputs)


def compared(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return list(compare(model, METHODS, inputs, target=target).values())


def reported(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    """The page's markup, its facts but for numbers, and these; its folder holds it alone."""
    with TemporaryDirectory() as folder:
        try:
            path = report(model, inputs, target=target, path=Path(folder, "page.html"))
            markup = re.sub(
                rb'<script type="application/.*?</script>', b"", path.read_bytes(), flags=re.S
            )
            page = read_page(path)
        finally:
            assert {file.name for file in Path(folder).iterdir()} <= {"page.html"}
    facts = list(_leaves(page.facts))
    numbers = torch.tensor([x for x in facts if isinstance(x, float)], dtype=torch.float64)
    words = json.dumps([x for x in facts if not isinstance(x, float)]).encode()
    texts = [torch.tensor(list(text), dtype=torch.uint8) for text in (markup, words)]
    return [*texts, numbers]


def _leaves(facts: Any) -> Iterator[Any]:
    """What nested facts hold, in their order; names of fields as well."""
    if isinstance(facts, dict):
        for name, value in facts.items():
            yield name
            yield from _leaves(value)
    elif isinstance(facts, list):
        for value in facts:
            yield from _leaves(value)
    else:
        yield facts


def texts(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    explain = SSMLLMAttribution(LatimLogit(model), word_tokenizer())
    found = explain.attribute("anna owns the lamp . bob", target="owns the")
    return [found.seq_attr, found.token_attr]


#: By name, those that take texts alone apart.
CALLS: dict[str, Call] = {
    "matrices": matrices,
    "norms": norms,
    "compare": compared,
    "report": reported,
}
OF_TEXTS: dict[str, Call] = {"SSMLLMAttribution": texts}
NAMES = [*(method.__name__ for method in METHODS), *CALLS, *OF_TEXTS]

#: A Mamba, a hybrid with attention and experts, and a Vision Mamba.
MODELS = (architectures.mamba, architectures.jamba, architectures.vim)
#: Between them these change all that any method does to a model.
QUICK = {
    ("mamba", "LatimFlow"),
    ("mamba", "matrices"),
    ("jamba", "TransformerAttribution"),
    ("vim", "MambaAttribution"),
}
#: Every method on every model that it takes.
CASES = [
    pytest.param(
        make,
        name,
        id=f"{make.__name__}-{name}",
        marks=() if (make.__name__, name) in QUICK else pytest.mark.full,
    )
    for make in MODELS
    for name in NAMES
    if make is not architectures.vim or name not in OF_TEXTS
]


def call(name: str, model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    """What the method of a name finds, detached and on the CPU."""
    calls = CALLS | OF_TEXTS
    if name in calls:
        found = calls[name](model, inputs, target)
    else:
        (method,) = (m for m in METHODS if m.__name__ == name)
        found = explained(method, model, inputs, target)
    return [tensor.detach() for tensor in found]
