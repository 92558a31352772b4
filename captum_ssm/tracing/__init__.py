"""Record a forward run of a model: the mixer calls in order, with their arguments."""

from .chance import require_deterministic
from .find import Mixer, find_mixers, find_model, runnable, unwrap
from .gradients import graphs_dropped
from .layer import Layer
from .quantized import exact_products
from .record import Graph, Trace, require_layers, require_real_tokens, trace
from .repair.loops import repaired_scans

__all__ = [
    "Graph",
    "Layer",
    "Mixer",
    "Trace",
    "exact_products",
    "find_mixers",
    "find_model",
    "graphs_dropped",
    "repaired_scans",
    "require_deterministic",
    "require_layers",
    "require_real_tokens",
    "runnable",
    "trace",
    "unwrap",
]
