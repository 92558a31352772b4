"""``captum-ssm-bench evaluate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_ssm._names import known_as, meant
from captum_ssm.errors import OptionError

if TYPE_CHECKING:
    from ..harness.experiment import Cell, Experiment
    from ..harness.runner import Plan, Result
    from ..harness.tables import Line
    from ..papers import PaperTable

#: Examples of each model and seed with --quick.
QUICK = 4

_DESCRIPTION = """Measure explanations on trained models whose right answers are known, and write
tables.  Results are recorded example by example; the same command goes on where a run ended, and
under torchrun or accelerate launch several processes share the examples.
Example: captum-ssm-bench evaluate copying --methods LatimFlow MambaLRP --out results

To tell how much depends on the seed of the training, make models again and name them all:
  captum-ssm-bench train copying-mamba --seed 1 --out again
  captum-ssm-bench evaluate copying --models copying-mamba copying-mamba=again

The papers' own tables, on their data and weights, which are not part of the package:
  captum-ssm-bench evaluate --data imagenet-segmentation gtsegs_ijcv.mat --models vim=vim_s.pth"""


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "evaluate",
        help="measure explanations on trained models with known answers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="see --list")
    parser.add_argument("--all", action="store_true", help="all experiments")
    parser.add_argument(
        "--list", action="store_true", help="list experiments, methods and variants"
    )
    parser.add_argument("--methods", nargs="+", metavar="M", help="only these methods")
    parser.add_argument("--formulations", nargs="+", metavar="F", help="only these variants")
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME[=FOLDER]",
        help="only these models; of NAME=FOLDER the one that captum-ssm-bench train NAME wrote "
        "there; with --data your own weights, NAME=PATH",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        metavar=("NAME", "PATH"),
        help="measure the papers' table of this data, which lies there; see --list",
    )
    parser.add_argument(
        "--between",
        metavar="TEXT",
        help="what stands between a sentence and its translation, with --data alignment",
    )
    parser.add_argument(
        "--against",
        metavar="ROW",
        help="hold all others against this row, METHOD or 'METHOD, FORMULATION'",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the examples")
    parser.add_argument("--examples", type=int, help="of each model and seed; see --list")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} examples of each model")
    parser.add_argument(
        "--device-map",
        metavar="MAP",
        help="spread each model by accelerate: auto, balanced, sequential; or one device",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("captum-ssm-results"), help="folder for records and tables"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    import torch

    from .. import EXPERIMENTS, Processes
    from .. import run as measure
    from ..harness.runner import note_machine
    from ..harness.tables import as_text, write_tables

    if options.list:
        _list(EXPERIMENTS)
        _list_data()
        return
    table = _of_paper(options)
    plans = _plans(options, {table.name: table} if table is not None else EXPERIMENTS)
    processes = Processes.launched()
    torch.set_num_threads(1)  # threads change the order of sums, and with it the last digits
    for plan in plans:
        results = measure(plan, options.out, processes, _log if processes.index == 0 else None)
        if processes.index == 0:
            for experiment, shown, lines in _tables(plan, results, options.against):
                print(as_text(experiment, shown))
                for path in write_tables(experiment, lines, options.out):
                    print(path)
            if table is not None:
                print(_beside(table, results, options.out))
    if processes.index == 0:
        print(note_machine(options.out, processes.device))


def _tables(
    plan: Plan, results: Sequence[Result], against: str | None
) -> Iterator[tuple[Experiment, Sequence[Line], Sequence[Line]]]:
    """The tables of a plan: of which experiment, the lines to print, and all lines."""
    from ..harness.tables import gain_lines, group_lines, lines

    experiment = plan.experiment
    groups, models = group_lines(experiment, results), lines(experiment, results)
    yield experiment, groups or models, [*groups, *models]
    held = _row(against) or experiment.against
    if held is not None and held in plan.cells:
        gains, table = gain_lines(experiment, results, held)
        named = {line.model for line in groups or models}
        yield gains, [line for line in table if line.model in named], table


def _row(named: str | None) -> Cell | None:
    """A row as tables name it: a method, and a formulation behind a comma if it has one."""
    from .. import Cell

    method, _, formulation = (named or "").partition(", ")
    return Cell(method, formulation) if named else None


def _plans(options: argparse.Namespace, known: Mapping[str, Experiment]) -> list[Plan]:
    """What is to be measured of each experiment asked for; those that it leaves nothing of go."""
    from ..harness.runner import Plan
    from ..harness.subjects import asked

    plans = []
    for each in _experiments(options, known):
        chosen = each.chosen(options.methods, options.formulations)
        subjects = each.subjects() if options.data else asked(each, options.models)
        examples = options.examples or (QUICK if options.quick else each.examples)
        if chosen and subjects:
            plans.append(Plan(each, chosen, examples, options.seeds, subjects, options.device_map))
    if not plans:
        raise OptionError("No experiment has these methods, formulations and models together.")
    held = _row(options.against)
    if held is not None and not any(held in plan.cells for plan in plans):
        raise OptionError(
            f"--against {options.against!r}: none of the rows that are measured. --list names all; "
            "one that --methods or --formulations leaves out is not measured."
        )
    return plans


def _experiments(
    options: argparse.Namespace, known: Mapping[str, Experiment]
) -> Sequence[Experiment]:
    """The experiments asked for; raises for what none of them has."""
    names = list(known) if options.all or options.data else options.experiments
    if not names:
        raise OptionError(f"No experiment is named. Use --all or some of {', '.join(known)}.")
    found = [known[name] for name in _known("the experiments", names, known) or ()]
    cells = [cell for each in found for cell in each.cells()]
    methods, formulations = ([cell[part] for cell in cells] for part in range(2))
    options.methods = _known("--methods", options.methods, methods)
    options.formulations = _known("--formulations", options.formulations, formulations)
    models = [subject.name for each in found for subject in each.subjects()]
    for number, each in enumerate(options.models or ()):
        name, *where = each.partition("=")
        (name,) = _known("--models", [name], models) or [name]
        options.models[number] = "".join([name, *where])
    if options.examples is not None and options.examples < 1:
        raise OptionError(f"--examples {options.examples}: use 1 or more.")
    return found


def _of_paper(options: argparse.Namespace) -> PaperTable | None:
    """The published table that --data asks for."""
    if not options.data:
        if options.between is not None:
            raise OptionError("--between is for --data alignment.")
        return None
    from ..papers import PAPER_TABLES, Alignment

    if options.experiments or options.all:
        raise OptionError(
            "--data names what is measured: leave out "
            f"{'--all' if options.all else ', '.join(options.experiments)}."
        )
    name, *paths = options.data
    _known("--data", [name], PAPER_TABLES)
    models = {}
    for each in options.models or ():
        label, _, path = each.partition("=")
        if not label or not path or label in models:
            raise OptionError(
                f"--models {each}: with --data each model is NAME=PATH, with a name of its own."
            )
        models[label] = path
    table = PAPER_TABLES[name](paths, models)
    if options.between is not None:
        if not isinstance(table, Alignment):
            raise OptionError("--between is for --data alignment.")
        table.between = options.between
    return table


def _beside(table: PaperTable, results: Sequence[Result], out: Path) -> str:
    """The papers' figures beside those measured, which are written, too."""
    from captum_ssm._files import write_whole

    from ..harness.tables import lines
    from ..papers import beside

    text = beside(table, lines(table, results))
    place = out / f"{table.name}-beside.md"
    write_whole(place, f"{text}\n")
    return f"{text}\n{place}"


def _list_data() -> None:
    from ..papers import PAPER_TABLES

    for name, table in PAPER_TABLES.items():
        print(f"--data {name} {' '.join(f'<{each}>' for each in table.files)}: {table.sources}")


def _known(what: str, asked: Sequence[str] | None, known: Iterable[str]) -> list[str] | None:
    """The names that are asked for as they are spelled; None for those of all."""
    names = dict.fromkeys(known)
    found = []
    for each in asked or ():
        name = known_as(each, names)
        if name is None:
            accepted = ", ".join(filter(None, names))
            raise OptionError(
                f"{what}: {each!r} is not known.{meant(each, names)} Use some of {accepted}."
            )
        found.append(name)
    return None if asked is None else found


def _list(experiments: dict[str, Any]) -> None:
    for name, experiment in experiments.items():
        print(f"{name}: {experiment.title}; {experiment.examples} examples")
        print(f"  models: {', '.join(subject.name for subject in experiment.subjects())}")
        variants: dict[str, list[str]] = {}
        for cell in experiment.cells():
            variants.setdefault(cell.method, []).append(cell.formulation)
        for method, known in variants.items():
            print(f"  {method}: {'; '.join(filter(None, known))}" if any(known) else f"  {method}")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
