"""Every public method called on a model and an input, as functions that other processes find."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn
from zoo import architectures
from zoo.language import word_tokenizer

from captum_ssm import (
    EdgeEffects,
    Edges,
    ImplicitAttention,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    LayerLatimFlow,
    SSMLLMAttribution,
    StateMemory,
    attribution_graph,
    compare,
    knock_out,
    report,
)
from captum_ssm.attr import catalogue
from captum_ssm.tracing import find_mixers
from captum_ssm.tracing.replays import Replays
from helpers.marks import slow_but
from helpers.pages import read_page

#: The model, its input and the target in; what is found out.
Call = Callable[[nn.Module, Tensor, Any], list[Tensor]]

METHODS: list[Any] = [entry.method for entry in catalogue.METHODS]
#: Those that ask for the row of a token, whatever the output is.
OF_QUERIES = [m for m in METHODS if "query" in inspect.signature(m.attribute).parameters]


def named(methods: list[Any], quick: Collection[Any] | None = None) -> pytest.MarkDecorator:
    """A case for each of some methods, of which all are quick or these alone."""
    cases = methods if quick is None else slow_but(quick, methods)
    return pytest.mark.parametrize("method", cases, ids=lambda method: method.__name__)


each_method, each_of_queries = named(METHODS), named(OF_QUERIES)


def explained(method: Any, model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return [method(model).attribute(inputs, target=target)]


def matrices(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return ImplicitAttention(model).matrices(inputs)


def norms(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return LatimNorm(model).maps(inputs)


def compared(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return list(compare(model, inputs, METHODS, target=target).values())


def reported(model: nn.Module, inputs: Tensor, target: Any, **options: Any) -> list[Tensor]:
    """The page's markup, its facts but for numbers, and these; its folder holds it alone."""
    with TemporaryDirectory() as folder:
        try:
            path = report(model, inputs, target=target, path=Path(folder, "page.html"), **options)
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


# --- by other rules, on single messages, and inside the model -------------------------------------


def roles(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    found = LatimFlow(model).decompose(inputs, target, rule="centered")
    assert found.roles is not None
    return [found.tokens, torch.stack([*found.roles.values()])]  # some are small beside the others


def effects(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    found = EdgeEffects(model).attribute(inputs, target)
    return [found.matrix(layer) for layer in range(len(found.layers))]


def cut(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    with knock_out(model, Edges(sources=[0], targets=slice(1, None))), torch.no_grad():
        found = model(inputs)
    return [getattr(found, "logits", found)]


def at_a_layer(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    layer = LayerLatimFlow(model, find_mixers(model)[-1].module)
    found = layer.attribute(inputs, target, attribute_to_layer_input=True)
    return [*found] if isinstance(found, tuple) else [found]  # of each of several inputs


def memory(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    return [layer.held(-1) for layer in StateMemory(model).of(inputs)]


def graph(model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    nodes = [mixer.name for mixer in find_mixers(model)]
    return [attribution_graph(model, inputs[:1], target, nodes=nodes, top=4, keep=None).edges]


#: By name, what is no method of tokens.
INSIDE: dict[str, Call] = {
    "roles": roles, "effects": effects, "cut": cut, "layer": at_a_layer, "memory": memory,
    "graph": graph,
}  # fmt: skip

#: By name, those that take texts alone apart.
CALLS: dict[str, Call] = {
    "matrices": matrices, "norms": norms, "compare": compared, "report": reported,
}  # fmt: skip
OF_TEXTS: dict[str, Call] = {"SSMLLMAttribution": texts}
NAMES = [*(method.__name__ for method in METHODS), *CALLS, *OF_TEXTS]

#: A Mamba, a hybrid with attention and experts, and a Vision Mamba.
MODELS = (architectures.mamba, architectures.jamba, architectures.vim)
#: A few methods on a few models, which between them change all that any method does to a model.
FEW = [
    (architectures.jamba, "TransformerAttribution"),
    (architectures.mamba, "LatimFlow"),
    (architectures.mamba, "matrices"),
    (architectures.vim, "MambaAttribution"),
]


def call(name: str, model: nn.Module, inputs: Tensor, target: Any) -> list[Tensor]:
    """What the method of a name finds, detached and on the CPU."""
    calls = CALLS | OF_TEXTS | INSIDE
    if name in calls:
        found = calls[name](model, inputs, target)
    else:
        (method,) = (m for m in METHODS if m.__name__ == name)
        found = explained(method, model, inputs, target)
    return [tensor.detach() for tensor in found]


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether results of two runs differ by rounding at most."""
    return all(
        torch.equal(a, b) or relative_error(a, b) <= 1e-5
        for a, b in zip(found, wanted, strict=True)
    )


def call_all(queue: Any, names: list[str], cases: list[tuple[nn.Module, Tensor, Any]]) -> None:
    """In another process: what every method finds in every model, or the error."""
    torch.set_num_threads(1)
    try:
        queue.put([[x.numpy() for x in call(name, *case)] for case in cases for name in names])
    except BaseException as error:
        queue.put(repr(error))


@contextmanager
def without_replays(runs: list[Any]) -> Iterator[None]:
    """Take off a list what replays of a run add to it, as hooks on the model do."""
    own = Replays.run

    def run(self: Replays, *args: Any, **kwargs: Any) -> Any:
        before = len(runs)
        found = own(self, *args, **kwargs)
        del runs[before:]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replays, "run", run)
        yield
