"""Tasks to judge attributions on: generated ones with gold sources, and loaders of real data."""

from captum_ssm.tasks.answers import Accuracy, SwapCheck, answer_accuracy, swap_check
from captum_ssm.tasks.arc import ChoiceQuestion, load_arc
from captum_ssm.tasks.copying import (
    LONG_COPIES,
    SHORT_COPIES,
    CopyAccuracy,
    CopyBatch,
    CopyingTask,
    copy_accuracy,
)
from captum_ssm.tasks.gold_alignment import AlignedPair, load_gold_alignment
from captum_ssm.tasks.image_folders import load_image_folders
from captum_ssm.tasks.imagenet_segmentation import load_imagenet_segmentation
from captum_ssm.tasks.images import LabelledImage, SegmentedImage
from captum_ssm.tasks.imdb import Review, load_imdb
from captum_ssm.tasks.linked import LinkedBatch, LinkedTask, LinkedText, Links, Targets
from captum_ssm.tasks.pascal_voc import VOC_CLASSES, VOC_IGNORED, load_pascal_voc
from captum_ssm.tasks.recall import (
    Example,
    Fact,
    generate,
    parse_prompt,
    recall_vocabulary,
    with_value,
)
from captum_ssm.tasks.recall_batch import Batch, accuracy, collate, predict
from captum_ssm.tasks.recall_task import RecallTask
from captum_ssm.tasks.retrieval import (
    FREQUENT_WORD,
    ONE_PASSKEY,
    TWO_PASSKEYS,
    FrequentWordTask,
    PasskeyTask,
)
from captum_ssm.tasks.ruler import LongPrompt, load_ruler
from captum_ssm.tasks.scenes import SCENES, SceneBatch, SceneTask
from captum_ssm.tasks.text_classes import CLASS_WORDS, CLS, TextReader, class_vocabulary
from captum_ssm.tasks.translation import NUMBER_WORDS, TranslationTask, translated
from captum_ssm.tasks.valence import RatedText, load_lexicon, load_valence, text_words
from captum_ssm.tasks.vocabulary import WordVocabulary

__all__ = [
    "CLASS_WORDS",
    "CLS",
    "FREQUENT_WORD",
    "LONG_COPIES",
    "NUMBER_WORDS",
    "ONE_PASSKEY",
    "SCENES",
    "SHORT_COPIES",
    "TWO_PASSKEYS",
    "VOC_CLASSES",
    "VOC_IGNORED",
    "Accuracy",
    "AlignedPair",
    "Batch",
    "ChoiceQuestion",
    "CopyAccuracy",
    "CopyBatch",
    "CopyingTask",
    "Example",
    "Fact",
    "FrequentWordTask",
    "LabelledImage",
    "LinkedBatch",
    "LinkedTask",
    "LinkedText",
    "Links",
    "LongPrompt",
    "PasskeyTask",
    "RatedText",
    "RecallTask",
    "Review",
    "SceneBatch",
    "SceneTask",
    "SegmentedImage",
    "SwapCheck",
    "Targets",
    "TextReader",
    "TranslationTask",
    "WordVocabulary",
    "accuracy",
    "answer_accuracy",
    "class_vocabulary",
    "collate",
    "copy_accuracy",
    "generate",
    "load_arc",
    "load_gold_alignment",
    "load_image_folders",
    "load_imagenet_segmentation",
    "load_imdb",
    "load_lexicon",
    "load_pascal_voc",
    "load_ruler",
    "load_valence",
    "parse_prompt",
    "predict",
    "recall_vocabulary",
    "swap_check",
    "text_words",
    "translated",
    "with_value",
]
