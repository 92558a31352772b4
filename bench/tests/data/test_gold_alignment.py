"""Gold alignments in both formats, written as the real ones are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from captum_ssm.errors import DataError, DataNotFoundError, OptionError
from captum_ssm_bench.data import AlignedPair, load_gold_alignment


def texts(folder: Path, *pairs: tuple[str, str], encoding: str = "utf-8") -> tuple[Path, Path]:
    paths = folder / "de", folder / "en"
    for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in side), encoding=encoding)
    return paths


PAIRS = [("das ist schön", "that is nice indeed"), ("", "oh"), ("ja !", "yes !")]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_talp(tmp_path, encoding):
    source, target = texts(tmp_path, *PAIRS, encoding=encoding)
    links = tmp_path / "links.talp"
    links.write_text("1-1 3p4 2-2 2p2\n\n1-1 2-2\n")
    found = load_gold_alignment(source, target, links, encoding=encoding)
    assert found[0] == AlignedPair(
        ("das", "ist", "schön"),
        ("that", "is", "nice", "indeed"),
        frozenset({(0, 0), (1, 1)}),
        frozenset({(0, 0), (1, 1), (2, 3)}),
    )
    assert found[1] == AlignedPair((), ("oh",), frozenset(), frozenset())
    assert found[2].sure == found[2].possible == {(0, 0), (1, 1)}
    sure, possible = found[0].matrices()
    assert sure.shape == (4, 3) and sure.nonzero().tolist() == [[0, 0], [1, 1]]
    assert possible.nonzero().tolist() == [[0, 0], [1, 1], [3, 2]]


def test_naacl(tmp_path):
    tagged = [(f"<s snum={n}> {a} </s>", f"<s snum={n}>{b}</s>") for n, (a, b) in enumerate(PAIRS)]
    source, target = texts(tmp_path, *tagged)
    links = tmp_path / "links.wa"
    links.write_text("0001 1 1 S\n1 3 4 P\n\n3 2 2\n0003 1 1 P 0.5\n1 0 3 S\n")
    found = load_gold_alignment(source, target, links, format="naacl")
    assert found[0].source == ("das", "ist", "schön") and found[1].source == ()
    assert found[0].sure == {(0, 0)} and found[0].possible == {(0, 0), (2, 3)}
    assert found[2].sure == {(1, 1)} and found[2].possible == {(0, 0), (1, 1)}


def test_the_formats_agree(tmp_path):
    words = [(random.randint(1, 6), random.randint(1, 6)) for _ in range(5)]
    source, target = texts(tmp_path, *[("a " * n, "b " * m) for n, m in words])
    talp, naacl = [], []
    for sentence, (n, m) in enumerate(words, start=1):
        drawn = {
            (random.randrange(n), random.randrange(m)): random.random() < 0.5 for _ in range(6)
        }
        talp.append(" ".join(f"{b}{'-' if sure else 'p'}{a}" for (a, b), sure in drawn.items()))
        naacl += [f"{sentence} {a + 1} {b + 1} {'PS'[sure]}" for (a, b), sure in drawn.items()]
    (tmp_path / "talp").write_text("\n".join(talp))
    (tmp_path / "naacl").write_text("\n".join(naacl))
    # one of them counts from 0 and names the target first
    one = load_gold_alignment(source, target, tmp_path / "talp", first=0, reverse=True)
    other = load_gold_alignment(source, target, tmp_path / "naacl", format="naacl")
    assert one == other
    for pair in one:
        sure, possible = pair.matrices()
        assert bool((possible | ~sure).all()) and int(possible.sum()) == len(pair.possible)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("1-1\n", {}, "has 1 lines for 3 sentences"),
        ("1-1\n\n1x1\n", {}, "line 3 holds '1x1'"),
        ("1-1\n\n3-1\n", {}, "line 3 links source word 3.*2 words, counted from 1"),
        ("1-5\n\n\n", {}, "line 1 links target word 5"),
        ("0-1\n\n\n", {}, "line 1 links source word 0"),
        ("3p1\n\n\n", {"first": 0}, "line 1 links source word 3"),
        ("1-4\n\n\n", {"reverse": True}, "line 1 links source word 4"),
        ("1 1\n", {"format": "naacl"}, "line 1 reads '1 1'"),
        ("1 1 1 X\n", {"format": "naacl"}, "line 1 reads"),
        ("1 1 -1 S\n", {"format": "naacl"}, "line 1 reads"),
        ("\n4 1 1 S\n", {"format": "naacl"}, "line 2 names sentence 4, but there are 3"),
        ("1 1 9 S\n", {"format": "naacl"}, "line 1 links target word 9"),
    ],
)
def test_broken_links(tmp_path, content, options, message):
    source, target = texts(tmp_path, *PAIRS)
    links = tmp_path / "links"
    links.write_text(content)
    with pytest.raises(DataError, match=f"links.*{message}"):
        load_gold_alignment(source, target, links, **options)


def test_broken_sentences_and_options(tmp_path):
    source, target = texts(tmp_path, *PAIRS)
    links = tmp_path / "links"
    links.write_text("\n\n\n")
    short = tmp_path / "short"
    short.write_text("one\n")
    with pytest.raises(DataError, match=r"short has 1 sentences, .*en 3"):
        load_gold_alignment(short, target, links)
    source.write_text("schön\n", encoding="latin-1")
    with pytest.raises(DataError, match="de is not utf-8"):
        load_gold_alignment(source, target, links)
    with pytest.raises(OptionError, match="format='giza'"):
        load_gold_alignment(source, target, links, format="giza")
    with pytest.raises(OptionError, match="first=2"):
        load_gold_alignment(source, target, links, first=2)
    with pytest.raises(DataNotFoundError, match="none does not exist"):
        load_gold_alignment(source, target, tmp_path / "none")


def test_every_word_on_a_line_of_its_own_kind(tmp_path):
    """Unusual spaces and line separators within a line do not end it."""
    source, target = texts(tmp_path, ("a\u2028b c", "x\x0by"))
    links = tmp_path / "links"
    links.write_text("3-2")
    (pair,) = load_gold_alignment(source, target, links)
    assert len(pair.source) == 3 and len(pair.target) == 2
    assert torch.equal(pair.matrices()[0].nonzero(), torch.tensor([[1, 2]]))
