"""Names of tokens that know their text: parts of words are joined wherever they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import read_page
from helpers.pictures import draw
from zoo.language import byte_tokenizer, piece_tokenizer, word_piece_tokenizer, word_tokenizer
from zoo.small import mamba_lm

from captum_ssm import load, report
from captum_ssm.attr import Comparison
from captum_ssm.attr.text.codec import Codec
from captum_ssm.edges import Edge
from captum_ssm.errors import InputError
from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature
from captum_ssm.viz import Tokens, captum_text, plot_edges, plot_matrices, plot_roles, plot_text
from captum_ssm.viz.labels import widths

pytestmark = pytest.mark.slow

#: A tokenizer of each kind, a text, what is read of each token, and those that are joined.
TEXTS: dict[str, tuple[Any, str, list[str], list[int]]] = {
    "sentence-piece": (
        piece_tokenizer,
        "ab abb a$ aab",
        ["ab", "abb", "a", "$", "a", "ab"],
        [3, 5],
    ),
    "chinese-bytes": (byte_tokenizer, "你好 a", [*"你₂₃好₂₃␣a"], [1, 2, 3, 4, 5]),
    "word-piece": (word_piece_tokenizer, "going home .", ["go", "ing", "home", "."], [1]),
    "marks": (word_tokenizer, "anna owns the", ["<s>", "anna", "owns", "the"], []),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_pages_join_what_the_report_joins(kind: str, tmp_path: Path) -> None:
    make, text, labels, joined = TEXTS[kind]
    tokenizer = make()
    ids = Codec(tokenizer).encode(text, special=True)[None]
    model = mamba_lm(vocab_size=256)

    path = report(model, ids, tokenizer=tokenizer, matrices=False, path=tmp_path / "report.html")
    shown = read_page(path).facts["examples"][0]
    assert (shown["tokens"], shown["joined"]) == (labels, joined)
    tokens = Tokens.of(tokenizer, ids[0])
    named = report(model, ids, tokens=tokens, matrices=False, path=tmp_path / "named.html")
    assert read_page(named).facts["examples"][0]["joined"] == joined

    compared = Comparison({"one": torch.rand(ids.shape)}).named(tokens)
    words = read_page(compared.to_html(tmp_path / "compared.html")).facts["examples"][0]["words"]
    assert (words["labels"], words["joined"]) == (labels, joined)
    loaded = load(compared.save(tmp_path / "compared.json"))
    assert loaded.names == compared.names == (tokens,)

    feature = TextFeature("text", None, None, lambda ids: Tokens.of(tokenizer, ids[0]))
    classes = [str(i) for i in range(256)]
    visualizer = AttributionVisualizer(model, classes, feature, [Batch(ids, None)])
    visualizer.config = FilterConfig("MambaAttribution")
    kept = read_page(visualizer.snapshot()).facts
    (output,) = kept["examples"]["examples"][0]["models"]
    base = output["feature_outputs"][0]["base"]
    assert (base["labels"], base["joined"]) == (labels, joined)
    assert base["marks"] == ([0] if kind == "marks" else [])


def gaps(spans: Sequence[tuple[float, float]]) -> list[int]:
    return [i for i in range(1, len(spans)) if abs(spans[i][0] - spans[i - 1][1]) < 1e-6]


@pytest.mark.parametrize("kind", TEXTS)
def test_pictures_join_what_the_report_joins(kind: str) -> None:
    make, text, labels, joined = TEXTS[kind]
    tokenizer = make()
    tokens = Tokens.of(tokenizer, Codec(tokenizer).encode(text, special=True))
    relevance = torch.rand(len(tokens))

    figure, (axis,) = plot_text(tokens, relevance)
    draw(figure)
    boxes = [(box.get_x(), box.get_x() + box.get_width()) for box in axis.patches]
    assert gaps(boxes) == joined
    canvas = figure.canvas.get_renderer()
    for written, box in zip(axis.texts, axis.patches, strict=True):  # words fit into their boxes
        assert written.get_window_extent(canvas).width <= box.get_window_extent(canvas).width
    _, (apart,) = plot_text(list(tokens), relevance)
    assert gaps([(box.get_x(), box.get_x() + box.get_width()) for box in apart.patches]) == []

    figure, (axis,) = plot_roles(tokens, {"content": relevance})
    draw(figure)
    middles = [float(x) for x in axis.get_xticks()]
    wide = [max(len(label.get_text()), 3) for label in axis.get_xticklabels()]
    spans = [(x - w / 2, x + w / 2) for x, w in zip(middles, wide, strict=True)]
    assert gaps(spans) == joined

    figure, (axis,) = plot_edges(tokens, [Edge(0, "mixer", 1, 0, 1.0)])
    draw(figure)
    middles = [float(x) for x in axis.get_xticks()]
    seen_labels = [label.get_text() for label in axis.get_xticklabels()]
    wide = [max(cells, 2) for cells in widths(seen_labels, joined)]
    spans = [(x - w / 2, x + w / 2) for x, w in zip(middles, wide, strict=True)]
    assert gaps(spans) == joined

    _, axes = plot_matrices(torch.rand(1, len(tokens), len(tokens)), tokens=tokens)
    ticks = [label.get_text() for label in axes.flatten()[0].get_xticklabels()]
    assert [tick.replace("\\$", "$") for tick in ticks] == [seen(label) for label in labels]
    assert captum_text(tokens, relevance).raw_input_ids[0] == labels[0].replace("<s>", "&lt;s&gt;")


def seen(label: str) -> str:
    return {"你": r"\u4f60", "好": r"\u597d"}.get(label, label)


def test_a_word_stays_in_one_line_unless_it_is_longer() -> None:
    words = Tokens(["x" * 40, "y" * 30, "z" * 30], ["x" * 40, " " + "y" * 30, "z" * 30])
    _, (axis,) = plot_text(words, torch.rand(3))
    assert [box.get_y() for box in axis.patches] == pytest.approx([0.08, 1.08, 1.08])
    longer = Tokens(["a" * 40] * 5, ["a" * 40] * 5)
    _, (axis,) = plot_text(longer, torch.rand(5))
    assert [box.get_y() for box in axis.patches] == pytest.approx([0.08, 0.08, 1.08, 1.08, 2.08])
    lines = Tokens(["a.", "b"], ["a.\n", "b"])
    _, (axis,) = plot_text(lines, torch.rand(2))
    assert [box.get_y() for box in axis.patches] == pytest.approx([0.08, 1.08])


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"for 2 names\. Pass one piece"):
        Tokens(["a", "b"], ["a"])
    with pytest.raises(InputError, match=r"ids has shape \(1, 2\).*such as ids\[0\]"):
        Tokens.of(word_tokenizer(), torch.tensor([[1, 2]]))


def test_they_are_a_list_of_names() -> None:
    tokens = Tokens(["<s>", "la", "mp"], [None, "la", "mp"])
    assert list(tokens) == ["<s>", "la", "mp"] and len(tokens) == 3 and tokens[-1] == "mp"
    assert tokens[1:] == Tokens(["la", "mp"], ["la", "mp"]) == tokens.chosen([1, 2])
    assert Tokens(["a", "b"])[:1] == Tokens(["a"])
