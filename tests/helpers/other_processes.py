"""What runs in other processes: new ones import it by this name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from zoo import architectures

from helpers.every_method import call


class Explained(Dataset[Tensor]):
    """Relevances, computed where they are asked for."""

    def __init__(self, name: str, case: architectures.Case) -> None:
        self.name, self.case = name, case

    def __len__(self) -> int:
        return len(self.case.inputs)

    def __getitem__(self, index: int) -> Tensor:
        target = self.case.target["target"]
        return call(self.name, self.case.model, self.case.inputs[index : index + 1], target)[0]


def explain(queue: Any, names: list[str], cases: list[tuple[nn.Module, Tensor, Any]]) -> None:
    """In another process: what every method says of every model, or the error."""
    torch.set_num_threads(1)
    try:
        queue.put([[x.numpy() for x in call(name, *case)] for case in cases for name in names])
    except BaseException as error:
        queue.put(repr(error))
