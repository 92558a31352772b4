"""The papers' tables on the data and weights that they are of, which users have and we do not."""

from .images import ImagenetSegmentation
from .table import PaperTable, beside
from .texts import Alignment, ArcQuestions, RulerTasks

#: By the name that ``captum-ssm-bench evaluate --data`` knows the data by.
PAPER_TABLES: dict[str, type[PaperTable]] = {
    each.name: each for each in (ImagenetSegmentation, ArcQuestions, Alignment, RulerTasks)
}

__all__ = ["PAPER_TABLES", "Alignment", "PaperTable", "beside"]
