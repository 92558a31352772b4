"""Batches, and going through them."""

from __future__ import annotations

import itertools

import pytest
import torch

from captum_ssm.errors import InputError
from captum_ssm.insights import Batch
from captum_ssm.insights.dataset import Stream, examples_of


def batches(*sizes: int) -> list[Batch]:
    """Each example holds its number, counted from 0."""
    count = itertools.count()
    return [Batch(torch.tensor([[next(count)] for _ in range(size)]), None) for size in sizes]


def seen(page, most: int | None = None) -> list[int]:
    return [int(example.inputs[0]) for example in itertools.islice(page, most)]


def test_a_batch_is_cut_into_examples():
    photo, question = torch.rand(3, 2, 4, 4), torch.randint(9, (3, 5))
    lengths, whole = torch.tensor([5, 4, 5]), torch.tensor(7)
    batch = Batch((photo, question), torch.tensor([2, 0, 1]), (lengths, "mode", whole))
    for i, example in enumerate(examples_of(batch)):
        assert torch.equal(example.inputs[0], photo[i : i + 1])
        assert torch.equal(example.inputs[1], question[i : i + 1])
        assert torch.equal(example.additional[0], lengths[i : i + 1])
        assert example.additional[1:] == ("mode", whole)
        assert example.label == [2, 0, 1][i] and type(example.label) is int


def test_labels_in_every_form():
    for labels in ([1, 0], (1, 0), torch.tensor([[1], [0]])):
        found = [example.label for example in examples_of(Batch(torch.rand(2, 1), labels))]
        assert found == [1, 0]
    assert [e.label for e in examples_of(Batch(torch.rand(2, 1), None))] == [None, None]


BAD = [
    ((torch.rand(2, 1), torch.zeros(2)), "holds a tuple.*Batch"),
    (Batch([torch.rand(2, 1)], None), "must be tensors"),
    (Batch((), None), "must be tensors"),
    (Batch(torch.tensor(1.0), None), "must be tensors"),
    (Batch((torch.rand(2, 1), torch.rand(3, 1)), None), r"has 2 examples.*3 in another.*\(3, 1\)"),
    (Batch(torch.rand(2, 1), None, torch.rand(1)), "has 2 examples.*1 in another"),
    (Batch(torch.rand(2, 1), torch.zeros(3)), "3 numbers for 2 examples"),
]


def test_a_batch_that_does_not_fit_is_named():
    for batch, what in BAD:
        with pytest.raises(InputError, match=what):
            list(examples_of(batch))


def test_pages_follow_each_other_and_one_again_is_the_same():
    for source in (batches(2, 3), (batch for batch in batches(2, 3)), iter(batches(1, 1, 3))):
        check_pages(Stream(source))


def check_pages(stream):
    assert int(stream.first().inputs[0]) == 0 == int(stream.first().inputs[0])
    assert seen(stream.page(), 2) == [0, 1] and not stream.ended
    assert seen(stream.page(), 2) == [2, 3] and not stream.ended
    assert seen(stream.page(), 2) == [4] and stream.ended
    assert int(stream.first().inputs[0]) == 0
    assert seen(stream.page(), 3) == [0, 1, 2]
    for again in range(3):
        assert seen(stream.page(again > 0), 3) == [3, 4] and stream.ended
    assert seen(stream.page(), 2) == [0, 1] and not stream.ended
    assert seen(stream.page(again=True), 4) == [0, 1, 2, 3]
    assert seen(stream.page(again=True), 1) == [0]
    assert seen(stream.page(), 2) == [1, 2]
    assert [example.number for example in stream.page()] == [4, 5]


def test_an_empty_dataset_ends():
    for dataset in ([], iter([]), [Batch(torch.rand(0, 1), None)]):
        stream = Stream(dataset)
        assert stream.first() is None
        for again in (False, True, False):
            assert seen(stream.page(again)) == [] and stream.ended


def test_generators_are_read_no_further_than_asked_and_their_errors_told():
    def published():
        loader = iter(batches(2))
        while True:
            yield next(loader)  # which ends as the published example does

    def broken():
        yield batches(1)[0]
        raise RuntimeError("broken")

    stream = Stream(published())
    assert seen(stream.page()) == [0, 1] and stream.ended
    assert seen(stream.page()) == [0, 1]
    assert seen(Stream(broken()).page(), 1) == [0]
    with pytest.raises(RuntimeError, match="broken"):
        seen(Stream(broken()).page())
