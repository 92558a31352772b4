"""Published data, read from files that others have laid out; nothing is downloaded."""

from .gold_alignment import AlignedPair, load_gold_alignment
from .imagenet_segmentation import SegmentedImage, load_imagenet_segmentation
from .prompts import ChoiceQuestion, LongPrompt, load_arc, load_ruler
from .valence import RatedText, load_valence

__all__ = [
    "AlignedPair",
    "ChoiceQuestion",
    "LongPrompt",
    "RatedText",
    "SegmentedImage",
    "load_arc",
    "load_gold_alignment",
    "load_imagenet_segmentation",
    "load_ruler",
    "load_valence",
]
