"""Every method on a network that is known, held to the dense matrices of its run."""

from __future__ import annotations

import re
from typing import Any

from fuzz.wrappers import Drawn, made
from zoo import wrapped

import captum_ssm
from captum_ssm.errors import CaptumSSMError

#: The methods, what :class:`oracles.wrapped.Explained` calls them, whether they take a query, and
#: the other options by which they are what it knows.
METHODS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "LatimFlow": ("flow", False, {"rule": "frozen"}),
    "MambaLRP": ("lrp", False, {}),
    "ImplicitAttention": ("implicit_attention", True, {}),
    "ImplicitAttentionRollout": ("rollout", True, {}),
    "MambaAttribution": ("mamba_attribution", True, {}),
    "TransformerAttribution": ("transformer_attribution", True, {}),
    "LatimNorm": ("latim_norm", True, {}),
    "LatimALTI": ("latim_alti", True, {}),
    "LatimLogit": ("latim_logit", False, {}),
}
EXACT = 1e-6
#: What is left of numbers around 1 that cancel out, as those of a gradient behind a LayerNorm.
ROUNDING = 1e-14


def check(drawn: Drawn) -> dict[str, str]:
    """Compare every method; the reasons of those that refuse the network."""
    with wrapped.never_rounded():
        case, refused = made(drawn), {}
        case.check()
        for name, (oracle, asks, own) in METHODS.items():
            options = {**own, "query": case.query} if asks else own
            method = getattr(captum_ssm, name)(case.forward, case.network)
            try:
                found = method.attribute(case.inputs, case.target, per_token=True, **options)
            except CaptumSSMError as error:
                refused[name] = re.sub(r"'[^']*'|\d+", "_", f"{type(error).__name__}: {error}")[:90]
                continue
            expected, size = case.expected(oracle)
            assert found.shape == expected.shape, f"{name}: {drawn}"
            error = float((found - expected).abs().max())
            assert error <= max(EXACT * size, ROUNDING), (
                f"{name} is off by {error:.1e} of {size:.1e}: {drawn}"
            )
        return refused
