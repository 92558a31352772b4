"""The recall task in the form that all tasks share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from bench_helpers.task_solvers import Solver

from captum_ssm.models.recall import generate, parse_prompt
from captum_ssm.models.recall_batch import collate
from captum_ssm_bench.tasks import RecallTask, answer_accuracy, swap_check


def test_batches_with_answers() -> None:
    task, seed = RecallTask(), random.randrange(10**9)
    examples = task.draw(50, seed)
    assert examples == generate(50, seed)
    batch = task.batch(examples)
    assert torch.equal(batch.input_ids[:, :-1], collate(examples).input_ids)
    for row, example in enumerate(examples):
        start = int((batch.attention_mask[row] == 0).sum())
        assert int(batch.input_ids[row, -1]) == int(batch.targets.tokens[row]) == example.answer_id
        assert int(batch.links.sources[row]) == start + example.value_position
        assert int(batch.possible_links.sources[row]) == start + example.name_position
        facts = {start + p for f in example.facts for p in (f.name_position, f.value_position)}
        context = set(batch.context[row].nonzero().flatten().tolist())
        assert facts <= context <= set(range(start, start + example.question_name_position - 1))


def test_answers_follow_from_the_asked_fact() -> None:
    def rule(prompt: Sequence[str]) -> Sequence[str]:
        return [parse_prompt(" ".join(prompt)).answer]

    task = RecallTask()
    batch = task.batch(task.draw(40, random.randrange(10**9), length=6))
    model = Solver(task, rule, ends="?", after=3)
    assert answer_accuracy(model, batch) == (1, 1)
    assert swap_check(model, batch, seed=1).moved == 1
