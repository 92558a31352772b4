"""The lines of the table of built-in mixers, and the versions that they are tested with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from .. import __version__

#: How a mixer's output joins the residual stream of its block: added to it; added together with
#: other mixers of the same block that read the same stream; or added only to the input of the
#: mixer that runs next.
Joins = Literal["residual", "parallel", "feeds"]

#: Ways to explain a model: the decomposition; the methods that fold the layers' operators
#: (ImplicitAttention, ImplicitAttentionRollout, MambaAttribution); and the decomposition of
#: generated text.
Ability = Literal["LatimFlow", "fold methods", "generated text"]


class Line(NamedTuple):
    """One mixer class and its adapter.

    Attributes:
        family: the common name of the architecture.
        path: the class; short for transformers: ``"mamba.MambaMixer"`` means
            ``transformers.models.mamba.modeling_mamba.MambaMixer``.
        adapter: module of this package and function.
        joins: how the mixer's output joins the residual stream.
        tested: version of the package that the tests run against, where it is an older one.
            Default: None, that of :data:`VERSIONS`.
        lacks: the abilities that models of the mixer lack, each with the reason. Default: none.
        alone: whether tests cover the mixer alone, without a model around it. Default: False.
    """

    family: str
    path: str
    adapter: str
    joins: Joins = "residual"
    tested: str | None = None
    lacks: Mapping[Ability, str] = MappingProxyType({})
    alone: bool = False

    @property
    def package(self) -> str:
        """The distribution that the class comes from."""
        if self.path.count(".") == 1:
            return "transformers"
        name = self.path.split(".")[0]
        return "flash-linear-attention" if name == "fla" else name.replace("_", "-")

    @property
    def class_path(self) -> str:
        """The fully qualified class name."""
        if self.package != "transformers":
            return self.path
        model, name = self.path.split(".")
        return f"transformers.models.{model}.modeling_{model}.{name}"


#: The last version 4, of which some classes were replaced.
TRANSFORMERS_4 = "4.57.6"

#: Versions that the tests run against.
VERSIONS = {
    "captum-ssm": __version__,
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "mamba-ssm": "2.3.2",
    "timm": "1.0.31",
    "mambavision": "1.2.0",
    "flash-linear-attention": "0.6.0",
    "xlstm": "2.0.6",
    "mambapy": "1.2.0",
    "deeptab": "2.1.0",
}
