"""Read the examples of a dataset one after the other, and select those that pass a filter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..attr.call.inputs import as_tuple
from ..errors import InputError

#: The number of stored examples of an iterator, which cannot be read twice.
KEPT = 256
#: The largest number of examples in one search, so that a search ends also for infinite datasets.
MOST_SEARCHED = 256

Seen = TypeVar("Seen")


class Batch:
    """A batch of model inputs with their labels.

    Args:
        inputs: a tensor, or a tuple of one tensor per feature; the first dimension is the batch.
        labels: the class index of each example, (B,); None if labels are not known.
        additional_args: further arguments of the model, which get no relevance. Tensors with
            dimensions must have the batch as first dimension. Default: None.

    Raises:
        InputError: when inputs, labels and additional tensors differ in their number of examples.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import Batch
        >>> ids, attention_mask = torch.tensor([[5, 3, 8], [4, 7, 0]]), torch.ones(2, 3)
        >>> batch = Batch(ids, labels=torch.tensor([1, 0]), additional_args=attention_mask)
        >>> len(batch.inputs) == len(batch.labels) == len(batch.additional_args)
        True
    """

    def __init__(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        labels: Tensor | None,
        additional_args: Any = None,
    ) -> None:
        self.inputs = inputs
        self.labels = labels
        self.additional_args = additional_args


class DatasetExample(NamedTuple):
    """One example of a batch.

    Attributes:
        inputs: a tensor for each feature, with a batch dimension of 1.
        additional: further arguments of the model, which get no relevance.
        label: the index of the example's class; None if it is not known.
        number: the position of the example in the dataset, from 1. Default: 0, not in a dataset.
    """

    inputs: tuple[Tensor, ...]
    additional: tuple[Any, ...]
    label: int | None
    number: int = 0


def examples_of(batch: Any) -> Iterator[DatasetExample]:
    """Yield the examples of a batch; the whole batch is checked first."""
    if not hasattr(batch, "inputs"):
        raise InputError(
            f"the dataset contains a {type(batch).__name__}. Wrap inputs and labels: Batch(inputs, "
            "labels)."
        )
    inputs = as_tuple(batch.inputs)
    if not inputs or not all(isinstance(x, Tensor) and x.dim() for x in inputs):
        raise InputError(
            f"a Batch has inputs of type {type(batch.inputs).__name__}. Pass a tensor whose first "
            "dimension is the batch, or a tuple of such tensors."
        )
    size = len(inputs[0])
    additional = as_tuple(getattr(batch, "additional_args", None))
    tensors = [*inputs, *(a for a in additional if isinstance(a, Tensor) and a.dim())]
    if others := [tuple(tensor.shape) for tensor in tensors if len(tensor) != size]:
        raise InputError(
            f"a Batch has {size} examples in its first input, but {others[0][0]} in a tensor of "
            f"shape {others[0]}. Pass tensors with the same number of examples."
        )
    labels = _labels(getattr(batch, "labels", None), size)
    for i in range(size):
        yield DatasetExample(
            tuple(x[i : i + 1] for x in inputs),
            tuple(a[i : i + 1] if isinstance(a, Tensor) and a.dim() else a for a in additional),
            labels[i],
        )


def _labels(labels: Any, size: int) -> list[int | None]:
    if labels is None:
        return [None] * size
    numbers: list[Any] = torch.as_tensor(labels).reshape(-1).tolist()
    if len(numbers) != size:
        raise InputError(
            f"a Batch has {len(numbers)} labels for {size} examples. Pass the class index of each "
            "example, or None."
        )
    return [int(number) for number in numbers]


class Pages:
    """Read a dataset page by page, and start again at the beginning after the end.

    Args:
        dataset: an iterable of batches. If it is an iterator, which can be read only once, its last
            :data:`KEPT` examples are stored and repeated.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._stored: deque[DatasetExample] = deque(maxlen=KEPT)
        # examples to return before the dataset is read further; None is the end of the dataset
        self._queue: deque[DatasetExample | None] = deque()
        self._page: list[DatasetExample | None] = []
        self._source = self._first_pass()
        #: True if the current page reached the end of the dataset
        self.ended = False

    def first(self) -> DatasetExample | None:
        """Return the next example without removing it; None if the dataset is empty."""
        for _ in range(2):  # the end may come first, followed by the beginning
            if not self._queue:
                self._queue.append(self._read_one())
            if self._queue[0] is not None:
                return self._queue[0]
            self._queue.popleft()
        return None

    def page(self, again: bool = False) -> Iterator[DatasetExample]:
        """Yield the next examples until the dataset ends; ``again`` starts with the last page."""
        if again:
            self._queue.extendleft(reversed(self._page))
        self._page, self.ended = [], False
        self.first()  # skips an end of the dataset that comes first
        while (example := self._queue.popleft() if self._queue else self._read_one()) is not None:
            self._page.append(example)
            yield example
        self._page.append(None)
        self.ended = True

    def _read_one(self) -> DatasetExample | None:
        """Read one example; at the end, return None and prepare to start again."""
        example = next(self._source, None)
        if example is None:
            self._source = self._restart()
        return example

    def _first_pass(self) -> Iterator[DatasetExample]:
        """Yield all examples; the examples of an iterator are stored for later passes."""
        is_iterator = isinstance(self._dataset, Iterator)
        for example in _numbered_examples(self._dataset):
            if is_iterator:
                self._stored.append(example)
            yield example

    def _restart(self) -> Iterator[DatasetExample]:
        """Return the examples from the start, or those that are stored of an iterator."""
        if isinstance(self._dataset, Iterator):
            return iter(tuple(self._stored))
        return _numbered_examples(self._dataset)


def _numbered_examples(dataset: Iterable[Any]) -> Iterator[DatasetExample]:
    number = 0
    for batch in _read_batches(iter(dataset)):
        for example in examples_of(batch):
            number += 1
            yield example._replace(number=number)


def _read_batches(dataset: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; a StopIteration inside a generator also ends the dataset."""
    try:
        yield from dataset
    except RuntimeError as error:
        # Captum's example calls next() inside a generator, where its end is an error (PEP 479)
        if not isinstance(error.__cause__, StopIteration):
            raise


@dataclass(frozen=True)
class SearchResult(Generic[Seen]):
    """The examples that passed the filter.

    Attributes:
        examples: pairs of an example and its explanations that passed the filter.
        searched: number of examples that the models were run on.
        ended: whether the end of the dataset was reached.
        labelled: number of searched examples with a label.
    """

    examples: list[tuple[DatasetExample, list[Seen]]]
    searched: int
    ended: bool
    labelled: int


def search(
    stream: Pages,
    count: int,
    views: int,
    view: Callable[[DatasetExample, int], Seen | None],
    again: bool = False,
) -> SearchResult[Seen]:
    """Explain examples until enough of them pass the filter, or the dataset ends.

    Args:
        stream: the dataset.
        count: the number of examples to find.
        views: the number of explanations of each example, models times methods.
        view: function from an example and an index below ``views`` to an explanation, or to None if
            the example does not pass the filter.
        again: True to repeat the last search from its start. Default: False, continue at its end.
    """
    examples: list[tuple[DatasetExample, list[Seen]]] = []
    searched = labelled = 0
    for example in stream.page(again):
        searched += 1
        labelled += example.label is not None
        explanations = [view(example, index) for index in range(views)]
        if passing := [x for x in explanations if x is not None]:
            examples.append((example, passing))
        if len(examples) == count or searched == MOST_SEARCHED:
            break
    return SearchResult(examples, searched, stream.ended, labelled)
