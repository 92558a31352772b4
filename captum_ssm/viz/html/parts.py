"""Compute the parts of the output, and roles of tokens, with methods that decompose the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attr import LatimFlow, LatimLogit
from ...attr.engine.decompose import Decomposition, OutputParts
from ...attr.engine.method import SSMAttribution
from ...attr.flow import FlowMethod

#: Options that ``attribute`` has and ``decompose`` does not have.
_OF_ATTRIBUTE = ("per_token", "internal_batch_size")


class Account(NamedTuple):
    """The parts of an explained number: relevance + ``bias`` + ``delta`` = ``output``.

    Attributes:
        output: the explained number.
        bias: the contribution of biases and other constants.
        delta: the output minus relevance and ``bias``; about 0 if the decomposition is complete.
        references: the part of ``bias`` from references for keys and queries. Default: 0.0.
        baselines: the part of ``bias`` from the baseline input. Default: 0.0.
    """

    output: float
    bias: float
    delta: float
    references: float = 0.0
    baselines: float = 0.0


#: Relevance below this share of the query's own entry, mostly the identity, is negligible.
_NEGLIGIBLE = 1e-3


def is_negligible(values: Sequence[float | None], query: int | None) -> bool:
    """Return True if all relevance is zero, or negligible beside the entry of token ``query``."""
    others = [abs(x) for i, x in enumerate(values) if x is not None and i != query]
    own = None if query is None else values[query]
    return max(others, default=0.0) <= _NEGLIGIBLE * abs(own or 0.0)


def decomposes(method: Any) -> bool:
    """Return True if a method object or class decomposes the output."""
    kind = method if isinstance(method, type) else type(method)
    return issubclass(kind, LatimFlow | LatimLogit)


def tells_roles(method: Any, options: Mapping[str, Any], inputs: Tensor | None = None) -> bool:
    """Return True if a method object or class has relevance by role; images have no roles."""
    kind = method if isinstance(method, type) else type(method)
    if not issubclass(kind, LatimFlow) or (inputs is not None and inputs.dim() == 4):
        return False
    rule = options.get("rule")
    return bool((method.default_rule if rule is None else rule) != "frozen")


def tells_pixels(method: Any) -> bool:
    """Return True if a method object or class has relevance per pixel, not only per patch."""
    kind = method if isinstance(method, type) else type(method)
    return issubclass(kind, FlowMethod) or not issubclass(kind, SSMAttribution)


def decomposition(
    method: LatimFlow | LatimLogit,
    inputs: Tensor,
    target: Any,
    additional: Any,
    *,
    options: Mapping[str, Any],
    roles: bool,
) -> OutputParts:
    """Decompose the output with a method, with the ``options`` that ``decompose`` accepts."""
    accepted = options_of_parts(options)
    if isinstance(method, LatimFlow):
        return method.decompose(inputs, target, additional, roles=roles, **accepted)
    return method.decompose(inputs, target, additional, **accepted)


def options_of_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``attribute`` that ``decompose`` also accepts."""
    return {name: value for name, value in options.items() if name not in _OF_ATTRIBUTE}


def account(parts: OutputParts) -> Account:
    """Return one example's output as a sum of relevance and constants, from a decomposition."""
    bias = sum(parts.biases.values(), torch.zeros_like(parts.output))
    references, baselines = (parts.biases.get(name, 0.0) for name in ("references", "baselines"))
    return Account(*map(float, (parts.output, bias, parts.delta, references, baselines)))


def roles_of(parts: OutputParts) -> dict[str, Tensor]:
    """Return relevance of tokens (B, L) by role, without empty roles."""
    roles = parts.roles if isinstance(parts, Decomposition) else None
    return {role: x for role, x in (roles or {}).items() if bool(x.any())}
