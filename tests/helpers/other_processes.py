"""What runs in other processes: new ones import it by this name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers.every_method import call


def explain(queue: Any, names: list[str], cases: list[tuple[nn.Module, Tensor, Any]]) -> None:
    """In another process: what every method says of every model, or the error."""
    torch.set_num_threads(1)
    try:
        queue.put([[x.numpy() for x in call(name, *case)] for case in cases for name in names])
    except BaseException as error:
        queue.put(repr(error))
