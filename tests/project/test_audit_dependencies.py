"""What the audit says, of answers as pip-audit gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "audit_dependencies.py"

PINS = "# a comment\n\nfirst==1.0\nsecond==2.0\n"
UNKNOWN = '{"name": "%s", "skip_reason": "it is not known"}'
SOUND = '{"name": "%s", "version": "1.0", "vulns": []}'
BROKEN = (
    '{"name": "%s", "version": "1.0", "vulns": ['
    '{"id": "PYSEC-1", "fix_versions": ["1.1", "2"]}, {"id": "PYSEC-2", "fix_versions": []}]}'
)

#: A pip-audit that answers one line of its ``answers`` for each line it is asked about.
FAKE = """
import sys
from pathlib import Path
asked = Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text().splitlines()
answers = dict(line.split("|") for line in Path(__file__).with_name("answers").open())
print('{"dependencies": [' + ", ".join(answers[line] for line in asked) + "]}")
"""


def audit(folder: Path, fake: str | None, **answers: str) -> subprocess.CompletedProcess[str]:
    (folder / "constraints.txt").write_text(PINS, encoding="utf-8")
    if fake is not None:
        (folder / "pip_audit.py").write_text(fake, encoding="utf-8")
    versions = {"first": "1.0", "second": "2.0"}
    lines = [f"{name}=={versions[name]}|{text % name}" for name, text in answers.items()]
    (folder / "answers").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, *(["-S"] if fake is None else []), str(TOOL), "constraints.txt"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)


def test_sound_packages(tmp_path: Path) -> None:
    result = audit(tmp_path, FAKE, first=SOUND, second=SOUND)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "audit: 0 vulnerabilities, 0 packages not audited\n"


def test_vulnerabilities_fail(tmp_path: Path) -> None:
    result = audit(tmp_path, FAKE, first=SOUND, second=BROKEN)
    assert result.returncode == 1, result.stderr
    assert result.stdout.splitlines() == [
        "VULNERABLE: second 1.0: PYSEC-1, mended in 1.1, 2",
        "VULNERABLE: second 1.0: PYSEC-2, mended in no version yet",
        "audit: 2 vulnerabilities, 0 packages not audited",
    ]


def test_one_package_that_the_service_does_not_know(tmp_path: Path) -> None:
    result = audit(tmp_path, FAKE, first=SOUND, second=UNKNOWN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "not audited: it is not known",
        "audit: 0 vulnerabilities, 1 packages not audited",
    ]


@pytest.mark.parametrize(
    "fake", [FAKE, "import sys\nsys.exit('no route to host')", "print('a page')"]
)
def test_a_service_that_does_not_answer_is_told(tmp_path: Path, fake: str) -> None:
    result = audit(tmp_path, fake, first=UNKNOWN, second=UNKNOWN)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert line.startswith("NOT AUDITED: the service of vulnerabilities does not answer (")


def test_without_pip_audit(tmp_path: Path) -> None:
    result = audit(tmp_path, None)
    assert result.returncode == 2
    assert "pip install pip-audit" in result.stderr
