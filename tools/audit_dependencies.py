"""Ask pip-audit for known vulnerabilities of what constraints.txt pins.

Usage: python tools/audit_dependencies.py [CONSTRAINTS], with the Python that pip-audit is for.

The exit status is 1 if there are some, and 2 if pip-audit is not there.  Where its service does not
answer, as without a network or behind an index that does not pass it on, that is said, with
status 0: it is no fault of a change.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

OPTIONS = (
    "--no-deps",
    "--disable-pip",
    "--format=json",
    "--progress-spinner=off",
    "--timeout=15",
)


class Unanswered(Exception):
    """The service says nothing about any package."""


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("constraints.txt")
    if importlib.util.find_spec("pip_audit") is None:
        print("pip-audit is not installed: pip install pip-audit", file=sys.stderr)
        return 2
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    try:
        findings(audited(pins[:1]))  # one question tells whether there is a service
        found = findings(audited(pins))
    except Unanswered as reason:
        print(f"NOT AUDITED: the service of vulnerabilities does not answer ({reason})")
        return 0
    for line in found:
        print(line)
    vulnerable = sum(line.startswith("VULNERABLE") for line in found)
    print(f"audit: {vulnerable} vulnerabilities, {len(found) - vulnerable} packages not audited")
    return 1 if vulnerable else 0


def audited(pins: list[str]) -> list[dict[str, Any]]:
    """What pip-audit says of each pin."""
    with TemporaryDirectory() as folder:
        asked = Path(folder, "requirements.txt")
        asked.write_text("\n".join(pins), encoding="utf-8")
        command = (sys.executable, "-m", "pip_audit", "--requirement", str(asked), *OPTIONS)
        result = subprocess.run(command, capture_output=True, text=True)
    try:
        found: list[dict[str, Any]] = json.loads(result.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise Unanswered(last_line(result.stderr)) from None
    return found


def findings(packages: list[dict[str, Any]]) -> list[str]:
    """One line for each vulnerability, and for each package that the service does not know.

    Raises:
        Unanswered: if it knows none.
    """
    skipped = [each["skip_reason"] for each in packages if "skip_reason" in each]
    if len(skipped) == len(packages):
        raise Unanswered(skipped[0] if skipped else "no package was asked for")
    found = [f"not audited: {reason}" for reason in skipped]
    for each in packages:
        for known in each.get("vulns", ()):
            fixed = ", ".join(known["fix_versions"]) or "no version yet"
            package = f"{each['name']} {each['version']}"
            found.append(f"VULNERABLE: {package}: {known['id']}, mended in {fixed}")
    return found


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


if __name__ == "__main__":
    sys.exit(main())
