"""The models that ship with the package, and others trained by the same recipes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from captum_ssm.errors import DataNotFoundError, OptionError
from captum_ssm.models.folders import WEIGHTS

from ..bundled import load_bundled, weights_of
from .experiment import Experiment, Subject

#: Characters of a fingerprint that tell trainings of one recipe apart.
_SHORT = 8


def bundled(name: str) -> Subject:
    """A model that ships with the package."""
    return Subject(name, partial(_load, name, None), _fingerprint(weights_of(name)))


def retrained(name: str, folder: str | Path) -> Subject:
    """A model that ``captum-ssm-bench train`` has made by the recipe of a bundled one."""
    weights = Path(folder) / WEIGHTS
    if not weights.is_file():
        raise DataNotFoundError(
            f"{name}={folder}: there is no {WEIGHTS} in this folder. Make one with "
            f"captum-ssm-bench train {name} --seed 1 --out {folder}."
        )
    fingerprint = _fingerprint(weights)
    return Subject(name, partial(_load, name, Path(folder)), fingerprint, fingerprint[:_SHORT])


def asked(experiment: Experiment, models: Sequence[str] | None) -> list[Subject]:
    """The models that are asked for by ``NAME``, or ``NAME=FOLDER`` of one that was trained again.

    All of the experiment's own if None; none, if it has none of them.
    """
    known = {subject.name: subject for subject in experiment.subjects()}
    if models is None:
        return list(known.values())
    found = []
    for name, _, folder in (each.partition("=") for each in models):
        if name in known:
            found.append(retrained(name, folder) if folder else known[name])
    return _distinct(found)


def _distinct(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects; raises if two are the same, which would count examples twice."""
    seen: set[tuple[str, str]] = set()
    for subject in subjects:
        if (subject.name, subject.fingerprint) in seen:
            raise OptionError(
                f"models: the same weights of {subject.name!r} are named twice. Name each model "
                "once, trained with a seed of its own."
            )
        seen.add((subject.name, subject.fingerprint))
    return list(subjects)


def _load(name: str, folder: Path | None, device: torch.device) -> nn.Module:
    return load_bundled(name, folder)[0].to(device)


def _fingerprint(weights: Path) -> str:
    return hashlib.sha256(weights.read_bytes()).hexdigest()
