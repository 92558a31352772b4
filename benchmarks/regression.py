"""Costs of a small case against those of a baseline, in units of this machine.

A cost is processor time divided by that of a fixed mix of work, calibrated in the same process.  A
cost that seems too high is measured again before it counts: other processes can only add to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.bounds import Work
from benchmarks.calibration import Calibration, calibrate

#: A cost so many times the baseline's is a regression.
LIMIT = 2.0
LENGTH, LAYERS, ATTEMPTS = 256, 2, 4
#: The mix of work that is one unit of cost.
UNIT = Work(products=3e8, exponentials=1e7, steps=1e7, calls=3e3)

Table = Callable[..., Iterator[dict[str, Any]]]


def write(path: Path, table: Table) -> None:
    """Measure the small case twice and write each greater cost as the new baseline."""
    one, other = (_costs(table, list(models.FAMILIES)) for _ in range(2))
    costs = {name: max(cost, other[name]) for name, cost in one.items()}
    path.write_text(json.dumps(costs, indent=2, sort_keys=True) + "\n")


def check(path: Path, table: Table) -> int:
    """Print what each cost is of the baseline's; how many are regressions."""
    baseline: dict[str, float] = json.loads(path.read_text())
    families = list(models.FAMILIES)
    found: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        for name, cost in _costs(table, families).items():
            found[name] = min(cost, found.get(name, cost))
        slow = [name for name in found if found[name] >= LIMIT * baseline.get(name, 0)]
        families = [f for f in families if any(name.startswith(f"{f}: ") for name in slow)]
        if not families:
            break
    for name, cost in sorted(found.items()):
        if name not in baseline:
            print(f"{name}: not in the baseline; write it anew")
        else:
            verdict = " REGRESSION" if name in slow else ""
            print(f"{name}: {cost / baseline[name]:.2f} of the baseline{verdict}")
    for name in sorted(set(baseline) - set(found)):
        print(f"{name}: in the baseline, but was not measured")
    return len(slow)


def _costs(table: Table, families: list[str]) -> dict[str, float]:
    units: Calibration = calibrate()
    unit = UNIT.seconds(units)
    return {
        f"{row['family']}: {row['quantity']}": row["seconds"] / unit
        for row in table(families, [LENGTH], LAYERS, units, reference=False)
    }
