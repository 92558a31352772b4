"""Check that imports inside captum_ssm run only downwards.

Usage: python tools/check_strata.py [ROOT], where ROOT is the folder that holds captum_ssm.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "captum_ssm"

# Lowest first. What stands on one line may not import each other.
STRATA: tuple[frozenset[str], ...] = (
    frozenset({"operators"}),
    frozenset({"mixers"}),
    frozenset({"tracing"}),
    frozenset({"linear"}),
    frozenset({"attr"}),
    frozenset({"metrics", "viz"}),
    frozenset({"models"}),
    frozenset({"explain"}),
    frozenset({"insights"}),
    frozenset({"bench"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
RANK = {part: rank for rank, stratum in enumerate(STRATA) for part in stratum}

# Barred even inside functions.
BARRED = {"operators": {"captum", "transformers"}, "mixers": {"captum"}}

# All other packages are optional, so they may only be imported inside functions.
REQUIRED = {"captum", "numpy", "torch"}

# captum_ssm/__init__.py offers its names lazily.
ROOT_IMPORTS = {"__future__", "importlib", "typing", f"{PACKAGE}.errors"}


class Import(NamedTuple):
    line: int
    module: str
    inside_function: bool
    for_typing: bool


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """All imports of a file whose ``__package__`` is ``package``."""
    pending: list[tuple[ast.AST, bool, bool]] = [(tree, False, False)]
    while pending:
        node, inside_function, for_typing = pending.pop()
        for module in _modules(node, package):
            yield Import(node.lineno, module, inside_function, for_typing)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += [(child, inside_function, True) for child in node.body]
            pending += [(child, inside_function, for_typing) for child in node.orelse]
            continue
        inside_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, inside_function, for_typing) for child in ast.iter_child_nodes(node)]


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*parents, node.module] if node.module else parents)
    if base == PACKAGE:
        return [f"{PACKAGE}.{alias.name}" for alias in node.names]
    return [base]


def complaint(part: str, imported: Import) -> str | None:
    """Why ``part`` of the package may not import this, or None if it may."""
    top, _, rest = imported.module.partition(".")
    at_import = not (imported.inside_function or imported.for_typing)
    if part == "__init__":
        allowed = any(
            imported.module == name or imported.module.startswith(f"{name}.")
            for name in ROOT_IMPORTS
        )
        if at_import and not allowed:
            return f"__init__ imports {imported.module} at module level"
        return None
    if top == PACKAGE:
        return _complaint_within(part, rest.partition(".")[0])
    if top in BARRED.get(part, ()):
        return f"{part} may not import {top}"
    if at_import and top not in REQUIRED and top not in sys.stdlib_module_names:
        return f"{top} is optional, so it may only be imported inside a function"
    return None


def _complaint_within(part: str, target: str) -> str | None:
    if target == part or _is_base(target):
        return None
    if _is_base(part):
        return f"{part} may only import errors and private helpers, not {target}"
    if part not in RANK:
        return f"{part} has no stratum"
    if target not in RANK:
        return f"{part} imports {target or PACKAGE}, which has no stratum"
    if RANK[target] >= RANK[part]:
        return f"{part} may not import {target}, which is not below it"
    return None


def _is_base(part: str) -> bool:
    private = part.startswith("_") and not part.startswith("__")
    return private or part in ("errors", "__version__")


def check(root: Path) -> list[str]:
    """One line for each import that breaks a rule."""
    complaints = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root)
        part = relative.parts[1].removesuffix(".py")
        package = ".".join(relative.parent.parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for imported in sorted(imports_of(tree, package)):
            if reason := complaint(part, imported):
                complaints.append(f"{relative.as_posix()}:{imported.line}: {reason}")
    return complaints


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    if not (root / PACKAGE).is_dir():
        print(f"no {PACKAGE} in {root}", file=sys.stderr)
        return 2
    complaints = check(root)
    for line in complaints:
        print(line)
    print(f"strata: {len(complaints)} imports break the rules")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
