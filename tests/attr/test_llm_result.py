"""Captum's plots of our results, with tokens that matplotlib would take for formulas."""

from __future__ import annotations

import io
from collections.abc import Iterator

import matplotlib
import pytest
import torch
from zoo import language
from zoo.small import mamba_lm

from captum_ssm import LatimFlow, SSMLLMAttribution

pytestmark = pytest.mark.slow

#: Tokens with a dollar sign each, with two, and with a formula that cannot be set.
PROMPT = "anna owns $5 . bob owns ^$ $5 . the"


@pytest.fixture(autouse=True)
def without_screen() -> Iterator[None]:
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(backend)


@pytest.fixture
def result():
    words = language.word_tokenizer()
    words.add_tokens(["$^$", "$x_$"])  # ids 13 and 14
    explain = SSMLLMAttribution(LatimFlow(mamba_lm()), words)
    return explain.attribute([*words.encode(PROMPT), 13], [7, 2, 14])


def drawn(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return buffer.getvalue()


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize("plot", ["plot_token_attr", "plot_seq_attr"])
def test_plots_show_the_tokens_as_they_are(result, plot):
    before = matplotlib.rcParams["text.parse_math"]
    figure, axes = getattr(result, plot)()
    assert matplotlib.rcParams["text.parse_math"] == before
    assert drawn(figure).startswith(b"\x89PNG")
    assert labels(axes.xaxis) == ["<s>", *PROMPT.split(), "$^$"] == result.input_tokens
    if plot == "plot_token_attr":
        assert labels(axes.yaxis) == ["$5", "owns", "$x_$"] == result.output_tokens
        assert torch.equal(torch.tensor(axes.images[0].get_array()), result.token_attr)
    else:
        heights = torch.tensor([bar.get_height() for bar in axes.patches]).view(2, -1).sum(0)
        assert torch.allclose(heights.float(), result.seq_attr)


@pytest.mark.parametrize("plot", ["plot_token_attr", "plot_seq_attr"])
def test_plots_can_be_shown(result, plot, monkeypatch):
    shown = []
    monkeypatch.setattr(matplotlib.pyplot, "show", lambda: shown.append(plot))
    assert getattr(result, plot)(show=True) is None
    assert shown == [plot]
