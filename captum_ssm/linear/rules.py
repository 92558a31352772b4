"""One rule for each torch function, by which a network becomes linear in its input.

A tensor is *live* if it depends on the explained input.  Functions fall into a few kinds:

========  =======================================================================================
linear    kept as they are: views, sums, convolutions, products with weights
affine    kept; parts that are not live enter as constants
bent      f(x) becomes x times the frozen ratio f(x) / x: activations that are 0 at 0
frozen    their result is a coefficient: softmax, sigmoid, exponentials, reciprocals, norms
product   of live factors, which divide the relevance by the rule of the mode
========  =======================================================================================

Values never change; only the set of live tensors does.  Each rule computes torch's function
``func`` at its arguments, and leaves a graph that is linear in the live ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import NotLinearError
from ..operators.kernels.truths import holds, may_hold_any
from .constants import shrink_repeats

if TYPE_CHECKING:
    from .mode import Linearizing

#: Positional and keyword arguments of a torch function.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: A rule: a function of the mode, the torch function, and the arguments of the torch function.
FunctionRule = Callable[["Linearizing", Callable[..., Any], Args, Kwargs], Any]

#: The usual name of the torch function behind each Python operator and each alias.
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

#: Prefixes of the names of functions in torch.linalg, torch.fft and torch.special.
PREFIXES = ("linalg_", "fft_", "special_")

#: Linear functions whose result contains the same entries as the argument.
VIEWS = """
    view view_as reshape reshape_as permute transpose t swapaxes swapdims movedim moveaxis
    contiguous to type type_as float double half bfloat16 cpu cuda clone chunk split
    split_with_sizes tensor_split unsafe_chunk unbind __getitem__ __get__ narrow select expand
    expand_as squeeze unsqueeze flatten unflatten flip roll neg requires_grad_ retain_grad
    register_hook dropout dropout1d feature_dropout masked_select resolve_conj
    resolve_neg real
"""

#: Other linear functions. A maximum is linear if the index of the maximum is frozen.
MIXING = """
    index_select gather take_along_dim repeat repeat_interleave tile sum mean nansum cumsum
    diagonal diag_embed tril triu unfold fold pixel_shuffle pixel_unshuffle avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    interpolate rfft irfft fft ifft embedding_bag trace amin amax max_pool1d max_pool2d
    max_pool3d adaptive_max_pool1d adaptive_max_pool2d topk sort median rot90 block_diag
    broadcast_to broadcast_tensors atleast_2d atleast_3d ravel deg2rad
"""

#: Sums and differences of two tensors, and functions that combine tensors side by side.
SUMS = "add sub rsub"
JOINS = "cat stack index_add scatter_add scatter masked_scatter index_copy index_put diff"

#: Products of two or more tensors.
PRODUCTS = """
    mul matmul mm bmm mv dot einsum outer tensordot inner vdot chain_matmul multi_dot grouped_mm
"""

#: Functions of single entries that are 0 at 0, possibly depending on their options.
BENT = """
    silu gelu relu relu6 leaky_relu prelu elu selu celu tanh softsign mish hardswish hardtanh
    hardshrink softshrink tanhshrink abs square sqrt clamp clamp_min clamp_max sin tan asinh
    arcsinh atan arctan erf expm1 log1p sinh sign threshold rrelu
"""

#: Functions whose results are treated as constant coefficients.
FROZEN = """
    softmax softmin gumbel_softmax sigmoid log_sigmoid hardsigmoid softplus exp exp2
    log log2 log10 rsqrt reciprocal rdiv cos cosh logsumexp logcumsumexp norm vector_norm
    matrix_norm var std var_mean std_mean cumprod prod maximum minimum floor ceil round trunc
    fmod remainder floor_divide nan_to_num bernoulli one_hot argsort cummax cummin logaddexp dist
    cdist cosine_similarity det inverse solve_triangular inv erfc fill zero
"""

#: Frozen functions of single entries that may be replaced by a tangent. Clamps are frozen only if 0
#: is outside of their limits.
TANGENT = frozenset(
    ("sigmoid", "log_sigmoid", "softplus", "exp", "exp2", "clamp", "clamp_min", "clamp_max")
)


@functools.cache
def plain_name(name: str) -> str:
    """Return a function's usual name without a prefix, such as "add" for "__radd__"."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return ALIASES.get(name, name)


