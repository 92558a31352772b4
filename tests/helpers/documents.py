"""README, CONTRIBUTING and docs: their code, commands and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: By the module that starts it, each program.
_PROGRAMS = {"captum_ssm": "captum-ssm", "captum_ssm_bench": "captum-ssm-bench"}


@dataclass(frozen=True)
class Command:
    """A call of captum-ssm or captum-ssm-bench in a page's bash block."""

    page: str
    program: str
    arguments: tuple[str, ...]
    needs: str  # by the first line of its block; empty for nothing
    launched: bool  # by another program, such as torchrun

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.arguments[:3])}"


def blocks(page: str, language: str = "python") -> list[str]:
    """The page's code in one language."""
    found = _FENCE.findall((ROOT / page).read_text("utf-8"))
    return [code for name, code in found if name == language]


def run(page: str, checkpoints: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The names that the page's Python code defines, run with these folders for checkpoints."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        for name, folder in checkpoints.items():
            block = block.replace(f'"{name}"', repr(folder))
        exec(compile(block, page, "exec"), names)
    return names


def commands(page: str) -> list[Command]:
    """The page's calls of captum-ssm and captum-ssm-bench."""
    return [command for block in blocks(page, "bash") for command in _of_block(page, block)]


def links(page: str) -> list[str]:
    """The relative links of a page's text, without what follows a #."""
    text = _CODE.sub("", _FENCE.sub("", (ROOT / page).read_text("utf-8")))
    found = (link.partition("#")[0] for link in _LINK.findall(text))
    return [link for link in found if link and ":" not in link]


def _of_block(page: str, block: str) -> list[Command]:
    first = block.partition("\n")[0]
    needs = first.removeprefix("# needs").strip() if first.startswith("# needs") else ""
    found = []
    for words in _calls(block):
        for module, program in _PROGRAMS.items():
            if program in words:
                start = words.index(program) + 1
            elif ["-m", module] in [words[i : i + 2] for i in range(len(words))]:
                start = words.index(module) + 1  # of python or of a launcher
            else:
                continue
            launched = words[0] != program
            found.append(Command(page, program, tuple(words[start:]), needs, launched))
    return found


def _calls(block: str) -> Iterator[list[str]]:
    """The words of each single command."""
    for line in block.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        for joint, words in groupby(reader, lambda word: word in ("&&", "||", "|", ";", "&")):
            if not joint:
                yield list(words)
