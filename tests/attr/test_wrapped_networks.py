"""What people build around mixers: every method, held to dense matrices of the same run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz.wrapper_checks import METHODS, check
from fuzz.wrappers import Drawn

pytestmark = pytest.mark.slow

#: A block with a mixer, which is what follows the other options of ``zoo.wrapped.Residual``.
BLOCK = ("Residual", "mamba", "rms", False, "one", "none", "behind")
BIDIRECTIONAL = ("Beside", ("mamba", "mamba2"), "layer", True, False, False)
PLAIN = Drawn(
    blocks=(BLOCK,), norms="rms", reads="all", positions=False, virtual=0, floating=False,
    prepared=(), weights=False, adapters="none", hooks=(), twice=False, batch=2, tokens=5,
    target=(-1, 3), query=None, seed=0,
)  # fmt: skip

CASES = {
    "a mixer in a module of its own": {
        "blocks": (("Residual", "griffin", "rms", True, "one", "plain", "behind"), BLOCK)
    },
    "both directions in a module of their own": {
        "blocks": (BLOCK, ("Beside", ("mamba", "mamba2"), "layer", True, False, True))
    },
    "one mixer for both directions": {
        "blocks": (("Beside", ("mamba", "mamba"), "rms", True, True, True), BLOCK)
    },
    "two mixers in one block": {"blocks": (("Pair", ("llama", "mamba2"), "torch"), BLOCK)},
    "parts that the network itself calls": {
        "blocks": (("Parts", "rwkv", "layer"), ("Parts", "gpt2", "rms")), "virtual": 2,
    },
    "an MLP beside a mixer": {
        "blocks": (BLOCK, ("Residual", "gpt2", "layer", False, "one", "gated", "beside"))
    },
    "that of a stream behind a norm": {
        "blocks": (BLOCK, ("norm", "layer"), ("Residual", "lfm2", "rms", True, "one", "plain",
                                              "beside"), BLOCK)
    },
    "two mixers that read the same": {
        "blocks": (BLOCK, ("Beside", ("mamba", "llama"), "rms", False, False, False)), "query": 2,
    },
    "one layer without": {
        "blocks": (("Bare", "rwkv", "layer", False),), "reads": "last", "virtual": 2
    },
    "none at the end, where all tokens are read": {
        "blocks": (BLOCK, ("Bare", "lfm2", "rms", False)), "reads": "mean"
    },
    "branches of one mixer": {
        "blocks": (("norm", "rms"), ("Doubled", ("mamba", "lfm2"), "rms"), BLOCK)
    },
    "virtual tokens read both ways": {"blocks": (BIDIRECTIONAL,), "virtual": 2},
    "a token in front read both ways": {"blocks": (BIDIRECTIONAL, BLOCK), "prepared": ("front",)},
    "one token replaced, and all turned at the end": {
        "blocks": (BLOCK, ("Turned",)), "prepared": ("slice", "front"), "floating": True,
        "batch": 1, "tokens": 3,
    },
    "two tokens, turned before parts that the network itself calls": {
        "blocks": (("Turned",), ("Parts", "rwkv", "none")), "floating": True, "batch": 1,
        "tokens": 2,
    },
    "ids in another order under a mean": {"prepared": ("flip",), "reads": "mean", "batch": 1},
    "a virtual token read by the head": {
        "blocks": (("Parts", "llama", "layer"),), "virtual": 2, "reads": 1,
    },
    "a block run twice, and all turned": {
        "blocks": (("Twice", BLOCK), ("Turned",), BLOCK), "query": 1,
    },
    "other weights, and adapters switched off": {"weights": True, "adapters": "off"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_explained_as_it_is(name: str, seed: int) -> None:
    assert check(replace(PLAIN, seed=seed % 2**31, **CASES[name])) == {}


@pytest.mark.parametrize("blocks", [(BLOCK,), (("Doubled", ("mamba", "griffin"), "rms"),)])
@pytest.mark.parametrize("reads", ["all", "mean"])
def test_a_network_of_one_stage_that_runs_twice(blocks: tuple[str, ...], reads: str) -> None:
    reasons = check(replace(PLAIN, blocks=blocks, reads=reads, twice=True))
    assert reasons.keys() == METHODS.keys() - {"LatimFlow", "MambaLRP"}
    assert all("NotAChain" in reason for reason in reasons.values())
