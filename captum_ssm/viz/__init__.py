"""Pictures: matplotlib figures of token relevance and of implicit attention matrices."""

from .matrices import plot_matrices
from .text import plot_text

__all__ = ["plot_matrices", "plot_text"]
