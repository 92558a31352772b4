"""The HTML file: what comes from outside stays data, and maps and images fit in few bytes."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pages import addresses, digest, read_page, unpacked
from helpers.pictures import AWKWARD
from matplotlib.image import imread
from torch import Tensor

from captum_ssm.errors import OptionError
from captum_ssm.viz.html.packing import entries_kept, pack
from captum_ssm.viz.html.page import page
from captum_ssm.viz.html.pictures import Raster, png, raster

HOSTILE = [*AWKWARD, "</script><script>alert(1)</script>", "<!--", "<!--data-->", "<!--script-->"]
HOSTILE += ["-->", "]]>", "\u2028", "\ud800", '" onload="alert(1)', "{{title}}"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    facts = {"tokens": HOSTILE, **{text: text for text in HOSTILE}}
    text = page("<!--script--> </title><script>" + " ".join(HOSTILE), facts, {'a"b<': b"\x00\xff"})
    path.write_text(text, encoding="utf-8")
    return path


def test_hostile_text_adds_no_element(hostile: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.html"
    plain.write_text(page("t", {}, {"a": b""}), encoding="utf-8")
    read, expected = read_page(hostile), read_page(plain)
    assert [tag for tag, _, _ in read.elements] == [tag for tag, _, _ in expected.elements]
    assert read.facts["tokens"] == HOSTILE
    assert read.block('a"b<') == b"\x00\xff"
    assert all("<script>" in heading for heading in read.texts("h1"))


def test_the_policy_allows_the_pages_own_script_and_style_alone(hostile: Path) -> None:
    read = read_page(hostile)
    scripts = [
        text for tag, attributes, text in read.elements if tag == "script" and not attributes
    ]
    (script,), (style,) = scripts, read.texts("style")
    rules = dict(rule.strip().split(" ", 1) for rule in read.policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not addresses(read)
    for unwanted in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unwanted not in script


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        page("t", {"x": float("nan")}, {})


def test_png() -> None:
    for size in ((1, 1), (5, 3), (2, 17)):
        picture = torch.rand(*size, 3, dtype=torch.float64)
        read = imread(io.BytesIO(png(picture)))
        assert read.shape == (*size, 3)
        np.testing.assert_allclose(read, picture.numpy(), atol=0.5 / 255 + 1e-6)


def steps(made: Raster) -> np.ndarray:
    return np.frombuffer(base64.b64decode(made.steps), "i1").reshape(made.rows, made.columns)


def test_maps_over_images() -> None:
    """A few extremes leave the others their steps, and numbers that are none have no step."""
    values = torch.ones(10, 10)
    values[3, 4] = -50.0
    made = raster(values, extremes=False)
    assert made.largest == 1.0
    assert steps(made)[3, 4] == -127 and steps(made)[0, 0] == 127
    assert raster(values, extremes=True).largest == 50.0
    for extremes in (True, False):
        made = raster(torch.tensor([[math.nan, 1.0, math.inf]]), extremes=extremes)
        np.testing.assert_array_equal(steps(made), [[-128, 127, -128]])
        nothing = raster(torch.zeros(2, 2), extremes=extremes)
        assert nothing.largest == 0.0 and not steps(nothing).any()


def random_map(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(size, 1).mul(4).exp()  # of very different sizes
    return (torch.randn(size, size) * rows).tril().to(dtype)


def test_the_overview_shows_the_strongest_entry_of_each_cell() -> None:
    for size in (128, 129, 300):
        matrix = random_map(size)
        packed = pack(matrix, 8)
        cell, side = packed.overview_cell, packed.overview_side
        overview = unpacked(packed.data, size, packed.kept, side)[3]
        assert side == -(-size // cell) <= 128
        exact = matrix.numpy()
        for row in range(side):
            for column in range(0, side, 7):
                inside = exact[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
                strongest = inside.flat[np.abs(inside).argmax()]
                assert overview[row, column] == np.round(strongest / packed.largest * 127)


def test_too_much_is_refused() -> None:
    with pytest.raises(OptionError, match=r"96 maps .* do not fit into 9.0 MB"):
        entries_kept([9000] * 96, 9_000_000)
    with pytest.raises(OptionError, match="at most 65536"):
        entries_kept([70_000], 10**12)
