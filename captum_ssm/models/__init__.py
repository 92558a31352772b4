"""The small trained model that ships with the package, and how it was made."""

from captum_ssm.models.bundled import load_bundled

__all__ = ["load_bundled"]
