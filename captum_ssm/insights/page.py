"""The page of Insights: served part by part, or whole with its examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..viz.html.page import filled, whole_page

_SKELETON, _TITLE = "insights.html", "Insights"
#: Files that are joined, in this order, to one style sheet and one script.
STYLES = ("common.css", "insights.css")
SCRIPTS = (
    "common.js",
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
    """Return the page, which requests its parts by name."""
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


def kept_page(facts: Mapping[str, Any]) -> str:
    """Return the page with all its data, which makes no requests."""
    return whole_page(_SKELETON, STYLES, SCRIPTS, _TITLE, facts)
