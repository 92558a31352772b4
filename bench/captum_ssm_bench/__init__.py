"""Experiments on trained models: how well explanations do, in tables."""

from .bundled import load_bundled
from .experiments.every_experiment import EXPERIMENTS
from .harness.experiment import Cell, Column, Experiment, Subject
from .harness.records import Key, Numbers, Records, Rows
from .harness.runner import Plan, Processes, run
from .harness.tables import Entry, Line, Side, lines, write_tables
from .harness.verdicts import Comparison, Verdict, verdicts

__all__ = [
    "EXPERIMENTS",
    "Cell",
    "Column",
    "Comparison",
    "Entry",
    "Experiment",
    "Key",
    "Line",
    "Numbers",
    "Plan",
    "Processes",
    "Records",
    "Rows",
    "Side",
    "Subject",
    "Verdict",
    "lines",
    "load_bundled",
    "run",
    "verdicts",
    "write_tables",
]
