"""What a run of a model may not change: the model, and the state of the process."""

from __future__ import annotations

import random
import sys
from contextvars import copy_context
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from captum_ssm.tracing import eager
from captum_ssm.tracing.repair import loops

HOOKS = [
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_state_dict_hooks",
]  # fmt: skip


def hooks(model: nn.Module) -> dict[tuple[str, str], dict[int, Any]]:
    """Every hook of every module, by module and kind."""
    return {
        (name, kind): dict(getattr(module, kind))
        for name, module in model.named_modules(remove_duplicate=False)
        for kind in HOOKS
    }


class Snapshot:
    """All that a run of the model may not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hooks = hooks(model)
        self.training = [m.training for m in model.modules()]
        self.grad_enabled = torch.is_grad_enabled()
        self.random = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
        self.tensors = {n: t.detach().clone() for n, t in self._tensors().items()}
        self.versions = {n: t._version for n, t in self._tensors().items()}
        self.flags = {n: p.requires_grad for n, p in model.named_parameters()}
        self.attributes = [sorted(vars(m)) for m in model.modules()]

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        gradients = {f"{n}.grad": p.grad for n, p in self.model.named_parameters()}
        return named | {n: g for n, g in gradients.items() if g is not None}

    def check(self, random_numbers: bool = True) -> None:
        assert hooks(self.model) == self.hooks
        assert [m.training for m in self.model.modules()] == self.training
        assert torch.is_grad_enabled() == self.grad_enabled
        if random_numbers:
            assert torch.equal(torch.get_rng_state(), self.random[0])
            assert random.getstate() == self.random[1]
            assert repr(np.random.get_state()) == self.random[2]
        assert {n: p.requires_grad for n, p in self.model.named_parameters()} == self.flags
        assert [sorted(vars(m)) for m in self.model.modules()] == self.attributes
        now = self._tensors()
        assert now.keys() == self.tensors.keys(), "a gradient came or went"
        for name, tensor in now.items():
            assert torch.equal(tensor, self.tensors[name]), name
            assert tensor._version == self.versions[name], f"{name} was written to"


def context() -> dict[str, Any]:
    """What the package has set for this thread."""
    return {
        variable.name: value
        for variable, value in copy_context().items()
        if variable.name.startswith("captum_ssm") and value is not None
    }


def process_state(model: nn.Module) -> dict[str, Any]:
    """What torch, the package and the packages that the model is of have set for the process."""
    tiny = torch.full((), torch.finfo(torch.float32).tiny)
    backends = torch.backends
    return {
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "flushes denormals": not tiny.mul_(0.5).item(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "matmul": (torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32),
        "attention": (backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": _len_torch_dispatch_stack(),
        "functions seen": torch._C._is_torch_function_enabled(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "users": [(x._users, x._undo) for x in (eager._switch, loops._repairs)],
        "context": context(),
        "functions": _functions(model),
        "configuration": str(getattr(model, "config", None)),
    }


def _functions(model: nn.Module) -> dict[tuple[str, str], int]:
    """Everything that can be called in what torch and the model's packages could be patched at."""
    holders = {"torch": torch, "functional": F, "Tensor": torch.Tensor, "Module": nn.Module}
    names = {type(module).__module__ for module in model.modules()}
    names |= {name for name, _, _ in loops._REPAIRS}
    holders |= {name: sys.modules[name] for name in names if name in sys.modules}
    return {
        (where, name): id(value)
        for where, holder in holders.items()
        for name, value in vars(holder).items()
        if callable(value)
    }
