"""The captum-ssm command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from captum.attr import LayerAttribution, NeuronAttribution
from matplotlib.image import imread

import captum_ssm
from captum_ssm import LatimFlow, LatimNorm
from captum_ssm.attr.catalogue import METHODS
from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.cli import explain, main
from captum_ssm.cli.architectures import architectures_table
from captum_ssm.errors import OptionError
from captum_ssm.linear import FAMILY
from captum_ssm.mixers.table import BUILT_IN
from captum_ssm.models import load_bundled

ROOT = Path(__file__).parents[2]
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"


@pytest.mark.slow
def test_demo(tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setattr("captum_ssm.cli.demo._SCORED", 4)
    printed = run("demo", "--prompt", PROMPT, "--out", folder)
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
        picture = imread(folder / name)
        assert picture.shape[0] > 200 and picture.shape[1] > 800
        assert float(picture.std()) > 0.02  # not an empty page


def test_errors(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence; with --debug their traceback."""
    assert "unknown word" in run("demo", "--prompt", "who owns what", code=1)
    with pytest.raises(ValueError, match="unknown word"):
        main(["--debug", "demo", "--prompt", "who owns what"])
    asked = ["explain", "recall-mamba", "--text", "anna"]
    with pytest.raises(OptionError):
        main(["--debug", *asked, "--method", "Magic"])
    for error, code, said in (
        (RuntimeError("odd"), 1, "odd (RuntimeError; captum-ssm --debug ... shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        monkeypatch.setattr(explain, "run", Mock(side_effect=error))
        assert said in run(*asked, code=code)


def test_errors_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [], ["explain", "recall-mamba"], ["explain"], ["serve", "recall-mamba"],
        ["serve", "--texts", "x"], ["explain", "recall-mamba", "--text", "a", "--rule", "none"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    told = capsys.readouterr().err
    assert all(rule in told for rule in FAMILY) and told.count("required") >= 2
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--help"])
    assert caught.value.code == 0
    assert "captum-ssm explain recall-mamba --text" in capsys.readouterr().out


def test_architectures(run: Callable[..., str]) -> None:
    lines = run("architectures").splitlines()
    head = ["family", "package", "tested with", "LatimFlow", "fold methods", "generated text"]
    assert re.split(r"  +", lines[0]) == [*head, "mixer class"]
    assert any("transformers.models.mamba.modeling_mamba.MambaMixer" in line for line in lines)
    page = (ROOT / "docs" / "architectures.md").read_text().splitlines()
    built_in = {f"`{line.class_path}`" for line in BUILT_IN}
    table = architectures_table(markdown=True).splitlines()
    lines = [line for line in table if line.split("|")[-2].strip() in built_in]
    assert len(lines) == len(BUILT_IN)
    assert [line for line in page if line.startswith("|")][2:] == lines


def test_methods(run: Callable[..., str]) -> None:
    page = (ROOT / "docs" / "methods" / "index.md").read_text("utf-8")
    assert run("methods", "--markdown") in page
    *lines, empty, captums = run("methods").splitlines()
    assert [line.split()[0] for line in lines[1:]] == [method.name for method in METHODS]
    assert not empty and captums.startswith("Of Captum: IntegratedGradients, Saliency, ")
    public = [getattr(captum_ssm, name) for name in captum_ssm.__all__]
    others = LayerAttribution | NeuronAttribution
    everything = {
        value.__name__
        for value in public
        if isinstance(value, type)
        and issubclass(value, SSMAttribution)
        and not issubclass(value, others)
    }
    assert {method.name for method in METHODS} == everything
