"""Relevance by role: what was moved, matched, asked, let through, and stepped on."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn

from captum_ssm import LatimFlow, MambaLRP
from captum_ssm.models import load_bundled

pytestmark = pytest.mark.slow

TEXT = "anna owns the lamp . bob owns the kite . ? anna owns the"


@pytest.fixture(scope="module")
def recall() -> tuple[nn.Module, Tensor, list[str]]:
    model, vocabulary = load_bundled()
    return model, torch.tensor([vocabulary.encode(TEXT)]), TEXT.split()


def test_who_asked_who_was_matched_who_answered(
    recall: tuple[nn.Module, Tensor, list[str]],
) -> None:
    model, ids, words = recall
    target = (-1, int(model(ids).logits[0, -1].argmax()))
    roles = LatimFlow(model).decompose(ids, target, rule="centered").roles
    assert roles is not None
    first = {role: int(relevance[0].argmax()) for role, relevance in roles.items()}
    assert words[first["content"]] == "lamp"
    assert first["key"] == words.index("anna")
    assert first["query"] == words.index("anna", 5)


def test_nobody_asked_for_roles(recall: tuple[nn.Module, Tensor, list[str]]) -> None:
    model, ids, _ = recall
    plain = LatimFlow(model).decompose(ids, (-1, 3), rule="centered", roles=False)
    asked = LatimFlow(model).decompose(ids, (-1, 3), rule="centered")
    assert plain.roles is None
    assert relative_error(plain.tokens, asked.tokens) <= 1e-5


def test_lrp_by_role_is_lrp(recall: tuple[nn.Module, Tensor, list[str]]) -> None:
    model, ids, _ = recall
    found = MambaLRP(model).decompose(ids, (-1, 3))
    assert relative_error(found.tokens, MambaLRP(model).attribute(ids, (-1, 3))) <= 1e-5
