"""Gather weights that transformers' ``tp_plan`` has split between processes.

Each process has some rows or columns of a weight, and so only some of the heads. transformers
replaces the module's ``forward`` by a function that gathers or sums the results. Adapters read the
weights by name, and would average over only these heads.
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
    """Return True if a transformers plan has replaced the module's own ``forward``.

    The weights may still be whole: some plans replace ``forward`` only to sum gradients.
    """
    code: str = getattr(vars(module).get("forward"), "__module__", "")
    return code.startswith("transformers.distributed.")


def require_gathered(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise for a module whose split weights :func:`gathered_weights` does not gather.

    FSDP gathers weights by itself for the time of a call. Earlier versions of transformers split
    weights into plain tensors, and leave an attribute on the module.

    Raises:
        InputError: naming the first such module.
    """
    for module in modules:
        is_known = is_split(module) or not _split_weights(module)
        is_known = is_known or any(map(_is_of_fsdp, model.modules()))
        if not is_known or "_hf_tp_plan" in vars(module):  # of earlier versions
            name = next(name for name, other in model.named_modules() if other is module)
            raise InputError(
                f"Module {name!r}: its weights are split between processes in a way that is not "
                "supported, and no process has the whole module. Load the model with a newer "
                "transformers and tp_plan, or with device_map, which puts whole layers on devices."
            )


def _is_of_fsdp(module: nn.Module) -> bool:
    return type(module).__name__.startswith("FSDP")


@contextmanager
def gathered_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give split modules complete weights and the class's ``forward``, inside the ``with``.

    The processes exchange their parts of the weights, so every process must enter the ``with``.
    Modules that are not split stay unchanged.
    """
    gathered = functools.cache(_gathered)  # a weight that modules share once
    with ExitStack() as stack:
        for module in filter(is_split, modules):
            attributes, weights = vars(module), module._parameters
            stack.callback(weights.update, dict(weights))
            stack.callback(attributes.update, forward=attributes.pop("forward"))
            weights.update({name: gathered(weight) for name, weight in weights.items()})
        yield


def smallest_of_processes(number: int, modules: Iterable[nn.Module]) -> int:
    """Return the smallest ``number`` of all processes, or ``number`` if the model is not split.

    Every process must call this function. Decided by its own free memory, one process might ask for
    weights that the others do not send, and would wait forever.
    """
    weights: Any = (x for m in filter(is_split, modules) for x in _split_weights(m))
    weight = next(weights, None)
    if weight is None:
        return number
    from torch.distributed.tensor import DTensor, Partial

    mesh, own = weight.device_mesh, weight.to_local().new_full((), number, dtype=torch.int64)
    return int(DTensor.from_local(own, mesh, [Partial("min")] * mesh.ndim).full_tensor())


def _split_weights(module: nn.Module) -> list[Any]:
    """Return the module's own weights that are divided between processes (DTensors)."""
    weights: Any = module._parameters.values()
    return [x for x in weights if not all(p.is_replicate() for p in getattr(x, "placements", ()))]


@torch.no_grad()
def _gathered(weight: Any) -> Any:
    """Return the complete weight of a DTensor; return any other weight unchanged."""
    if not hasattr(weight, "full_tensor"):
        return weight
    return nn.Parameter(weight.full_tensor(), weight.requires_grad)
