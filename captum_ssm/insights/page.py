"""Build the HTML page of Insights, for a server or as one file with all examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..viz.html.page import filled, whole_page

_SKELETON, _TITLE = "insights.html", "Insights"
#: Style sheets and scripts of the page, in this order.
STYLES = ("common.css", "insights.css")
SCRIPTS = (
    "common.js",
    "svg.js",
    "maps.js",
    "canvases.js",
    "images.js",
    "tables.js",
    "tip.js",
    "graph.js",
    "words.js",
    "drawing.js",
    "controls.js",
    "insights.js",
)


def served_page(policy: str) -> str:
    """Return the page for a server, with a Content-Security-Policy and links to its scripts."""
    styles = (f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = (f'<script defer src="{name}"></script>' for name in SCRIPTS)
    parts = {
        "title": _TITLE,
        "policy": policy,
        "style": "\n".join(styles),
        "script": "\n".join(scripts),
        "data": "",
    }
    return filled(_SKELETON, parts)


def snapshot_page(facts: Mapping[str, Any]) -> str:
    """Return the page as one HTML file, with all scripts and ``facts``, the page's data."""
    return whole_page(_SKELETON, STYLES, SCRIPTS, _TITLE, facts)
