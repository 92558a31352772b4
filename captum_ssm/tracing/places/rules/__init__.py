"""What each of torch's functions does to the places that the elements of a tensor come from.

*Places* are an integer tensor with as many dimensions as the tensor that it speaks of, and size 1
in every dimension along which that does not tell tokens apart: B * L numbers for one (B, L, E).
Each is the flat index, b * L + t, of the token of a source that the element was computed from, or
-1 for an element that comes from none.  A *group* is places and the sources that share them, each
with its *skip*: the weight with which the source itself, unchanged, is a term of the tensor.

Functions fall into a few kinds:

=========  ======================================================================================
moves      views and reorderings: the same is done to the places
joins      cat, where, writes: the same is done to the places of all, with -1 for constants
sums       of two; skips add up
pointwise  element by element: the places of all operands, without their skips
along      norms, softmax, reductions: the places must not differ along the dimensions
products   likewise, along the dimensions that are contracted
=========  ======================================================================================

In a product of what activations returned and of what is straight, the former is a gate: its sources
go on as such, by numbers of their own, unless they are there otherwise as well.

A rule that finds elements of several tokens brought together raises :class:`TokensMeet`.
"""

from __future__ import annotations

import functools
from typing import Any

from . import along, joins, moves, products
from .groups import Rule

#: Python's operators and other names, by the function they stand for.
ALIASES = {
    "__add__": "add", "__sub__": "sub", "__rsub__": "rsub", "__neg__": "neg", "__pow__": "pow",
    "__mul__": "mul", "__matmul__": "matmul", "__radd__": "add", "__iadd__": "add_",
    "__isub__": "sub_", "subtract": "sub", "__rmul__": "mul", "__imul__": "mul_", "multiply": "mul",
    "__truediv__": "div", "__itruediv__": "div_", "__idiv__": "div_", "__rtruediv__": "div",
    "__rdiv__": "div", "true_divide": "div", "divide": "div", "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide", "__mod__": "remainder", "__rmod__": "remainder",
    "__ipow__": "pow_", "__rpow__": "pow", "float_power": "pow", "negative": "neg",
    "concat": "cat", "concatenate": "cat", "absolute": "abs", "clip": "clamp",
    "_threshold": "threshold", "expit": "sigmoid", "_grouped_mm": "grouped_mm",
    "transformers::grouped_mm_fallback": "grouped_mm", "_index_put_impl_": "index_put_",
}  # fmt: skip

#: In front of the names of functions in torch.linalg, torch.fft and torch.special.
PREFIXES = ("linalg_", "fft_", "special_")

KEPT = """
    to type type_as float double half bfloat16 cfloat cpu cuda clone contiguous detach alias
    requires_grad_ pin_memory resolve_conj resolve_neg conj conj_physical positive
    __deepcopy__ __copy__ _to_copy long int short data
"""
TAKEN = """
    chunk split split_with_sizes tensor_split hsplit vsplit dsplit unsafe_chunk unsafe_split
    unbind narrow select slice unfold diagonal masked_select pixel_shuffle pixel_unshuffle rot90
    channel_shuffle
"""
REORDERED = """
    permute transpose t swapaxes swapdims movedim moveaxis adjoint flip fliplr flipud __reversed__
    T mT H mH
"""
RESHAPED = """
    view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze atleast_1d atleast_2d
    atleast_3d _unsafe_view
"""
BROADCAST = "expand expand_as broadcast_to broadcast_tensors"
TOGETHER = """
    masked_scatter index_copy scatter slice_scatter select_scatter diagonal_scatter hstack vstack
    dstack column_stack row_stack
"""
POINTWISE = """
    mul div pow abs square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos
    atan sinh cosh tanh asinh acosh atanh atan2 arctan arctan2 arcsin arccos arcsinh arctanh sigmoid
    logit log_sigmoid logsigmoid softplus softsign silu swish gelu relu relu6 leaky_relu prelu elu
    selu celu mish hardswish hardsigmoid hardtanh hardshrink softshrink tanhshrink threshold rrelu
    clamp clamp_min clamp_max maximum minimum fmax fmin erf erfc erfinv sinc reciprocal sign sgn
    floor ceil round trunc fix frac fmod remainder floor_divide nan_to_num lerp addcmul addcdiv
    logaddexp logaddexp2 hypot xlogy xlog1py copysign bernoulli deg2rad rad2deg real imag angle
    complex polar lgamma digamma i0 i0e i1 i1e ndtr log_ndtr heaviside dequantize entr
    fake_quantize_per_tensor_affine
"""
SUMS = "add sub rsub"
MATMUL = "matmul __rmatmul__ mm bmm mv dot vdot"
#: Products that are added to their first operand.
ADDED_MATMUL = "addmm baddbmm addmv"
SUMMAND = f"{ADDED_MATMUL} addcmul addcdiv"
DROPOUT = """
    dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout
"""

#: Functions along dimensions: the position of the argument that names these, and what they are
#: without it.
ALONG: tuple[tuple[int, Any, str], ...] = (
    (1, None, """
        sum mean nansum nanmean amax amin aminmax prod logsumexp median nanmedian var std var_mean
        std_mean softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp"""),
    (1, -1, "sort mode"),
    (2, None, "norm vector_norm fftn ifftn rfftn irfftn"),
    (2, -1, "topk kthvalue fft ifft rfft irfft diff"),
    (2, 1, "normalize cosine_similarity"),
    (2, (-2, -1), "matrix_norm fft2 ifft2 rfft2 irfft2"),
    (4, -1, "gumbel_softmax"),
)  # fmt: skip

