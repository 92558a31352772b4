"""Models whose weights are split between processes: new processes import this by its name."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

PROCESSES = 2


def explain(rank: int, queue: Any, store: Path, asked: list[tuple[Path, list[str]]]) -> None:
    """In one of the processes: how far methods are from those of the whole model, or the error.

    ``asked`` holds folders of saved models and names of methods. ``"without room"`` is a rollout
    for which one process has no memory to keep operators.
    """
    try:
        _begin(rank, store)
        queue.put([_errors(*each) for each in asked])
    except BaseException as error:
        queue.put(repr(error))
        raise


def _begin(rank: int, store: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    for package in ("fla", "mamba_ssm", "causal_conv1d"):  # their kernels need a GPU
        sys.modules[package] = None  # type: ignore[assignment]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    shared, timeout = dist.FileStore(str(store), PROCESSES), timedelta(seconds=30)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=PROCESSES, timeout=timeout)


def _errors(folder: Path, names: list[str]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    before = dict(split.named_parameters())
    found = {name: _error(name, whole, split) for name in names}
    after = dict(split.named_parameters())
    assert all(after[name] is before[name] for name in before), "weights were not put back"
    return found


def _error(name: str, whole: Any, split: Any) -> float:
    from oracles import relative_error

    from captum_ssm.tracing import record
    from helpers.every_method import call

    ids, target, free = torch.arange(3, 12)[None], (-1, 5), record.free_memory
    method = name
    if name == "without room":
        method = "ImplicitAttentionRollout"
        record.free_memory = lambda device: int(os.environ["RANK"]) << 30
    try:
        both = [call(method, model, ids, target) for model in (split, whole)]
    finally:
        record.free_memory = free
    return max(relative_error(x, y) for x, y in zip(*both, strict=True))
