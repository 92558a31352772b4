"""One bar a call, which moves with all that runs in it and whose clock goes on."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, LatimNorm, compare, report
from captum_ssm.attr.call import progress

METHODS = ["LatimFlow", "Integrated Gradients", "LatimNorm"]
RUNS = {"Integrated Gradients": {"internal_batch_size": 1, "n_steps": 6}}


def states(text: str) -> list[tuple[str, int, str]]:
    """What a bar was called, where it was in percent, and what was being done."""
    found = re.findall(r"(\w+): +(\d+)%\|[^|]*\|[^,\r\n]*,? ?([^\r\n]*)", text)
    return [(name, int(share), label.strip()) for name, share, label in found]


@pytest.mark.slow
def test_a_report_has_one_bar_that_names_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"options": RUNS, "show_progress": True, "cuts": 0, "path": tmp_path / "r.html"}
    report(mamba_lm(), token_ids(2, 5), METHODS, **given)
    found = states(capsys.readouterr().err)
    assert {name for name, *_ in found} == {"Report"}
    shares = [share for _, share, _ in found]
    assert shares == sorted(shares) and shares[-1] == 100
    labels = [label for *_, label in found]
    for example in ("example 1 of 2", "example 2 of 2"):
        for run in range(1, 7):
            assert f"{example}, Integrated Gradients, run {run}" in labels
        # the bar is also drawn between moves
        runs = (f"{example}, Integrated Gradients, run {run}" for run in (1, 3, 5))
        moves = [next(share for _, share, label in found if label == run) for run in runs]
        assert moves[0] < moves[1] < moves[2]


def test_without_being_asked_for_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    compare(mamba_lm(), token_ids(1, 5), METHODS, target=(-1, 3), options=RUNS)
    assert capsys.readouterr().err == ""


def test_a_call_that_fails_leaves_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model, ids = mamba_lm(), token_ids(1, 5)
    with pytest.raises(ValueError, match="out of range"):
        LatimNorm(model).attribute(ids, (-1, 9999), show_progress=True)
    assert "100%" not in capsys.readouterr().err
    LatimFlow(model).attribute(ids, (-1, 3), show_progress=True)
    assert states(capsys.readouterr().err)[-1][:2] == ("LatimFlow", 100)


def test_the_clock_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_TICK", 0.01)
    with progress.bar("waiting", show=True):
        seen, until = 0, time.monotonic() + 30
        while seen < 3 and time.monotonic() < until:
            time.sleep(0.02)
            seen += bool(capsys.readouterr().err)
    assert seen == 3
