"""The HTML file: a fixed skeleton, style and script, and data that none of them can be made of.

The folder ``assets`` holds what pages are made of, this one and that of Insights, which share
``common.css`` and ``common.js``.

Whatever comes from a model or a text stands in data blocks, as JSON without a ``<`` or as base64,
and reaches the page as text alone.  The policy in the page's head lets no other script run than the
one that is written here, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

#: In this order they are one style, and one script.
_STYLES = ("common.css", "report.css", "scissors.css")
_SCRIPTS = (
    "common.js",
    "maps.js",
    "canvases.js",
    "images.js",
    "tokens.js",
    "tables.js",
    "graph.js",
    "scissors.js",
    "tip.js",
    "answers.js",
    "layers.js",
    "pointing.js",
    "report.js",
)

#: Where files lie, by their ending.
_FOLDERS = MappingProxyType({"html": "pages", "js": "scripts", "css": "styles"})
_PLACE = re.compile(r"<!--(title|policy|style|script|data)-->")


def page(title: str, facts: Mapping[str, Any], blocks: Mapping[str, bytes]) -> str:
    """A report as a whole file."""
    return whole_page("report.html", _STYLES, _SCRIPTS, title, facts, blocks)


def short(number: float) -> float:
    """A number in as many digits as a page has use for; of what is no number, 0."""
    return float(f"{number:.5g}") if math.isfinite(number) else 0.0


def whole_page(
    skeleton: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    title: str,
    facts: Mapping[str, Any],
    blocks: Mapping[str, bytes] = MappingProxyType({}),
) -> str:
    """A file that needs no other.

    Args:
        skeleton: the name of the file whose places are filled.
        styles, scripts: names of files that become one style, and one script.
        title, facts, blocks: as in :func:`page`. Default of blocks: none.
    """
    style, script = ("\n".join(map(asset, names)) for names in (styles, scripts))
    data = [f'<script type="application/json" id="facts">{_json(facts)}</script>']
    for name, content in blocks.items():
        encoded = base64.b64encode(content).decode("ascii")
        block = html.escape(name, quote=True)
        data.append(f'<script type="application/octet-stream" id="{block}">{encoded}</script>')
    parts = {
        "title": html.escape(title.encode(errors="backslashreplace").decode()),
        "policy": html.escape(_policy(style, script), quote=True),
        "style": f"<style>{style}</style>",
        "script": f"<script>{script}</script>",
        "data": "\n".join(data),
    }
    return filled(skeleton, parts)


def filled(skeleton: str, parts: Mapping[str, str]) -> str:
    """A skeleton with its places filled, in one pass: what is put in is not searched again."""
    return _PLACE.sub(lambda place: parts[place[1]], asset(skeleton))


def framed(page: str, title: str, height: int) -> str:
    """A whole page as an element of another, such as a cell of a notebook: it asks for no address.

    Its styles and those of the notebook are kept apart, and its script from all but the page.
    """
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts" '
        f'title="{html.escape(title, quote=True)}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def asset(name: str) -> str:
    """A file that pages are made of.

    Args:
        name: of the file; its ending tells the folder in ``assets``.
    """
    folder = _FOLDERS[name.rpartition(".")[2]]
    return files(__package__).joinpath("assets", folder, name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _json(facts: Mapping[str, Any]) -> str:
    """JSON that can neither end its element nor begin a comment in it."""
    return json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
