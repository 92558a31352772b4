"""Captum's infidelity and sensitivity_max for sequences, by changes of whole tokens.

Captum's own perturbations add noise to numbers. Token ids cannot change a little, and noise on
padding would count against a method that rightly ignores it. These adapters remove, replace or
perturb real tokens only. They take token ids and embeddings, and attributions of Captum and of this
package.

Shapes: B examples, L tokens, E width; R = B times the draws for each example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from captum.attr import Attribution
from captum.metrics import infidelity, sensitivity_max
from torch import Tensor

from ..attr.call.inputs import as_tuple, call_model, single_input
from ..attr.call.targets import logits_of
from ..errors import InputError, OptionError
from .checks import as_mask, as_scores, check_positive
from .tokens import Filling, check_share, draw_tokens, is_sequence, replace_tokens


def token_infidelity(
    method: Attribution,
    inputs: Tensor | tuple[Tensor],
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    fill: Filling,
    attributions: Tensor | tuple[Tensor] | None = None,
    mask: Tensor | None = None,
    share: float = 0.25,
    samples: int = 10,
    normalize: bool = False,
    seed: int = 0,
    internal_batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Measure infidelity under the removal of random tokens (Yeh et al. 2019), (B,).

    The expected square of the relevance of removed tokens less the target's loss::

        E over draws I of (sum over i in I of r[i]  -  (f(x) - f(x without I)))^2

    Relevance must be in the output's units to score well, unless it is normalized.

    Args:
        method: an attribution, whose forward_func is the function explained.
        inputs: token ids (B, L) or embeddings (B, L, E).
        target: in Captum's forms. Default: None.
        additional_forward_args: further positional arguments of forward_func. Default: None.
        fill: the replacement of removed tokens: an id, or for embeddings a number or vector (E,).
        attributions: the method's attributions of inputs, of their shape. Default: None, computed.
        mask: tokens that may be removed, (B, L), such as an attention mask. Default: None, all.
        share: the share of an example's tokens that each draw removes, at least one. Default: 0.25.
        samples: draws for each example. Default: 10.
        normalize: scale relevance by the factor that fits best, see Captum. Default: False.
        seed: of the draws. Default: 0.
        internal_batch_size: run at most so many changed inputs at a time, B or more. Default: None.
        options: further arguments of ``attribute``. Default: None.

    Returns:
        (B,); 0 is best.

    Raises:
        InputError: when inputs are not a sequence, attributions differ in shape, or mask leaves an
            example without a token to remove.
        OptionError: when share, samples, fill or internal_batch_size is not accepted.

    Example:
        >>> import torch
        >>> from captum.attr import InputXGradient
        >>> from captum_ssm.metrics import token_infidelity
        >>> method, x = InputXGradient(lambda x: x.sum((1, 2))), torch.ones(1, 4, 2)
        >>> token_infidelity(method, x, fill=0.0).item()  # exact for a linear function
        0.0
        >>> token_infidelity(method, x, fill=0.0, attributions=torch.zeros(1, 4, 2)).item()
        4.0
    """
    tensor = _sequence(inputs)
    allowed = _allowed(tensor, mask)
    _check(samples, internal_batch_size, len(tensor))
    check_share(share)
    generator = torch.Generator().manual_seed(seed)
    if attributions is None:
        attributions = method.attribute(
            tensor,
            target=target,
            additional_forward_args=additional_forward_args,
            **(options or {}),
        )
    found = as_scores(single_input(attributions, "attributions")[0], "attributions")
    if found.shape != tensor.shape:
        raise InputError(
            f"attributions has shape {tuple(found.shape)}, inputs {tuple(tensor.shape)}: they must "
            "be the same, so leave per_token=False."
        )

    def remove(rows: Tensor) -> tuple[Tensor, Tensor]:
        gone = draw_tokens(_repeated(allowed, rows), share, generator)
        changed = replace_tokens(rows, gone, fill)
        units = gone if rows.dim() == 2 else gone[..., None].expand_as(rows)
        return units.to(found), changed

    result: Tensor = infidelity(
        _scores_of(method.forward_func),
        remove,
        tensor,
        found,
        additional_forward_args=additional_forward_args,
        target=target,
        n_perturb_samples=samples,
        max_examples_per_batch=internal_batch_size,
        normalize=normalize,
    )
    return result


