"""Models that answer the texts of a task by a rule, to hold tasks and measures to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm_bench.tasks import LinkedTask

#: From the words of the prompt, the whole answer.
Rule = Callable[[Sequence[str]], Sequence[str]]


class Solver(nn.Module):
    """Reads the prompt up to a word that ends it and predicts the answer, whatever is fed of it."""

    def __init__(self, task: LinkedTask, rule: Rule, ends: str, after: int = 0) -> None:
        super().__init__()
        self.words, self.rule, self.ends, self.after = task.vocabulary, rule, ends, after
        self.anchor = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.seen.append(len(input_ids))
        found = torch.zeros_like(input_ids)
        for row, (ids, real) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            words = self.words.tokens(ids[real])
            prompt = words[: words.index(self.ends) + self.after + 1]
            start = len(ids) - len(words) + len(prompt) - 1
            answer = list(self.rule(prompt))[: len(ids) - start]
            found[row, start : start + len(answer)] = torch.tensor(
                [self.words.id_of(word) for word in answer]
            )
        return SimpleNamespace(logits=nn.functional.one_hot(found, len(self.words)))
