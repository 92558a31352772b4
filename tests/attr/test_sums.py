"""Whether relevance adds up, as every view says it: one function, and the same sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients
from helpers.pages import read_page
from torch import Tensor, nn

from captum_ssm import LatimFlow, LatimLogit, LatimNorm, compare, load, report
from captum_ssm.cli import main
from captum_ssm.models import load_bundled

TEXT = "anna owns the lamp . lena owns the kite . ? anna owns the"


class Kinked(nn.Module):
    """A function that a coarse integral misses: a step far from most of the path."""

    def forward(self, x: Tensor) -> Tensor:
        return (200 * torch.sigmoid(300 * (x.sum(1, keepdim=True) - 0.6))).expand(-1, 2)


def integral(x: Tensor, steps: int) -> Any:
    method = IntegratedGradients(Kinked())
    options = {"method": {"n_steps": steps}}
    return compare(Kinked(), x, {"method": method}, target=0, options=options, per_token=False)


def test_each_sum_is_compared_with_its_own_number() -> None:
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(TEXT)] * 2)
    ids[1, 3] = ids[1, 8]
    found = compare(model, ids, [LatimFlow, LatimLogit, LatimNorm], target=(-1, 5))
    assert list(found.sums) == ["LatimFlow", "LatimLogit"]
    for name in found.sums:
        for example in range(2):
            one = found.sums[name][example]
            assert one.adds_up and one.of == "the output without constants"
            assert one.total == pytest.approx(float(found[name][example].sum()), rel=1e-5)
    parts = LatimFlow(model).decompose(ids, (-1, 5))
    wanted = parts.output - parts.bias
    assert found.sums["LatimFlow"].wanted.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


def test_what_relevance_lacks_is_told_by_its_sign() -> None:
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(TEXT)])
    method = LatimLogit(model, activation="silu")
    parts = method.decompose(ids, (-1, 5))
    one = compare(model, ids, {"it": method}, target=(-1, 5)).sums["it"][0]
    assert abs(one.delta) > 1e-3
    assert one.wanted == pytest.approx(float(parts.output - parts.bias), abs=1e-4)
    assert one.delta == pytest.approx(-float(parts.delta), abs=1e-4)


@pytest.mark.parametrize(("steps", "adds_up"), [(2, False), (500, True)])
def test_an_integral_that_misses_its_number_is_marked(steps: int, adds_up: bool) -> None:
    x = torch.tensor([[0.5, 0.5], [0.3, 0.3]])
    found = integral(x, steps)
    model = Kinked()
    wanted = (model(x) - model(0 * x))[:, 0]
    sums = found.sums["method"]
    assert sums.of == "the output minus the output for the baseline"
    assert sums.wanted.tolist() == pytest.approx(wanted.tolist(), rel=1e-3)
    assert sums.total.tolist() == pytest.approx(found["method"].sum(1).tolist(), abs=1e-5)
    assert sums[0].adds_up is adds_up
    assert sums[0].told.startswith("Sum" if adds_up else "Does not add up")


def test_sums_are_saved_and_split_with_the_batch(tmp_path: Path) -> None:
    found = integral(torch.tensor([[0.5, 0.5], [0.3, 0.3]]), 5)
    again = load(found.named([["a", "b"]] * 2).save(tmp_path / "found.json"))
    assert again.sums["method"][1] == found.sums["method"][1]
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(TEXT)] * 3)
    whole = compare(model, ids, [LatimFlow], target=(-1, 5))
    parts = compare(model, ids, [LatimFlow], target=(-1, 5), internal_batch_size=2)
    assert parts.sums["LatimFlow"].total.tolist() == pytest.approx(
        whole.sums["LatimFlow"].total.tolist(), rel=1e-5
    )


@pytest.mark.slow
def test_every_view_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature

    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(TEXT)])
    target = int(model(ids).logits[0, -1].argmax())
    methods = ["LatimFlow", "Integrated Gradients"]
    options = {"Integrated Gradients": {"n_steps": 2}}
    found = compare(model, ids, methods, target=(-1, target), options=options)
    told = [found.sums[name][0].told for name in methods]
    assert [line.startswith("Does not") for line in told] == [False, True]
    pages = [
        report(model, TEXT, methods, options=options, tokenizer=vocabulary, matrices=False,
               path=tmp_path / "report.html"),
        found.to_html(tmp_path / "found.html"),
    ]  # fmt: skip
    for page in pages:
        text = json.dumps(read_page(page).facts)
        assert all(json.dumps(line)[1:-1] in text for line in told), page.name
    out = tmp_path / "numbers.json"
    asked = ["explain", "recall-mamba", "--text", TEXT, "--method", *methods, "--out", str(out)]
    main([*asked, "--option", "n_steps=2"])
    printed = capsys.readouterr().out
    (example,) = json.loads(out.read_text())["examples"]
    assert [example["sums"][name]["told"] for name in methods] == told
    assert all(line in printed for line in told)
    feature = TextFeature("text", None, None, lambda x: [str(int(i)) for i in x.flatten()])
    classes = [str(number) for number in range(model.config.vocab_size)]
    visualizer = AttributionVisualizer(model, classes, feature, [Batch(ids, None)])
    visualizer.config = FilterConfig("LatimFlow", {"rule": "balanced"}, num_examples=1)
    ((output,),) = visualizer.visualize()
    assert output.sum is not None and output.sum["told"] == told[0]
