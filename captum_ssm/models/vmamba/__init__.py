"""VMamba in plain PyTorch, with a loader for the official checkpoints."""

from .load import load_vmamba
from .mixer import SS2D, Form, form_of
from .model import VMamba, VSSBlock

__all__ = ["SS2D", "Form", "VMamba", "VSSBlock", "form_of", "load_vmamba"]
