"""Torch's functions by what they are to a network that is linear at its input."""

from __future__ import annotations

#: Python's operators and other names, by the function they stand for.
ALIASES = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_",
    "__sub__": "sub", "__rsub__": "rsub", "__isub__": "sub_", "subtract": "sub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "multiply": "mul",
    "__div__": "div", "__truediv__": "div", "__itruediv__": "div_", "__idiv__": "div_",
    "true_divide": "div", "divide": "div", "__rdiv__": "rdiv", "__rtruediv__": "rdiv",
    "__floordiv__": "floor_divide", "__mod__": "remainder",
    "__matmul__": "matmul", "__rmatmul__": "matmul",
    "__pow__": "pow", "__ipow__": "pow_", "__rpow__": "exp2", "__neg__": "neg",
    "negative": "neg", "concat": "cat", "concatenate": "cat", "vstack": "cat", "hstack": "cat",
    "absolute": "abs", "clip": "clamp", "float_power": "pow", "_threshold": "threshold",
    "expit": "sigmoid", "_grouped_mm": "grouped_mm",
}  # fmt: skip

#: In front of the names of functions in torch.linalg, torch.fft and torch.special.
PREFIXES = ("linalg_", "fft_", "special_")

#: Linear, and the result holds the same numbers.
VIEWS = """
    view view_as reshape reshape_as permute transpose t swapaxes swapdims movedim moveaxis
    contiguous to type type_as float double half bfloat16 cpu cuda clone chunk split
    split_with_sizes tensor_split unsafe_chunk unbind __getitem__ __get__ narrow select expand
    expand_as squeeze unsqueeze flatten unflatten flip roll neg requires_grad_ retain_grad
    register_hook dropout dropout1d feature_dropout masked_select resolve_conj
    resolve_neg real
"""

#: Linear in other ways; a maximum is linear once its place is frozen.
MIXING = """
    index_select gather take_along_dim repeat repeat_interleave tile sum mean nansum cumsum
    diagonal diag_embed tril triu unfold fold pixel_shuffle pixel_unshuffle avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    interpolate rfft irfft fft ifft embedding_bag trace amin amax max_pool1d max_pool2d
    max_pool3d adaptive_max_pool1d adaptive_max_pool2d topk sort median rot90 block_diag
    broadcast_to broadcast_tensors atleast_2d atleast_3d ravel deg2rad
"""

#: Sums and differences of two, and other functions that put constants beside what they are given.
SUMS = "add sub rsub"
JOINS = "cat stack index_add scatter_add scatter masked_scatter index_copy index_put diff"

#: Products of two tensors or more.
PRODUCTS = """
    mul matmul mm bmm mv dot einsum outer tensordot inner vdot chain_matmul multi_dot grouped_mm
"""

#: Functions of one number that are 0 at 0, for the arguments that make them so.
BENT = """
    silu gelu relu relu6 leaky_relu prelu elu selu celu tanh softsign mish hardswish hardtanh
    hardshrink softshrink tanhshrink abs square sqrt clamp clamp_min clamp_max sin tan asinh
    arcsinh atan arctan erf expm1 log1p sinh sign threshold rrelu
"""

#: Their results are coefficients.
FROZEN = """
    softmax softmin gumbel_softmax sigmoid log_sigmoid hardsigmoid softplus exp exp2
    log log2 log10 rsqrt reciprocal rdiv cos cosh logsumexp logcumsumexp norm vector_norm
    matrix_norm var std var_mean std_mean cumprod prod maximum minimum floor ceil round trunc
    fmod remainder floor_divide nan_to_num bernoulli one_hot argsort cummax cummin logaddexp dist
    cdist cosine_similarity det inverse solve_triangular inv erfc fill zero
"""

#: Of the frozen ones those that are smooth functions of one number each.
TANGENT = frozenset(("sigmoid", "log_sigmoid", "softplus", "exp", "exp2"))


def plain(name: str) -> str:
    """A function's name without the namespace it is in."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return ALIASES.get(name, name)
