"""Experiments on trained models: how well explanations do, in tables."""

from .experiment import Cell, Column, Experiment, Subject
from .experiments import EXPERIMENTS
from .records import Key, Numbers, Records, Rows
from .runner import Plan, Processes, run
from .tables import Entry, Line, lines, write_tables
from .verdicts import Comparison, Outcome, Side, Verdict, verdicts

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
    "Outcome",
    "Plan",
    "Processes",
    "Records",
    "Rows",
    "Side",
    "Subject",
    "Verdict",
    "lines",
    "run",
    "verdicts",
    "write_tables",
]
