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


#: What comes after the first argument, by functions; others take one argument.
_ALIKE: dict[str, tuple[Any, ...]] = {
    "view": (2, 24),
    "reshape": ((4, 12),),
    "permute": ((2, 0, 1),),
    "transpose select": (1, 2),
    "swapaxes swapdims movedim moveaxis": (0, 2),
    "type": (torch.float64,),
    "chunk unsafe_chunk": (2, 1),
    "split": (4, 2),
    "split_with_sizes": ((1, 5), 2),
    "tensor_split topk": (3, 2),
    "__getitem__": ((slice(None), [0, 2], None, slice(1, 4)),),
    "narrow": (1, 1, 2),
    "expand": (3, 2, 4, 6),
    (
        "unsqueeze flatten sum mean nansum cumsum max min amax amin logsumexp "
        "logcumsumexp cumprod cummax cummin"
    ): (1,),
    "unflatten": (2, (2, 3)),
    "flip": ((1,),),
    "roll diff": (1, 1),
    "dropout dropout1d feature_dropout": (0.5, False),
    "index_select": (1, torch.tensor([3, 0, 0])),
    "repeat": (2, 1, 3),
    "repeat_interleave": (3, 1),
    "tile": ((2, 1, 1),),
    "avg_pool1d avg_pool2d max_pool1d max_pool2d float_power __pow__ __ipow__ __rpow__": (2,),
    "adaptive_avg_pool1d adaptive_max_pool1d": (4,),
    "adaptive_avg_pool2d adaptive_max_pool2d": ((3, 4),),
    "interpolate": (9,),
    "rot90": (1, (1, 2)),
    "broadcast_to": ((3, *SHAPE),),
    "clamp clip": (-0.5, 0.7),
    "clamp_min": (-0.5,),
    "clamp_max __floordiv__ __mod__ fmod remainder floor_divide": (0.7,),
    "threshold": (0.1, 0.0),
    "__radd__ __rsub__ __isub__ __rmul__ __rtruediv__ __rdiv__ fill": (1.5,),
    "pow": (3,),
    "softmax log_softmax softmin": (-1,),
    "normalize": (2.0, 1, 0.001),
}
_OF_CONSTANTS: dict[str, Callable[[Constants], tuple[Any, ...]]] = {
    "view_as reshape_as": lambda k: (k.c.view(8, 6),),
    (
        "type_as add sub subtract rsub __add__ __iadd__ __sub__ mul multiply __mul__ "
        "__imul__ div divide __truediv__ __itruediv__ __div__ __idiv__ maximum minimum "
        "logaddexp dist cdist cosine_similarity copy_"
    ): lambda k: (k.c,),
    "expand_as": lambda k: (k.c.expand(3, *SHAPE),),
    "masked_select": lambda k: (k.mask,),
    "gather": lambda k: (1, k.index),
    "take_along_dim": lambda k: (k.index, 1),
    "prelu": lambda k: (k.c[0, :, 0],),
    "matmul __matmul__": lambda k: (k.square,),
    "__rmatmul__": lambda k: (k.c[0, :, :4],),
    "linear": lambda k: (k.weight, k.c[0, 0, :5]),
    "index_add": lambda k: (1, torch.tensor([1, 1]), k.c[:, :2]),
    "index_copy": lambda k: (1, torch.tensor([3, 1]), k.c[:, :2]),
    "index_put": lambda k: ((torch.tensor([1, 0]),), k.c),
    "scatter": lambda k: (1, k.index[:, :1], k.c),
    "scatter_add": lambda k: (1, k.index, k.c),
    "layer_norm": lambda k: ((6,), k.c[0, 0], k.c[0, 1], 0.01),
    "rms_norm": lambda k: ((4, 6), k.c[0], 0.01),
    "group_norm": lambda k: (2, k.c[0, :, 0], k.c[0, :, 1], 0.01),
}
#: The same, by the name of each.
ARGUMENTS: dict[str, Callable[[Constants], tuple[Any, ...]]] = {
    **{n: lambda _, x=x: x for names, x in _ALIKE.items() for n in names.split()},
    **{n: make for names, make in _OF_CONSTANTS.items() for n in names.split()},
}
