"""What axe-core, an outside judge of accessibility, holds against a page.

Its script comes with the package axe-playwright-python, under the Mozilla Public License 2.0.  Only
checks use it: nothing of it is part of a page, or of the package.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, files

from helpers.browser import Page

PACKAGE = "axe-playwright-python"
#: All of axe's rules: those of WCAG, and what it calls best practices.
_RUN = """\
axe.run().then(({violations}) => violations.flatMap((rule) => rule.nodes.map(
  (node) => `${rule.id} (${rule.impact}): ${node.target.join(' ')}: ` +
    node.failureSummary.replace(/\\s+/g, ' '))))"""


@cache
def script() -> str | None:
    """The source of axe-core; None where its package is not installed."""
    try:
        (found,) = (path for path in files(PACKAGE) or () if path.name == "axe.min.js")
    except PackageNotFoundError:
        return None
    return str(found.read_text(encoding="utf-8"))


def violations(page: Page) -> list[str]:
    """Every rule that the page breaks as it is shown now, and by which element."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(f"{script()};null")
    return [str(found) for found in page.evaluate(_RUN)]
