"""Weights that are split between processes, as ``tp_plan`` of transformers splits them.

Each process holds rows or columns of a weight, and so some of the heads. A function in place of the
module's ``forward`` gathers or sums the results. Adapters read weights by name, and would average
over a part of the heads only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import InputError


def is_split(module: nn.Module) -> bool:
    """Return True if a plan of transformers splits the module itself, not its submodules.

    Some plans replace the ``forward`` of modules whose weights stay whole, and sum gradients there.
    """
    code: str = getattr(vars(module).get("forward"), "__module__", "")
    return code.startswith("transformers.distributed.")


def require_gathered(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise for a module whose split weights :func:`whole` does not gather.

    FSDP gathers weights by itself for the time of a call. Earlier versions of transformers split
    weights into plain tensors, and leave an attribute on the module.

    Args:
        model: the model.
        modules: some of its modules.

    Raises:
        InputError: naming the module.
    """
    by_fsdp = any(type(module).__name__.startswith("FSDP") for module in model.modules())
    for module in modules:
        known = by_fsdp or is_split(module) or not _parts(module)
        if not known or "_hf_tp_plan" in vars(module):
            name = next(name for name, each in model.named_modules() if each is module)
            raise InputError(
                f"Module {name!r}: its weights are split between processes in a way that is not "
                "supported, and no process has the whole module. Load the model with a newer "
                "transformers and tp_plan, or with device_map, which puts whole layers on devices."
            )


@contextmanager
def whole(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give split modules their whole weights and the ``forward`` of their class.

    The processes exchange their parts, so every process has to enter the ``with``.

    Args:
        modules: the modules; those that are not split stay as they are.
    """
    gathered = functools.cache(_gathered)  # a weight that modules share once
    with ExitStack() as stack:
        for module in filter(is_split, modules):
            attributes, weights = vars(module), module._parameters
            stack.callback(weights.update, dict(weights))
            stack.callback(attributes.update, forward=attributes.pop("forward"))
            weights.update({name: gathered(weight) for name, weight in weights.items()})
        yield


def least(number: int, modules: Iterable[nn.Module]) -> int:
    """Return the smallest of the processes' numbers; the number itself of an unsplit model.

    Decisions by each process's free memory would differ, and so would the calls in which the
    processes exchange weights.

    Args:
        number: the number of this process.
        modules: the modules of the model.
    """
    part: Any = next((x for m in filter(is_split, modules) for x in _parts(m)), None)
    if part is None:
        return number
    from torch.distributed.tensor import DTensor, Partial

    mesh, own = part.device_mesh, part.to_local().new_full((), number, dtype=torch.int64)
    return int(DTensor.from_local(own, mesh, [Partial("min")] * mesh.ndim).full_tensor())


def _parts(module: nn.Module) -> list[Any]:
    """Return the weights of a module itself of which each process has a part."""
    weights: Any = module._parameters.values()
    return [x for x in weights if not all(p.is_replicate() for p in getattr(x, "placements", ()))]


@torch.no_grad()
def _gathered(weight: Any) -> Any:
    """Return all of a weight that is a DTensor; any other weight as it is."""
    if not hasattr(weight, "full_tensor"):
        return weight
    return nn.Parameter(weight.full_tensor(), weight.requires_grad)
