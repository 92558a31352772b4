"""Check what the package says it needs against what it imports and what is installed.

Usage: python tools/check_dependencies.py [ROOT], where ROOT is the folder that holds setup.cfg,
constraints.txt and captum_ssm; with the Python of the environment to be checked.

- What captum_ssm imports, also inside functions and by name, is declared in setup.cfg: in
  install_requires or in an extra for users.
- What is installed is pinned in constraints.txt, at the version that is installed.
- What users get, all that it needs in turn included, has a licence that is permitted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from importlib.metadata import Distribution, distributions
from pathlib import Path

from check_strata import PACKAGE, imports_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Extras for whoever works on the package itself.
DEVELOPMENT = {"dev", "docs", "lint", "test"}

#: Functions whose first argument names a module to import.
IMPORTERS = {"import_module", "optional"}

#: Distributions that are not called as their module is.
DISTRIBUTIONS = {"IPython": "ipython", "PIL": "pillow", "skimage": "scikit-image"}

#: Installed whatever is asked for: pip makes the environment, the package is what it is for.
UNPINNED = {"captum-ssm", "pip"}

#: What torch's builds for CUDA bring along, at versions of its choice, under NVIDIA's terms.
OF_CUDA = ("cuda-", "nvidia-")

#: As SPDX has them, and as classifiers and older metadata spell them.
PERMITTED = {
    "0BSD",
    "Apache", "Apache 2.0", "Apache 2.0 License", "Apache Software License", "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC", "ISC License (ISCL)",
    "MIT", "MIT License", "MIT-CMU",
    "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)",
    "PSF-2.0", "Python Software Foundation License",
    "Zlib",
}  # fmt: skip


# --- what is imported ------------------------------------------------------------------------


def undeclared(root: Path) -> Iterator[str]:
    """One line for each import of a package that users are not told of."""
    declared = {canonicalize_name(requirement.name) for requirement in for_users(root)}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, module in sorted(imported(tree, ".".join(relative.parent.parts))):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("", PACKAGE):
                continue
            name = canonicalize_name(DISTRIBUTIONS.get(top, top))
            if name not in declared:
                yield f"{relative.as_posix()}:{line}: {name} is in no extra for users"


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Line and name of every module that a file imports, at any time."""
    for found in imports_of(tree, package):
        if not found.for_typing:
            yield found.line, found.module
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in IMPORTERS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def for_users(root: Path) -> list[Requirement]:
    """What install_requires and the extras for users ask for."""
    config = ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    lists = [config["options"]["install_requires"]]
    extras = config["options.extras_require"]
    lists += [extras[name] for name in extras if name not in DEVELOPMENT]
    return [Requirement(line) for text in lists for line in text.splitlines() if line.strip()]


# --- what is installed -----------------------------------------------------------------------


def unpinned(root: Path, installed: Iterable[Distribution]) -> Iterator[str]:
    """One line for each distribution that constraints.txt does not pin, or pins elsewhere."""
    pins = constraints(root)
    for name, distribution in sorted(by_name(installed).items()):
        if name in UNPINNED or name.startswith(OF_CUDA):
            continue
        found = f"{name}=={distribution.version}"
        if name not in pins:
            yield f"constraints.txt: {found} is installed and not pinned"
        elif not pins[name].specifier.contains(distribution.version, prereleases=True):
            yield f"constraints.txt: {found} is installed, pinned is {pins[name]}"


def constraints(root: Path) -> dict[str, Requirement]:
    """The pins that hold for this Python."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    stripped = (line.partition("#")[0].strip() for line in lines)
    pins = (Requirement(line) for line in stripped if line)
    return {
        canonicalize_name(pin.name): pin
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def by_name(installed: Iterable[Distribution]) -> dict[str, Distribution]:
    return {canonicalize_name(found.metadata["Name"]): found for found in installed}


# --- licences --------------------------------------------------------------------------------


def unlicensed(root: Path, installed: Iterable[Distribution]) -> Iterator[str]:
    """One line for each licence, of what users get, that is not permitted."""
    for name, distribution in sorted(needed(for_users(root), by_name(installed)).items()):
        for licence in licences(distribution):
            if licence not in PERMITTED and not name.startswith(OF_CUDA):
                yield f"{name}: the licence {licence!r} is not among those permitted"


def needed(asked: list[Requirement], installed: dict[str, Distribution]) -> dict[str, Distribution]:
    """Of what is installed, what these requirements bring in, by name."""
    pending = [part for requirement in asked for part in parts(requirement)]
    seen: set[tuple[str, str]] = set()
    while pending:
        part = name, extra = pending.pop()
        if part in seen or name not in installed:
            continue
        seen.add(part)
        for requirement in map(Requirement, installed[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += parts(requirement)
    return {name: installed[name] for name, _ in seen}


def parts(requirement: Requirement) -> list[tuple[str, str]]:
    """The distribution without extras, and with each that is asked for."""
    name = canonicalize_name(requirement.name)
    return [(name, extra) for extra in ("", *requirement.extras)]


def licences(distribution: Distribution) -> list[str]:
    """The licences that a distribution names, in the best of three places."""
    metadata = distribution.metadata
    classifiers = metadata.get_all("Classifier") or ()
    of_licence = [text for text in classifiers if text.startswith("License :: ")]
    if of_licence and not metadata["License-Expression"]:
        return [text.rpartition(" :: ")[2] for text in of_licence]
    text = metadata["License-Expression"] or metadata["License"] or ""
    return re.split(r" (?:AND|OR) ", re.sub("[()]", "", text.strip().partition("\n")[0]))


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    installed = list(distributions())
    complaints = [*undeclared(root), *unpinned(root, installed), *unlicensed(root, installed)]
    for line in complaints:
        print(line)
    print(f"dependencies: {len(complaints)} complaints, {len(installed)} distributions installed")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
