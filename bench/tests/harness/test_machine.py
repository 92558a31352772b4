"""What a run says of itself."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import torch

import captum_ssm
from captum_ssm_bench.harness.machine import described, note


def test_versions_and_the_kind_of_machine() -> None:
    found = described(torch.device("cpu"))
    assert found["torch"] == torch.__version__ and found["captum_ssm"] == captum_ssm.__version__
    assert found["device"] == "cpu" and platform.system() in found["system"]


def test_it_names_no_place(tmp_path: Path) -> None:
    path = note(tmp_path, torch.device("cpu"))
    text = path.read_text()
    assert json.loads(text) == described(torch.device("cpu"))
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert getpass.getuser() not in json.loads(text).values()
