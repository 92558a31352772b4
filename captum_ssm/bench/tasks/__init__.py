"""Tasks to judge attributions on: generated ones with gold sources, and loaders of real data."""

from ...models.image_files import LabelledImage, SegmentedImage, load_image_folders
from ...models.vocabulary import WordVocabulary
from ..data.arc import ChoiceQuestion, load_arc
from ..data.gold_alignment import AlignedPair, load_gold_alignment
from ..data.imagenet_segmentation import load_imagenet_segmentation
from ..data.imdb import Review, load_imdb
from ..data.pascal_voc import VOC_CLASSES, VOC_IGNORED, load_pascal_voc
from ..data.ruler import LongPrompt, load_ruler
from ..data.valence import RatedText, load_lexicon, load_valence, text_words
from .answers import Accuracy, SwapCheck, answer_accuracy, swap_check
from .class_texts import CLASS_WORDS, CLS, TextReader, class_vocabulary
from .copying import LONG_COPIES, SHORT_COPIES, CopyAccuracy, CopyBatch, CopyingTask, copy_accuracy
from .linked import LinkedBatch, LinkedTask, LinkedText, Links, Targets
from .long_texts import FREQUENT_WORD, ONE_PASSKEY, TWO_PASSKEYS, FrequentWordTask, PasskeyTask
from .recall import Example, Fact, generate, parse_prompt, recall_vocabulary, with_value
from .recall_batch import Batch, accuracy, collate, predict
from .recall_task import RecallTask
from .scenes import SCENES, SceneBatch, SceneTask
from .translation import NUMBER_WORDS, TranslationTask, translated

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
