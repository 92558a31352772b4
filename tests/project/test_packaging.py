"""The package as it is shipped: metadata, types, light import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import pytest

import captum_ssm


@pytest.mark.slow
def test_import_is_light() -> None:
    code = "import sys, captum_ssm; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
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
