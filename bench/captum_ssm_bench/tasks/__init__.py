"""Tasks to judge attributions on: texts and images are drawn, so that right sources are known."""

from .answers import Accuracy, SwapCheck, answer_accuracy, swap_check
from .chains import CHAINS, ChainsTask
from .copying import LONG_COPIES, SHORT_COPIES, CopyingTask
from .linked import LinkedBatch, LinkedTask, LinkedText, Links, Targets
from .pairs import FEW_PAIRS, PAIRS, PairsTask
from .recall_task import RecallTask
from .retrieval import FREQUENT_WORD, ONE_PASSKEY, TWO_PASSKEYS, FrequentWordTask, PasskeyTask
from .scenes import SCENES, SceneBatch, SceneTask
from .translation import NUMBER_WORDS, TranslationTask

__all__ = [
    "CHAINS",
    "FEW_PAIRS",
    "FREQUENT_WORD",
    "LONG_COPIES",
    "NUMBER_WORDS",
    "ONE_PASSKEY",
    "PAIRS",
    "SCENES",
    "SHORT_COPIES",
    "TWO_PASSKEYS",
    "Accuracy",
    "ChainsTask",
    "CopyingTask",
    "FrequentWordTask",
    "LinkedBatch",
    "LinkedTask",
    "LinkedText",
    "Links",
    "PairsTask",
    "PasskeyTask",
    "RecallTask",
    "SceneBatch",
    "SceneTask",
    "SwapCheck",
    "Targets",
    "TranslationTask",
    "answer_accuracy",
    "swap_check",
]
