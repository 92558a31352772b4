"""Measures of explanations: functions of tensors, and classes that collect batches.

Docstrings refer to tables and figures of three papers. HA is `The Hidden Attention of Mamba Models
<https://arxiv.org/abs/2403.01590>`_. UN is `Explaining Modern Gated-Linear RNNs via a Unified
Implicit Attention Formulation <https://arxiv.org/abs/2405.16504>`_. LATIM is `LaTIM: Measuring
Latent Token-to-Token Interactions in Mamba Models <https://arxiv.org/abs/2502.15612>`_.
"""

from .alignment import (
    Alignment,
    LinkCounts,
    alignment_rates,
    best_links,
    link_accuracy,
    link_counts,
    words_of_tokens,
)
from .amplify import (
    Demonstration,
    amplify_prompt,
    hardest_examples,
    key_words,
    misclassification_confidence,
)
from .captum_adapters import token_infidelity, token_sensitivity
from .classes import Perturbed
from .confusion import confusion, f1, iou, mean_iou, pixel_accuracy
from .curve import TENTHS, WHOLE, Curve, change_order
from .faithfulness import Faithfulness, relevance_mass, token_faithfulness
from .fills import black, blurred
from .image_perturbation import image_perturbation, pixel_relevance
from .long_texts import span_relevance
from .oversmoothing import token_similarity
from .pseudo_masks import PseudoMaskScores, pseudo_masks
from .ranking import (
    average_precision,
    kendall,
    pearson,
    precision_at_k,
    recall_at_k,
    roc_auc,
    spearman,
)
from .sample import Interval, Sample
from .segmentation import (
    Segmentation,
    SegmentationScores,
    foreground,
    segmentation_average_precision,
    unit_range,
)
from .text_perturbation import Texts, text_activation, text_perturbation, text_pruning

__all__ = [
    "TENTHS",
    "WHOLE",
    "Alignment",
    "Curve",
    "Demonstration",
    "Faithfulness",
    "Interval",
    "LinkCounts",
    "Perturbed",
    "PseudoMaskScores",
    "Sample",
    "Segmentation",
    "SegmentationScores",
    "Texts",
    "alignment_rates",
    "amplify_prompt",
    "average_precision",
    "best_links",
    "black",
    "blurred",
    "change_order",
    "confusion",
    "f1",
    "foreground",
    "hardest_examples",
    "image_perturbation",
    "iou",
    "kendall",
    "key_words",
    "link_accuracy",
    "link_counts",
    "mean_iou",
    "misclassification_confidence",
    "pearson",
    "pixel_accuracy",
    "pixel_relevance",
    "precision_at_k",
    "pseudo_masks",
    "recall_at_k",
    "relevance_mass",
    "roc_auc",
    "segmentation_average_precision",
    "span_relevance",
    "spearman",
    "text_activation",
    "text_perturbation",
    "text_pruning",
    "token_faithfulness",
    "token_infidelity",
    "token_sensitivity",
    "token_similarity",
    "unit_range",
    "words_of_tokens",
]
