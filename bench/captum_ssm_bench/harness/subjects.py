"""The models that ship with the package, as subjects of experiments."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from ..bundled import load_bundled, weights_of
from .experiment import Subject


def bundled(name: str) -> Subject:
    """A model that ships with the package."""

    def load(device: torch.device) -> nn.Module:
        return load_bundled(name)[0].to(device)

    return Subject(name, load, hashlib.sha256(weights_of(name).read_bytes()).hexdigest())
