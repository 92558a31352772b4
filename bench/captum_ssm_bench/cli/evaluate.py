"""``captum-ssm-bench evaluate``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_ssm._names import find_name, suggest
from captum_ssm.errors import OptionError

if TYPE_CHECKING:
    from ..harness.experiment import Cell, Experiment
    from ..harness.runner import Plan, Result

#: Examples of each model and seed with --quick.
QUICK = 4

_DESCRIPTION = """Measure explanations on trained models whose right answers are known, and write
tables.  Results are recorded example by example; the same command goes on where a run ended.
Example: captum-ssm-bench evaluate copying --methods LatimFlow MambaLRP --out results"""


def add_to(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "evaluate",
        help="measure explanations on trained models with known answers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("experiments", nargs="*", metavar="EXPERIMENT", help="see --list")
    add("--all", action="store_true", help="all experiments")
    add("--list", action="store_true", help="list experiments, methods and variants")
    add("--methods", nargs="+", metavar="M", help="only these methods")
    add("--formulations", nargs="+", metavar="F", help="only these variants")
    add("--models", nargs="+", metavar="NAME", help="only these models")
    against = "hold all others against this row, METHOD or 'METHOD, FORMULATION'"
    add("--against", metavar="ROW", help=against)
    add("--seeds", nargs="+", type=int, default=[0], help="of the examples")
    add("--examples", type=int, help="of each model and seed; see --list")
    add("--quick", action="store_true", help=f"{QUICK} examples of each model")
    out = "folder for records and tables"
    add("--out", type=Path, default=Path("captum-ssm-results"), help=out)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    import torch

    from .. import EXPERIMENTS
    from .. import run as measure
    from ..harness.runner import note_machine

    if options.list:
        _list(EXPERIMENTS)
        return
    plans = _plans(options, EXPERIMENTS)
    torch.set_num_threads(1)  # threads change the order of sums, and with it the last digits
    for plan in plans:
        _show(plan, measure(plan, options.out, progress=True), options)
    print(note_machine(options.out))


def _show(plan: Plan, results: Sequence[Result], options: argparse.Namespace) -> None:
    """Print the tables of a plan: the groups of models if it has any; and write all of them."""
    from ..harness.tables import as_text, gain_lines, group_lines, lines, write_table

    experiment = plan.experiment
    groups, models = group_lines(experiment, results), lines(experiment, results)
    tables = [(experiment, groups or models, [*groups, *models])]
    held = _row(options.against) or experiment.against
    if held is not None and held in plan.cells:
        gains, table = gain_lines(experiment, results, held)
        named = {line.model for line in groups or models}
        tables.append((gains, [line for line in table if line.model in named], table))
    for each, shown, written in tables:
        print(as_text(each, shown))
        print(write_table(each, written, options.out))


def _row(named: str | None) -> Cell | None:
    """A row as tables name it: a method, and a formulation behind a comma if it has one."""
    from .. import Cell

    method, _, formulation = (named or "").partition(", ")
    return Cell(method, formulation) if named else None


def _plans(options: argparse.Namespace, known: Mapping[str, Experiment]) -> list[Plan]:
    """What is to be measured of each experiment asked for; those that it leaves nothing of go."""
    from ..harness.runner import Plan

    plans = []
    for each in _experiments(options, known):
        chosen = each.chosen(options.methods, options.formulations)
        models = options.models
        subjects = [own for own in each.subjects() if models is None or own.name in models]
        examples = options.examples or (QUICK if options.quick else each.examples)
        if chosen and subjects:
            plans.append(Plan(each, chosen, examples, options.seeds, subjects))
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
    names = list(known) if options.all else options.experiments
    if not names:
        raise OptionError(f"No experiment is named. Use --all or some of {', '.join(known)}.")
    found = [known[name] for name in _known("the experiments", names, known) or ()]
    cells = [cell for each in found for cell in each.cells()]
    methods, formulations = ([cell[part] for cell in cells] for part in range(2))
    options.methods = _known("--methods", options.methods, methods)
    options.formulations = _known("--formulations", options.formulations, formulations)
    models = [subject.name for each in found for subject in each.subjects()]
    options.models = _known("--models", options.models, models)
    if options.examples is not None and options.examples < 1:
        raise OptionError(f"--examples {options.examples}: use 1 or more.")
    return found


def _known(what: str, asked: Sequence[str] | None, known: Iterable[str]) -> list[str] | None:
    """The names that are asked for as they are spelled; None for those of all."""
    names = dict.fromkeys(known)
    found = []
    for each in asked or ():
        name = find_name(each, names)
        if name is None:
            accepted = ", ".join(filter(None, names))
            raise OptionError(
                f"{what}: {each!r} is not known.{suggest(each, names)} Use some of {accepted}."
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
