"""Build an HTML file from a skeleton, styles, scripts and data.

The folder ``assets`` has the parts of this page and of the Insights page, which share
``common.css`` and ``common.js``. Texts from a model or user are in compressed data blocks in
base64, and are shown only as text. The page's policy allows only its own script, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeAlias

#: Files that are joined, in this order, to one style sheet and one script.
_STYLES = ("common.css", "report.css", "scissors.css")
_SCRIPTS = (
    "common.js", "svg.js", "maps.js", "canvases.js", "images.js", "tokens.js", "tables.js",
    "graph.js", "scissors.js", "tip.js", "answers.js", "layers.js", "pointing.js", "report.js",
)  # fmt: skip

#: JSON values that a page's script reads.
Facts: TypeAlias = dict[str, Any]
#: Folders of the asset files, by suffix.
_FOLDERS = MappingProxyType({"html": "pages", "js": "scripts", "css": "styles"})
_PLACEHOLDER = re.compile(r"<!--(title|policy|style|script|data)-->")


def page(title: str, facts: Mapping[str, Any], blocks: Mapping[str, bytes]) -> str:
    """Return the HTML file of a report."""
    return whole_page("report.html", _STYLES, _SCRIPTS, title, facts, blocks)


def short(number: float) -> float:
    """Round a number to the digits that a page needs; 0 for NaN and infinity."""
    return float(f"{number:.5g}") if math.isfinite(number) else 0.0


def whole_page(
    skeleton: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    title: str,
    facts: Mapping[str, Any],
    blocks: Mapping[str, bytes] = MappingProxyType({}),
) -> str:
    """Return an HTML file that contains all styles, scripts and data.

    Files ``styles`` and ``scripts`` are joined and put into the file ``skeleton``, with JSON values
    ``facts`` and bytes by name.
    """
    style, script = (_without_comments("\n".join(map(asset, names))) for names in (styles, scripts))
    json_bytes = json.dumps(facts, allow_nan=False, separators=(",", ":")).encode()
    data = []
    for name, content in {"facts": json_bytes, **blocks}.items():
        encoded = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
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


def _without_comments(text: str) -> str:
    """Remove indents and comment lines from a style or a script."""
    return re.sub(
        r"^ *(/\*(?:(?!\*/).)*\*/\n|// [^\n]*\n)?", "", text, flags=re.DOTALL | re.MULTILINE
    )


def filled(skeleton: str, parts: Mapping[str, str]) -> str:
    """Fill a skeleton's placeholders in one pass; inserted text is not searched again."""
    return _PLACEHOLDER.sub(lambda place: parts[place[1]], asset(skeleton))


def framed(page: str, title: str, height: int) -> str:
    """Return a page as an iframe, which separates the page's styles and script from a notebook."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts" '
        f'title="{html.escape(title, quote=True)}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def asset(name: str) -> str:
    """Read an asset file; its ending determines the folder in ``assets``."""
    folder = _FOLDERS[name.rpartition(".")[2]]
    return files(__package__).joinpath("assets", folder, name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows only this style and this script, by digest."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
