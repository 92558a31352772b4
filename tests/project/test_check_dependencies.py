"""The checker of dependencies finds what is undeclared, unpinned or under another licence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_dependencies.py"

SETUP = """
[options]
install_requires =
    torch>=2.4
    numpy

[options.extras_require]
hf =
    transformers[fast]>=4.44
all =
    captum_ssm[hf]
test =
    pytest
"""

FILES = {
    "__init__.py": "import json\nimport torch.nn",
    "images.py": "def load():\n    from PIL import Image",
    "tasks/files.py": "def optional(name):\n    from .. import errors\n    import pytest",
    "tasks/tables.py": "optional('h5py.core', 1)\nimportlib.import_module('yaml')\noptional(n)",
    "typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas",
    "whole.py": "def load():\n    import transformers.models, captum_ssm.errors",
}

UNDECLARED = [
    "captum_ssm/images.py:2: pillow is in no extra for users",
    "captum_ssm/_files.py:3: pytest is in no extra for users",
    "captum_ssm/tasks/tables.py:1: h5py is in no extra for users",
    "captum_ssm/tasks/tables.py:2: yaml is in no extra for users",
]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool, which finds its neighbours where a script does."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import check_dependencies

    return check_dependencies


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "setup.cfg").write_text(SETUP, encoding="utf-8")
    for name, text in FILES.items():
        path = tmp_path / "captum_ssm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    """Installs made-up distributions, each a text of metadata."""

    def install(*texts: str) -> list[Distribution]:
        for number, text in enumerate(texts):
            folder = tmp_path / "site" / f"d{number}-1.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.4\n{text}\n", encoding="utf-8")
        return list(distributions(path=[str(tmp_path / "site")]))

    yield install


def test_imports_that_are_not_declared(tool: Any, root: Path) -> None:
    assert list(tool.undeclared(root)) == UNDECLARED


def test_imports_of_this_package_are_declared(tool: Any) -> None:
    assert list(tool.undeclared(ROOT)) == []


def test_pins(tool: Any, tmp_path: Path, site: Any) -> None:
    pins = "# a comment\n\ntorch==2.5  # another\nnumpy==1; python_version < '3'\nPy_Yaml==6.1\n"
    (tmp_path / "constraints.txt").write_text(pins, encoding="utf-8")
    installed = site(
        "Name: torch\nVersion: 2.5+cpu",
        "Name: numpy\nVersion: 1",
        "Name: Py.YAML\nVersion: 6.2",
        "Name: nvidia-nccl-cu13\nVersion: 2",
        "Name: captum_ssm\nVersion: 0.1",
        "Name: pip\nVersion: 26",
    )
    assert list(tool.unpinned(tmp_path, installed)) == [
        "constraints.txt: numpy==1 is installed and not pinned",
        "constraints.txt: py-yaml==6.2 is installed, pinned is Py_Yaml==6.1",
    ]


def test_licences(tool: Any, root: Path, site: Any) -> None:
    """Of what users get alone, and of what that needs; a stated expression goes first."""
    osi = "Classifier: License :: OSI Approved"
    installed = site(
        "Name: torch\nVersion: 3\nLicense-Expression: MIT AND (BSD-3-Clause OR Zlib)\n"
        f"Requires-Dist: filelock\n{osi} :: Odd License",
        f"Name: numpy\nVersion: 3\nLicense: all of it\n{osi} :: BSD License\n{osi} :: Zope",
        "Name: filelock\nVersion: 3\nLicense: MPL-2.0 AND Beerware",
        'Name: transformers\nVersion: 5\nLicense: MIT\nRequires-Dist: quick; extra == "fast"\n'
        'Requires-Dist: slow; extra == "slow"',
        "Name: quick\nVersion: 5",
        "Name: slow\nVersion: 5\nLicense: Odd",
        "Name: pytest\nVersion: 5\nLicense: Odd",
    )
    assert list(tool.unlicensed(root, installed)) == [
        "filelock: the licence 'Beerware' is not among those permitted",
        "numpy: the licence 'Zope' is not among those permitted",
        "quick: the licence '' is not among those permitted",
    ]


def test_the_command(root: Path) -> None:
    (root / "constraints.txt").write_text("torch==0.1", encoding="utf-8")
    command = (sys.executable, str(TOOL), str(root))
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    assert lines[: len(UNDECLARED)] == UNDECLARED
    assert any(line.endswith("is installed, pinned is torch==0.1") for line in lines)
    assert lines[-1].startswith(f"dependencies: {len(lines) - 1} complaints, ")
