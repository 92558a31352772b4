"""The earlier name of what is in captum_ssm.bench.tasks, captum_ssm.bench.data and models now."""

from __future__ import annotations

from ._forwarding import forward, moved

__getattr__ = forward(__name__, "bench.tasks", "bench.data", "models")
recall = moved(f"{__name__}.recall", "bench.tasks.recall")
