"""Results as files: what is loaded is what was saved, to the last bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    SSMLLMAttribution,
    compare,
    load,
)
from captum_ssm.attr import Comparison
from captum_ssm.errors import DataError, DataNotFoundError, InputError
from captum_ssm.models import load_bundled


def answer(**options: Any) -> Any:
    model, vocabulary = load_bundled()
    explain = SSMLLMAttribution(LatimFlow(model), vocabulary)
    return explain.attribute("anna owns the lamp . ? anna owns the", "lamp .", **options)


def of_a_text(**options: Any) -> Any:
    return LatimFlow(mamba_lm()).decompose(token_ids(2, 5), (-1, 3), **options)


#: What there is to save.
RESULTS: dict[str, Callable[[], Any]] = {
    "words": answer,
    "spans": lambda: answer(spans="word", prompt_spans="sentence", hops=2),
    "comparison": lambda: compare(
        mamba_lm(), token_ids(2, 5), [MambaAttribution, ImplicitAttentionRollout], target=(-1, 3)
    ).named([list("abcde")] * 2),
    "roles": lambda: of_a_text(rule="centered", features=True),
    "named": lambda: of_a_text().named([["a", "", "<b>", "\ud800", "é"]] * 2),
    "image": lambda: LatimFlow(vision("middle", (3, 4))).decompose(images(1), 0),
    "logits": lambda: LatimLogit(mamba_lm()).decompose(token_ids(1, 5), (-1, 3)),
}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, str | int | float | range | None):
        assert one == other
    if hasattr(one, "__dict__"):
        assert_same(vars(one), vars(other))


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_loaded_is_what_was_saved(name: str, tmp_path: Path) -> None:
    found, path = RESULTS[name](), tmp_path / "new" / "found.json"
    assert found.save(path) == path
    assert_same(load(path), found)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int64", "bool"])
def test_every_dtype_and_all_that_is_no_number(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    values = (torch.randn(3, 0 if dtype == "bool" else 7) * 1e3).to(kind)
    found = Comparison({"random": values})
    if kind.is_floating_point:
        odd = [0.0, -0.0, math.nan, math.inf, -math.inf, torch.finfo(kind).tiny / 2, 1 / 3]
        found["odd"] = torch.tensor([odd], dtype=kind)
        found["odd"][found["odd"].isnan()] = math.nan  # of one bit pattern
    again = load(found.save(tmp_path / "found.json"))
    assert_same(dict(again), dict(found))


def test_what_is_saved_says_what_it_is(tmp_path: Path) -> None:
    path = Comparison({"one": torch.tensor([[0.5]])}).save(tmp_path / "found.json")
    said = json.loads(path.read_text())
    assert said["kind"] == "Comparison" and said["form"] == 1 and said["captum_ssm"]
    said |= {"form": 2, "captum_ssm": "9.9"}
    path.write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"written by captum_ssm 9\.9: Comparison in format 2"):
        load(path)


@pytest.mark.parametrize("content", [
    b"",
    b"{",
    b"[]",
    b'{"model": "recall-mamba", "answers": []}',
    b"\xff\xfe",
    b"<!doctype html>",
])  # fmt: skip
def test_other_files_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"other\.json"):
        load(path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"none\.json does not exist"):
        load(tmp_path / "none.json")
    path = Comparison({"one": torch.tensor([[0.5, 1.5]])}).save(tmp_path / "found.json")
    whole = path.read_text()
    for old, new in [
        ("[1, 2]", "[3, 2]"),
        ("float32", "nn"),
        ("float32", "elephant"),
        ('"tensor"', '"module"'),
        ('"relevance"', '"other"'),
        ("1.5", '"1.5"'),
    ]:
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(DataError, match=r"found\.json holds no result .* that can be read"):
            load(path)


def test_values_that_are_not_tensors_are_refused(tmp_path: Path) -> None:
    found: Any = Comparison({"mine": 1j})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"contains 1j \(complex\). Pass tensors"):
        found.save(tmp_path / "found.json")


def test_names_are_as_many_as_tokens() -> None:
    found = Comparison({"one": torch.zeros(2, 3)})
    for names in (["a", "b", "c"], [["a", "b"]] * 2, "abc"):
        with pytest.raises(InputError, match="2 sequences of 3 tokens"):
            found.named(names)
    assert found.named([["a", "b", "c"], ["d", "e", "f"]]).names == (
        ("a", "b", "c"),
        ("d", "e", "f"),
    )
