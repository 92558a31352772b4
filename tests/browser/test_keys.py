"""All that can be done on a page is done by keys alone, at both widths and in both themes.

Each page is gone through with Tab.  What takes the focus has a line below, with the keys that are
pressed on it and what they must change; a control without a line fails, and so does one that Tab
does not come to or whose focus is not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from browser.made import sentences
from helpers.browser import Page
from zoo.small import token_ids


class Use(NamedTuple):
    """A control, the keys that are pressed on it, and an expression that the last of them changes.

    Without keys it is an area that scrolls, where there is more in it than is seen.
    """

    selector: str
    keys: str = ""
    changes: str = ""


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.innerText"


def value(selector: str, name: str = "value") -> str:
    return f"document.querySelector({json.dumps(selector)})?.{name}"


def count(selector: str) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length"


FOCUS = "document.activeElement.dataset.index ?? document.activeElement.ariaLabel"
SHADES = "[...document.querySelectorAll('.token')].map((t) => t.style.backgroundColor).join()"
DRAWN = "[...document.querySelectorAll('canvas')].map((c) => c.toDataURL()).join()"
COLOURS = f"{SHADES} + {DRAWN}"
KEPT = value(".token[aria-pressed=true]", "dataset.index")
THEME = Use("#theme", "Enter", "document.documentElement.dataset.theme")
DOT = ".graph svg [tabindex='0']"
GRAPH = [
    Use(".graph .smallest input", "End", count(".graph line:not(.hidden)")),
    *(Use(DOT, key, FOCUS) for key in ("ArrowDown", "ArrowUp", "ArrowDown")),
    Use(DOT, "Enter", text(".graph .parts")),
    Use(DOT, "Escape", count(".graph .faint")),
    Use(".graph .parts .jump", "Enter", text(".graph .parts")),
    Use(".graph .whole", "Enter", value(".graph .whole", "hidden")),
    Use(".graph .path"),
]
ARC, SAID = "#cuts .arc[tabindex='0']", text("#cuts .say")
CUTS = [
    Use("#cuts .copy", "Enter", text("#cuts .why")),
    *(Use(ARC, key, FOCUS) for key in ("ArrowRight", "ArrowLeft", "End", "Home")),
    *(Use(ARC, key, SAID) for key in ("Enter", "Escape", "Space")),
    Use("#cuts .heal", "Enter", SAID),
]
TABLE = [
    Use("#cuts td button", "Enter", SAID),
    Use("#cuts .heal", "Enter", SAID),
    Use("#cuts details div"),
    Use("#cuts summary", "Enter", value("#cuts details", "open")),
]
TO_AND_FRO = ("Home ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "End")
TOKENS = "#text .token[tabindex='0']"
REPORT = [
    THEME,
    Use("#example", "ArrowDown", f"{value('#picture img', 'src')} + {text('#text')}"),
    Use("#targets input:checked", "ArrowRight", COLOURS),
    Use("#rivals input:checked", "ArrowRight", COLOURS),
    Use("#methods input:checked", "ArrowDown", COLOURS),
    Use("#strongest .jump", "Enter", KEPT),
    Use("#thumbnails input:checked", "ArrowLeft", DRAWN),
    Use("#entering"),
    Use("#map-picture"),
    Use("#lens"),
    Use("#numbers summary", "Enter", count("#numbers-table tr")),
    Use("#numbers-table"),
    Use("#help summary", "Enter", value("#help", "open")),
]
PANE = ".pane .token[tabindex='0']"
OF_PANE = [
    *(Use(PANE, key, FOCUS) for key in ("Home ArrowRight", "ArrowLeft", "End")),
    Use(PANE, "Enter", KEPT),
    Use(PANE, "Escape", KEPT),
]
PAGES = {
    "long": [
        *REPORT,
        *GRAPH,
        *CUTS,
        TABLE[-1],
        *TABLE[:-1],
        *(Use(TOKENS, key, FOCUS) for key in TO_AND_FRO),
        Use(TOKENS, "Enter", KEPT),
        Use(TOKENS, "Escape", KEPT),
        Use(TOKENS, "PageDown", text("#layer-name")),
        Use("#map", "ArrowDown", DRAWN),
        Use("#closer", "Enter", f"{text('#zoomed')} + {DRAWN}"),
        Use("#wider", "Enter", f"{text('#zoomed')} + {DRAWN}"),
    ],
    "image": [
        *REPORT,
        *TABLE,
        *(Use("#picture .token[tabindex='0']", key, FOCUS) for key in TO_AND_FRO),
        Use("#picture .token[tabindex='0']", "Enter", KEPT),
        Use("#over-image select", "ArrowDown", DRAWN),
        Use("#over-image input", "ArrowLeft", "document.documentElement.style.cssText"),
    ],
    "answers": [
        THEME,
        *OF_PANE,
        Use(PANE, "Home End", value(".arcs", "innerHTML")),
        Use("#stretch input:checked", "ArrowRight", text("#status")),
        Use("#shades input:checked", "ArrowRight", SHADES),
        Use("#hops", "ArrowLeft", SHADES),
        Use("#strongest button", "Enter", count(".found")),
        Use("#whole", "Enter", text("#status")),
        Use("#example", "ArrowDown", text("#prompt")),
        Use("#numbers summary", "Enter", count("#numbers-table tr")),
        Use("#numbers-table"),
        Use("#help summary", "Enter", value("#help", "open")),
    ],
    "results": [
        THEME,
        *OF_PANE,
        Use("#example", "ArrowDown", text("#sum")),
        Use("#biases summary", "Enter", value("#biases", "open")),
        Use("#numbers summary", "Enter", count("#numbers-table tr")),
        Use("#numbers-table"),
    ],
    "insights": [
        Use("a.skip", "Enter", "document.activeElement.id"),
        THEME,
        Use(".flow", "ArrowRight", text("#tip")),
        Use(".flow", "End", text("#tip")),
        Use(".flow", "Escape", value("#tip", "hidden")),
        Use("details:has(.role) > summary", "Enter", value("details:has(.role)", "open")),
        Use(".role .flow", "ArrowRight", text("#tip")),
        Use(".flow + details > summary", "Enter", count(".numbers")),
        Use(".numbers"),
        Use(".predicted button:nth-child(2)", "Enter", text(".predicted [aria-pressed=true]")),
        Use(".predicted button", "Enter", text(".predicted [aria-pressed=true]")),
        Use(".cutting > summary", "Enter", value(".cutting", "open")),
        Use(".cutting select", "ArrowDown", value(".cutting select")),
        Use(".cutting form button", "Enter", text(".cutting .result")),
        Use(".cutting .predicted button", "Enter", text(".cutting .result")),
        Use(".way > summary", "Enter", count(".way svg")),
        *GRAPH,
        Use("#choosing > summary", "Enter", value("#choosing", "open")),
        Use("#unfit summary", "Enter", value("#unfit", "open")),
        Use("#add-method", "Enter", count(".choice")),
        Use(".remove", "Enter", count(".choice")),
        Use("#prediction", "ArrowDown", value("#prediction")),
        Use("#prediction", "Home", value("#prediction")),
        Use("#class", "w 4", value("#class")),
        Use("#add-class", "Enter", count("#classes button")),
        Use("#classes button", "Enter", count("#classes button")),
        Use("#count", "ArrowUp", value("#count")),
        Use("#show", "Enter", count("h2")),
        Use("#next", "Enter", text("h2")),
        Use("#method", "ArrowDown", value("#method")),
        Use("[id^='argument-']"),
    ],
}
FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"
#: Of what has the focus: what it is, which selectors it matches, and whether its focus is seen.
TOLD = """((selectors) => {
  const e = document.activeElement;
  if (e === document.body) return null;
  (globalThis.reached ??= new Set()).add(e);
  const seen = [e, e.closest('label')].some((x) => x && getComputedStyle(x).outlineStyle !== 'none')
    || [...e.children].some((x) => getComputedStyle(x).strokeWidth === '2.5px'); // of a dot
  const known = selectors.some((selector) => e.matches(selector.replace(':checked', '')));
  return [e.outerHTML.slice(0, 160), known, seen];
})"""
LEFT = f"""[...document.querySelectorAll({json.dumps(FOCUSABLE)})].filter((e) => e.checkVisibility()
  && !e.disabled && e.tabIndex >= 0 && !(e.type === 'radio' && !e.checked)
  && !reached.has(e)).map((e) => e.outerHTML.slice(0, 160))"""


def go_through(page: Page, uses: list[Use]) -> None:
    """Tab from the top to the bottom: all is come to, is known and shows its focus."""
    selectors = json.dumps([use.selector for use in uses])
    page.evaluate("globalThis.reached = new Set(), document.body.tabIndex = -1")
    page.evaluate("document.body.focus(), document.body.removeAttribute('tabindex')")
    for _ in range(250):
        page.keys("Tab")
        told = page.evaluate(f"{TOLD}({selectors})")
        if told is None:
            break
        element, known, seen = told
        assert known, f"no line for {element}"
        assert seen, f"the focus is not seen on {element}"
    assert page.evaluate(LEFT) == []


def use(page: Page, each: Use) -> None:
    """Press the keys on a control: what they are to change changes."""
    element = f"document.querySelector({json.dumps(each.selector)})"
    page.wait_for(f"{element}?.checkVisibility()")
    page.evaluate(f"{element}.focus()")
    if not each.keys:
        for key, side, place in (("Right", "Width", "Left"), ("Down", "Height", "Top")):
            if page.evaluate(f"{element}.scroll{side} > {element}.client{side} + 1"):
                page.keys(f"Arrow{key}")
                page.wait_for(f"{element}.scroll{place} > 0")
        return
    *first, last = each.keys.split()
    for key in first:
        page.keys(key)
    before = page.evaluate(each.changes)
    page.keys(last)
    page.wait_for(f"({each.changes}) !== {json.dumps(before)}")
    page.wait_for("!document.querySelector('[aria-busy]')")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("view")
def test_every_control_by_keys(page: Page, written: Callable[[str], Path], name: str) -> None:
    if name == "insights":
        chosen = {"attribution_arguments": {"rule": "centered"}, "num_examples": 1}
        with sentences(token_ids(6, 6).tolist(), **chosen) as visualizer:
            visualizer.serve()
            page.goto(visualizer.url)
            page.wait_for("document.querySelector('article') !== null")
            work(page, PAGES[name])
            own = visualizer.url.partition("?")[0]
            assert all(url.startswith(own) for url in page.requests)
    else:
        page.goto(written(name))
        work(page, PAGES[name])
        assert page.requests == [written(name).as_uri()]


def work(page: Page, uses: list[Use]) -> None:
    go_through(page, uses)
    for each in uses:
        use(page, each)
    go_through(page, uses)
    assert page.overflow() <= 0
    assert page.errors == [] and page.dialogs == []
