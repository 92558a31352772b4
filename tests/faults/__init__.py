"""Realistic faults that the tests have to see; ``python -m tests.faults`` plants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A mistake that somebody might make.

    Attributes:
        name: name of the fault.
        old: text of the package that occurs once, in any file, so that code may move.
        new: text that replaces it.
        tests: files or folders below ``tests`` that should see the fault, the likeliest first.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, sources: Mapping[Path, str]) -> tuple[Path, str]:
        """Return the file that changes, and its text with the fault.

        Args:
            sources: text of every file of the package, by path.

        Raises:
            StaleFaultError: if the old text does not occur exactly once, or the new one is no code.
        """
        found = [path for path, text in sources.items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            places = ", ".join(map(str, found)) or "nowhere"
            raise StaleFaultError(f"{self.name}: the old text must occur once; it is in {places}.")
        text = sources[found[0]].replace(self.old, self.new)
        try:
            compile(text, str(found[0]), "exec")
        except SyntaxError as error:
            raise StaleFaultError(f"{self.name}: the new text is no code: {error}.") from error
        return found[0], text


class StaleFaultError(Exception):
    """A fault that no longer fits the package."""


def read(table: str) -> tuple[Fault, ...]:
    """Read faults: a line with name and tests, the old text behind "-", the new one behind "+"."""
    faults = []
    for block in table.split("\n\n"):
        head, *lines = block.strip("\n").split("\n")
        if head and not head.startswith("#"):
            name, _, tests = head.partition(" @ ")
            old, new = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
            faults.append(Fault(name, old, new, tuple(tests.split())))
    return tuple(faults)


#: The faults, by room. Old texts are as short as they can be, so that they outlive their neighbors.
FAULTS = read(Path(__file__).with_name("table.txt").read_text(encoding="utf-8"))


def sources(root: Path = ROOT) -> dict[Path, str]:
    """Read the package: the text of each file, by its path below the root."""
    files = sorted((root / "captum_ssm").rglob("*.py"))
    return {file.relative_to(root): file.read_text(encoding="utf-8") for file in files}
