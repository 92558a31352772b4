"""Weights that are split between processes, as ``tp_plan`` of transformers splits them.

Each process holds rows or columns of a weight, and with them some of the heads.  A function in the
place of the module's ``forward`` gathers or sums what the processes compute.  Adapters read weights
by name: a mean over the heads that they found would be one over a part of the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError


def is_split(module: nn.Module) -> bool:
    """Return whether weights of a module itself are split between processes.

    Args:
        module: the module; its submodules are not asked.
    """
    return any(map(_is_part, module._parameters.values()))


def require_gathered(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise for a module whose split weights :func:`whole` does not gather.

    FSDP gathers weights by itself for the time of a call.  Before version 5.21 transformers split
    weights into plain tensors, and only a name that it leaves on the module tells.

    Args:
        model: the model.
        modules: some of its modules.

    Raises:
        InputError: naming the module.
    """
    if any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        return
    for module in modules:
        if (is_split(module) and "forward" not in vars(module)) or hasattr(module, "_hf_tp_plan"):
            name = next(name for name, each in model.named_modules() if each is module)
            raise InputError(
                f"Module {name!r}: its weights are split between processes in a way that is not "
                "supported, and no process has the whole module. Load the model with tp_plan of "
                "transformers, or with device_map, which puts whole layers on devices."
            )


@contextmanager
def whole(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give split modules their whole weights and the ``forward`` of their class.

    The processes exchange their parts, so that every process has to enter the ``with``.

    Args:
        modules: the modules; those that are not split stay as they are.
    """
    with ExitStack() as stack:
        for module in modules:
            if is_split(module) and "forward" in vars(module):
                stack.callback(module._parameters.update, dict(module._parameters))
                stack.callback(vars(module).update, forward=vars(module).pop("forward"))
                for name, weight in module._parameters.items():
                    module._parameters[name] = _gathered(weight)
        yield


def least(number: int, modules: Iterable[nn.Module]) -> int:
    """Return the smallest of the processes' numbers; the number itself of an unsplit model.

    What depends on each process's free memory would differ between them, and so would the calls in
    which they exchange weights.

    Args:
        number: of this process.
        modules: of the model.
    """
    from torch.distributed.tensor import DTensor, Partial

    part: Any = next((x for m in modules for x in m._parameters.values() if _is_part(x)), None)
    if part is None:
        return number
    mesh, own = part.device_mesh, part.to_local().new_full((), number, dtype=torch.int64)
    return int(DTensor.from_local(own, mesh, [Partial("min")] * mesh.ndim).full_tensor())


def _is_part(weight: Tensor | None) -> bool:
    return any(not place.is_replicate() for place in getattr(weight, "placements", ()))


@torch.no_grad()
def _gathered(weight: Any) -> Any:
    """All of a weight; one that is no DTensor is returned itself."""
    if not hasattr(weight, "full_tensor"):
        return weight
    return nn.Parameter(weight.full_tensor(), weight.requires_grad)
