"""Check that a custom operator, adapter or method keeps the promises of this package.

Each check raises an ``AssertionError`` that names the promise that does not hold.
"""

from .adapters import check_adapter
from .methods import check_method
from .operators import check_operator

__all__ = ["check_adapter", "check_method", "check_operator"]
