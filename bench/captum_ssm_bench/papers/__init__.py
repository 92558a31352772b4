"""The papers' tables on the data and weights that they are of, which users have and we do not."""

from .images import ImagenetRemoval, ImagenetSegmentation, PascalVoc
from .table import PaperTable, beside
from .texts import Alignment, Amplify, ArcQuestions, ImdbReviews, RulerTasks

#: By the name that ``captum-ssm-bench evaluate --data`` knows the data by.
PAPER_TABLES: dict[str, type[PaperTable]] = {
    each.name: each
    for each in (
        ImagenetSegmentation,
        ImagenetRemoval,
        PascalVoc,
        ArcQuestions,
        ImdbReviews,
        Alignment,
        RulerTasks,
        Amplify,
    )
}

__all__ = ["PAPER_TABLES", "Alignment", "PaperTable", "beside"]
