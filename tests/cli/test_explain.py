"""captum-ssm explain and methods."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerAttribution, NeuronAttribution
from helpers.pages import read_page
from helpers.sessions import sampled
from matplotlib.image import imread
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
from zoo.folders import SHAPES, sentences, shapes
from zoo.language import word_tokenizer
from zoo.small import mamba_lm, randomise
from zoo.vision_language import vision_language_model

import captum_ssm
from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, MambaLRP
from captum_ssm.attr.catalogue import DEFAULT, METHODS
from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.cli import explain, main
from captum_ssm.errors import OptionError
from captum_ssm.explain.loading import Source, load
from captum_ssm.linear import FAMILY
from captum_ssm.models import VisionMamba, VMamba, load_bundled
from captum_ssm.viz.html.pictures import png

PROMPT = "anna owns the lamp . ? anna owns the"


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A folder as transformers writes it."""
    folder = tmp_path / "language"
    mamba_lm().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    path.write_bytes(png(torch.rand(50, 40, 3)))
    return path


def read(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def test_numbers_are_those_of_the_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "numbers.json"
    arguments = ["--text", PROMPT, "bob owns the kite", "--out", str(out)]
    chosen = ["--method", "latimflow", "ImplicitAttentionRollout", "--target", "lamp"]
    assert main(["explain", "recall-mamba", *arguments, *chosen]) == 0
    printed = capsys.readouterr().out
    assert "Explained is the logit of “lamp”, predicted after token 8." in printed
    assert f"wrote {out}" in printed
    model, vocabulary = load_bundled()
    lamp = vocabulary.encode("lamp")[0]
    found = read(out)
    assert found["model"] == "recall-mamba"
    for example, text in zip(found["examples"], [PROMPT, "bob owns the kite"], strict=True):
        ids = torch.tensor([vocabulary.encode(text)])
        assert example["tokens"] == text.split()
        assert list(example["relevance"]) == ["LatimFlow", "ImplicitAttentionRollout"]
        for method in (LatimFlow, ImplicitAttentionRollout):
            expected = method(model).attribute(ids, target=(-1, lamp))[0].numpy()
            np.testing.assert_allclose(example["relevance"][method.name], expected, rtol=1e-4)
            own = method is ImplicitAttentionRollout
            expected[-1] *= not own  # mostly the identity
            best = text.split()[np.abs(expected).argmax()]
            left_out = f" (without the own entry of token {len(ids[0]) - 1}, " if own else ": "
            line = next(x for x in printed.splitlines() if x.startswith(f"  {method.name}"))
            assert line.startswith(f"  {method.name}{left_out}")
            assert line.split(": ", 1)[1].startswith(f"{best} (")
            printed = printed.replace(line, "", 1)  # the next example's comes first


@pytest.mark.full
def test_numbers_are_whole_and_add_up(tmp_path: Path) -> None:
    out, texts = tmp_path / "numbers.json", [PROMPT, "bob owns the kite"]
    decomposing: list[Any] = [LatimFlow, MambaLRP, LatimLogit]
    chosen = [method.__name__ for method in (*decomposing, ImplicitAttentionRollout)]
    arguments = ["--text", *texts, "--method", *chosen, "--target", "lamp", "--dtype", "float64"]
    assert main(["explain", "recall-mamba", *arguments, "--out", str(out)]) == 0
    model, vocabulary = load_bundled()
    target = (-1, vocabulary.encode("lamp")[0])
    for example, text in zip(read(out)["examples"], texts, strict=True):
        ids = torch.tensor([vocabulary.encode(text)])
        for method in (*decomposing, ImplicitAttentionRollout):
            wanted = method(model.double()).attribute(ids, target=target)[0].numpy()
            np.testing.assert_allclose(example["relevance"][method.name], wanted, rtol=1e-12)
        assert list(example["accounts"]) == [method.name for method in decomposing]
        for method in decomposing:
            sums, found = example["accounts"][method.name], method(model).decompose(ids, target)
            assert sums["output"] == pytest.approx(found.output.item(), rel=1e-12)
            assert sums["bias"] == pytest.approx(found.bias.item(), rel=1e-9) and sums["bias"]
            total = sum(example["relevance"][method.name]) + sums["bias"] + sums["delta"]
            assert total == pytest.approx(sums["output"], rel=1e-12)
            assert abs(sums["delta"]) <= 1e-5 * abs(sums["output"])


def test_two_rules_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "numbers.json"
    arguments = ["explain", "recall-mamba", "--text", PROMPT, "--target", "lamp", "--method"]
    arguments += ["LatimFlow", "MambaLRP", "--out", str(out), "--dtype", "float64", "--force"]
    rules = ["--rule", "frozen", "centred"]
    assert main([*arguments, *rules]) == 0
    (example,) = read(out)["examples"]
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(PROMPT)])
    target = (-1, vocabulary.encode("lamp")[0])
    flow, centred = LatimFlow(model.double()), "LatimFlow, centred"
    assert list(example["relevance"]) == ["LatimFlow, frozen", centred, "MambaLRP"]
    for rule in ("frozen", "centred"):
        wanted = flow.attribute(ids, target=target, rule=rule)[0].numpy()
        np.testing.assert_allclose(example["relevance"][f"LatimFlow, {rule}"], wanted, rtol=1e-9)
    assert list(example["roles"]) == [centred, "MambaLRP"]
    found = flow.decompose(ids, target, rule="centred")
    assert found.roles is not None
    for role, relevance in found.roles.items():
        np.testing.assert_allclose(example["roles"][centred][role], relevance[0].numpy(), rtol=1e-9)
    sums = example["accounts"][centred]
    for name in ("references", "baselines"):
        assert sums[name] == pytest.approx(found.biases[name].item(), rel=1e-9) and sums[name]
        assert example["accounts"]["LatimFlow, frozen"][name] == 0
    total = sum(example["relevance"][centred]) + sums["bias"] + sums["delta"]
    assert total == pytest.approx(sums["output"], rel=1e-12)
    asking, matched = PROMPT.split().index("anna", 2), PROMPT.split().index("anna")
    printed = capsys.readouterr().out
    assert f"    query: anna (+{found.roles['query'][0, asking]:.3g}, token {asking})" in printed
    assert f"    key: anna (+{found.roles['key'][0, matched]:.3g}, token {matched})" in printed
    assert main([*arguments, *rules, "--baselines", "0"]) == 0
    (example,) = read(out)["examples"]
    wanted = flow.attribute(ids, target=target, rule="centred", baselines=0.0)[0].numpy()
    np.testing.assert_allclose(example["relevance"][centred], wanted, rtol=1e-9)
    assert example["accounts"][centred]["baselines"] == 0


