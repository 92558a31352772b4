"""Running experiments: over examples, and again from where a run ended."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from captum_ssm import __version__
from captum_ssm._files import write_whole
from captum_ssm.errors import InputError

from .experiment import Cell, Experiment, Subject
from .records import Key, Records, Rows

#: Packages that results follow from.
_PACKAGES = ("torch", "captum", "transformers", "numpy")

Result = tuple[Key, Rows]


@dataclass(frozen=True)
class Plan:
    """What a run is to measure.

    Attributes:
        experiment: the experiment.
        cells: the rows of its table.
        examples: how many examples of each model and seed.
        seeds: of the examples. Default: 0 alone.
        subjects: the models. Default: None, those of the experiment.
    """

    experiment: Experiment
    cells: Sequence[Cell]
    examples: int
    seeds: Sequence[int] = (0,)
    subjects: Sequence[Subject] | None = None

    @property
    def models(self) -> Sequence[Subject]:
        """The models to explain."""
        return self.experiment.subjects() if self.subjects is None else self.subjects

    def key(self, subject: Subject, cell: Cell, seed: int, index: int) -> Key:
        """The key that one result is recorded under."""
        return Key(self.experiment.name, subject.name, *cell, seed, index)


def run(plan: Plan, folder: str | Path, progress: bool = False) -> list[Result]:
    """Measure what is not recorded yet, and return all results of the plan.

    Args:
        plan: what to measure.
        folder: where results are recorded; a run that was ended goes on from them.
        progress: whether a bar says how far the run is. Default: False.

    Returns:
        Results of the plan, each a key and its rows, sorted by key.

    Raises:
        InputError: when the folder holds results of other weights under the same names, or a line
            that is not a result.
    """
    experiment, place = plan.experiment, Path(folder) / plan.experiment.name
    records = Records(place)
    _check_weights(place / "weights.json", plan)
    found = dict(records)
    asked = [
        (subject, seed, index, {plan.key(subject, cell, seed, index): cell for cell in plan.cells})
        for subject in plan.models
        for seed in plan.seeds
        for index in range(plan.examples)
    ]
    missing = [each for each in asked if each[3].keys() - found.keys()]
    loaded, model = "", torch.nn.Module()
    for subject, seed, index, cells in tqdm(missing, experiment.name, disable=not progress):
        if loaded != subject.name:
            loaded, model = subject.name, subject.load(_device())
        example = experiment.example(subject, index, seed)
        with experiment.together():
            for key, cell in cells.items():
                if key not in found:
                    found[key] = experiment.measure(model, example, cell)
                    records.append(key, found[key])
    return [(key, found[key]) for key in sorted(key for each in asked for key in each[3])]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_weights(path: Path, plan: Plan) -> None:
    """Note the weights of the plan's models; raise if the folder holds results of others."""
    wanted = {each.name: each.fingerprint for each in plan.models}
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    changed = [name for name in wanted if noted.get(name, wanted[name]) != wanted[name]]
    if changed:
        raise InputError(
            f"{path} says that the results of {changed[0]!r} beside it are of other weights "
            "than those to be explained now. Use another folder, or delete this one."
        )
    write_whole(path, json.dumps(noted | wanted, indent=2, sort_keys=True) + "\n")


def note_machine(folder: Path) -> Path:
    """Write day, versions and kind of machine beside the results, without names of places."""
    device = _device()
    said = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "captum_ssm": __version__,
        "Python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    path = folder / "machine.json"
    write_whole(path, json.dumps(said, indent=2) + "\n")
    return path
