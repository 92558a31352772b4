"""Denormal numbers and modes of torch are switched off for a while; work is done in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from captum_ssm.operators.kernels.arithmetic import underflow_flushed, unseen_by
from captum_ssm.operators.kernels.portions import as_memory_allows


def flushes() -> bool:
    tiny = torch.finfo(torch.float32).tiny
    return float(torch.tensor(tiny, dtype=torch.float32, device="cpu").mul(0.5)) == 0


def test_denormal_numbers_are_flushed_inside_and_nowhere_else() -> None:
    """Whatever tensors are made of by default, and on which device."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    kept = torch.get_default_dtype()
    try:
        for before in (True, False):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                torch.set_flush_denormal(before)
                torch.set_default_dtype(dtype)
                with pytest.raises(KeyError), torch.device("meta"), underflow_flushed():
                    with underflow_flushed():
                        pass
                    assert flushes()
                    raise KeyError
                assert flushes() == before
    finally:
        torch.set_default_dtype(kept)
        torch.set_flush_denormal(False)


class Named(TorchFunctionMode):
    """Notes its name, and hands on what is asked."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


def asked(seen: list[str]) -> str:
    """Who is asked of a function, the first one first."""
    one = torch.ones(1)
    seen.clear()
    torch.neg(one)
    return "".join(seen)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_mode_is_taken_off_and_all_others_stay(error: type[BaseException]) -> None:
    seen: list[str] = []
    modes = {name: Named(name, seen) for name in "abc"}
    with modes["a"], modes["b"], modes["c"]:
        for which, left in (("a", "cb"), ("b", "ca"), ("c", "ba")):
            with pytest.raises(error), unseen_by(modes[which]), unseen_by(None):
                assert asked(seen) == left
                raise error
            assert asked(seen) == "cba"
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]


#: What devices and the processor's allocator say, as torch raises it.
OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("most", [1, 3, 50])
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


def test_nothing_but_memory_is_recognized() -> None:
    def form(part: range) -> object:
        return torch.empty(2**55 if len(part) > 1 else 1, dtype=torch.uint8)

    assert len(list(as_memory_allows(range(3), 3, form))) == 3
    for error in (OUT_OF_MEMORY[0], RuntimeError("mat1 and mat2 shapes")):

        def fails(part: range, error: RuntimeError = error) -> object:
            raise error

        with pytest.raises(RuntimeError, match=str(error)):
            list(as_memory_allows(range(9), 4, fails))