@pytest.mark.full
def test_roles_have_pictures_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    arguments = ["explain", "recall-mamba", "--text", PROMPT, "bob owns", "--out", str(out)]
    assert main([*arguments, "--rule", "frozen", "half", "centred"]) == 0
    stems = ("picture", "picture-roles", "picture-roles-2")
    wanted = {*stems, "picture-2", "picture-2-roles", "picture-2-roles-2"}
    assert {path.stem for path in tmp_path.iterdir()} == wanted
    halves, centred = (imread(tmp_path / f"{stem}.png") for stem in stems[1:])
    assert halves.shape != centred.shape or not np.array_equal(halves, centred)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rule", "half", "--method", "MambaLRP"], "--rule is LatimFlow's"),
        (["--baselines", "0", "--method", "LatimNorm"], "--baselines is for LatimFlow"),
        (["--baselines", "zero"], "--baselines zero: use mean, or a number"),
        (["--baselines", "nan"], "baselines=nan cannot stand in for embeddings"),
    ],
)
def test_rules_and_baselines_that_nothing_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    arguments = ["explain", "recall-mamba", "--text", PROMPT, "--out", str(tmp_path / "a.json")]
    assert main([*arguments, *options]) != 0
    assert message in capsys.readouterr().err


def test_the_command_names_all_rules() -> None:
    assert tuple(FAMILY) == explain._RULES


