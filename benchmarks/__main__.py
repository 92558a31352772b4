"""Time, peak memory and error of every quantity against the length of the input.

    python -m benchmarks --out results
    python -m benchmarks --device cuda --out results
    python -m benchmarks --check benchmarks/baseline.json

The first prints the table and writes it as JSON, markdown and a picture, the second that of a GPU.
Sizes are those of a
130M model; ``f+b`` is one forward and backward pass of the same model with the repaired scan, with
respect to its embeddings or pixels.  The bound is the least arithmetic or traffic, in units that
are measured on this machine in the same run (see :mod:`benchmarks.calibration`); errors are against
float64.  Kinds of operator of which no package has a model for a CPU have random coefficients and
no ``f+b``.

The third measures a small case and fails if a cost, in those units, is twice the baseline's or
more.  ``--baseline FILE`` writes a new one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import kinds, models, regression
from benchmarks.calibration import Calibration, calibrate
from benchmarks.measure import Cost, measure, versions
from benchmarks.plot import draw
from benchmarks.quantities import Quantity, of_calls, of_operators, quantities
from benchmarks.report import markdown, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    families = [*models.FAMILIES, *kinds.KINDS]
    known = [*families, *models.LARGE]
    parser.add_argument("--families", nargs="+", choices=known, default=families)
    parser.add_argument("--lengths", type=int, nargs="+", default=[197, 512, 1024, 2048])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--calls", nargs="+", help="whole calls alone, and of them these")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="folder for speed.{json,md,png}")
    parser.add_argument("--check", type=Path, help="compare a small case with this baseline")
    parser.add_argument("--baseline", type=Path, help="write the small case here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # errors are those of float32
    if options.baseline is not None:
        regression.write(options.baseline, table)
        return
    if options.check is not None:
        raise SystemExit(bool(regression.check(options.check, table)))
    rows: list[dict[str, Any]] = []
    units = calibrate(options.device)
    dtype, sizes = getattr(torch, options.dtype), (options.lengths, options.layers)
    where = {"dtype": dtype, "device": options.device}
    for row in table(options.families, *sizes, units, calls=options.calls, **where):
        rows.append(row)
        print(markdown([row], header=len(rows) == 1), flush=True)
    if options.out is not None:
        facts = {
            "date": date.today().isoformat(),
            "layers": options.layers,
            "device": options.device,
            "dtype": options.dtype,
            **{f"seconds per {unit}": value for unit, value in asdict(units).items()},
            **versions("torch", "captum", "transformers", "captum_ssm"),
        }
        write(options.out, "speed", facts, rows)
        draw(rows, options.out / "speed.png")


def table(
    families: Sequence[str],
    lengths: Sequence[int],
    layers: int,
    units: Calibration,
    reference: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    calls: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows, as they are measured; without ``reference`` nothing long or in float64 is.

    Args:
        families: of models, or kinds of operators.
        lengths: of the inputs.
        layers: of the models.
        units: what costs are judged by.
        reference: see above. Default: True.
        dtype: of the models. Default: float32.
        device: where they are, and kinds of operators. Default: ``"cpu"``.
        calls: of the quantities only these whole calls. Default: None, all.
    """
    for family in families:
        if family in kinds.KINDS:
            for length in lengths:
                yield from _of_kind(family, length, layers, units, reference, device)
            continue
        if family == "Gated DeltaNet" and find_spec("fla") and not torch.cuda.is_available():
            print(f"{family} is left out: where fla is installed, its kernels need a GPU")
            continue
        model = models.build(family, layers).to(device, dtype)
        for length in [197] if family == "Vim-S" else lengths:
            x = models.example(family, length)
            x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
            yardstick = measure(lambda model=model, x=x: models.gradient(model, x), device=device)
            asked = (
                quantities(family, model, x)
                if calls is None
                else (each for each in of_calls(family, model, x) if each.name in calls)
            )
            for quantity in (Quantity("f+b", lambda: None), *asked):
                if quantity.long and not reference:
                    continue
                kept = quantity if reference else _alone(quantity)
                with torch.no_grad():
                    is_yardstick = quantity.name == "f+b"
                    cost = yardstick if is_yardstick else measure(quantity.call, device=device)
                    yield entry(family, length, kept, cost, yardstick, units, device)


def _of_kind(
    kind: str, length: int, layers: int, units: Calibration, reference: bool, device: str
) -> Iterator[dict[str, Any]]:
    """The rows of layers that no model stands for."""
    with torch.device(device):
        parts = kinds.layer(kind, length)
    for name, operator in parts.items():
        for quantity in of_operators(name, [operator] * layers):
            kept = quantity if reference else _alone(quantity)
            with torch.no_grad():
                cost = measure(quantity.call, device=device)
                yield entry(kind, length, kept, cost, None, units, device)


def _alone(quantity: Quantity) -> Quantity:
    """The same without what it is compared with."""
    return replace(quantity, precise=None, others={})


def entry(
    family: str,
    length: int,
    quantity: Quantity,
    cost: Cost,
    yardstick: Cost | None,
    units: Calibration,
    device: str,
) -> dict[str, Any]:
    least = None if quantity.work is None else quantity.layers * quantity.work.seconds(units)
    slower = {name: measure(call, 1, device).seconds for name, call in quantity.others.items()}
    return {
        "family": family,
        "L": length,
        "quantity": quantity.name,
        "seconds": cost.seconds,
        "of f+b": None if yardstick is None else cost.seconds / yardstick.seconds,
        "times its bound": None if least is None else cost.seconds / least,
        "textbook / it": _ratio(slower.get("textbook"), cost.seconds),
        "exponentials / it": _ratio(slower.get("exponentials"), cost.seconds),
        "peak MiB": cost.mebibytes,
        "error": None if quantity.precise is None else _error(cost.result, quantity.precise()),
    }


def _ratio(slow: float | None, fast: float) -> float | None:
    return None if slow is None else slow / fast


def _error(found: torch.Tensor, precise: torch.Tensor) -> float:
    return float((found.double() - precise).abs().max() / precise.abs().max())


if __name__ == "__main__":
    main()
