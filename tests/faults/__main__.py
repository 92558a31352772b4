"""Plant faults one at a time in a copy of the tree, and tell which test sees each.

Tests run until the first one fails: first the files that a fault names, in the quick session and
then whole, at last the quick session of all.  A test counts if it passes without faults.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from . import FAULTS, ROOT, Fault, StaleFaultError, sources

#: Seconds after which a run of tests counts as one that hangs.
_LIMIT = 1800
#: Width of the column of names.
_WIDTH = max(len(fault.name) for fault in FAULTS)
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """What became of a fault.

    Attributes:
        name: name of the fault.
        test: id of the test that fails with it; None if none does.
        seconds: time it took.
    """

    name: str
    test: str | None
    seconds: float


def main() -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_args()
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if unknown := set(options.only) - {fault.name for fault in chosen}:
        print(f"no such fault: {', '.join(sorted(unknown))}")
        return 1
    package = sources()
    try:
        places = {fault.name: fault.planted(package)[0] for fault in chosen}
    except StaleFaultError as error:
        print(error)
        return 1
    if options.list:
        for fault in chosen:
            print(f"{fault.name:{_WIDTH}}  {places[fault.name]}: {', '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trees = [_copied(Path(folder, str(number))) for number in range(options.jobs)]
        found = _all(chosen, trees, options.named)
        tests = {outcome.test for outcome in found if outcome.test is not None}
        wrong = _failures(trees[0], *sorted(tests), "-m", "") if tests else []
    for test in wrong:
        print(f"{test} fails without a fault as well.")
    missed = [outcome for outcome in found if outcome.test is None or outcome.test in wrong]
    print(f"{len(found) - len(missed)} of {len(found)} faults are seen.")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults alone")
    parser.add_argument("--list", action="store_true", help="name the faults, and plant none")
    parser.add_argument("--named", action="store_true", help="no other tests than a fault names")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time; 2 if left")
    return parser


def _all(faults: Sequence[Fault], trees: Sequence[Path], named: bool) -> list[Outcome]:
    """Plant each fault in one of the copies, and print its row when it is known."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def outcome(fault: Fault) -> Outcome:
        tree = free.get()
        try:
            found = _planted(fault, tree, named)
        finally:
            free.put(tree)
        told = found.test or "NO TEST SEES IT"
        print(f"{found.name:{_WIDTH}}  {found.seconds:5.0f} s  {told}", flush=True)
        return found

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(outcome, faults))


def _copied(tree: Path) -> Path:
    """Copy the files of the checkout that git knows or would add."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    return tree


def _planted(fault: Fault, tree: Path, named: bool) -> Outcome:
    start = time.monotonic()
    path, text = fault.planted(sources(tree))
    before = (tree / path).read_text(encoding="utf-8")
    _write(tree / path, text)
    try:
        test = _first_failure(fault, tree, named)
    finally:
        _write(tree / path, before)
    return Outcome(fault.name, test, time.monotonic() - start)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # compiled code is told by size and second, which both may be those of the other text
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _first_failure(fault: Fault, tree: Path, named: bool) -> str | None:
    """Run the tests that should see a fault, then all, until one fails; return its id."""
    there = [f"tests/{name}" for name in fault.tests if (tree / "tests" / name).exists()]
    runs: list[tuple[str, ...]] = [(name,) for name in there]
    runs += [(*there, "-m", "")] if there else []
    runs += [] if named else [("tests",)]
    for arguments in runs:
        if found := _failures(tree, "-x", *arguments):
            return found[0]
    return None


def _failures(tree: Path, *arguments: str) -> list[str]:
    """Run tests; return the ids of those that fail."""
    options = ("-q", "--tb=no", "-p", "no:cacheprovider", "--disable-warnings")
    # the tests' own commands find the copy as well, before a package that is installed
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    done = subprocess.Popen(
        (sys.executable, "-m", "pytest", *options, *arguments),
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told, _ = done.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        done.kill()
        return [f"tests that do not end in {_LIMIT} s: {' '.join(arguments)}"]
    found = _FAILURE.findall(told)
    if not found and done.returncode not in (0, 5):  # 5: no test is chosen
        raise RuntimeError(f"pytest says:\n{told[-2000:]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
