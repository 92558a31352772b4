"""The experiments that the package brings, by name."""

from __future__ import annotations

from dataclasses import replace

from ..harness.experiment import Experiment
from ..tasks.linked import LinkedTask
from ..tasks.retrieval import ONE_PASSKEY
from ..training.language_recipes import LANGUAGE_RECIPES as RECIPES
from .answers.erasers import Erasers
from .answers.forgetting import ForgottenPasskeys
from .answers.hops import ChainedAnswers
from .causal.bytes import Bytes
from .causal.experiment import Causal
from .causal.fresh import Fresh
from .compiled import Compiled
from .exchanged_roles import ExchangedRoles
from .finding_sources import FindingSources
from .knockout.experiment import Knockout
from .knockout.graphs import Graphs
from .knockout.parts import HybridParts
from .knockout.single import SingleMessages
from .roles import CountedRoles
from .segmentation import Segmenting

_TITLES = {
    "copying": "Sources of copied tokens",
    "translation": "Alignment of number words in two languages",
    "passkey": "Sources of a passkey in filler text",
    "two-passkeys": "Sources of the passkey asked for, of two",
    "frequent-word": "Occurrences of the most frequent word",
    "recall": "Sources of recalled facts",
}


def _tasks(*names: str) -> dict[str, LinkedTask]:
    """By the name of a bundled model, what it was trained on."""
    return {
        each: recipe.task
        for each, recipe in RECIPES.items()
        if each.rpartition("-mamba")[0] in names
    }


#: Models of five kinds of states.
_OF_STATES = (
    "chains-mamba",
    "pairs-mamba",
    "chains-mamba2",
    "pairs-mamba2",
    "pairs-gated-deltanet",
    "two-passkeys-gated-deltanet",
    "pairs-rwkv",
    "pairs-griffin",
)
#: Tokens of texts that models begin to fail at.
FAILING = {"passkey-mamba": 640, "passkey-mamba2": 2048, "passkey-gated-deltanet": 4096}

_ON_TEXTS: tuple[Experiment, ...] = (
    *(FindingSources(name, title, _tasks(name)) for name, title in _TITLES.items()),
    CountedRoles(
        "roles",
        "Tokens that ask, are matched and are answered, by role",
        {name: RECIPES[name].task for group in CountedRoles.groups.values() for name in group},
    ),
    HybridParts(
        "hybrid-parts",
        "Answers of hybrids without some of their parts (after arXiv 2510.19861)",
        {name: RECIPES[name].task for name in ("pairs-bamba", "copying-bamba")},
    ),
    ChainedAnswers(
        "answers",
        "Facts that the last word of a chained answer is due to, by hops",
        {name: RECIPES[name].task for name in ("chains-mamba", "chains-mamba2")},
    ),
    Erasers(
        "erasers",
        "What states hold of a token without who erased it, true and predicted",
        {name: RECIPES[name].task for name in _OF_STATES},
    ),
    ForgottenPasskeys(
        "forgotten-passkeys",
        "Shares of a passkey in the state, where it is answered and where it is lost",
        {
            name: replace(ONE_PASSKEY, shortest=length, longest=length)
            for name, length in FAILING.items()
        },
    ),
    Graphs(),
)

#: All experiments, by the names under which ``captum-ssm-bench evaluate`` knows them.  The last
#: asks for texts of others, without which a run of all ends there.
EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        *_ON_TEXTS,
        Segmenting(),
        Compiled(),
        SingleMessages(),
        Knockout(),
        ExchangedRoles(),
        Fresh(),
        Bytes(),
        Causal(),
    )
}
