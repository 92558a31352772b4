"""What each function in the tables of the package is given after its first argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHAPE = (2, 4, 6)


def draw(positive: bool = False) -> Tensor:
    """An input; positive ones are for roots and logarithms."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    return x.abs() + 0.3 if positive else x


class Constants:
    """Random constants that a case draws on, the same each time it runs."""

    def __init__(self) -> None:
        self.c = draw()
        self.weight = torch.randn(5, 6, dtype=torch.float64)
        self.square = torch.randn(6, 6, dtype=torch.float64)
        self.mask = torch.rand(SHAPE) < 0.5
        self.index = torch.randint(4, SHAPE)


#: What comes after the first argument; functions that are not named take one argument.
ARGUMENTS: dict[str, Callable[[Constants], tuple[Any, ...]]] = {
    "view": lambda _: (2, 24),
    "view_as": lambda k: (k.c.view(8, 6),),
    "reshape": lambda _: ((4, 12),),
    "reshape_as": lambda k: (k.c.view(8, 6),),
    "permute": lambda _: ((2, 0, 1),),
    "transpose": lambda _: (1, 2),
    "swapaxes": lambda _: (0, 2),
    "swapdims": lambda _: (0, 2),
    "movedim": lambda _: (0, 2),
    "moveaxis": lambda _: (0, 2),
    "type": lambda _: (torch.float64,),
    "type_as": lambda k: (k.c,),
    "chunk": lambda _: (2, 1),
    "split": lambda _: (4, 2),
    "split_with_sizes": lambda _: ((1, 5), 2),
    "tensor_split": lambda _: (3, 2),
    "unsafe_chunk": lambda _: (2, 1),
    "__getitem__": lambda _: ((slice(None), [0, 2], None, slice(1, 4)),),
    "narrow": lambda _: (1, 1, 2),
    "select": lambda _: (1, 2),
    "expand": lambda _: (3, 2, 4, 6),
    "expand_as": lambda k: (k.c.expand(3, *SHAPE),),
    "unsqueeze": lambda _: (1,),
    "flatten": lambda _: (1,),
    "unflatten": lambda _: (2, (2, 3)),
    "flip": lambda _: ((1,),),
    "roll": lambda _: (1, 1),
    "dropout": lambda _: (0.5, False),
    "dropout1d": lambda _: (0.5, False),
    "feature_dropout": lambda _: (0.5, False),
    "masked_select": lambda k: (k.mask,),
    "index_select": lambda _: (1, torch.tensor([3, 0, 0])),
    "gather": lambda k: (1, k.index),
    "take_along_dim": lambda k: (k.index, 1),
    "repeat": lambda _: (2, 1, 3),
    "repeat_interleave": lambda _: (3, 1),
    "tile": lambda _: ((2, 1, 1),),
    "sum": lambda _: (1,),
    "mean": lambda _: (1,),
    "nansum": lambda _: (1,),
    "cumsum": lambda _: (1,),
    "diff": lambda _: (1, 1),
    "avg_pool1d": lambda _: (2,),
    "avg_pool2d": lambda _: (2,),
    "adaptive_avg_pool1d": lambda _: (4,),
    "adaptive_avg_pool2d": lambda _: ((3, 4),),
    "interpolate": lambda _: (9,),
    "max": lambda _: (1,),
    "min": lambda _: (1,),
    "amax": lambda _: (1,),
    "amin": lambda _: (1,),
    "max_pool1d": lambda _: (2,),
    "max_pool2d": lambda _: (2,),
    "adaptive_max_pool1d": lambda _: (4,),
    "adaptive_max_pool2d": lambda _: ((3, 4),),
    "topk": lambda _: (3, 2),
    "rot90": lambda _: (1, (1, 2)),
    "broadcast_to": lambda _: ((3, *SHAPE),),
    "clamp": lambda _: (-0.5, 0.7),
    "clip": lambda _: (-0.5, 0.7),
    "clamp_min": lambda _: (-0.5,),
    "clamp_max": lambda _: (0.7,),
    "threshold": lambda _: (0.1, 0.0),
    "prelu": lambda k: (k.c[0, :, 0],),
    "add": lambda k: (k.c,),
    "sub": lambda k: (k.c,),
    "subtract": lambda k: (k.c,),
    "rsub": lambda k: (k.c,),
    "__add__": lambda k: (k.c,),
    "__radd__": lambda _: (1.5,),
    "__iadd__": lambda k: (k.c,),
    "__sub__": lambda k: (k.c,),
    "__rsub__": lambda _: (1.5,),
    "__isub__": lambda _: (1.5,),
    "mul": lambda k: (k.c,),
    "multiply": lambda k: (k.c,),
    "__mul__": lambda k: (k.c,),
    "__rmul__": lambda _: (1.5,),
    "__imul__": lambda k: (k.c,),
    "div": lambda k: (k.c,),
    "divide": lambda k: (k.c,),
    "__truediv__": lambda k: (k.c,),
    "__itruediv__": lambda k: (k.c,),
    "__div__": lambda k: (k.c,),
    "__idiv__": lambda k: (k.c,),
    "__rtruediv__": lambda _: (1.5,),
    "__rdiv__": lambda _: (1.5,),
    "matmul": lambda k: (k.square,),
    "__matmul__": lambda k: (k.square,),
    "__rmatmul__": lambda k: (k.c[0, :, :4],),
    "pow": lambda _: (3,),
    "float_power": lambda _: (2,),
    "__pow__": lambda _: (2,),
    "__ipow__": lambda _: (2,),
    "__rpow__": lambda _: (2,),
    "fill": lambda _: (1.5,),
    "softmax": lambda _: (-1,),
    "log_softmax": lambda _: (-1,),
    "softmin": lambda _: (-1,),
    "logsumexp": lambda _: (1,),
    "logcumsumexp": lambda _: (1,),
    "cumprod": lambda _: (1,),
    "cummax": lambda _: (1,),
    "cummin": lambda _: (1,),
    "maximum": lambda k: (k.c,),
    "minimum": lambda k: (k.c,),
    "__floordiv__": lambda _: (0.7,),
    "__mod__": lambda _: (0.7,),
    "fmod": lambda _: (0.7,),
    "remainder": lambda _: (0.7,),
    "floor_divide": lambda _: (0.7,),
    "logaddexp": lambda k: (k.c,),
    "dist": lambda k: (k.c,),
    "cdist": lambda k: (k.c,),
    "cosine_similarity": lambda k: (k.c,),
    "linear": lambda k: (k.weight, k.c[0, 0, :5]),
    "index_add": lambda k: (1, torch.tensor([1, 1]), k.c[:, :2]),
    "index_copy": lambda k: (1, torch.tensor([3, 1]), k.c[:, :2]),
    "index_put": lambda k: ((torch.tensor([1, 0]),), k.c),
    "scatter": lambda k: (1, k.index[:, :1], k.c),
    "scatter_add": lambda k: (1, k.index, k.c),
    "copy_": lambda k: (k.c,),
    "layer_norm": lambda k: ((6,), k.c[0, 0], k.c[0, 1], 1e-2),
    "rms_norm": lambda k: ((4, 6), k.c[0], 1e-2),
    "group_norm": lambda k: (2, k.c[0, :, 0], k.c[0, :, 1], 1e-2),
    "normalize": lambda _: (2.0, 1, 1e-3),
}  # fmt: skip
