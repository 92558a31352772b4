"""From which tokens the elements of tensors come, and whether layers are a chain."""

from .follow import Places
from .origin import Entry, Mixed, Origin, token_places

__all__ = ["Entry", "Mixed", "Origin", "Places", "token_places"]
