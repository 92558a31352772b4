"""Things that users of Captum and transformers do, each as they would type it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import LLMGradientAttribution, TextTemplateInput, TextTokenInput
from captum.attr import visualization as viz
from helpers.user_models import TEXT, Made
from torch import Tensor
from transformers import pipeline

from captum_ssm import LatimFlow, SSMLLMAttribution, report
from captum_ssm.errors import InputError, OptionError, TargetError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("workflows"))


@pytest.fixture
def s(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    made.tmp = tmp_path
    return made


def assert_told(relevance: Tensor, shape: tuple[int, ...] | None = None) -> None:
    assert bool(relevance.isfinite().all()) and bool(relevance.any())
    assert shape is None or tuple(relevance.shape) == tuple(shape)


# --- a user of Captum ----------------------------------------------------------------------------


def test_classifier_of_my_own(s):
    ids = s.tok(["anna owns the lamp .", "bob owns the kite ."], return_tensors="pt").input_ids
    pred = s.classifier(ids).argmax(-1)
    attr, _ = LatimFlow(s.classifier).attribute(ids, target=pred, return_convergence_delta=True)
    assert_told(attr, ids.shape)


def test_lambda_as_forward_func(s):
    model = s.lm
    attr = LatimFlow(lambda x: model(x).logits[:, -1]).attribute(s.ids, target=5)
    assert_told(attr, s.ids.shape)


def test_log_probability_as_forward_func(s):
    def forward(x):
        return s.lm(x).logits[:, -1].log_softmax(-1)

    assert_told(LatimFlow(forward).attribute(s.ids, target=5), s.ids.shape)


def test_int_target_of_a_language_model(s):
    with pytest.raises(TargetError, match=r"Pass a tuple \(position, token\), for example target="):
        LatimFlow(s.lm).attribute(s.ids, target=5)


def test_arguments_of_integrated_gradients(s):
    with pytest.raises(OptionError, match=r"n_steps is not an argument of .*Leave it out"):
        LatimFlow(lambda e: s.lm(inputs_embeds=e).logits[:, -1]).attribute(
            s.emb, baselines=torch.zeros_like(s.emb), target=5, n_steps=50
        )


def test_feature_mask(s):
    mask = torch.zeros_like(s.ids)
    with pytest.raises(OptionError, match=r"feature_mask is not an argument of .*add up the rel"):
        LatimFlow(s.lm).attribute(s.ids, target=(-1, 5), feature_mask=mask)


def test_text_drawn_by_captum(s):
    attr = LatimFlow(s.classifier).attribute(s.ids, target=1)[0]
    attr = attr / attr.norm()
    words = s.tok.convert_ids_to_tokens(s.ids[0])
    record = viz.VisualizationDataRecord(attr, 0.9, "1", "1", "1", attr.sum(), words, 0.0)
    assert "lamp" in viz.visualize_text([record]).data


def test_llm_attribution_of_captum(s):
    llm = LLMGradientAttribution(LatimFlow(s.lm), s.tok)
    found = llm.attribute(TextTokenInput(TEXT, s.tok), target="lamp")
    assert_told(found.token_attr, s.ids.shape)


def test_text_template_input(s):
    prompt = TextTemplateInput("{} owns the {} . ? anna owns the", values=["anna", "lamp"])
    res = SSMLLMAttribution(LatimFlow(s.lm), s.tok).attribute(prompt, target="lamp")
    assert_told(res.seq_attr, (2,))


# --- a user of transformers ----------------------------------------------------------------------


def test_what_a_tokenizer_returns(s):
    inputs = s.tok(TEXT, return_tensors="pt")
    assert_told(LatimFlow(s.lm).attribute(inputs, target=(-1, 5)), inputs.input_ids.shape)


def test_ids_without_a_batch(s):
    ids = torch.tensor(s.tok.encode(TEXT))
    with pytest.raises(InputError, match=r"a batch dimension is needed.*Pass inputs\[None\]"):
        LatimFlow(s.lm).attribute(ids, target=(-1, 5))


def test_report_of_a_pipeline(s):
    pipe = pipeline("text-generation", model=str(s.folder))
    assert "lamp" in report(pipe, TEXT, path=s.tmp / "pipe.html").read_text()


def test_generate_then_explain(s):
    out = s.lm.generate(s.ids, max_new_tokens=4, do_sample=False)
    read = out[:, :-1]
    assert_told(LatimFlow(s.lm).attribute(read, target=(-1, out[0, -1])), read.shape)


def test_sampled_generation(s):
    llm = SSMLLMAttribution(LatimFlow(s.lm), s.tok)
    found = llm.attribute(TEXT, gen_args={"max_new_tokens": 4, "do_sample": True, "top_k": 5})
    assert_told(found.token_attr)
