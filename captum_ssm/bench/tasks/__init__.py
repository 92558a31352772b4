"""Tasks to judge attributions on: texts and images are drawn, so that right sources are known."""

from .answers import Accuracy, SwapCheck, answer_accuracy, swap_check
from .chains import CHAINS, ChainsTask
from .copying import LONG_COPIES, SHORT_COPIES, CopyAccuracy, CopyBatch, CopyingTask, copy_accuracy
from .linked import LinkedBatch, LinkedTask, LinkedText, Links, Targets
from .motifs import MotifBatch, MotifTask
from .pairs import FEW_PAIRS, PAIRS, PairsTask
from .recall import Example, Fact, generate, parse_prompt, recall_vocabulary, with_value
from .recall_batch import Batch, accuracy, collate, predict
from .recall_task import RecallTask
from .retrieval import FREQUENT_WORD, ONE_PASSKEY, TWO_PASSKEYS, FrequentWordTask, PasskeyTask
from .scenes import SCENES, SceneBatch, SceneTask
from .translation import NUMBER_WORDS, TranslationTask, translated

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
    "Batch",
    "ChainsTask",
    "CopyAccuracy",
    "CopyBatch",
    "CopyingTask",
    "Example",
    "Fact",
    "FrequentWordTask",
    "LinkedBatch",
    "LinkedTask",
    "LinkedText",
    "Links",
    "MotifBatch",
    "MotifTask",
    "PairsTask",
    "PasskeyTask",
    "RecallTask",
    "SceneBatch",
    "SceneTask",
    "SwapCheck",
    "Targets",
    "TranslationTask",
    "accuracy",
    "answer_accuracy",
    "collate",
    "copy_accuracy",
    "generate",
    "parse_prompt",
    "predict",
    "recall_vocabulary",
    "swap_check",
    "translated",
    "with_value",
]
