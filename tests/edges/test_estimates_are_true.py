"""Estimated effects of messages come near what cutting them does, wherever they are listed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zoo.architectures import vit
from zoo.small import mamba_lm, token_ids

from captum_ssm import EdgeEffects, Edges, LatimFlow, knock_out, report
from captum_ssm.models import load_bundled
from captum_ssm.viz import plot_edges
from tests.helpers.pages import read_page

pytestmark = pytest.mark.slow

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"


def lost(model: torch.nn.Module, ids: torch.Tensor, token: int, edges: Edges) -> float:
    """What a logit loses without edges."""
    with torch.no_grad():
        before = model(ids).logits[0, -1, token]
        with knock_out(model, edges):
            return float(before - model(ids).logits[0, -1, token])


def test_the_default_is_near_the_truth() -> None:
    model, vocabulary = load_bundled()
    ids, lamp = torch.tensor([vocabulary.encode(PROMPT)]), vocabulary.id_of("lamp")
    effects = EdgeEffects(model).attribute(ids, (-1, lamp))
    for edge in effects.top(2)[0]:
        true = lost(model, ids, lamp, Edges(edge.layer, edge.source, edge.target))
        assert edge.effect == pytest.approx(true, rel=0.02)
    first = EdgeEffects(model, exact_norms=False).attribute(ids, (-1, lamp))
    assert abs(first.matrix(1)[0, 13, 3]) < 0.3 * abs(effects.matrix(1)[0, 13, 3])


def test_a_report_marks_layers_of_first_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = vit(monkeypatch)
    path = report(case.model, case.inputs[:1], [LatimFlow], path=tmp_path / "page.html")
    (example,) = read_page(path).facts["examples"]
    rough = EdgeEffects(case.model).attribute(case.inputs[:1], example["asked"]).first_order
    rows = example["edges"]["rows"]
    assert [row["first_order"] for row in rows] == [row["module"] in rough for row in rows]


def test_a_picture_marks_them() -> None:
    effects = EdgeEffects(mamba_lm(), rule="frozen").attribute(token_ids(1, 4), (-1, 3))
    _, axes = plot_edges(["a", "b", "c", "d"], effects.top(2)[0])
    numbers = [text.get_text() for axis in axes for text in axis.texts]
    assert numbers and all("≈" in text for text in numbers)
