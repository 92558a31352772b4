"""The line of registration of every built-in mixer."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: How a mixer's output joins the residual stream of its block: added to it; added together with
#: other mixers of the same block that read the same stream; or added only to the input of the
#: mixer that runs next.
Joins = Literal["residual", "parallel", "feeds"]


class Line(NamedTuple):
    """One mixer class and its adapter.

    Attributes:
        family: the common name of the architecture.
        package: distribution the class comes from.
        path: the class; for transformers short, ``"mamba.MambaMixer"`` standing for
            ``transformers.models.mamba.modeling_mamba.MambaMixer``.
        adapter: module of this package and function.
        joins: how the mixer's output joins the residual stream.
    """

    family: str
    package: str
    path: str
    adapter: str
    joins: Joins = "residual"

    @property
    def class_path(self) -> str:
        """The fully qualified class name."""
        if self.package != "transformers":
            return self.path
        model, name = self.path.split(".")
        return f"transformers.models.{model}.modeling_{model}.{name}"


#: Versions that the tests run against.
VERSIONS = {"transformers": "5.23.0", "mamba-ssm": "2.3.2"}

BUILT_IN = (
    Line("Mamba", "transformers", "mamba.MambaMixer", "mamba:hf_mamba"),
    Line("Falcon Mamba", "transformers", "falcon_mamba.FalconMambaMixer", "mamba:hf_mamba"),
    Line("Mamba", "mamba-ssm", "mamba_ssm.modules.mamba_simple.Mamba", "mamba:mamba_ssm_mamba"),
)
