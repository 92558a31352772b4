"""captum-ssm serve."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.insights_examples import ask
from PIL import Image

from captum_ssm.cli import main, serve
from captum_ssm.errors import DataError, DataNotFoundError, InputError, OptionError
from captum_ssm.explain.loading import Loaded
from captum_ssm.insights import AttributionVisualizer, FilterConfig
from captum_ssm.insights.files import Images, TextFiles, class_names, common_classes
from captum_ssm.models import load_bundled

PROMPTS = ["anna owns the lamp . ? anna owns the", "bob owns the red kite . ? bob owns the red"]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.set_defaults(debug=False)
    serve.add_to(parser.add_subparsers(dest="command"))
    return parser.parse_args(["serve", *arguments])


def made(*arguments: Any) -> AttributionVisualizer:
    return serve.visualizer_of(parsed(*map(str, arguments)))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """One image without a label, two cats and a dog."""
    folder = tmp_path / "photos"
    for name in ("one.png", "cat/b.JPG", "cat/a.png", "dog/c.webp", "notes/readme.md"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            path.write_text("no image")
        else:
            Image.fromarray(torch.randint(256, (20, 17, 3), dtype=torch.uint8).numpy()).save(path)
    return folder


def test_texts_of_a_language_model(prompts):
    visualizer = made("recall-mamba", "--texts", prompts)
    model, vocabulary = load_bundled("recall-mamba")
    assert visualizer.classes == vocabulary.vocab
    assert visualizer.config.attribution_method == "LatimFlow"
    shown = visualizer.visualize()
    assert len(shown) == len(PROMPTS)
    for text, (output, *_) in zip(PROMPTS, shown, strict=True):
        chances = model(torch.tensor([vocabulary.encode(text)])).logits[0, -1].detach().softmax(-1)
        assert output.predicted[0].label == vocabulary.vocab[int(chances.argmax())]
        assert output.predicted[0].score == pytest.approx(float(chances.max()), rel=1e-5)
        assert list(output.feature_outputs[0].base) == text.split() and output.actual is None


@pytest.mark.slow
def test_images_of_two_models(vim, photos, labels):
    visualizer = made(vim, vim, "--images", photos, "--labels", labels)
    visualizer.config = FilterConfig("MambaAttribution")
    shown = visualizer.visualize()
    actual = [outputs[0].actual and outputs[0].actual.label for outputs in shown]
    assert actual == [None, "cat", "cat", "dog"]
    assert all([output.model_index for output in outputs] == [0, 1] for outputs in shown)
    assert {o.feature_outputs[0].type for outputs in shown for o in outputs} == {"image"}
    (photos / "cat").rename(photos / "1")
    (photos / "dog").rename(photos / "0")
    visualizer = made(vim, "--images", photos)
    assert visualizer.classes == ["0", "1", "2"]
    shown = [outputs[0].actual for outputs in visualizer.visualize()]
    assert [actual and actual.index for actual in shown] == [None, 0, 1, 1]


@pytest.mark.slow
def test_texts_of_a_classifier_in_folders(bert, tmp_path):
    for name, text in {"good/a.txt": "good film", "bad/b.TXT": "bad\nfilm", "c.txt": "odd"}.items():
        path = tmp_path / "reviews" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    visualizer = made(bert, "--texts", tmp_path / "reviews")
    assert visualizer.classes == ["bad", "good"]
    shown = [outputs[0] for outputs in visualizer.visualize()]
    assert [o.actual and o.actual.label for o in shown] == [None, "bad", "good"]
    words = [list(output.feature_outputs[0].base) for output in shown]
    assert words == [["[UNK]"], ["bad", "film"], ["good", "film"]]


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_the_page_is_served_until_ctrl_c(prompts, monkeypatch, capsys):
    served, statuses = [], []
    unseen = AttributionVisualizer.serve

    def noted(self, *arguments, **options):
        served.append(self)
        return unseen(self, *arguments, **options)

    def interrupt():
        while not served or served[0]._server is None:
            pass
        statuses.append(ask(served[0].url, "/api/examples", {}).status)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AttributionVisualizer, "serve", noted)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert main(["serve", "recall-mamba", "--texts", str(prompts)]) == 0
    thread.join()
    assert statuses == [200]
    assert "http://127.0.0.1:" in capsys.readouterr().out


def test_models_and_inputs_must_fit(vim, prompts, photos, language_model, tmp_path):
    recall, (empty, blank) = "recall-mamba", (tmp_path / "folder", tmp_path / "blank.txt")
    empty.mkdir()
    blank.write_text("\n \n")
    for error, said, arguments in (
        (OptionError, "--images: recall-mamba reads texts", [recall, "--images", photos]),
        (OptionError, "--texts: .*safetensors reads images", [vim, "--texts", prompts]),
        (
            DataNotFoundError,
            "is neither a folder, a file nor",
            ["a/mamba-130m-hf", "--texts", prompts],
        ),
        (DataError, "cat does not have the name of one of the 3", [vim, "--images", photos]),
        (DataError, "contains no text", [recall, "--texts", blank]),
        (DataError, "contains no file", [recall, "--texts", empty]),
        (
            OptionError,
            "recall-mamba and .* have different vocab",
            [recall, language_model, "--texts", prompts],
        ),
    ):
        with pytest.raises(error, match=said):
            made(*arguments)


class Letters:
    """A tokenizer of letters, counted from an offset."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - self.offset for letter in text if letter.isalpha()]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + self.offset) for i in ids)


def reader(offset: int = 0) -> Loaded:
    return Loaded(torch.nn.Linear(1, 1), Letters(offset), is_language=True)


def test_models_must_read_a_text_and_see_an_image_alike(tmp_path, photos):
    def sees(side: int) -> Loaded:
        return Loaded(torch.nn.Linear(1, 1), prepare=lambda files: torch.ones(1, 3, side, side))

    path = tmp_path / "texts"
    path.write_text("ab\n")
    with pytest.raises(OptionError, match=r"different tokens for 'ab'.*--tokenizer"):
        list(TextFiles(path, [reader(), reader(1)], []))
    path.write_text("ab\n!\n")
    with pytest.raises(InputError, match="'!' has no tokens"):
        list(TextFiles(path, [reader()], []))
    (batch, *_) = Images(photos, [sees(4), sees(4)], ["cat", "dog"])
    assert batch.inputs.shape == (1, 3, 4, 4)
    with pytest.raises(OptionError, match="different inputs"):
        list(Images(photos, [sees(4), sees(5)], ["cat", "dog"]))


def test_names_of_classes():
    configured = SimpleNamespace(config=SimpleNamespace(id2label={1: "yes", 0: "no"}))
    assert class_names(Loaded(configured), None) == ["no", "yes"]
    assert class_names(Loaded(configured), ["a", "b"]) == ["a", "b"]
    pets, more, eels = (
        Loaded(torch.nn.Linear(1, 1), labels=names)
        for names in (("cat", "dog"), ("cat", "dog", "eel"), ("cat", "eel"))
    )
    assert common_classes(["a", "b"], [pets, more], None) == ["cat", "dog"]
    assert common_classes(["a", "b"], [pets, eels], ["0", "1"]) == ["0", "1"]
    with pytest.raises(OptionError, match=r"class 1 is 'dog' in a and 'eel' in b.*--labels"):
        common_classes(["a", "b"], [pets, eels], None)
