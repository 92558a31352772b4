"""AMPLIFY: few-shot prompts that list important words of each example (HA table 7, UN table 5).

Krishna et al. (2023) use the training examples with the most confident errors of a small proxy
model. Attribution on the proxy model finds important words for the right label. A sentence with
these words is inserted between each example and its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .checks import as_scores, check_positive
from .classes import class_targets


@dataclass(frozen=True)
class Demonstration:
    """One example of a few-shot prompt.

    Attributes:
        text: the question of the example.
        words: the important words, which the rationale lists.
        label: the right answer to the question.

    Example:
        >>> from captum_ssm.metrics import Demonstration
        >>> Demonstration("Is ice cold ?", ("ice", "cold"), "yes").rationale
        'The key words: ice, cold are crucial clues for predicting yes as the correct answer.'
    """

    text: str
    words: tuple[str, ...]
    label: str

    @property
    def rationale(self) -> str:
        """The sentence that lists the important words."""
        return (
            f"The key words: {', '.join(self.words)} are crucial clues for predicting {self.label} "
            "as the correct answer."
        )


def misclassification_confidence(logits: Tensor, labels: Sequence[int] | Tensor) -> Tensor:
    """Return the highest probability of a wrong class minus the probability of the right class.

    ::

        max over k != y of p[k], minus p[y],    p = softmax(logits)

    Args:
        logits: logits of at least two classes, (B, K).
        labels: the right class y of each example, (B,).

    Returns:
        Differences (B,) from -1 to 1, above 0 if the example is misclassified.

    Raises:
        InputError: when there is only one class.
        TargetError: when labels are not class indices, or not one for each example.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import misclassification_confidence
        >>> logits = torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log()
        >>> misclassification_confidence(logits, [0, 1]).round(decimals=2).tolist()
        [-0.5, 0.5]
    """
    scores = as_scores(logits, "logits", dims=2).double()
    if scores.shape[1] < 2:
        raise InputError(f"logits has shape {tuple(scores.shape)}. Pass two or more classes.")
    right = class_targets(labels, scores)[:, None]
    probabilities = scores.softmax(-1)
    wrong = probabilities.scatter(-1, right, -1).amax(-1)
    return wrong - probabilities.gather(-1, right)[:, 0]


def hardest_examples(logits: Tensor, labels: Sequence[int] | Tensor, count: int) -> Tensor:
    """Return the indices of the examples with the most confident errors.

    Args:
        logits: logits of at least two classes, (B, K).
        labels: the right class of each example, (B,).
        count: the number of examples to return.

    Returns:
        Indices (count,), sorted by :func:`misclassification_confidence`, the highest first.

    Raises:
        InputError: when there are fewer examples than ``count``.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import hardest_examples
        >>> logits = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
        >>> hardest_examples(logits, [0, 1, 0], count=2).tolist()
        [1, 2]
    """
    check_positive(count, "count")
    confidence = misclassification_confidence(logits, labels)
    if count > len(confidence):
        raise InputError(
            f"count={count} is above the {len(confidence)} examples in logits. Pass a lower count."
        )
    return confidence.argsort(descending=True, stable=True)[:count]


def key_words(words: Sequence[str], relevance: Tensor, count: int = 5) -> tuple[str, ...]:
    """Return the most relevant words without repetition, starting with the most relevant word.

    Args:
        words: the words of a text.
        relevance: the relevance of each word, (n,).
        count: the number of words; all distinct words if there are fewer. Default: 5.

    Raises:
        InputError: when the numbers of words and of entries of relevance differ.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import key_words
        >>> key_words(["a", "bad", "bad", "film"], torch.tensor([0.0, 0.3, 0.2, 0.1]), count=2)
        ('bad', 'film')
    """
    check_positive(count, "count")
    scores = as_scores(relevance, "relevance", dims=1)
    if len(words) != len(scores):
        raise InputError(
            f"words has {len(words)} entries, but relevance has {len(scores)}. Pass one per word."
        )
    order = torch.argsort(scores, descending=True, stable=True).tolist()
    return tuple(list(dict.fromkeys(words[i] for i in order))[:count])


def amplify_prompt(demonstrations: Sequence[Demonstration], question: str) -> str:
    """Return a few-shot prompt: the demonstrations with rationales and answers, then the question.

    Args:
        demonstrations: one or more examples with answers.
        question: the question that the model answers after the prompt's last word, ``Answer:``.

    Raises:
        InputError: when there is no demonstration.

    Example:
        >>> from captum_ssm.metrics import Demonstration, amplify_prompt
        >>> print(amplify_prompt([Demonstration("Is ice hot ?", ("ice",), "no")], "Is fire hot ?"))
        Is ice hot ?
        The key words: ice are crucial clues for predicting no as the correct answer.
        Answer: no
        <BLANKLINE>
        Is fire hot ?
        Answer:
    """
    if not demonstrations:
        raise InputError("demonstrations is empty. Pass at least one Demonstration.")
    examples = [f"{d.text}\n{d.rationale}\nAnswer: {d.label}" for d in demonstrations]
    return "\n\n".join([*examples, f"{question}\nAnswer:"])
