"""The memory that strips may take: sizes as people write them, and what is free."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.attr.engine import strips
from captum_ssm.attr.engine.strips import Budget
from captum_ssm.errors import OptionError
from captum_ssm.operators import Diagonal, Shape
from captum_ssm.tracing import memory
from captum_ssm.tracing.memory import free_memory


def operator(batch=1, tokens=100, heads=3, dtype=torch.float32):
    shape = Shape(batch, tokens, heads, 2)
    return Diagonal(torch.ones(1, 1, 1, 1, dtype=dtype), shape)


@pytest.mark.parametrize(
    "text, wanted",
    [
        (12345, 12345),
        ("800", 800),
        ("800B", 800),
        ("3kB", 3000),
        ("3 KiB", 3072),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        (" 2TiB ", 2**41),
    ],
)
def test_sizes(text, wanted):
    assert Budget.parse(text).on(torch.device("cpu")) == wanted


@pytest.mark.parametrize(
    "wrong", [0, -5, True, 1.5, "", "MiB", "-1MiB", "0GB", "5 apples", "1e9", "12MM", "1.MiB", []]
)
def test_what_is_no_size_is_an_error(wrong):
    with pytest.raises(OptionError, match=r"memory_budget=.*is not a size.*'512MiB'"):
        Budget.parse(wrong)


def test_rows_that_fit():
    row = 4 * 100 * 4
    assert Budget(row).height(operator(), "mean") == 1
    assert Budget(8 * row - 1).height(operator(), "mean") == 7
    assert Budget(8 * row).height(operator(), "mean") == 8
    assert Budget(8 * row).height(operator(batch=2), "mean") == 4
    assert Budget(8 * row).height(operator(dtype=torch.float64), "mean") == 4
    assert Budget(8 * row).height(operator(tokens=50), "mean") == 16
    assert Budget(2**60).height(operator(), "mean") == strips._ROWS
    assert Budget(2**60).height(operator(tokens=3_000), "mean") == strips._ENTRIES // 3_000
    assert Budget(2**60).height(operator(tokens=100_000), "mean") == strips._FEW_ROWS
    # a maximum needs the row of each of the six channels too
    assert Budget(7 * 3 * row).height(operator(), "max") == 3


def test_an_error_names_the_least_and_how_to_need_less():
    with pytest.raises(OptionError, match=r"memory_budget=1599 .* at least 1600 bytes\."):
        Budget(1599).height(operator(), "mean")
    with pytest.raises(OptionError, match="at least 3200 bytes, or use internal_batch_size=1"):
        Budget(1600).height(operator(batch=2), "mean")


def test_without_a_budget_there_is_always_room_for_a_row(monkeypatch):
    monkeypatch.setattr(strips, "free_memory", lambda device: 8 * 5000)
    assert Budget().height(operator(), "mean") == 3
    monkeypatch.setattr(strips, "free_memory", lambda device: 0)
    assert Budget().height(operator(), "mean") == 1


def test_free_memory(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    assert free_memory(cpu) == memory._UNKNOWN
    meminfo.write_text("MemTotal: 999 kB\nMemFree: 10 kB\nMemAvailable:    700 kB\n")
    assert free_memory(cpu) == 700 * 1024
    meminfo.write_text("MemTotal: 999 kB\n")
    assert free_memory(cpu) == memory._UNKNOWN
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (321, 654))
    assert free_memory(torch.device("cuda")) == 321
    assert free_memory(torch.device("meta")) == memory._UNKNOWN
