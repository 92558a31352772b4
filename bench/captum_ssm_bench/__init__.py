"""Experiments on trained models: how well explanations do, in tables."""

from .bundled import load_bundled
from .experiments.every_experiment import EXPERIMENTS
from .harness.experiment import Cell, Column, Experiment, Subject
from .harness.records import Key, Numbers, Records, Rows
from .harness.runner import Plan, run
from .harness.tables import Entry, Line, Side, lines, write_table

__all__ = [
    "EXPERIMENTS",
    "Cell",
    "Column",
    "Entry",
    "Experiment",
    "Key",
    "Line",
    "Numbers",
    "Plan",
    "Records",
    "Rows",
    "Side",
    "Subject",
    "lines",
    "load_bundled",
    "run",
    "write_table",
]
