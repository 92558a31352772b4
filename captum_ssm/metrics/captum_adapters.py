"""Captum's infidelity and sensitivity_max for sequences, with changes of whole tokens.

Captum's perturbations add noise to inputs. But noise cannot be added to token ids, and with noise
on padding, a method that ignores padding would get a worse score. These functions remove, replace
or perturb only unpadded tokens. They accept ids, embeddings, and methods of Captum and this
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
    """Measure infidelity under the removal of random tokens (Yeh et al. 2019).

    Infidelity is the expected squared difference between the relevance of the removed tokens and
    the decrease of the target::

        E over draws I of (sum over i in I of r[i]  -  (f(x) - f(x without I)))^2

    For a low value, relevance must have the units of the output, unless ``normalize`` is True.

    Args:
        method: an attribution method; its ``forward_func`` is the explained function.
        inputs: token ids (B, L) or embeddings (B, L, E).
        target: the target, in all forms that Captum accepts. Default: None.
        additional_forward_args: further positional arguments of forward_func. Default: None.
        fill: the replacement of removed tokens: an id, or for embeddings a number or vector (E,).
        attributions: the method's attributions, in the inputs' shape. Default: None, computed here.
        mask: tokens that may be removed, (B, L), for example unpadded ones. Default: None, all.
        share: the share of tokens that each draw removes, at least one token. Default: 0.25.
        samples: the number of draws for each example. Default: 10.
        normalize: multiply relevance by the factor that fits best, as in Captum. Default: False.
        seed: the seed of the random draws. Default: 0.
        internal_batch_size: the largest number of changed inputs per run, B or more. Default: None.
        options: further arguments of ``attribute``. Default: None.

    Returns:
        The infidelity of each example, (B,); 0 is best.

    Raises:
        InputError: when inputs are not a sequence, the shapes of attributions and inputs differ, or
            mask is False for all tokens of an example.
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
    tensor = _as_sequence(inputs)
    allowed = _changeable_tokens(tensor, mask)
    _check_sampling(samples, internal_batch_size, len(tensor))
    check_share(share)
    generator = torch.Generator().manual_seed(seed)
    if attributions is None:
        attributions = method.attribute(
            tensor,
            target=target,
            additional_forward_args=additional_forward_args,
            **(options or {}),
        )
    scores = as_scores(single_input(attributions, "attributions")[0], "attributions")
    if scores.shape != tensor.shape:
        raise InputError(
            f"attributions has shape {tuple(scores.shape)}, but inputs has {tuple(tensor.shape)}. "
            "Pass attributions of the same shape, computed with per_token=False."
        )

    def remove(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 for removed units and 0 for others, as Captum requires, and changed inputs."""
        removed = draw_tokens(_repeat_mask(allowed, rows), share, generator)
        changed_rows = replace_tokens(rows, removed, fill)
        units = removed if rows.dim() == 2 else removed[..., None].expand_as(rows)
        return units.to(scores), changed_rows

    result: Tensor = infidelity(
        _finite_logits_of(method.forward_func),
        remove,
        tensor,
        scores,
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
    """Return the largest relative change of relevance for small changes of the input.

    For embeddings, uniform noise is added (Yeh et al. 2019; Captum's sensitivity_max). For token
    ids, a share of them is replaced by random ids::

        max over draws x' of ||r(x') - r(x)|| / ||r(x)||

    Args:
        method, inputs, target, additional_forward_args: see :func:`token_infidelity`, with the
            same defaults.
        replacements: the ids from which random ids are drawn, (n,); required for token ids.
            Default: None.
        radius: the largest absolute value of the noise. Default: 0.02.
        mask: tokens that may be changed, (B, L), for example unpadded ones. Default: None, all.
        share: the share of token ids that each draw replaces, at least one id. Default: 0.1.
        samples: the number of draws for each example. Default: 10.
        seed: the seed of the random draws. Default: 0.
        internal_batch_size: the largest number of changed inputs per run, B or more. Default: None.
        options: further arguments of ``attribute``, the same for all examples. Default: None.

    Returns:
        The largest relative changes (B,); 0 if relevance does not change.

    Raises:
        InputError: when inputs are not a sequence, or mask is False for all tokens of an example.
        OptionError: when radius, share, samples or internal_batch_size is not accepted, or inputs
            are token ids and replacements is None.

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
    tensor = _as_sequence(inputs)
    allowed = _changeable_tokens(tensor, mask)
    _check_sampling(samples, internal_batch_size, len(tensor))
    generator = torch.Generator().manual_seed(seed)
    perturb = (
        _noise_adder(radius, generator)
        if tensor.is_floating_point()
        else _id_replacer(replacements, share, generator)
    )
    extra = options or {}

    def explain(changed_inputs: Any, **arguments: Any) -> tuple[Tensor]:
        relevance, _ = single_input(method.attribute(changed_inputs, **arguments, **extra))
        return (as_scores(relevance, "the method's relevance"),)

    result: Tensor = sensitivity_max(
        explain,
        tensor,
        perturb_func=lambda rows: perturb(rows, _repeat_mask(allowed, rows)),
        n_perturb_samples=samples,
        max_examples_per_batch=internal_batch_size,
        target=target,
        additional_forward_args=additional_forward_args,
    )
    return result


def _noise_adder(radius: float, generator: torch.Generator) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that adds uniform noise to the allowed tokens of embeddings (R, L, E)."""
    if not radius > 0:
        raise OptionError(f"radius={radius} is not above 0. Pass a number above 0.")

    def shake(rows: Tensor, allowed: Tensor) -> Tensor:
        noise = (torch.rand(rows.shape, generator=generator) * 2 - 1) * radius
        return rows + noise.to(rows) * allowed[..., None]

    return shake


def _id_replacer(
    replacements: Tensor | None, share: float, generator: torch.Generator
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that replaces a share of the allowed ids (R, L) by random replacements."""
    check_share(share)
    if replacements is None or replacements.dim() != 1 or not len(replacements):
        raise OptionError(
            f"replacements={replacements}: noise cannot be added to token ids. Pass a tensor of "
            "ids (n,) that may replace them, for example torch.arange(vocabulary_size)."
        )

    def replace(rows: Tensor, allowed: Tensor) -> Tensor:
        indices = torch.randint(len(replacements), rows.shape, generator=generator)
        random_ids = replacements.to(rows)[indices.to(rows.device)]
        return torch.where(draw_tokens(allowed, share, generator), random_ids, rows)

    return replace


def _finite_logits_of(forward_func: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function that computes the model's logits and raises if they are not finite."""

    def scores(inputs: Tensor, *additional: Any) -> Tensor:
        output = logits_of(call_model(forward_func, inputs, as_tuple(additional)))
        return as_scores(output, "the model's output")

    return scores


def _as_sequence(inputs: Tensor | tuple[Tensor]) -> Tensor:
    """Return the only input; raise unless it is token ids or embeddings."""
    tensor, _ = single_input(inputs)
    if not is_sequence(tensor):
        raise InputError(
            f"inputs has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; pass token ids "
            "(B, L) or embeddings (B, L, E). For images use captum.metrics."
        )
    return tensor


def _changeable_tokens(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of tokens that may be changed, (B, L), for ids or embeddings."""
    allowed = as_mask(mask, tensor if tensor.dim() == 2 else tensor[..., 0])
    if not bool(allowed.any(-1).all()):
        example = int((~allowed.any(-1)).long().argmax())
        raise InputError(f"mask is False for all tokens of example {example}. Set one to True.")
    return allowed


def _repeat_mask(mask: Tensor, rows: Tensor) -> Tensor:
    """Repeat each example's mask (B, L) to (R, L), as Captum repeats the examples."""
    return mask.repeat_interleave(len(rows) // len(mask), dim=0)


def _check_sampling(samples: int, internal_batch_size: int | None, batch: int) -> None:
    """Raise unless there is at least one draw, and a run has room for the whole batch."""
    check_positive(samples, "samples")
    if internal_batch_size is not None and internal_batch_size < batch:
        raise OptionError(
            f"internal_batch_size={internal_batch_size} is below the batch size {batch}, and "
            f"Captum runs the whole batch for each draw. Pass at least {batch}, or fewer examples."
        )