def linear(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a linear function that only rearranges entries; activations' outputs stay marked."""
    out = func(*args, **kwargs)
    if mode.is_bent(args[0]):
        for view in out if isinstance(out, tuple | list) else (out,):
            mode.mark_bent(view)
    return out


def mixing(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a linear function whose result does not count as an activation's, such as a sum."""
    return func(*args, **kwargs)


def extremum(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call max or min of one tensor as a linear function; freeze max or min of two tensors."""
    # if not ``other``, the second argument is a dim
    of_two = isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), Tensor)
    return frozen(mode, func, args, kwargs) if of_two else func(*args, **kwargs)


def affine(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function that joins tensors, such as cat; record constant arguments."""
    out = func(*args, **kwargs)
    if mode.all_live((*args, *kwargs.values())):
        return out
    return _record_constants(mode, func, args, kwargs, out)


def filling(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call where, pad or masked_fill; record the constant arguments, including Python scalars."""
    out = func(*args, **kwargs)
    values = (*args, *kwargs.values())
    has_fill_value = any(isinstance(value, int | float) and value for value in values)
    if mode.all_live(values) and not has_fill_value:
        return out
    return _record_constants(mode, func, args, kwargs, out)


def _record_constants(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Any:
    """Return ``out``; record as its constant the result for 0 in place of live arguments."""
    kwargs = {name: mode.constant_part(value) for name, value in kwargs.items()}
    constant = func(*map(mode.constant_part, args), **kwargs)
    return mode.ledger.included(out, constant) if may_hold_any(constant) else out


def summing(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Add or subtract two arguments; record a constant argument, which may be a Python scalar."""
    (x, other), kwargs = to_positional(args, kwargs, "input", "other")
    out = func(x, other, **kwargs)
    constants = [value for value in (x, other) if not mode.is_live(value)]
    if not constants or (not isinstance(constants[0], Tensor) and constants[0] == 0):
        return out
    # keep the constant's own shape: the live argument is replaced by a 0 without dimensions
    zero = torch.zeros((), dtype=out.dtype, device="cpu")  # one number needs no device
    x, other = (zero if mode.is_live(value) else shrink_repeats(value) for value in (x, other))
    if isinstance(constants[0], Tensor):
        return mode.ledger.included(out, func(x, other, **kwargs))
    # a Python number stays in the network even if biases do not
    mode.ledger.record(out, func(x, other, **kwargs))
    return out


def assigning(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> None:
    """Assign x[index] = value; record constant entries of x, or a constant value."""
    base, index, value = args
    if mode.is_live(base) and mode.is_live(value):
        func(base, index, value)
        return
    constants = mode.constant_part(base).clone()
    func(constants, index, mode.constant_part(value))
    func(base, index, value)
    if may_hold_any(constants):
        mode.ledger.included_in(base, constants)


def copying(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute x.copy_(source) by overwriting x with source and its graph."""
    (x, source), _ = to_positional(args, kwargs, "self", "src")
    return mode.overwrite(x, source)


def product(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute a product whose relevance is divided among the factors depending on the input."""
    return mode.product(func, args, kwargs)


def quotient(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Divide by the frozen denominator; with ``rounding_mode``, freeze the whole quotient."""
    if kwargs.get("rounding_mode") is not None:
        return frozen(mode, func, args, kwargs)
    (numerator, denominator), _ = to_positional(args, kwargs, "input", "other")
    if isinstance(denominator, Tensor):
        denominator = denominator.detach()
    out = func(numerator, denominator)
    if mode.is_live(numerator) and numerator in mode.at_rest:
        mode.at_rest[out] = None  # a tangent, but not a gate
    return out


def gated(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute glu: the first half of the features times the frozen sigmoid of the second half."""
    x, dim = fill_arguments(args, kwargs, ("input", "dim"), (-1,))
    stream, gate = x.chunk(2, dim)
    return stream * torch.sigmoid(gate.detach())


def log_softmax(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute log_softmax: x minus the mean of x under frozen probabilities, minus the entropy.

    logsumexp(x) = sum(p x) + entropy(p) for p = softmax(x); with p frozen the entropy is constant.
    """
    x = args[0] if args else kwargs["input"]
    log_probabilities = frozen(mode, func, args, kwargs)
    (_, dim), _ = to_positional(args[:2], kwargs, "input", "dim")
    probabilities = log_probabilities.exp()
    x = x.to(log_probabilities.dtype)
    terms = probabilities * x.masked_fill(probabilities == 0, 0)  # x may be -inf there
    entropy = torch.special.entr(probabilities).sum(dim, keepdim=True)
    out = x - terms.sum(dim, keepdim=True) - entropy
    mode.ledger.record(out, -entropy)
    return out


def frozen(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Detach the result; with ``mode.follows_tangents``, functions in TANGENT stay as tangents."""
    has_tangent = plain_name(func.__name__) in TANGENT and bool(args) and mode.is_live(args[0])
    if has_tangent and mode.follows_tangents:
        out = _tangent(mode, func, args, kwargs)
        # in a mixer's own code a sigmoid may be a gate
        is_gate = mode.reading is not None and func in (torch.sigmoid, F.sigmoid, Tensor.sigmoid)
        mode.at_rest[out] = 0.5 if is_gate else None
        return out
    with torch.no_grad():
        return func(*args, **kwargs)


def _tangent(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return f(x) as its tangent at x: the frozen slope times x, plus a constant."""
    x, *options = args
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        # else torch's checkpoint around the model takes this graph for a part of the model's
        with saved_tensors_hooks(_identity, _identity):
            point = x.detach().requires_grad_()
            value = func(point, *options, **kwargs)
            (slope,) = torch.autograd.grad(value.sum(), point)  # of each entry by itself
        linear_part = x * slope
        constant = value.detach() - linear_part.detach()
    return mode.ledger.included(linear_part + constant, constant)


def _identity(x: Tensor) -> Tensor:
    return x


def bent(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return x times the frozen ratio f(x) / x; freeze the result if f(0) is not 0.

    A clamp of a tangent, as of a step after softplus, is a tangent as well: a step at its limit
    does not depend on the input.
    """
    (x, *options), kwargs = to_positional(args, kwargs, "input")
    if x in mode.at_rest and plain_name(func.__name__) in TANGENT:
        return frozen(mode, func, (x, *options), kwargs)
    ratio = _closed_ratio(func, x.detach(), options, kwargs)  # without calls of ``func``
    if ratio is not None:
        out = x * ratio
        mode.mark_bent(out)
        return out
    has_tensors = any(isinstance(option, Tensor) for option in (*options, *kwargs.values()))
    with torch.no_grad():
        # a 0 on the CPU, since reading a result from a GPU waits for it
        zero = torch.zeros_like(x) if has_tensors else torch.zeros((), dtype=x.dtype, device="cpu")
        is_bent = holds(~func(zero, *options, **kwargs).any())
    if not is_bent:
        return frozen(mode, func, args, kwargs)
    with torch.no_grad():
        ratio, in_place = _frozen_ratio(x.detach(), lambda point: func(point, *options, **kwargs))
    out = x * ratio
    mode.mark_bent(out)
    return mode.overwrite(x, out) if in_place else out


def _closed_ratio(
    func: Any, x: Tensor, positional_options: Iterable[Any], kwargs: Kwargs
) -> Tensor | None:
    """Return f(x) / x if it has a closed form, as for silu and squares; else, or in place, None."""
    name, options = plain_name(func.__name__), [*positional_options, *kwargs.values()]
    if name == "silu" and not any(options):  # its only option is inplace
        return torch.sigmoid(x)
    is_square = name == "square" or (name == "pow" and options == [2])
    return x if is_square and not func.__name__.endswith("_") else None


def _frozen_ratio(x: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, bool]:
    """Return the ratio f(x) / x, and True if f changes its argument in place."""
    # at 0 the ratio is the slope, which is approximated at a small number
    point = torch.where(x == 0, torch.finfo(x.dtype).eps ** 0.5, x)
    argument = point.clone()
    result = function(argument)
    return result.div_(point), result is argument


def power(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute a positive power as x times a frozen ratio; freeze all other powers."""
    exponent = args[1] if len(args) > 1 else kwargs["exponent"]
    if isinstance(exponent, Tensor) or exponent <= 0:
        return frozen(mode, func, args, kwargs)
    return bent(mode, func, args, kwargs)


def with_bias(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute linear or a convolution: a product with a weight, plus a bias per output channel."""
    (x, weight, *options), kwargs = to_positional(args, kwargs, "input", "weight", "bias")
    bias = options[0] if options else None
    if bias is None:
        return mode.product(func, (x, weight, *options), kwargs)
    spatial_dims = weight.dim() - 2
    return mode.product(func, (x, weight, *options), kwargs, bias.view(-1, *(1,) * spatial_dims))


def with_summand(product: Callable[..., Tensor], left: str, right: str) -> FunctionRule:
    """Return the rule of addmm and similar functions: beta * summand + alpha * product."""

    def rule(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Compute the product and the sum by their own rules."""
        (summand, *factors), kwargs = to_positional(args, kwargs, "input", left, right)
        value: Any = kwargs.get("value", 1)  # addcmul's name of alpha
        alpha, beta = kwargs.get("alpha", value), kwargs.get("beta", 1)
        terms = beta * summand, alpha * mode.product(product, tuple(factors), {})
        return summing(mode, torch.add, terms, {})

    return rule


def lerp(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute lerp as x + (end - x) * weight, by the rules of sums and products.

    In a mixer that is explained by its own code, the weight is frozen: RWKV-7's share of the first
    layer's values.
    """
    (x, end, weight), _ = to_positional(args, kwargs, "input", "end", "weight")
    if mode.reading is not None and mode.is_live(weight):
        weight = weight.detach()
    difference = summing(mode, torch.sub, (end, x), {})
    return summing(mode, torch.add, (x, mode.product(torch.mul, (difference, weight), {})), {})


def _summed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix products of a batch (b, i, k), summed over the batch to (i, k)."""
    return torch.einsum("bij,bjk->ik", left, right)


def layer_norm(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute layer_norm: center, and divide by a frozen standard deviation."""
    x, size, weight, bias, eps = fill_arguments(
        args, kwargs, ("input", "normalized_shape", "weight", "bias", "eps"), (None, None, 1e-5)
    )
    out = _standardize(x, tuple(range(-len(size), 0)), eps)
    return _scale_and_shift(mode, out, weight, bias).to(x.dtype)


def group_norm(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute group_norm: center each channel group; divide by a frozen standard deviation."""
    x, groups, weight, bias, eps = fill_arguments(
        args, kwargs, ("input", "num_groups", "weight", "bias", "eps"), (None, None, 1e-5)
    )
    out = _standardize(x.reshape(len(x), groups, -1), (-1,), eps).reshape(x.shape)
    channel_shape = (-1, *(1,) * (x.dim() - 2))
    weight, bias = (None if p is None else p.view(channel_shape) for p in (weight, bias))
    return _scale_and_shift(mode, out, weight, bias).to(x.dtype)


def instance_norm(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute instance_norm: center each channel; divide by a frozen standard deviation."""
    args, kwargs = _name_arguments(func, args, kwargs)
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")
    x, mean, variance, weight, bias, uses_input, _, eps, *_ = fill_arguments(
        args,
        kwargs,
        (*names, "momentum", "eps", "cudnn_enabled"),
        (None, None, None, None, True, 0.1, 1e-5, True),
    )
    if not uses_input:  # no training; a momentum, which is then unused
        arguments = x, mean, variance, weight, bias, False, 0.1, eps
        return batch_norm(mode, F.batch_norm, arguments, {})
    return group_norm(mode, F.group_norm, (x, x.shape[1], weight, bias, eps), {})


def rms_norm(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute rms_norm: divide by a frozen root mean square."""
    x, size, weight, eps = fill_arguments(
        args, kwargs, ("input", "normalized_shape", "weight", "eps"), (None, None)
    )
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = _widen(x.detach()).square().mean(tuple(range(-len(size), 0)), keepdim=True)
    out = _widen(x) * torch.rsqrt(square + eps)
    return _scale_and_shift(mode, out, weight, None).to(x.dtype)


def batch_norm(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute batch_norm: an affine map of each channel with the running statistics."""
    args, kwargs = _name_arguments(func, args, kwargs)
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum")
    x, mean, variance, weight, bias, training, _, eps = fill_arguments(
        args, kwargs, (*names, "eps"), (None, None, False, 0.1, 1e-5)
    )
    if training or mean is None:
        raise NotLinearError(
            f"Module {mode.where()!r} runs a batch_norm in training mode, which mixes examples. "
            "Call model.eval(), and use batch norms with running statistics."
        )
    channel_shape = (-1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(_widen(variance) + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    out = _widen(x) * scale.view(channel_shape) + shift.view(channel_shape)
    return mode.ledger.included(out, shift.view(channel_shape)).to(x.dtype)


def _name_arguments(func: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Convert positional arguments of torch.batch_norm or torch.instance_norm to named ones.

    These functions take weights before statistics, unlike the ones in torch.nn.functional.
    """
    if func not in (torch.batch_norm, torch.instance_norm):
        return args, kwargs
    switch = "training" if func is torch.batch_norm else "use_input_stats"
    names = ("input", "weight", "bias", "running_mean", "running_var", switch, "momentum", "eps")
    return (), dict(zip(names, args, strict=False)) | kwargs


def normalize(mode: Linearizing, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute normalize: divide vectors by their frozen lengths."""
    x, p, dim, eps = fill_arguments(args, kwargs, ("input", "p", "dim", "eps"), (2.0, 1, 1e-12))
    length = torch.linalg.vector_norm(x.detach(), p, dim, keepdim=True)
    out: Tensor = x / length.clamp_min(eps)
    return out


def _standardize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """Center ``x``, and divide by a frozen standard deviation over ``dims``."""
    wide = _widen(x)
    centered = wide - wide.mean(dims, keepdim=True)
    variance = centered.detach().square().mean(dims, keepdim=True)
    return centered * torch.rsqrt(variance + eps)


def _scale_and_shift(
    mode: Linearizing, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Multiply by a weight and add a bias, if any, and record the bias."""
    out = out if weight is None else out * weight
    return out if bias is None else mode.ledger.included(out + bias, bias)


def _widen(x: Tensor) -> Tensor:
    """Convert to float32 or wider, as torch's own norms do."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def fill_arguments(args: Args, kwargs: Kwargs, names: tuple[str, ...], defaults: Args) -> list[Any]:
    """Return all arguments in the order of ``names``; ``defaults`` are for the last names."""
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | kwargs
    values.update(zip(names, args, strict=False))
    return [values[name] for name in names]


def to_positional(args: Args, kwargs: Kwargs, *names: str) -> tuple[Args, Kwargs]:
    """Move keyword arguments with the given names to positional arguments, in this order."""
    kwargs = dict(kwargs)
    moved = [kwargs.pop(name) for name in names[len(args) :] if name in kwargs]
    return (*args, *moved), kwargs


def _rule_by_name() -> dict[str, FunctionRule]:
    """Return the rule of each torch function, by the name that :func:`plain_name` returns."""
    rules: dict[str, FunctionRule] = {}
    kinds: tuple[tuple[str, FunctionRule], ...] = (
        (VIEWS, linear),
        (MIXING, mixing),
        (SUMS, summing),
        (JOINS, affine),
        (PRODUCTS, product),
        (BENT, bent),
        (FROZEN, frozen),
        ("linear conv1d conv2d conv3d", with_bias),
        ("conv_transpose1d conv_transpose2d conv_transpose3d", with_bias),
        ("where pad masked_fill", filling),
        ("max min", extremum),
    )
    for names, rule in kinds:
        rules.update(dict.fromkeys(names.split(), rule))
    same_names = (layer_norm, group_norm, instance_norm, rms_norm, batch_norm, normalize, lerp)
    rules.update({rule.__name__: rule for rule in same_names})
    return rules | {
        "__setitem__": assigning,
        "copy_": copying,
        "div": quotient,
        "pow": power,
        "glu": gated,
        "log_softmax": log_softmax,
        "addmm": with_summand(torch.matmul, "mat1", "mat2"),
        "baddbmm": with_summand(torch.matmul, "batch1", "batch2"),
        "addbmm": with_summand(_summed_product, "batch1", "batch2"),
        "addmv": with_summand(torch.matmul, "mat", "vec"),
        "addcmul": with_summand(torch.mul, "tensor1", "tensor2"),
    }


RULES = _rule_by_name()
