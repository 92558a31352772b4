"""Rated texts of the form in which vaderSentiment's source distribution carries them, made up."""

from __future__ import annotations

import io
import os
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from captum_ssm_bench.valence import SOURCES, VARIABLE

GOOD = ("good", "lovely", "funny", "brilliant", ":)")
BAD = ("bad", "dull", "awful", "tedious", ":(")
OTHER = ("the", "film", "a", "plot", "it's", "was", "of", "actors", ",", "and", "2", "...")

#: Where the real texts are, if anywhere.
REAL = os.environ.get(VARIABLE)
needs_real_texts = pytest.mark.skipif(
    not REAL, reason=f"{VARIABLE} does not say where the rated texts are; see CONTRIBUTING.md"
)


def sentence(rng: random.Random, valence: float) -> str:
    """Words of no valence, and two of the sign of this one unless it is small."""
    words = rng.choices(OTHER, k=rng.randint(3, 9))
    if abs(valence) >= 1:
        for word in rng.sample(GOOD if valence > 0 else BAD, 2):
            words.insert(rng.randint(0, len(words)), word)
    return " ".join(words).capitalize()


def rated_texts(count: int, rng: random.Random) -> dict[str, str]:
    """The files by name: ``count`` sentences of each source."""
    files = {}
    for name in SOURCES.values():
        rows = []
        for number in range(1, count + 1):
            valence = rng.uniform(-4, 4)
            rows.append(f"{number}\t{valence:.4f}\t{sentence(rng, valence)}\r\n")
        files[name] = "".join(rows)
    return files


def write_folder(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("utf-8"))
    return folder


def write_distribution(path: Path, files: dict[str, str]) -> Path:
    """The source distribution, with the archive that lies in it."""
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"hutto_ICWSM_2014/{name}")
            content = text.encode("utf-8")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with zipfile.ZipFile(path, "w") as whole:
        whole.writestr("vaderSentiment-0.5/setup.py", "")
        place = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
        whole.writestr(place, inside.getvalue())
    return path