_CONSTANT = """
    zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full
    new_tensor zero_ normal_ uniform_ exponential_ bernoulli_ random_ cauchy_ log_normal_ geometric_
    trunc_normal_ grad
"""
#: Their results do not depend on their operands' numbers.
CONSTANT = frozenset(_CONSTANT.split())

#: What their results hold is undefined: if it comes to depend on anything, torch did not see how.
EMPTY = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted", "new_empty_strided"}
)


@functools.cache
def plain(name: str) -> str:
    """A function's name without its namespace and overload."""
    name = name.partition(".")[0]
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return ALIASES.get(name, name)


def _table() -> dict[str, Rule]:
    kinds: tuple[tuple[str, Rule], ...] = (
        (KEPT, moves.kept),
        (TAKEN, moves.taken),
        (REORDERED, moves.reordered),
        (RESHAPED, moves.reshaping),
        (BROADCAST, moves.broadcast),
        (TOGETHER, joins.put_together),
        (POINTWISE, along.pointwise),
        (SUMS, along.summed),
        (DROPOUT, along.dropout),
        ("repeat tile", moves.repeated),
        ("gather take_along_dim", moves.gathered),
        ("tril triu diag_embed", moves.triangle),
        ("pad constant_pad_nd", moves.padded),
        ("__setitem__ index_put", joins.assigned),
        ("copy fill __set__", joins.copied),
        ("layer_norm rms_norm", along.last_dims),
        (MATMUL, products.matmul),
        (ADDED_MATMUL, products.with_summand),
        ("inner", products.inner),
        ("outer ger", products.outer),
        ("conv1d conv2d conv3d", products.convolution),
        ("max min", along.extremum),
    )
    rules = {name: rule for names, rule in kinds for name in names.split()}
    for position, default, names in ALONG:
        rules.update(dict.fromkeys(names.split(), along.along(position, default)))
    rules |= dict.fromkeys(CONSTANT, moves.constant)
    pools = ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    rules |= {f"{pool}{n}d": along.pooling for pool in pools for n in (1, 2, 3)}
    return rules | {
        "roll": moves.rolled,
        "repeat_interleave": moves.interleaved,
        "index_select": moves.selected,
        "__getitem__": moves.item,
        "embedding": moves.lookup,
        "cat": joins.cat,
        "stack": joins.stack,
        "where": joins.where,
        "masked_fill": joins.masked_fill,
        "index_fill": joins.index_fill,
        "index_add": joins.index_add,
        "scatter_add": joins.scatter_add,
        "neg": along.negative,
        "glu": along.glu,
        "group_norm": along.behind_first,
        "instance_norm": along.of_images,
        "batch_norm": along.batch_norm,
        "view_as_complex": along.as_complex,
        "view_as_real": along.as_real,
        "linear": products.linear,
        "grouped_mm": products.grouped_mm,
        "einsum": products.einsum,
        "scaled_dot_product_attention": products.attention,
        "as_strided": moves.strided,
    }


RULES = _table()

#: They hand on what they are given, so that of whole numbers, too, places are known.
HANDING = frozenset(
    f"""{KEPT} {TAKEN} {REORDERED} {RESHAPED} {BROADCAST} {TOGETHER} repeat tile gather
    take_along_dim tril triu pad constant_pad_nd __setitem__ index_put copy __set__ roll
    repeat_interleave index_select __getitem__ cat stack where masked_fill index_fill as_strided
    """.split()
)
#: They replace what they are given first by what they are given then.
REPLACING = frozenset({"copy", "fill", "__set__"})
_INDEXED = """
    gather take_along_dim __setitem__ index_put index_copy scatter masked_scatter index_fill
    index_add scatter_add repeat_interleave masked_fill
"""
#: They take, besides what they hand on, whole numbers that say where it goes.
INDEXED = frozenset(_INDEXED.split())
#: They put what they are given beside, or onto, what is there.
WRITING = frozenset(
    f"{SUMS} __setitem__ index_put index_add scatter_add index_copy scatter masked_scatter".split()
)
#: What their result holds is in their first operand alone.
OF_FIRST = HANDING - WRITING - {"where", "broadcast_tensors"}

#: Products, of whose operands those that are bent are gates to those that are not.
PRODUCTS = frozenset(f"{MATMUL} {SUMMAND} linear einsum inner outer ger mul".split())
#: Those with a weight.
PROJECTING = frozenset(
    f"{MATMUL} {ADDED_MATMUL} linear einsum inner grouped_mm conv1d conv2d conv3d".split()
)
#: They have a first operand that is no factor.
WITH_SUMMAND = frozenset(SUMMAND.split())
#: The positions of operands that are gates, bent or not.
GATED = {"div": 1, "lerp": 2, "addcdiv": 2}
_STRAIGHT = """
    mul div lerp addcmul addcdiv maximum minimum fmax fmin real imag complex nan_to_num dequantize
    deg2rad rad2deg fake_quantize_per_tensor_affine
"""
_BENT = """
    softmax log_softmax softmin logsumexp logcumsumexp prod cumprod norm vector_norm var std
    var_mean std_mean cosine_similarity
"""
#: Their results bend what they are given: they scale it, or are scaled by it.
BENDING = frozenset(POINTWISE.split()) - set(_STRAIGHT.split()) | set(_BENT.split())