def token_sensitivity(
    method: Attribution,
    inputs: Tensor | tuple[Tensor],
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    replacements: Tensor | None = None,
    radius: float = 0.02,
    mask: Tensor | None = None,
    share: float = 0.1,
    samples: int = 10,
    seed: int = 0,
    internal_batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the largest relative change of relevance under small changes of the input, (B,).

    Uniform noise is added to embeddings (Yeh et al. 2019; Captum's sensitivity_max).  A share of
    token ids is replaced by random ids::

        max over draws x' of ||r(x') - r(x)|| / ||r(x)||

    Args:
        method, inputs, target, additional_forward_args: as in :func:`token_infidelity`, with the
            same defaults.
        replacements: ids that may take a token's place, (n,). Default: None; token ids need it.
        radius: largest noise on a feature of an embedding. Default: 0.02.
        mask: tokens that may be changed, (B, L), such as an attention mask. Default: None, all.
        share: of an example's token ids that each draw replaces, at least one. Default: 0.1.
        samples: draws for each example. Default: 10.
        seed: of the draws. Default: 0.
        internal_batch_size: run at most so many changed inputs at a time, B or more. Default: None.
        options: further arguments of ``attribute``, the same for all examples. Default: None.

    Returns:
        (B,); 0 if relevance does not change.

    Raises:
        InputError: when inputs are no sequence, or mask leaves an example without a token to
            change.
        OptionError: when radius, share, samples or internal_batch_size is not accepted, or token
            ids come without replacements.

    Example:
        >>> import torch
        >>> from captum.attr import InputXGradient, Saliency
        >>> from captum_ssm.metrics import token_sensitivity
        >>> f, x = lambda x: x.sum((1, 2)), torch.ones(1, 4, 2)
        >>> token_sensitivity(Saliency(f), x).item()  # a linear function has one gradient
        0.0
        >>> 0 < token_sensitivity(InputXGradient(f), x, radius=0.02).item() < 0.02
        True
    """
    tensor = _sequence(inputs)
    allowed = _allowed(tensor, mask)
    _check(samples, internal_batch_size, len(tensor))
    generator = torch.Generator().manual_seed(seed)
    change = (
        _shaking(radius, generator)
        if tensor.is_floating_point()
        else _replacing(replacements, share, generator)
    )
    chosen = options or {}

    def explain(given: Any, **arguments: Any) -> tuple[Tensor]:
        relevance, _ = single_input(method.attribute(given, **arguments, **chosen))
        return (as_scores(relevance, "the method's relevance"),)

    result: Tensor = sensitivity_max(
        explain,
        tensor,
        perturb_func=lambda rows: change(rows, _repeated(allowed, rows)),
        n_perturb_samples=samples,
        max_examples_per_batch=internal_batch_size,
        target=target,
        additional_forward_args=additional_forward_args,
    )
    return result


def _shaking(radius: float, generator: torch.Generator) -> Callable[[Tensor, Tensor], Tensor]:
    if not radius > 0:
        raise OptionError(f"radius={radius}: use a number above 0.")

    def shake(rows: Tensor, allowed: Tensor) -> Tensor:
        noise = (torch.rand(rows.shape, generator=generator) * 2 - 1) * radius
        return rows + noise.to(rows) * allowed[..., None]

    return shake


def _replacing(
    replacements: Tensor | None, share: float, generator: torch.Generator
) -> Callable[[Tensor, Tensor], Tensor]:
    check_share(share)
    if replacements is None or replacements.dim() != 1 or not len(replacements):
        raise OptionError(
            "replacements: token ids cannot be shaken; pass a tensor of ids that may take their "
            "place, for example torch.arange(vocabulary_size)."
        )

    def replace(rows: Tensor, allowed: Tensor) -> Tensor:
        which = torch.randint(len(replacements), rows.shape, generator=generator)
        drawn = replacements.to(rows)[which.to(rows.device)]
        return torch.where(draw_tokens(allowed, share, generator), drawn, rows)

    return replace


def _scores_of(forward_func: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function of inputs whose output is the model's logits, as finite numbers."""

    def scores(inputs: Tensor, *additional: Any) -> Tensor:
        output = logits_of(call_model(forward_func, inputs, as_tuple(additional)))
        return as_scores(output, "the model's output")

    return scores


def _sequence(inputs: Tensor | tuple[Tensor]) -> Tensor:
    tensor, _ = single_input(inputs)
    if not is_sequence(tensor):
        raise InputError(
            f"inputs has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; token ids (B, L) or "
            "embeddings (B, L, E) are needed. For images use captum.metrics itself."
        )
    return tensor


def _allowed(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return True for tokens that may be changed, (B, L)."""
    allowed = as_mask(mask, tensor if tensor.dim() == 2 else tensor[..., 0])
    if not bool(allowed.any(-1).all()):
        raise InputError("mask leaves an example without any token that may be changed.")
    return allowed


def _repeated(mask: Tensor, rows: Tensor) -> Tensor:
    """Return the mask (B, L) for rows (R, ...) in which Captum repeats each example in place."""
    return mask.repeat_interleave(len(rows) // len(mask), dim=0)


def _check(samples: int, internal_batch_size: int | None, batch: int) -> None:
    check_positive(samples, "samples")
    if internal_batch_size is not None and internal_batch_size < batch:
        raise OptionError(
            f"internal_batch_size={internal_batch_size}: Captum runs the whole batch of {batch} "
            "for each draw. Pass that or more, or a smaller batch."
        )
