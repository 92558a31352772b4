"""DNA models in plain PyTorch, with loaders for the official checkpoints."""

from .caduceus import (
    COMPLEMENTS,
    BiMamba,
    Caduceus,
    CaduceusBlock,
    StrandsEmbedding,
    StrandsHead,
    StrandsMixer,
    StrandsNorm,
)
from .hyena import HyenaBlock, HyenaDNA, HyenaFilter, HyenaOperator
from .load import load_caduceus, load_hyenadna, load_striped_hyena
from .one_hot import BASE_IDS, OneHot
from .striped_hyena import HyenaCascade, StripedAttention, StripedHyena

__all__ = [
    "BASE_IDS",
    "COMPLEMENTS",
    "BiMamba",
    "Caduceus",
    "CaduceusBlock",
    "HyenaBlock",
    "HyenaCascade",
    "HyenaDNA",
    "HyenaFilter",
    "HyenaOperator",
    "OneHot",
    "StrandsEmbedding",
    "StrandsHead",
    "StrandsMixer",
    "StrandsNorm",
    "StripedAttention",
    "StripedHyena",
    "load_caduceus",
    "load_hyenadna",
    "load_striped_hyena",
]
