"""Synthetic tasks with exact gold sources, to judge attributions against."""

from captum_ssm.tasks.recall import (
    Batch,
    Example,
    Fact,
    accuracy,
    collate,
    generate,
    parse_prompt,
    predict,
    recall_vocabulary,
    with_value,
)
from captum_ssm.tasks.vocabulary import WordVocabulary

__all__ = [
    "Batch",
    "Example",
    "Fact",
    "WordVocabulary",
    "accuracy",
    "collate",
    "generate",
    "parse_prompt",
    "predict",
    "recall_vocabulary",
    "with_value",
]