def test_reports(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    arguments = ["explain", "recall-mamba", "--text", PROMPT, "--out", str(out), "--force"]
    assert main([*arguments, "--title", "<T>"]) == 0
    page = read_page(out)
    assert page.texts("h1") == ["<T>"]
    (example,) = page.facts["examples"]
    assert [m["name"] for m in example["methods"]] == [method.get_name() for method in DEFAULT]
    assert [m["name"] for m in example["maps"]] == ["Implicit attention"]
    assert main([*arguments, "--maps", "contributions", "--layers", "-1"]) == 0
    (contributions,) = read_page(out).facts["examples"][0]["maps"]
    assert [layer["index"] for layer in contributions["layers"]] == [1]
    assert main([*arguments, "--maps"]) == 0
    assert read_page(out).facts["examples"][0]["maps"] == []


def test_pictures(tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    assert main(["explain", "recall-mamba", "--text", PROMPT, "bob", "--out", str(out)]) == 0
    for path in (out, tmp_path / "picture-2.png"):
        pixels = imread(path)
        assert pixels.shape[1] > 1000
        assert float(pixels.std()) > 0.02  # not an empty page


@pytest.mark.parametrize("target", ["lamp", "id:4"])
def test_a_folder_of_transformers(tmp_path: Path, language_model: Path, target: str) -> None:
    out, text = tmp_path / "numbers.json", tmp_path / "prompt.txt"
    text.write_text("anna owns the $5", encoding="utf-8")
    arguments = ["--file", str(text), "--target", target, "--out", str(out), "--dtype", "float64"]
    assert main(["explain", str(language_model), *arguments]) == 0
    (example,) = read(out)["examples"]
    assert example["tokens"] == ["<s>", "anna", "owns", "the", "$5"]
    assert example["explained"] == "the logit of “lamp”, predicted after token 4"


@pytest.mark.transformers5
def test_a_text_of_a_vision_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "seeing"
    vision_language_model("lfm2_vl", monkeypatch).float().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    given = ["explain", str(folder), "--text", "anna owns the", "--target", "lamp"]
    assert main([*given, "--out", str(tmp_path / "numbers.json")]) == 0
    (example,) = read(tmp_path / "numbers.json")["examples"]
    assert example["explained"] == "the logit of “lamp”, predicted after token 3"
    assert main([*given, "--out", str(tmp_path / "report.html")]) == 0
    assert read_page(tmp_path / "report.html").facts["examples"][0]["maps"]


def test_a_folder_with_a_list_of_words(tmp_path: Path) -> None:
    model, vocabulary = load_bundled()
    folder, out = tmp_path / "trained", tmp_path / "numbers.json"
    model.save_pretrained(folder)  # type: ignore[operator]
    vocabulary.to_json(folder / "vocab.json")
    assert main(["explain", str(folder), "--text", PROMPT, "--out", str(out)]) == 0
    assert "“lamp”" in read(out)["examples"][0]["explained"]


def vision_mamba(path: Path) -> VisionMamba:
    model = randomise(VisionMamba(img_size=24, patch_size=8, depth=2, embed_dim=12, num_classes=3))
    save_file(model.state_dict(), path)
    return model


@pytest.mark.parametrize("target", ["dog", "1"])
def test_vision_mamba(tmp_path: Path, picture: Path, target: str) -> None:
    weights, labels, out = tmp_path / "vim.safetensors", tmp_path / "labels", tmp_path / "out.json"
    vision_mamba(weights)
    labels.write_text("cat\ndog\nbird\n")
    arguments = ["--image", str(picture), str(picture), "--labels", str(labels)]
    arguments += ["--target", target, "--method", "ImplicitAttentionRollout", "--out", str(out)]
    assert main(["explain", str(weights), *arguments]) == 0
    for example in read(out)["examples"]:
        assert example["explained"] == "the logit of “dog”"
        assert len(example["tokens"]) == 10  # a cls token among 3 x 3 patches
        assert sum(v is not None for v in example["relevance"]["ImplicitAttentionRollout"]) == 9
    arguments[-1] = str(tmp_path / "out.png")
    assert main(["explain", str(weights), *arguments]) == 0
    assert (tmp_path / "out-2.png").exists()


def test_a_folder_of_an_image_classifier(tmp_path: Path, picture: Path) -> None:
    out = tmp_path / "shape.json"
    words = ["explain", str(shapes(tmp_path / "vim")), "--image", str(picture), "--target", "ring"]
    assert main([*words, "--method", "LatimFlow", "--out", str(out), "--quiet"]) == 0
    (example,) = read(out)["examples"]
    assert "ring" in example["explained"]
    assert {each["label"] for each in example["predictions"]} <= set(SHAPES)
    relevance = example["relevance"]["LatimFlow"]
    assert len(relevance) == 65 and relevance.count(None) == 1  # 64 patches and the cls token
    sums, shares = example["accounts"]["LatimFlow"], [x for x in relevance if x is not None]
    assert sum(shares) + sums["bias"] + sums["delta"] == pytest.approx(sums["output"], rel=1e-5)


@pytest.mark.parametrize("architecture", sampled(["mamba", "rwkv", "bert"], 3))
def test_folders_of_classifiers_of_sentences(tmp_path: Path, architecture: str) -> None:
    out = tmp_path / "sentence.json"
    folder = sentences(tmp_path / architecture, architecture)
    words = ["explain", str(folder), "--text", "a truly wonderful film", "--target", "positive"]
    assert main([*words, "--method", "LatimFlow", "--out", str(out), "--quiet"]) == 0
    (example,) = read(out)["examples"]
    assert "positive" in example["explained"]
    assert {each["label"] for each in example["predictions"]} == {"negative", "positive"}
    first = example["tokens"].index("a")
    assert example["tokens"][first : first + 4] == ["a", "truly", "wonderful", "film"]
    assert len(example["tokens"]) == 5  # and the mark
    assert all(example["relevance"]["LatimFlow"][first : first + 4])


def test_an_image_classifier_of_transformers(tmp_path: Path, picture: Path) -> None:
    folder, out = tmp_path / "vit", tmp_path / "out.json"
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    names = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    config = ViTConfig(image_size=16, patch_size=8, num_hidden_layers=2, **sizes, **names)
    randomise(ViTForImageClassification(config)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    arguments = ["--image", str(picture), "--target", "dog", "--method", "LatimFlow"]
    assert main(["explain", str(folder), *arguments, "--out", str(out)]) == 0
    (example,) = read(out)["examples"]
    assert example["explained"] == "the logit of “dog”"
    assert {p["label"] for p in example["predictions"]} == {"cat", "dog"}
    assert len(example["tokens"]) == 5


def test_vmamba(tmp_path: Path, picture: Path) -> None:
    weights, out = tmp_path / "vmamba.safetensors", tmp_path / "out.json"
    model = VMamba(depths=(1, 1), dims=4, num_classes=3, patch_size=32, patch_embed="v1")
    save_file(randomise(model).state_dict(), weights)
    arguments = ["--image", str(picture), "--target", "1", "--method", "LatimFlow"]
    assert main(["explain", str(weights), *arguments, "--out", str(out)]) == 0
    (example,) = read(out)["examples"]
    sums = example["accounts"]["LatimFlow"]
    assert len(example["tokens"]) == 49  # 7 x 7 patches of 32 in an image of 224
    assert sum(example["relevance"]["LatimFlow"]) + sums["bias"] == pytest.approx(
        sums["output"], rel=1e-4, abs=1e-5
    )


SEGMENTER = """
import torch
from torch import nn
from transformers import MambaConfig, PreTrainedModel, PretrainedConfig
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.models.mamba.modeling_mamba import MambaMixer


class OwnConfig(PretrainedConfig):
    model_type = "own-segmenter"


class OwnForSemanticSegmentation(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Conv2d(3, 6, 4, 4)
        self.mixer = MambaMixer(MambaConfig(hidden_size=6, state_size=2), 0)
        self.head = nn.Conv2d(6, 2, 1)
        self.post_init()

    def forward(self, pixel_values):
        x = self.embed(pixel_values)
        x = x + self.mixer(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])
        return SemanticSegmenterOutput(logits=self.head(x))
"""


@pytest.fixture
def segmenter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A folder with code beside its weights, and the model in it; it answers for 4 x 4 pixels."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    folder, space = tmp_path / "segmenter", {"__name__": "own"}
    exec(SEGMENTER, space)
    names = {"id2label": {0: "road", 1: "car"}, "label2id": {"road": 0, "car": 1}}
    model = randomise(space["OwnForSemanticSegmentation"](space["OwnConfig"](**names)))
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    settings = model.config.to_dict() | {
        "architectures": ["OwnForSemanticSegmentation"],
        "auto_map": {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForSemanticSegmentation": "own.OwnForSemanticSegmentation",
        },
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(SEGMENTER)
    return folder, model


def test_a_model_that_segments_images(
    tmp_path: Path, picture: Path, segmenter: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = segmenter
    out, mask = tmp_path / "out.json", tmp_path / "mask.png"
    shown = torch.zeros(16, 16, 3)
    shown[4:12, 8:] = 1  # pixels 1 and 2 down, 2 and 3 across
    mask.write_bytes(png(shown))
    arguments = ["explain", str(folder), "--image", str(picture), "--trust-remote-code", "--force"]
    arguments += ["--target", "car", "--method", "LatimFlow", "--out", str(out)]
    image = load(Source(str(folder), trust_remote_code=True)).prepared([picture])
    with torch.no_grad():
        logits = model(image).logits[0]
    given = logits[1][logits.argmax(0) == 1]
    wanted = {
        ("--target-mask", str(mask)): logits[1, 1:3, 2:].mean(),
        ("--target-pixel", "3", "0"): logits[1, 3, 0],
        (): given.mean() if len(given) else torch.tensor(0.0),
    }
    for options, output in wanted.items():
        assert main([*arguments, *options]) == 0
        (example,) = read(out)["examples"]
        assert example["explained"] == "the logit of “car”" and len(example["tokens"]) == 16
        sums = example["accounts"]["LatimFlow"]
        assert sums["output"] == pytest.approx(float(output), rel=1e-4, abs=1e-5)
        total = sum(example["relevance"]["LatimFlow"]) + sums["bias"]
        assert total == pytest.approx(sums["output"], rel=1e-4, abs=1e-5)
    capsys.readouterr()
    assert main([*arguments, "--target-pixel", "4", "0"]) == 1
    assert "the model answers for 4 rows and 4 columns" in capsys.readouterr().err
    mask.write_bytes(png(torch.zeros(16, 16, 3)))
    assert main([*arguments, "--target-mask", str(mask)]) == 1
    assert "mask.png has no light pixels" in capsys.readouterr().err
    vim = str(shapes(tmp_path / "vim"))
    asked = ["explain", vim, "--image", str(picture), "--target-pixel", "0", "0"]
    assert main([*asked, "--out", str(out), "--force"]) == 1
    assert "models that answer for every pixel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recall-mamba", "--text", "a", "--out", "x.pdf"], ".html (a report)"),
        (["recall-mamba", "--text", "anna", "--method", "Magic"], "which is no method"),
        (["recall-mamba", "--text", "anna", "--method", "latinflow"], "Did you mean LatimFlow?"),
        (["no-such-model", "--text", "anna"], "add --hub"),
        (["recal-mamba", "--text", "anna"], "Did you mean recall-mamba?"),
        (["recall-mamba", "--image", "x.png"], "reads texts"),
        (["recall-mamba", "--text", "zebra"], "unknown word 'zebra'"),
        (["recall-mamba", "--text", "anna", "--target", "anna bob"], "is 2 tokens"),
        (["recall-mamba", "--text", "anna", "--target", "id:5000"], "out of range"),
        (["recall-mamba", "--text", "anna", "--layers", "9"], "layers names 9"),
        (["recall-mamba", "--text", "anna", "--device", "quantum"], "--device quantum"),
        (["recall-mamba", "--file", "no-such-file"], "--file no-such-file cannot be read: No such"),
        (["recall-mamba", "--file", __file__, "--labels", "/"], "--labels / cannot be read: Is a"),
        (["recall-mamba", "--text", "anna", "--target", "zebra"], "--target 'zebra': unknown word"),
        (["recall-mamba", "--text", "anna", "--layers", "0", "--out", "x.json"], "--layers says"),
        (["recall-mamba", "--text", "anna", "--maps", "--out", "x.png"], "--maps says"),
    ],
)
def test_errors_are_a_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *arguments]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("captum-ssm: ")
    assert message in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_text(
    tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "x.json")
    assert main(["explain", "recall-mamba", "--file", str(picture), "--out", out]) == 1
    assert f"--file {picture} is no text in UTF-8" in capsys.readouterr().err


