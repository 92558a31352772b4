"""The package as it is shipped: metadata, light import, strata."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

import captum_ssm

ROOT = Path(__file__).resolve().parents[2]

README_COMMANDS = (
    'pip install -c constraints.txt -e ".[test]" && pytest',
    'pip install -c constraints.txt -e ".[demo]" && captum-ssm demo',
)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def check_strata(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(str(ROOT / "tools" / "check_strata.py"), *arguments)


def test_import_is_light() -> None:
    code = "import sys, captum_ssm; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "captum_ssm" in loaded
    assert not loaded & {"captum", "mamba_ssm", "matplotlib", "torch", "transformers"}


def test_every_public_name_resolves() -> None:
    assert len(set(captum_ssm.__all__)) == len(captum_ssm.__all__)
    for name in captum_ssm.__all__:
        assert getattr(captum_ssm, name) is not None, name
    assert set(captum_ssm.__all__) <= set(dir(captum_ssm))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = captum_ssm.no_such_name


def test_version_is_that_of_the_metadata() -> None:
    assert captum_ssm.__version__ == version("captum_ssm")


def test_types_are_announced() -> None:
    assert files("captum_ssm").joinpath("py.typed").is_file()


def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "captum_ssm", source / "captum_ssm", ignore=ignored)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = (sys.executable, "-c", code, str(tmp_path))
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "captum_ssm").rglob("*.*")}
    files = {name for name in files if "__pycache__" not in name}
    assert any(name.endswith(".safetensors") for name in files)
    assert files <= shipped, sorted(files - shipped)


@pytest.mark.parametrize("command", README_COMMANDS)
@pytest.mark.parametrize("path", ["README.md", ".ci/run"])
def test_readme_commands_are_those_of_ci(path: str, command: str) -> None:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert command in [line.strip() for line in lines]


def test_strata_hold() -> None:
    result = check_strata()
    assert result.returncode == 0, result.stdout + result.stderr


BAD_TREE = {
    "__init__.py": "from captum_ssm.attr import Attribution",
    "errors.py": "from . import mixers",
    "_helpers.py": "from .errors import Error",
    "operators/scan.py": "def load():\n    import captum",
    "mixers/mamba.py": "from ..tracing import record",
    "tracing/record.py": "import transformers\nfrom .. import _helpers",
    "metrics/faithfulness.py": "import captum_ssm.viz.heatmap",
    "viz/heatmap.py": "try:\n    import matplotlib.pyplot\nexcept ImportError:\n    pass",
    "novel.py": "from .operators import scan",
}

COMPLAINTS = [
    "captum_ssm/__init__.py:1: __init__ imports captum_ssm.attr at module level",
    "captum_ssm/errors.py:1: errors may only import errors and private helpers, not mixers",
    "captum_ssm/metrics/faithfulness.py:1: metrics may not import viz, which is not below it",
    "captum_ssm/mixers/mamba.py:1: mixers may not import tracing, which is not below it",
    "captum_ssm/novel.py:1: novel has no stratum",
    "captum_ssm/operators/scan.py:2: operators may not import captum",
    "captum_ssm/tracing/record.py:1: "
    "transformers is optional, so it may only be imported inside a function",
    "captum_ssm/viz/heatmap.py:2: "
    "matplotlib is optional, so it may only be imported inside a function",
]

GOOD_TREE = {
    "__init__.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from captum_ssm.attr import Attribution",
    "errors.py": "import enum",
    "operators/scan.py": "import torch\nfrom ..errors import Error",
    "mixers/mamba.py": "def load():\n    import transformers\n    from ..operators import scan",
    "attr/__init__.py": "from captum.attr import Saliency\nfrom .. import mixers, _helpers",
    "cli.py": "from . import __version__, attr",
}


@pytest.mark.parametrize(("tree", "complaints"), [(BAD_TREE, COMPLAINTS), (GOOD_TREE, [])])
def test_strata_checker(tmp_path: Path, tree: dict[str, str], complaints: list[str]) -> None:
    for name, text in tree.items():
        path = tmp_path / "captum_ssm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    result = check_strata(str(tmp_path))
    assert result.stdout.splitlines()[:-1] == complaints
    assert result.returncode == bool(complaints)
