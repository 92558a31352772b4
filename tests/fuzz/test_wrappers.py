"""Every method on random networks of real mixers, held to dense matrices of the same run.

What networks are, and the functions around them, is known and never found out: which mixer reads
what, in which order of the tokens, what its output is added to, what hooks, adapters, other weights
and virtual tokens make of it.
"""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from typing import Any

import pytest
from fuzz.fuzzing import cases
from fuzz.wrappers import Case, draw, made
from zoo import wrapped

import captum_ssm
from captum_ssm.errors import CaptumSSMError

#: The methods, what :class:`oracles.wrapped.Explained` calls them, whether they take a query.
METHODS = {
    "LatimFlow": ("flow", False),
    "MambaLRP": ("lrp", False),
    "ImplicitAttention": ("implicit_attention", True),
    "ImplicitAttentionRollout": ("rollout", True),
    "MambaAttribution": ("mamba_attribution", True),
    "TransformerAttribution": ("transformer_attribution", True),
    "LatimNorm": ("latim_norm", True),
    "LatimALTI": ("latim_alti", True),
    "LatimLogit": ("latim_logit", False),
}
#: They follow a network whatever it is; all others fold layers.
FOLLOWING = ("LatimFlow", "MambaLRP")
EXACT = 1e-6
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_explained_as_they_are_or_refused(part: int, seed: int) -> None:
    random, count = Random(f"{seed} {part}"), cases(quick=5, long=2000 // PARTS)
    refused: Counter[str] = Counter()
    networks = 0
    for _ in range(count):
        drawn = draw(random)
        with wrapped.never_rounded():
            reasons = check(made(drawn), str(drawn))
        unfoldable = drawn.twice or any(spec[0] == "Branches" for spec in drawn.blocks)
        followed = [name for name in METHODS if name not in FOLLOWING]
        assert not unfoldable or set(followed) <= reasons.keys(), drawn
        refused.update(reasons.values())
        networks += bool(reasons)
    print(f"{count} networks, of which {networks} were refused by a method: {dict(refused)}")
    assert networks <= max(3, count // 5)


def check(case: Case, what: str) -> dict[str, str]:
    """Compare every method; the reasons of those that refuse the network."""
    case.check()
    refused = {}
    for name, (oracle, asks) in METHODS.items():
        options: dict[str, Any] = {"query": case.query} if asks else {}
        method = getattr(captum_ssm, name)(case.forward, case.network)
        try:
            found = method.attribute(case.inputs, case.target, per_token=True, **options)
        except CaptumSSMError as error:
            refused[name] = re.sub(r"'[^']*'|\d+", "_", f"{type(error).__name__}: {error}")[:90]
            continue
        expected, size = case.expected(oracle)
        assert found.shape == expected.shape, f"{name}: {what}"
        error = float((found - expected).abs().max())
        assert error <= EXACT * size, f"{name} is off by {error:.1e} of {size:.1e}: {what}"
    return refused
