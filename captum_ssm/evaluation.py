"""The earlier name of captum_ssm.bench."""

from __future__ import annotations

from ._forwarding import forward, moved

__getattr__ = forward(__name__, "bench")
moved(f"{__name__}.verdicts", "bench.harness.verdicts")
