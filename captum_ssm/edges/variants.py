"""Compute effects of single-base variants on an output, to first order or by one run each.

    effect[a, p] = gradient[a, p] - gradient[r, p],       r the base at p

One forward and one backward pass give the 3 L first-order effects. The gradient is the model's own,
or the gradient of :class:`~captum_ssm.LatimFlow`'s linear network with one of its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attr import LatimFlow
from ..attr.call import checks
from ..attr.call.inputs import BatchPart, as_tuple, call_model, single_input
from ..attr.call.targets import contrasted, logits_of
from ..errors import GradientModeError, InputError
from ..linear import FAMILY
from ..tracing import find_model, repaired_scans


def variant_effects(
    forward_func: Callable[..., Any],
    one_hot: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    contrast: Any = None,
    rule: str | None = "centered",
    model: nn.Module | None = None,
    layers: Sequence[str | nn.Module] | None = None,
) -> Tensor:
    """Estimate the effect of every single-base variant, to first order, from one backward pass.

    :func:`mutagenesis` computes the true effects, by one run per variant.

    Args:
        forward_func: the model, which reads one-hot sequences, such as
            :class:`~captum_ssm.models.OneHot`; or a function that runs it.
        one_hot: the reference sequences, (B, 4, L) or (B, L, 4): at each position one base, or
            zeros.
        target: the explained output, in Captum's forms. Default: None, for models that return one
            number per example.
        additional_forward_args: further positional arguments of forward_func. Default: None.
        contrast: the alternative to the target; see :meth:`.LatimFlow.attribute`. Default: None.
        rule: the rule of :class:`.LatimFlow` whose gradient is used, or None for the model's own
            gradient, which is near 0 for a confident model. Default: ``"centered"``, the most
            accurate in experiments.
        model: the module, if forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use, with a rule. Default: None, all.

    Returns:
        The estimated change of the target for each base in place of the reference, in the shape of
        ``one_hot``. It is 0 for the reference base, and at positions without one.

    Raises:
        InputError: when ``one_hot`` is not one-hot, or zeros, at some position.
        OptionError: for an unknown rule or contrast.
        GradientModeError: when the target does not depend on the inputs.

    Example:
        >>> import torch
        >>> from captum_ssm import variant_effects
        >>> from captum_ssm.models import Caduceus, OneHot
        >>> model = OneHot(Caduceus(d_model=16, n_layer=2, num_classes=3).eval())
        >>> x = torch.nn.functional.one_hot(torch.randint(4, (2, 10)), 4).mT.float()  # (B, 4, L)
        >>> effects = variant_effects(model, x, target=1)
        >>> effects.shape, bool((effects * x).any())
        (torch.Size([2, 4, 10]), False)
    """
    one_hot, dim = _checked(one_hot)
    if rule is None:
        gradient = _own_gradient(
            forward_func, one_hot, target, additional_forward_args, contrast, model
        )
    else:
        checked_rule: Any = checks.choice("rule", rule, FAMILY)
        # relevance for a baseline of inputs - 1 is the gradient itself
        gradient = LatimFlow(forward_func, model, layers).attribute(
            one_hot, target, additional_forward_args,
            contrast=contrast, rule=checked_rule, baselines=one_hot - 1,
        )  # fmt: skip
    has_base = one_hot.sum(dim, keepdim=True)  # 0 at positions without one
    at_reference = (gradient * one_hot).sum(dim, keepdim=True)
    return ((gradient - at_reference) * (has_base - one_hot)).to(one_hot)


def mutagenesis(
    forward_func: Callable[..., Any],
    one_hot: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    contrast: Any = None,
    at_a_time: int = 64,
) -> Tensor:
    """Run every single-base variant, 3 L of each example, and return its effect on the target.

    Args:
        forward_func, one_hot, target, additional_forward_args, contrast: as in
            :func:`variant_effects`; additional arguments are the same for all variants.
        at_a_time: the number of variants in one batch. Default: 64.

    Returns:
        The change of the target, in the shape of ``one_hot``.

    Raises:
        InputError: when ``one_hot`` is not one-hot, or zeros, at some position.

    Example:
        >>> import torch
        >>> from captum_ssm.edges import mutagenesis
        >>> x = torch.eye(4)[:, [0, 2, 2]][None]  # A G G
        >>> weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> mutagenesis(lambda x: (x * weights[:, None]).sum((1, 2)), x)[0].int()
        tensor([[ 0, -2, -2],
                [ 1, -1, -1],
                [ 2,  0,  0],
                [ 3,  1,  1]], dtype=torch.int32)
    """
    one_hot, dim = _checked(one_hot)
    batch_size = checks.count("at_a_time", at_a_time) or one_hot.numel()  # None: all variants
    bases = one_hot.mT if dim == 1 else one_hot  # (B, L, 4)
    effects = torch.zeros_like(bases)
    identity = torch.eye(4).to(bases)
    for example, sequence in enumerate(bases):
        part = BatchPart(slice(example, example + 1), len(bases))
        question = part.target(target), part.target(contrast)

        def values_of(sequences: Tensor, question: tuple[Any, Any] = question) -> Tensor:
            """Return the target of each sequence (n, L, 4), minus the contrast: (n,).

            ``question`` is bound now, because the loop changes it.
            """
            in_layout = sequences.mT if dim == 1 else sequences
            with torch.no_grad(), repaired_scans():  # faster, same values
                output = logits_of(
                    call_model(forward_func, in_layout, as_tuple(additional_forward_args))
                )
            return torch.cat([contrasted(logits[None], *question)[0] for logits in output])

        reference_value = values_of(sequence[None])
        variants = ((sequence == 0) & (sequence.sum(-1, keepdim=True) > 0)).nonzero()  # (n, 2)
        for batch in variants.split(batch_size):
            places, bases_there = batch.unbind(1)
            changed = sequence.repeat(len(batch), 1, 1)
            changed[torch.arange(len(batch)), places] = identity[bases_there]
            changes = values_of(changed) - reference_value
            effects[example, places, bases_there] = changes.to(effects)
    return effects.mT if dim == 1 else effects


def _checked(one_hot: Any) -> tuple[Tensor, int]:
    """Check one-hot sequences; return them as floats, and the dimension of the bases, 1 or 2."""
    x, _ = single_input(one_hot, "one_hot")
    for dim in (1, 2):
        if x.dim() != 3 or x.shape[dim] != 4:
            continue
        sums = x.sum(dim)
        if bool(((x == 0) | (x == 1)).all() and ((sums == 0) | (sums == 1)).all()):
            return (x if x.is_floating_point() else x.float()), dim
    raise InputError(
        f"one_hot of shape {tuple(x.shape)} is not (B, 4, L) or (B, L, 4) with a single 1, or "
        "zeros, at each position. Pass the sequences one-hot."
    )


def _own_gradient(
    forward_func: Callable[..., Any],
    one_hot: Tensor,
    target: Any,
    additional: Any,
    contrast: Any,
    model: nn.Module | None,
) -> Tensor:
    """Return the model's gradient of the target at the sequences, in their shape."""
    find_model(forward_func, model)  # only to raise: rule= needs a module, so this does, too
    if torch.is_inference_mode_enabled():
        raise GradientModeError(
            "variant_effects needs gradients, which torch.inference_mode() forbids. Leave that "
            "context, or use torch.no_grad()."
        )
    x = one_hot.detach().clone().requires_grad_()
    with torch.enable_grad(), repaired_scans():  # faster, same values
        output = logits_of(call_model(forward_func, x, as_tuple(additional)))
        values, _ = contrasted(output, target, contrast)
        if not values.requires_grad:
            raise GradientModeError(
                "The target does not depend on one_hot, so there is no gradient. Pass a "
                "forward_func without detach() and torch.no_grad()."
            )
        (gradient,) = torch.autograd.grad(values.sum(), x)
    return gradient
