"""Pictures and pages: matplotlib figures, Captum's own pictures, and a report in HTML."""

from ..attr.text.tokens import Tokens
from .captum_pictures import captum_image, captum_text, image_arrays
from .curves import plot_curves
from .edges import plot_edges, plot_windows
from .graphs import plot_graph
from .html.report import report
from .intervals import plot_intervals
from .layers import plot_layers
from .matrices import plot_matrices
from .overlay import plot_image
from .roles import plot_roles
from .sources import plot_contributions
from .text import plot_text

__all__ = [
    "Tokens",
    "captum_image",
    "captum_text",
    "image_arrays",
    "plot_contributions",
    "plot_curves",
    "plot_edges",
    "plot_graph",
    "plot_image",
    "plot_intervals",
    "plot_layers",
    "plot_matrices",
    "plot_roles",
    "plot_text",
    "plot_windows",
    "report",
]
