"""Parts of half the size where memory runs out, and nothing but memory."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.operators.kernels.portions import as_memory_allows

#: What devices and the processor's allocator say, as torch raises it.
OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("most", [1, 2, 3, 7, 50])
def test_parts_are_halved_until_they_fit(error: RuntimeError, most: int) -> None:
    tried = []

    def form(part: range) -> object:
        tried.append(len(part))
        if len(part) > most:
            raise error
        return list(part)

    made = list(as_memory_allows(range(5, 36), 11, form))
    assert [place for part in made for place in part] == list(range(5, 36))
    assert max(map(len, made)) <= most
    assert [size for size in tried if size > most] == [s for s in (11, 5, 2) if s > most]


def test_what_does_not_fit_alone_is_an_error() -> None:
    def form(part: range) -> object:
        raise OUT_OF_MEMORY[0]

    with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
        list(as_memory_allows(range(9), 4, form))


def test_other_errors_pass() -> None:
    def form(part: range) -> object:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        list(as_memory_allows(range(9), 4, form))


def test_a_real_allocation_that_fails_is_recognised() -> None:
    def form(part: range) -> object:
        size = 2**55 if len(part) > 1 else 1
        return torch.empty(size, dtype=torch.uint8)

    assert len(list(as_memory_allows(range(3), 3, form))) == 3
