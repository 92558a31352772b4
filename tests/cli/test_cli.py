"""The captum-ssm command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from captum_ssm import LatimFlow, LatimNorm
from captum_ssm.cli import main
from captum_ssm.cli.architectures import architectures_table
from captum_ssm.mixers.table import BUILT_IN
from captum_ssm.models import load_bundled

ROOT = Path(__file__).parents[2]
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"


@pytest.mark.slow
def test_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import captum_ssm.cli.demo as demo

    monkeypatch.setattr(demo, "_SCORED", 4)
    assert main(["demo", "--prompt", PROMPT, "--out", str(tmp_path / "new" / "folder")]) == 0
    printed = capsys.readouterr().out
    assert PROMPT in printed and "Answer    lamp" in printed and "position 3" in printed
    assert printed.index("LatimFlow:") < printed.index("LatimNorm:")
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(PROMPT)])
    flow = LatimFlow(model).attribute(ids, target=(-1, vocabulary.id_of("lamp")))[0]
    norm = LatimNorm(model).attribute(ids)[0]
    for title, relevance in {"LatimFlow": flow, "LatimNorm": norm}.items():
        part = printed[printed.index(f"{title}:") :].splitlines()[1:6]
        best = relevance.abs().topk(5).indices.tolist()
        assert [int(line.split()[0]) for line in part] == best
        for line, place in zip(part, best, strict=True):
            _, word, value, *bar = line.removesuffix("  <- evidence").split()
            assert word == PROMPT.split()[place]
            assert float(value) == pytest.approx(float(relevance[place]), abs=1e-4)
            assert set("".join(bar)) <= {"#" if relevance[place] > 0 else "-"}
    for name in ("relevance.png", "matrices.png"):
        picture = imread(tmp_path / "new" / "folder" / name)
        assert picture.shape[0] > 200
        assert picture.shape[1] > 800
        assert float(picture.std()) > 0.02  # not an empty page


def test_a_bad_prompt_is_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--prompt", "who owns what"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("captum-ssm: ")
    assert "Traceback" not in printed.err
    with pytest.raises(ValueError, match="unknown word"):
        main(["--debug", "demo", "--prompt", "who owns what"])


def test_an_unusable_folder_is_an_error_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert "file" in capsys.readouterr().err


def test_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["architectures"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = ["family", "package", "tested with", "LatimFlow", "fold methods", "generated text"]
    assert re.split(r"  +", lines[0]) == [*head, "mixer class"]
    assert any("transformers.models.mamba.modeling_mamba.MambaMixer" in line for line in lines)


def test_the_page_of_architectures_is_up_to_date() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text().splitlines()
    built_in = {f"`{line.class_path}`" for line in BUILT_IN}
    lines = [
        line
        for line in architectures_table(markdown=True).splitlines()
        if line.split("|")[-2].strip() in built_in
    ]
    assert len(lines) == len(BUILT_IN)
    assert [line for line in page if line.startswith("|")][2:] == lines


def test_no_command_is_an_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
