"""RWKV-7 in plain PyTorch, with a loader for the published checkpoints."""

from .load import load_rwkv7
from .mixer import RWKV7TimeMix
from .model import RWKV7, RWKV7Block, RWKV7FeedForward

__all__ = ["RWKV7", "RWKV7Block", "RWKV7FeedForward", "RWKV7TimeMix", "load_rwkv7"]
