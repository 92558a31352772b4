"""Say whether the tests of bench have passed for its files as they are.

Usage: python bench/passed.py [--write], which notes that they have. The note is a hash of the files
below bench that git tracks, but the note's own.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
NOTE = BENCH / "PASSED"


def digest() -> str:
    """The hash of names and contents, in the order of the names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=BENCH, capture_output=True, check=True)
    found = hashlib.sha256()
    for name in sorted(filter(None, listed.stdout.decode().split("\0"))):
        if (BENCH / name).is_file() and BENCH / name != NOTE:
            found.update(
                f"{name}\0".encode() + hashlib.sha256((BENCH / name).read_bytes()).digest()
            )
    return found.hexdigest()


def main() -> int:
    """Write the note, or compare it; returns the exit code."""
    if "--write" in sys.argv[1:]:
        NOTE.write_text(f"{digest()}\n", encoding="utf-8")
    passed = NOTE.is_file() and NOTE.read_text(encoding="utf-8").strip() == digest()
    print("bench: its tests have passed" if passed else "bench: changed since its tests passed")
    return not passed


if __name__ == "__main__":
    raise SystemExit(main())
