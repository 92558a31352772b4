"""What a model's own run makes of it inside, for tests of what explains activations."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from zoo.architectures import Case
from zoo.networks import embedding

from captum_ssm import trace


def call(case: Case) -> Any:
    """The model's own run, without a cache."""
    takes_cache = "use_cache" in inspect.signature(case.model.forward).parameters
    return case.model(case.inputs, **({"use_cache": False} if takes_cache else {}))


def mixer_calls(case: Case) -> list[tuple[str, str | None]]:
    """The mixers in the order in which they run, each with the block around it."""
    with torch.no_grad(), trace(case.model, operators=False) as record:
        call(case)
    names = {module: name for name, module in case.model.named_modules()}
    found = [(layer.name, layer.call.block) for layer in record.layers]
    return [(name, None if block is None else names[block]) for name, block in found]


def blocks_of(case: Case) -> list[str]:
    """Of each kind of blocks that run once the first and the last."""
    calls, kinds = mixer_calls(case), dict[type, list[str]]()
    for mixer, block in calls:
        if block is not None and calls.count((mixer, block)) == 1:
            kinds.setdefault(type(case.model.get_submodule(block)), []).append(block)
    return [name for found in kinds.values() for name in dict.fromkeys((found[0], found[-1]))]


def own_activations(case: Case, layers: list[str]) -> dict[tuple[str, bool], list[Tensor]]:
    """What depends on the input of what modules return and, with True, of what they are given."""
    found: dict[tuple[str, bool], list[Tensor]] = {}

    def keep(key: tuple[str, bool], value: Any) -> None:
        assert key not in found
        live = _live(value)
        tokens = live[0].shape[:2]  # states of mixers have others
        found[key] = [x.detach().clone() for x in live if x.shape[:2] == tokens]

    def before(name: str) -> Any:
        return lambda module, args, kwargs: keep((name, True), [*args, *kwargs.values()])

    def after(name: str) -> Any:
        return lambda module, args, output: keep((name, False), output)

    flags = [(p, p.requires_grad) for p in case.model.parameters()]
    case.model.requires_grad_(False)
    modules, handles = dict(case.model.named_modules()), []
    for name in layers:
        enter = modules[name].register_forward_pre_hook(before(name), with_kwargs=True)
        handles += [enter, modules[name].register_forward_hook(after(name))]
    inputs = case.inputs
    if inputs.is_floating_point():
        case.inputs = inputs.clone().requires_grad_()
    else:
        handles.append(embedding(case.model).register_forward_hook(_begin))
    call(case)
    case.inputs = inputs
    for handle in handles:
        handle.remove()
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    return found


def _begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_()


def _live(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if not isinstance(value, list | tuple | dict):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [x for item in items for x in _live(item)]


def own(model: nn.Module, inputs: Tensor, layer: str, at_input: bool = False) -> Tensor:
    """The one tensor that a layer returns or is given."""
    (value,) = own_activations(Case(model, inputs), [layer])[layer, at_input]
    return value
