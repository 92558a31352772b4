"""How the documentation is built: sphinx-build -W -c docs . site.

The source is the whole checkout, so that pages and notebooks link to each other by paths that hold
in the checkout, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

sys.path += [str(Path(__file__).parent / "_extensions"), str(Path(__file__).parents[1] / "bench")]

from captum_ssm import __version__

project = "captum_ssm"
author = copyright = "The captum_ssm developers"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
    "measured",
    "warm_kernels",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "tutorials/**"]
exclude_patterns = ["docs/_*/**"]
templates_path = ["_templates"]
html_additional_pages = {"index": "to_the_first_page.html"}
html_theme = "furo"
html_title = f"captum_ssm {version}"
# formulas are part of the pages: nothing is fetched when they are read
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["formulas.css", "pages.css"]
html_js_files = ["pages.js"]
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "_extensions" / "search_scorer.js")

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# Cells of pages and notebooks run at every build: they are stored without output.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 180
# packages warn of kernels that a CPU lacks, each time a kernel starts
nb_output_stderr = "remove"

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_use_rtype = False


#: Of each page, its entry in the tree of pages, and the entries below it.
TITLES: dict[str, nodes.bullet_list] = {}


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip_aliases)
    app.connect("html-page-context", keep_titles, priority=400)  # before the theme asks for it


def skip_aliases(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any) -> bool:
    """Leave out what Python writes of a NamedTuple's fields; its docstring says what they are."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def keep_titles(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Make the tree of pages of titles alone: Sphinx copies all names, and the theme shows none."""
    make, env = context["toctree"], app.env
    for name in env.tocs.keys() - TITLES.keys():
        TITLES[name] = env.tocs[name].deepcopy()
        for entry in (each for each in TITLES[name] if len(each) > 1):
            entry[1][:] = list(entry.findall(addnodes.toctree))

    def of_titles(**options: Any) -> str:
        full, env.tocs = env.tocs, TITLES
        try:
            return str(make(**options))
        finally:
            env.tocs = full

    context["toctree"] = of_titles
