"""The HTML file: a fixed skeleton, style and script, and data that none of them can be made of.

Whatever comes from a model or a text stands in data blocks, as JSON without a ``<`` or as base64,
and reaches the page as text alone.  The policy in the page's head lets no other script run than the
one that is written here, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

#: In this order they are one script.
_SCRIPTS = ("maps.js", "colours.js", "tokens.js", "tables.js", "report.js")

_PLACE = re.compile(r"<!--(title|policy|style|script|data)-->")


def page(title: str, facts: Mapping[str, Any], blocks: Mapping[str, bytes]) -> str:
    """The whole file.

    Args:
        title: the heading.
        facts: what the script reads as JSON.
        blocks: bytes that it reads when they are needed, by the id of their element.
    """
    style = _asset("report.css")
    script = "\n".join(_asset(name) for name in _SCRIPTS)
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
    # in one pass: what is put in is not searched again
    return _PLACE.sub(lambda place: parts[place[1]], _asset("report.html"))


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


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
