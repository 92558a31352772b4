"""The examples of a dataset, one after the other, and the ones that pass a filter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..attr.call.inputs import as_tuple
from ..errors import InputError

#: Of a dataset that can be gone through only once, so many examples are kept to be shown again.
KEPT = 256
#: At most so many examples are run at a time, so that neither a dataset without end nor a filter
#: that nothing passes keeps a search going for ever.
MOST_SEARCHED = 256

Seen = TypeVar("Seen")


class Batch:
    """Inputs of a model, with their labels.

    Args:
        inputs: a tensor, or one for each feature; the first dimension counts the examples.
        labels: the index of each example's class, (B,); None if it is not known.
        additional_args: further arguments of the model, without relevance. Tensors with a dimension
            count examples as well. Default: None.

    Raises:
        InputError: when the tensors and labels do not hold equally many examples.

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
        inputs: a batch of one for each feature.
        additional: further arguments of the model, which get no relevance.
        label: the index of the example's class; None if not known.
        number: which one of the dataset it is, from 1. Default: 0, of none.
    """

    inputs: tuple[Tensor, ...]
    additional: tuple[Any, ...]
    label: int | None
    number: int = 0


def examples_of(batch: Any) -> Iterator[DatasetExample]:
    """Yield the examples of a batch, checked before the first is handed out."""
    if not hasattr(batch, "inputs"):
        raise InputError(
            f"the dataset holds a {type(batch).__name__}; wrap inputs and labels: Batch(inputs, "
            "labels)."
        )
    inputs = as_tuple(batch.inputs)
    if not inputs or not all(isinstance(x, Tensor) and x.dim() for x in inputs):
        raise InputError(
            "the inputs of a Batch must be tensors whose first dimension is the batch."
        )
    size = len(inputs[0])
    additional = as_tuple(getattr(batch, "additional_args", None))
    counted = [*inputs, *(a for a in additional if isinstance(a, Tensor) and a.dim())]
    if others := [tuple(tensor.shape) for tensor in counted if len(tensor) != size]:
        raise InputError(
            f"a Batch has {size} examples in its first input, but {others[0][0]} in another tensor "
            f"of shape {others[0]}."
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
            f"the labels of a Batch are {len(numbers)} numbers for {size} examples; pass the index "
            "of each example's class, or None."
        )
    return [int(number) for number in numbers]


class Pages:
    """Read a dataset page by page, and after its end from the beginning again.

    Args:
        dataset: batches. After the end of an iterator, the last :data:`KEPT` examples are shown
            again.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._kept: deque[DatasetExample] = deque(maxlen=KEPT)
        # None stands for the end of the dataset
        self._ahead: deque[DatasetExample | None] = deque()
        self._page: list[DatasetExample | None] = []
        self._source = self._first_time()
        #: whether the current page reached the end of the dataset
        self.ended = False

    def first(self) -> DatasetExample | None:
        """Peek at the next example; None if the dataset is empty."""
        for _ in range(2):  # the end may come first, and behind it the beginning
            if not self._ahead:
                self._ahead.append(self._read())
            if self._ahead[0] is not None:
                return self._ahead[0]
            self._ahead.popleft()
        return None

    def page(self, again: bool = False) -> Iterator[DatasetExample]:
        """Yield the examples from here to the end of the dataset, as many as are taken."""
        if again:
            self._ahead.extendleft(reversed(self._page))
        self._page, self.ended = [], False
        self.first()
        while (example := self._ahead.popleft() if self._ahead else self._read()) is not None:
            self._page.append(example)
            yield example
        self._page.append(None)
        self.ended = True

    def _read(self) -> DatasetExample | None:
        example = next(self._source, None)
        if example is None:
            self._source = self._again()
        return example

    def _first_time(self) -> Iterator[DatasetExample]:
        once = isinstance(self._dataset, Iterator)
        for example in _examples(self._dataset):
            if once:
                self._kept.append(example)
            yield example

    def _again(self) -> Iterator[DatasetExample]:
        if isinstance(self._dataset, Iterator):
            return iter(tuple(self._kept))
        return _examples(self._dataset)


def _examples(dataset: Iterable[Any]) -> Iterator[DatasetExample]:
    number = 0
    for batch in _batches(iter(dataset)):
        for example in examples_of(batch):
            number += 1
            yield example._replace(number=number)


def _batches(dataset: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from dataset
    except RuntimeError as error:
        # Captum's own example calls next() inside a generator, which so ends (PEP 479)
        if not isinstance(error.__cause__, StopIteration):
            raise


@dataclass(frozen=True)
class Found(Generic[Seen]):
    """The examples that passed the filter.

    Attributes:
        examples: each with its views that passed.
        searched: number of examples that were run.
        ended: whether the end of the dataset was reached.
        labelled: number of examples with a label, of those that were run.
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
) -> Found[Seen]:
    """Search a stream until enough examples passed, or the dataset ends.

    Args:
        stream: the examples.
        count: number of examples wanted.
        views: number of views of an example: models times methods.
        view: returns an example's view by index; None if it does not pass.
        again: begin at the start of the last search. Default: False, at its end.
    """
    found: list[tuple[DatasetExample, list[Seen]]] = []
    searched = labelled = 0
    for example in stream.page(again):
        searched += 1
        labelled += example.label is not None
        seen = [view(example, index) for index in range(views)]
        if passed := [one for one in seen if one is not None]:
            found.append((example, passed))
        if len(found) == count or searched == MOST_SEARCHED:
            break
    return Found(found, searched, stream.ended, labelled)
