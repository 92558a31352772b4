"""Running experiments: over examples, in several processes, and again from where a run ended."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from captum_ssm import __version__
from captum_ssm._files import write_whole
from captum_ssm.errors import InputError, OptionError

from .experiment import Cell, Experiment, Subject, file_name
from .placing import placed
from .records import Key, Records, Rows

#: Seconds between two looks at the records of other processes.
_WAIT = 0.2
#: Packages that results follow from.
_PACKAGES = ("torch", "captum", "transformers", "numpy")

Result = tuple[Key, Rows]


@dataclass(frozen=True)
class Processes:
    """This process among those that share the work.

    Attributes:
        index: from 0. Default: 0.
        count: how many there are. Default: 1.
        local: index among those of this machine, which picks the GPU. Default: 0.
    """

    index: int = 0
    count: int = 1
    local: int = 0

    @classmethod
    def launched(cls) -> Processes:
        """As ``accelerate launch`` or ``torchrun`` started them; else one alone.

        Returns:
            What ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` in the environment say.

        Raises:
            OptionError: when ``RANK`` is not below ``WORLD_SIZE``.
        """
        index, count, local = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        if not 0 <= index < count:
            raise OptionError(f"RANK={index} must be at least 0 and below WORLD_SIZE={count}.")
        return cls(index, count, local)

    @property
    def device(self) -> torch.device:
        """A GPU of this process's own where there are some, else the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local % torch.cuda.device_count())


@dataclass(frozen=True)
class Plan:
    """What a run is to measure.

    Attributes:
        experiment: the experiment.
        cells: the rows of its table.
        examples: how many examples of each model and seed.
        seeds: of the examples. Default: 0 alone.
        subjects: the models. Default: None, those of the experiment.
        device_map: how accelerate spreads each model; see :func:`.placed`. Default: None, each
            process has the whole model on its own device.
    """

    experiment: Experiment
    cells: Sequence[Cell]
    examples: int
    seeds: Sequence[int] = (0,)
    subjects: Sequence[Subject] | None = None
    device_map: str | None = None

    @property
    def models(self) -> Sequence[Subject]:
        """The models to explain."""
        return self.experiment.subjects() if self.subjects is None else self.subjects

    def key(self, subject: Subject, cell: Cell, seed: int, index: int) -> Key:
        """The key that one result is recorded under."""
        return Key(self.experiment.name, subject.label, *cell, seed, index)

    def keys(self) -> set[Key]:
        """The keys of all results of the plan."""
        return {
            self.key(subject, cell, seed, index)
            for subject in self.models
            for cell in self.cells
            for seed in self.seeds
            for index in range(self.examples)
        }


def run(
    plan: Plan,
    folder: str | Path,
    processes: Processes | None = None,
    log: Callable[[str], None] | None = None,
) -> list[Result]:
    """Measure what is not recorded yet, and return all results of the plan.

    Every process measures the examples whose index is its own modulo their number, one at a time,
    so that no result depends on how many there are.

    Args:
        plan: what to measure.
        folder: where results are recorded; a run that was ended goes on from them.
        processes: this process among others. Default: None, as the environment says.
        log: takes lines of progress. Default: None, silent.

    Returns:
        Results of the plan, each a key and its rows, sorted by key: to the first process all of
        them, for which it waits; to others those that are recorded so far.

    Raises:
        InputError: when the folder holds results of other weights under the same names, or a line
            that is not a result.
        OptionError: when no folder can be named after the experiment.
    """
    processes = Processes.launched() if processes is None else processes
    experiment = plan.experiment
    records = Records(Path(folder) / file_name(experiment), processes.index)
    _check_weights(records.folder / "weights.json", plan, processes)
    recorded = {key for key, _ in records}
    mine = [
        (subject, seed, index, missing)
        for subject in plan.models
        for seed in plan.seeds
        for index in range(processes.index, plan.examples, processes.count)
        if (missing := [c for c in plan.cells if plan.key(subject, c, seed, index) not in recorded])
    ]
    progress = _Progress(experiment.name, len(mine), log)
    model: tuple[str, torch.nn.Module] | None = None
    for subject, seed, index, cells in mine:
        if model is None or model[0] != subject.label:
            model = subject.label, _loaded(subject, plan.device_map, processes.device)
        example = experiment.example(subject, index, seed)
        with experiment.together():
            for cell in cells:
                rows = experiment.measure(model[1], example, cell)
                records.append(plan.key(subject, cell, seed, index), rows)
        progress.step()
    return _gathered(plan, records, processes, log)


def _loaded(subject: Subject, device_map: str | None, device: torch.device) -> torch.nn.Module:
    if device_map is None:
        return subject.load(device)
    return placed(subject.load(torch.device("cpu")), device_map)


def _check_weights(path: Path, plan: Plan, processes: Processes) -> None:
    """Note the weights of the plan's models; raise if the folder holds results of others."""
    wanted = {each.label: each.fingerprint for each in plan.models}
    while True:
        noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        changed = [name for name in wanted if noted.get(name, wanted[name]) != wanted[name]]
        if changed:
            raise InputError(
                f"{path} says that the results of {changed[0]!r} beside it are of other weights "
                "than those to be explained now. Use another folder, or delete this one."
            )
        if wanted.keys() <= noted.keys():
            return
        if processes.index == 0:
            write_whole(path, json.dumps(noted | wanted, indent=2, sort_keys=True) + "\n")
        else:
            time.sleep(_WAIT)


def _gathered(
    plan: Plan, records: Records, processes: Processes, log: Callable[[str], None] | None
) -> list[Result]:
    """The results of all processes; the first process waits for those of the others."""
    asked = plan.keys()
    found = [result for result in records if result[0] in asked]
    if processes.index == 0 and len(found) < len(asked) and log is not None:
        log(f"{plan.experiment.name}: waiting for other processes")
    while processes.index == 0 and len(found) < len(asked):
        time.sleep(_WAIT)
        found = [result for result in records if result[0] in asked]
    return found


class _Progress:
    """Lines that say how far a run is and how long it will take."""

    def __init__(self, name: str, total: int, log: Callable[[str], None] | None) -> None:
        self._name, self._total, self._log = name, total, log
        self._done, self._start, self._last = 0, time.monotonic(), time.monotonic()

    def step(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._log is None or (now - self._last < 5 and self._done < self._total):
            return
        self._last = now
        left = (now - self._start) / self._done * (self._total - self._done)
        self._log(f"{self._name}: {self._done}/{self._total} examples, {left:.0f} s left")


def note_machine(folder: Path, device: torch.device) -> Path:
    """Write day, versions and kind of machine beside the results, without names of places."""
    said = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "captum_ssm": __version__,
        "Python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    path = folder / "machine.json"
    write_whole(path, json.dumps(said, indent=2) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
