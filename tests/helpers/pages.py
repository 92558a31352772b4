"""Reading a report back: an independent decoder of what the page's script reads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class ReadPage:
    """What a report holds: elements with their attributes and text, facts, blocks."""

    elements: list[tuple[str, dict[str, str | None], str]]

    def texts(self, tag: str) -> list[str]:
        return [text for name, _, text in self.elements if name == tag]

    def by_id(self, name: str) -> str:
        (text,) = [text for _, attributes, text in self.elements if attributes.get("id") == name]
        return text

    def block(self, name: str) -> bytes:
        return zlib.decompress(base64.b64decode(self.by_id(name), validate=True))

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.block("facts"))
        return found

    @property
    def policy(self) -> str:
        (policy,) = [
            str(attributes["content"])
            for tag, attributes, _ in self.elements
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        return policy

    def matrix(self, layer: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """A layer's map (L, L) and which entries of it are kept; the others are zero."""
        size = layer["size"]
        data = self.block(layer["block"])
        scales, columns, values, _ = unpacked(data, size, layer["kept"], layer["side"])
        matrix, known = np.zeros((size, size)), np.zeros((size, size), bool)
        np.put_along_axis(matrix, columns, values / 127 * scales[:, None], 1)
        np.put_along_axis(known, columns, True, 1)
        return matrix, known


def unpacked(data: bytes, size: int, kept: int, side: int) -> tuple[np.ndarray, ...]:
    """Scales, columns, values and overview of a map, as packing.py says that they lie."""
    whole = kept == size
    cells = 0 if whole and side == size else side * side  # else the overview is the map
    counts = [4 * size, 4 * size, 0 if whole else 2 * size * kept, cells, size * kept]
    assert len(data) == sum(counts)
    ends = np.cumsum(counts)
    raw = [data[end - count : end] for end, count in zip(ends, counts, strict=True)]
    kinds = ["<f4", "<f4", "<u2", "i1", "i1"]
    scales, _, columns, overview, values = map(np.frombuffer, raw, kinds)
    columns = np.tile(np.arange(size), (size, 1)) if whole else columns.reshape(size, kept)
    values = values.reshape(size, kept)
    overview = overview.reshape(side, side) if cells else np.empty((0, 0))
    return scales, columns.astype(int), values, overview


def streams(page: ReadPage, block: str, tokens: int) -> np.ndarray:
    """What enters each layer, as the page's script reads it."""
    data = page.block(block)
    layers = len(data) // (4 + 2 * tokens)
    scales = np.frombuffer(data, "<f4", layers)
    steps = np.frombuffer(data, "<i2", layers * tokens, 4 * layers).reshape(layers, tokens)
    return steps / 32767 * scales[:, None]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self._open: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))
        if tag not in ("meta", "input", "br", "img"):
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, attributes, text = self.elements[self._open[-1]]
            self.elements[self._open[-1]] = (tag, attributes, text + data)


def read_page(page: str | Path) -> ReadPage:
    """A report, or the file of one, as a parser of HTML sees it."""
    reader = _Reader()
    reader.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))
    reader.close()
    return ReadPage(reader.elements)


def digest(text: str) -> str:
    """What a content security policy calls a script or style of this text."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def addresses(page: ReadPage) -> list[str]:
    """Everything in the page's elements and style that a browser would fetch."""
    found = [
        str(value)
        for _, attributes, _ in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster")
    ]
    style = "".join(page.texts("style"))
    return found + re.findall(r"url\(|@import", style)
