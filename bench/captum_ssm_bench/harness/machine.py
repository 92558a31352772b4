"""What a run was made with and on, without names of machines or places."""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from captum_ssm import __version__
from captum_ssm._files import write_whole

#: Packages that results follow from.
_PACKAGES = ("torch", "captum", "transformers", "numpy")


def described(device: torch.device) -> dict[str, str]:
    """The day, versions, and the kind of machine.

    Args:
        device: what the models ran on.
    """
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "captum_ssm": __version__,
        "Python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def note(folder: Path, device: torch.device) -> Path:
    """Write what :func:`described` says beside the results, as machine.json; returns its path."""
    path = folder / "machine.json"
    write_whole(path, json.dumps(described(device), indent=2) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
