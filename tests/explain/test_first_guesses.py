"""Lines that users of Captum, transformers, inseq and SHAP type first work, or are refused well."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import NoiseTunnel
from PIL import Image
from torch import Tensor
from transformers import BatchEncoding, pipeline
from zoo.language import word_tokenizer
from zoo.small import mamba_lm

import captum_ssm
from captum_ssm import (
    EdgeEffects,
    Edges,
    LatimFlow,
    LatimNorm,
    LayerLatimFlow,
    MambaLRP,
    SSMLLMAttribution,
    StateMemory,
    SumTarget,
    attribution_graph,
    compare,
    knock_out,
    report,
    trace,
)
from captum_ssm.cli import main
from captum_ssm.errors import CaptumSSMError
from captum_ssm.models import VisionMamba, load_bundled
from captum_ssm.viz import plot_text

pytestmark = pytest.mark.slow

MODEL, WORDS = load_bundled()
TEXT = "anna owns the lamp . ? anna owns the"
IDS = torch.tensor([WORDS.encode(TEXT)])
LAMP = WORDS.id_of("lamp")
TARGET = (-1, LAMP)
MASK = torch.ones_like(IDS)
EMBEDDED = MODEL.get_input_embeddings()(IDS).detach()
MIXER = "backbone.layers.0.mixer"
FLOW = LatimFlow(MODEL)
CHAT = [{"role": "user", "content": "anna owns the lamp"}]
PADDED = BatchEncoding({
    "input_ids": torch.tensor([[0, 0, 5, 3, 4], [1, 2, 3, 4, 5]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
})  # fmt: skip
MASK_OF_BATCH = PADDED["attention_mask"]
PICTURE = Image.fromarray(np.random.default_rng(0).integers(255, size=(32, 32, 3), dtype="uint8"))


@pytest.fixture(autouse=True)
def a_table_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))


def whole(method: Any = FLOW, **options: Any) -> Tensor:
    found: Tensor = method.attribute(IDS, TARGET, **options)
    return found


def same(found: Tensor, wanted: Tensor | None = None) -> bool:
    return torch.allclose(found, whole() if wanted is None else wanted, atol=1e-5)


@functools.cache
def masked() -> Tensor:
    """The relevance of a padded batch, with the mask in the place of an argument."""
    function = lambda x, mask: MODEL(x, attention_mask=mask).logits  # noqa: E731
    return LatimFlow(function, MODEL).attribute(PADDED["input_ids"], (-1, 3), MASK_OF_BATCH)


def bars(method: Any) -> bool:
    with redirect_stderr(io.StringIO()) as said:
        method(MODEL).attribute(IDS, TARGET, show_progress=True)
    return f"{method.__name__}: 100%" in said.getvalue()


def said(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def loaded_again(folder: Path) -> bool:
    return same(captum_ssm.load(FLOW.decompose(IDS, TARGET).save(folder / "it.json")).tokens)


def shown(folder: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr("webbrowser.open", lambda address: True)
        FLOW.decompose(IDS, TARGET).show()
    path = Path(out.getvalue().removeprefix("wrote ").strip())
    page = path.read_text(encoding="utf-8")
    path.unlink()
    return "<html" in page


def pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def of_picture(folder: Path) -> bool:
    model = VisionMamba(img_size=32, patch_size=8, embed_dim=16, depth=2, num_classes=3).eval()
    return report(model, PICTURE, transform=pixels, path=folder / "v.html").stat().st_size > 1e4


def written(folder: Path) -> bool:
    given = {"tokenizer": WORDS, "methods": [LatimFlow]}
    paths = [
        report(MODEL, TEXT, path=folder / f"x.{end}", **given) for end in ("json", "csv", "png")
    ]
    numbers, table, picture = (path.read_bytes() for path in paths)
    relevance = json.loads(numbers)["examples"][0]["relevance"]["LatimFlow"]
    read = [float(line.split(b",")[3]) for line in table.splitlines()[1:]]
    return same(torch.tensor([relevance, read]), whole().expand(2, -1)) and picture[1:4] == b"PNG"


def of_captum() -> bool:
    from captum_ssm.attr import LatimFlow as Again

    return Again is LatimFlow


#: Lines that work, with whether they do what they say.
WORKS: dict[str, Callable[[Path], Any]] = {
    "from captum_ssm.attr import LatimFlow": lambda _: of_captum(),
    "captum_ssm.SumTarget": lambda _: same(FLOW.attribute(IDS, SumTarget([-1], [LAMP]))),
    "dir(captum_ssm)": lambda _: set(dir(captum_ssm)) - {*captum_ssm.__all__} == {"__version__"},
    "LatimFlow(m, rule='centered')": lambda _: same(
        whole(LatimFlow(MODEL, rule="centered")), whole(rule="centered")
    ),
    "rule='centred'": lambda _: same(whole(rule="centred"), whole(rule="centered")),
    "EdgeEffects(m, rule='centred')": lambda _: (
        EdgeEffects(MODEL, rule="centred").rule == "centered"
    ),
    "LayerLatimFlow(m, m.layers[1])": lambda _: (
        LayerLatimFlow(MODEL, MODEL.backbone.layers[1]).attribute(IDS, TARGET).shape == (1, 9, 64)
    ),
    "attribute(**enc)": lambda _: same(FLOW.attribute(**PADDED, target=(-1, 3)), masked()),
    "attribute(enc)": lambda _: same(FLOW.attribute(PADDED, (-1, 3)), masked()),
    "attention_mask=": lambda _: same(
        FLOW.attribute(PADDED["input_ids"], (-1, 3), attention_mask=MASK_OF_BATCH), masked()
    ),
    "attribute(text, tokenizer=)": lambda _: same(FLOW.attribute(TEXT, TARGET, tokenizer=WORDS)),
    "attribute([text, text], tokenizer=)": lambda _: same(
        FLOW.attribute([TEXT] * 2, [TARGET] * 2, tokenizer=WORDS), whole().expand(2, -1)
    ),
    "target=' lamp'": lambda _: same(FLOW.attribute(IDS, " lamp", tokenizer=WORDS)),
    "contrast=' kite'": lambda _: same(
        FLOW.attribute(IDS, (4, LAMP), contrast=" kite", tokenizer=WORDS),
        FLOW.attribute(IDS, (4, LAMP), contrast=(4, WORDS.id_of("kite"))),
    ),
    "attribute_each(ids, [' lamp'])": lambda _: same(
        FLOW.attribute_each(IDS, [" lamp"], tokenizer=WORDS)[0]
    ),
    "decompose(text, ' lamp')": lambda _: same(
        FLOW.decompose(TEXT, " lamp", tokenizer=WORDS).tokens
    ),
    "attribute(inputs_embeds=)": lambda _: same(
        FLOW.attribute(inputs_embeds=EMBEDDED, target=TARGET, per_token=True)
    ),
    "NoiseTunnel, attention_mask=": lambda _: same(
        NoiseTunnel(FLOW)
        .attribute(EMBEDDED, nt_samples=2, stdevs=1e-9, target=TARGET, attention_mask=MASK)
        .sum(-1)
    ),
    "return_convergence_delta=True": lambda _: bool(
        whole(return_convergence_delta=True)[1].abs() < 1e-4
    ),
    "attribute(ids.tolist())": lambda _: same(FLOW.attribute(IDS.tolist(), TARGET)),
    "attribute(ids.numpy())": lambda _: same(FLOW.attribute(IDS.numpy(), TARGET)),
    "baselines=0": lambda _: same(whole(baselines=0, rule="frozen"), whole(rule="frozen")),
    "show_progress=True": lambda _: all(map(bars, (LatimFlow, MambaLRP, LatimNorm, EdgeEffects))),
    "decomposition.to_pandas()": lambda _: same(
        torch.tensor([[row["relevance"] for row in FLOW.decompose(IDS, TARGET).to_pandas()]])
    ),
    "save and load": loaded_again,
    "show()": shown,
    "to_html()": lambda _: FLOW.decompose(IDS, TARGET).to_html().startswith("<!doctype html>"),
    "effects.to_pandas()": lambda _: (
        len(EdgeEffects(MODEL).attribute(IDS, TARGET).to_pandas(7)) == 7
    ),
    "answer.to_pandas()": lambda _: (
        {row["from"] for row in SSMLLMAttribution(FLOW, WORDS).attribute(TEXT, " lamp").to_pandas()}
        >= set(TEXT.split())
    ),
    "compare(m, ids, methods=[...])": lambda _: same(
        compare(MODEL, IDS, methods=["LatimFlow", "MambaLRP"], target=TARGET)["LatimFlow"]
    ),
    "compare(m, text, target=' lamp')": lambda _: same(
        compare(MODEL, TEXT, target=" lamp", tokenizer=WORDS)["LatimFlow, balanced"]
    ),
    "attribution_graph(m, ids).to_html()": lambda _: (
        "image/svg" in attribution_graph(MODEL, IDS, TARGET)._repr_html_()
    ),
    "plot_text(values, tokens)": lambda _: len(plot_text(whole(), TEXT.split())[0].axes) == 1,
    "report(vit, PIL, transform=)": of_picture,
    "report(m, chat, tokenizer=)": lambda folder: report(
        mamba_lm(), CHAT, tokenizer=word_tokenizer(chat=True), path=folder / "c.html"
    ).exists(),
    "report(path='x.json'), .csv, .png": written,
    "explain --out -": lambda _: (
        json.loads(said("explain", "recall-mamba", "--text", TEXT, "--out", "-"))["examples"][0][
            "tokens"
        ]
        == TEXT.split()
    ),
    "captum-ssm models": lambda _: said("models").startswith("recall-mamba  MambaForCausalLM"),
}

#: Lines that are refused, with what an error says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "LatimFlow(m, layer=2)": (lambda: LatimFlow(MODEL, layer=2), "LayerLatimFlow.model, layer"),
    "LatimFlow()": (lambda: LatimFlow(), "LatimFlow: missing .* Pass only forward_func, model"),
    "LatimFlow(m, tokenizer)": (lambda: LatimFlow(MODEL, WORDS), "Pass it when you call"),
    "LatimFlow('mamba-130m')": (lambda: LatimFlow("mamba-130m"), "Load the model"),
    "target=' lamp kite'": (
        lambda: FLOW.attribute(IDS, " lamp kite", tokenizer=WORDS), r"2 tokens, \['lamp', 'kite'\]",
    ),
    "target=5": (lambda: FLOW.attribute(IDS, 5), r"target=\(-1, 5\)"),
    "n_steps=50": (lambda: whole(n_steps=50), "no steps between two inputs"),
    "LatimFlow(m)(ids)": (lambda: FLOW(IDS), r"Call LatimFlow\(model\).attribute"),
    "knock_out(m, Edges())": (lambda: knock_out(MODEL, Edges()).__enter__(), "has no arguments"),
    "Edges(layer=0)": (lambda: Edges(layer=0), "Did you mean layers.* Pass only layers, sources"),
    "knock_out(m, layers=[0])": (lambda: knock_out(MODEL, layers=[0]), r"Edges\(layers="),
    "verfy=True": (lambda: whole(verfy=True), "LatimFlow.attribute: .* Did you mean verify"),
    "a mask beside arguments": (
        lambda: FLOW.attribute(IDS, TARGET, (None,), attention_mask=MASK), "Pass only one",
    ),
    "a mask of other examples": (
        lambda: FLOW.attribute(IDS, TARGET, attention_mask=MASK_OF_BATCH), "has 2 examples",
    ),
    "a mask that is not taken": (
        lambda: LatimFlow(lambda x: MODEL(x), MODEL).attribute(IDS, TARGET, attention_mask=MASK),
        "has no positional parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", WORKS)
def test_a_first_guess_works(line: str, tmp_path: Path) -> None:
    assert WORKS[line](tmp_path)


@pytest.mark.parametrize("line", REFUSED)
def test_a_first_guess_is_refused_with_advice(line: str) -> None:
    guess, advice = REFUSED[line]
    with pytest.raises(CaptumSSMError, match=advice):
        guess()


SAID: dict[str, Callable[[], Any]] = {
    f"LatimNorm(MambaForCausalLM, layers=['{MIXER}'])": lambda: LatimNorm(MODEL, layers=[MIXER]),
    "LatimFlow(MambaForCausalLM, rule='half')": lambda: LatimFlow(MODEL, rule="half"),
    "EdgeEffects(MambaForCausalLM, rule='half')": lambda: EdgeEffects(MODEL, rule="half"),
    f"LayerLatimFlow(MambaForCausalLM, layer='{MIXER}')": lambda: LayerLatimFlow(MODEL, MIXER),
    "SSMLLMAttribution(LatimFlow(MambaForCausalLM))": lambda: SSMLLMAttribution(FLOW, WORDS),
    "Decomposition(2 examples of 9 tokens)": lambda: FLOW.decompose(IDS.repeat(2, 1), TARGET),
    f"LayerMemory('{MIXER}', heads 0 to 127, 9 tokens)": lambda: StateMemory(MODEL).of(IDS)[0],
    "Comparison(LatimNorm (1, 9))": lambda: compare(MODEL, IDS, LatimNorm, TARGET),
    "Effects(2 layers of 9 tokens, with exact norms)": lambda: EdgeEffects(MODEL).attribute(
        IDS, TARGET
    ),
    "WordVocabulary(55 words)": lambda: WORDS,
}


@pytest.mark.parametrize("said", SAID)
def test_one_line(said: str) -> None:
    assert repr(SAID[said]()) == said


def test_a_decomposition_shows_its_sum() -> None:
    found = FLOW.decompose(IDS, TARGET, rule="frozen")
    numbers = (float(found.output), float(found.tokens.sum()), float(found.bias))
    assert repr(found).startswith(
        "Decomposition(9 tokens: output {:.3g} = tokens {:.3g} + biases {:.3g}".format(*numbers)
    )


def test_lines_of_runs_and_graphs(tmp_path: Path) -> None:
    with trace(MODEL) as run:
        MODEL(IDS)
    graph = attribution_graph(MODEL, IDS, TARGET)
    parts = {"Trace": run, "Chain": run.layers[0].linear.operator, "Graph": graph}
    assert all(repr(part).startswith(f"{name}(") for name, part in parts.items())
    assert all(len(repr(part)) < 120 for part in parts.values())
    assert same(captum_ssm.load(graph.save(tmp_path / "graph.json")).edges, graph.edges)


def test_a_pipeline_and_what_it_samples(tmp_path: Path) -> None:
    model, tokenizer = mamba_lm(), word_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path))
    page = report(pipe, "anna owns the lamp", path=tmp_path / "page.html")
    assert "lamp" in page.read_text(encoding="utf-8")
    assert LatimFlow(pipe).attribute("anna owns the", target="lamp").shape == (1, 4)
    sampled = {"max_new_tokens": 4, "do_sample": True, "top_k": 5}
    found = SSMLLMAttribution(LatimFlow(model), tokenizer).attribute("anna owns", gen_args=sampled)
    assert bool(found.token_attr.isfinite().all()) and bool(found.token_attr.any())