def test_images_need_a_model_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision_mamba(tmp_path / "vim.safetensors")
    assert main(["explain", str(tmp_path / "vim.safetensors"), "--text", "a"]) == 1
    assert "reads images" in capsys.readouterr().err
    arguments = ["--image", str(tmp_path / "vim.safetensors"), "--target", "zebra"]
    assert main(["explain", str(tmp_path / "vim.safetensors"), *arguments]) == 1
    assert "cannot be read as an image" in capsys.readouterr().err


def test_debug_shows_where() -> None:
    with pytest.raises(OptionError):
        main(["--debug", "explain", "recall-mamba", "--text", "anna", "--method", "Magic"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("odd"), 1, "odd (RuntimeError; captum-ssm --debug ... shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_nobody_expected(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(explain, "run", fail)
    assert main(["explain", "recall-mamba", "--text", "anna"]) == code
    assert said in capsys.readouterr().err


def test_nothing_is_asked_for_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["explain", "recall-mamba"], ["explain"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--help"])
    assert caught.value.code == 0
    assert "captum-ssm explain recall-mamba --text" in capsys.readouterr().out


CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import MambaConfig
class Own(MambaConfig):
    model_type = "own"
"""


def test_code_beside_the_weights_runs_only_if_it_is_trusted(
    tmp_path: Path,
    language_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr("sys.stdin", None)  # nobody answers a question
    marker, settings = tmp_path / "marker", read(language_model / "config.json")
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (language_model / "config.json").write_text(json.dumps(settings))
    (language_model / "own.py").write_text(CODE.format(marker=str(marker)))
    arguments = ["explain", str(language_model), "--text", "anna"]
    assert main([*arguments, "--out", str(tmp_path / "x.json")]) == 1
    assert not marker.exists()
    assert "Traceback" not in capsys.readouterr().err
    main([*arguments, "--trust-remote-code", "--out", str(tmp_path / "x.json")])
    assert marker.exists()


def test_the_hub_is_asked_only_if_the_user_says_so(
    language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    local: list[bool] = []
    real = transformers.AutoConfig.from_pretrained
    settings = transformers.PretrainedConfig.get_config_dict(language_model)

    def seen(name: str, **options: object) -> object:
        local.append(bool(options["local_files_only"]))
        return real(language_model, local_files_only=True)

    def read(name: str, **options: object) -> object:
        return copy.deepcopy(settings)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", seen)
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", read)
    monkeypatch.setattr(
        transformers.MambaForCausalLM,
        "from_pretrained",
        lambda *a, **k: (mamba_lm(), {"missing_keys": set()}),
    )
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: word_tokenizer()
    )
    out = ["--text", "anna", "--out", str(tmp_path / "x.json"), "--force"]
    assert main(["explain", str(language_model), *out]) == 0
    assert main(["explain", "somebody/some-mamba", *out]) == 1
    assert local == [True]
    assert main(["explain", "somebody/some-mamba", "--hub", *out]) == 0
    assert local == [True, False]


def test_the_page_of_methods_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--markdown"]) == 0
    page = Path(__file__).parents[2] / "docs" / "methods" / "index.md"
    assert capsys.readouterr().out in page.read_text("utf-8")


def test_all_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    *lines, empty, captums = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [method.name for method in METHODS]
    assert not empty and captums.startswith("Of Captum: IntegratedGradients, Saliency, ")
    everything = {
        name
        for name in captum_ssm.__all__
        if isinstance(value := getattr(captum_ssm, name), type)
        and issubclass(value, SSMAttribution)
        and not issubclass(value, LayerAttribution | NeuronAttribution)
    }
    assert {method.name for method in METHODS} == everything
