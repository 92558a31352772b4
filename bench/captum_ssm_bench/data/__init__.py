"""Published data, read from files that others have laid out; nothing is downloaded."""

from .arc import ChoiceQuestion, load_arc
from .big_bench import load_big_bench, load_choices
from .gold_alignment import AlignedPair, load_gold_alignment
from .imagenet_segmentation import load_imagenet_segmentation
from .imdb import Review, load_imdb
from .iwslt17 import load_iwslt17
from .labelled_images import LabelledImage, SegmentedImage, load_image_folders
from .pascal_voc import VOC_CLASSES, VOC_IGNORED, load_pascal_voc
from .ruler import LongPrompt, load_ruler
from .valence import RatedText, load_lexicon, load_valence

__all__ = [
    "VOC_CLASSES",
    "VOC_IGNORED",
    "AlignedPair",
    "ChoiceQuestion",
    "LabelledImage",
    "LongPrompt",
    "RatedText",
    "Review",
    "SegmentedImage",
    "load_arc",
    "load_big_bench",
    "load_choices",
    "load_gold_alignment",
    "load_image_folders",
    "load_imagenet_segmentation",
    "load_imdb",
    "load_iwslt17",
    "load_lexicon",
    "load_pascal_voc",
    "load_ruler",
    "load_valence",
]
