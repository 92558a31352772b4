"""Cut single messages between tokens, and estimate the effects of cuts."""

from .cutting import knock_out
from .edge_effects import EdgeEffects
from .effects import Edge, Effects
from .experiments import KnockoutWindows, PartScores, knockout_windows, parts_off
from .pairs import Edges
from .truth import Truth
from .variants import mutagenesis, variant_effects

__all__ = [
    "Edge",
    "EdgeEffects",
    "Edges",
    "Effects",
    "KnockoutWindows",
    "PartScores",
    "Truth",
    "knock_out",
    "knockout_windows",
    "mutagenesis",
    "parts_off",
    "variant_effects",
]
