"""captum-ssm explain and methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerAttribution, NeuronAttribution
from helpers.pages import read_page
from helpers.versions import transformers5
from matplotlib.image import imread
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
from zoo.language import word_tokenizer
from zoo.small import randomise
from zoo.vision_language import vision_language_model

import captum_ssm
from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, MambaLRP
from captum_ssm.attr.catalogue import DEFAULT, METHODS
from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.cli import explain, main
from captum_ssm.errors import OptionError
from captum_ssm.explain.loading import Source, load
from captum_ssm.linear import FAMILY
from captum_ssm.models import VMamba, load_bundled
from captum_ssm.viz.html.pictures import png

PROMPT = "anna owns the lamp . ? anna owns the"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def explained(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The examples that the command writes."""
    assert main(["explain", *arguments, "--out", str(out), "--force"]) == 0
    return read(out)["examples"]


def check_sum(example: dict[str, Any], method: str = "LatimFlow", rel: float = 1e-4) -> None:
    """Tokens, biases and the rest add up to the output."""
    sums = example["accounts"][method]
    shares = [value for value in example["relevance"][method] if value is not None]
    total = sum(shares) + sums["bias"] + sums["delta"]
    assert total == pytest.approx(sums["output"], rel=rel, abs=rel / 10)
    assert abs(sums["delta"]) <= max(rel, 1e-5) * max(1, abs(sums["output"]))


def test_numbers_are_those_of_the_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "numbers.json"
    texts = [PROMPT, "bob owns the kite"]
    decomposing: list[Any] = [LatimFlow, MambaLRP, LatimLogit]
    methods = [*decomposing, ImplicitAttentionRollout]
    chosen = ["--method", "latimflow", *(method.__name__ for method in methods[1:])]
    arguments = ["recall-mamba", "--text", *texts, *chosen, "--target", "lamp"]
    examples = explained(out, *arguments, "--dtype", "float64")
    printed = capsys.readouterr().out
    assert "Explained is the logit of “lamp”, predicted after token 8." in printed
    assert f"wrote {out}" in printed and read(out)["model"] == "recall-mamba"
    model, vocabulary = load_bundled()
    target = (-1, vocabulary.encode("lamp")[0])
    for example, text in zip(examples, texts, strict=True):
        ids = torch.tensor([vocabulary.encode(text)])
        assert example["tokens"] == text.split()
        assert list(example["relevance"]) == [method.name for method in methods]
        assert list(example["accounts"]) == [method.name for method in decomposing]
        for method in methods:
            expected = method(model.double()).attribute(ids, target=target)[0].numpy()
            np.testing.assert_allclose(example["relevance"][method.name], expected, rtol=1e-12)
            own = method is ImplicitAttentionRollout
            expected[-1] *= not own  # mostly the identity
            best = text.split()[np.abs(expected).argmax()]
            left_out = f" (without the own entry of token {len(ids[0]) - 1}, " if own else ": "
            line = next(x for x in printed.splitlines() if x.startswith(f"  {method.name}"))
            assert line.startswith(f"  {method.name}{left_out}")
            assert line.split(": ", 1)[1].startswith(f"{best} (")
            printed = printed.replace(line, "", 1)  # the next example's comes first
        for method in decomposing:
            sums, found = example["accounts"][method.name], method(model).decompose(ids, target)
            assert sums["output"] == pytest.approx(found.output.item(), rel=1e-12)
            assert sums["bias"] == pytest.approx(found.bias.item(), rel=1e-9) and sums["bias"]
            check_sum(example, method.name, rel=1e-9)


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


@pytest.mark.slow
def test_roles_have_pictures_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    arguments = ["explain", "recall-mamba", "--text", PROMPT, "bob owns", "--out", str(out)]
    assert main([*arguments, "--rule", "frozen", "half", "centred"]) == 0
    stems = ("picture", "picture-roles", "picture-roles-2")
    wanted = {*stems, "picture-2", "picture-2-roles", "picture-2-roles-2"}
    assert {path.stem for path in tmp_path.iterdir()} == wanted
    halves, centred = (imread(tmp_path / f"{stem}.png") for stem in stems[1:])
    assert halves.shape != centred.shape or not np.array_equal(halves, centred)


def test_the_command_names_all_rules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "recall-mamba", "--text", PROMPT, "--rule", "none"])
    printed = capsys.readouterr().err
    assert all(rule in printed for rule in FAMILY)


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


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    assert main(["explain", "recall-mamba", "--text", PROMPT, "bob", "--out", str(out)]) == 0
    for path in (out, tmp_path / "picture-2.png"):
        pixels = imread(path)
        assert pixels.shape[1] > 1000
        assert float(pixels.std()) > 0.02  # not an empty page


def test_a_folder_of_transformers(tmp_path: Path, language_model: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("anna owns the $5", encoding="utf-8")
    for target in ("lamp", "id:4"):
        arguments = [str(language_model), "--file", str(text), "--target", target]
        (example,) = explained(tmp_path / "numbers.json", *arguments)
        assert example["tokens"] == ["<s>", "anna", "owns", "the", "$5"]
        assert example["explained"] == "the logit of “lamp”, predicted after token 4"


@pytest.mark.slow
@transformers5
def test_a_text_of_a_vision_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "seeing"
    vision_language_model("lfm2_vl", monkeypatch).float().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    given = [str(folder), "--text", "anna owns the", "--target", "lamp"]
    (example,) = explained(tmp_path / "numbers.json", *given)
    assert example["explained"] == "the logit of “lamp”, predicted after token 3"
    assert main(["explain", *given, "--out", str(tmp_path / "report.html")]) == 0
    assert read_page(tmp_path / "report.html").facts["examples"][0]["maps"]


@pytest.mark.slow
def test_a_folder_with_a_list_of_words(tmp_path: Path) -> None:
    model, vocabulary = load_bundled()
    folder = tmp_path / "trained"
    model.save_pretrained(folder)  # type: ignore[operator]
    vocabulary.to_json(folder / "vocab.json")
    (example,) = explained(tmp_path / "numbers.json", str(folder), "--text", PROMPT)
    assert "“lamp”" in example["explained"]


@pytest.mark.slow
def test_vision_mamba(tmp_path: Path, vim: Path, picture: Path, labels: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [str(vim), "--image", str(picture), str(picture), "--labels", str(labels)]
    arguments += ["--method", "ImplicitAttentionRollout", "LatimFlow", "--target"]
    for target in ("cat", "1"):
        for example in explained(out, *arguments, target):
            assert example["explained"] == "the logit of “cat”"
            assert {each["label"] for each in example["predictions"]} == {"ant", "cat", "dog"}
            assert len(example["tokens"]) == 10  # a cls token among 3 x 3 patches
            for values in example["relevance"].values():
                assert sum(value is not None for value in values) == 9
            check_sum(example)
    assert main(["explain", *arguments, "1", "--out", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out-2.png").exists()


def test_a_classifier_of_sentences(tmp_path: Path, bert: Path) -> None:
    arguments = [str(bert), "--text", "good film", "--target", "good", "--method", "LatimFlow"]
    (example,) = explained(tmp_path / "sentence.json", *arguments, "--quiet")
    assert example["explained"] == "the logit of “good”" and example["tokens"] == ["good", "film"]
    assert {each["label"] for each in example["predictions"]} == {"good", "bad"}
    check_sum(example)


def test_an_image_classifier_of_transformers(tmp_path: Path, picture: Path) -> None:
    folder = tmp_path / "vit"
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    names = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    config = ViTConfig(image_size=16, patch_size=8, num_hidden_layers=2, **sizes, **names)
    randomise(ViTForImageClassification(config)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    arguments = ["--image", str(picture), "--target", "dog", "--method", "LatimFlow"]
    (example,) = explained(tmp_path / "out.json", str(folder), *arguments)
    assert example["explained"] == "the logit of “dog”" and len(example["tokens"]) == 5
    assert {p["label"] for p in example["predictions"]} == {"cat", "dog"}


@pytest.mark.slow
def test_vmamba(tmp_path: Path, picture: Path) -> None:
    weights = tmp_path / "vmamba.safetensors"
    model = VMamba(depths=(1, 1), dims=4, num_classes=3, patch_size=32, patch_embed="v1")
    save_file(randomise(model).state_dict(), weights)
    arguments = ["--image", str(picture), "--target", "1", "--method", "LatimFlow"]
    (example,) = explained(tmp_path / "out.json", str(weights), *arguments)
    assert len(example["tokens"]) == 49  # 7 x 7 patches of 32 in an image of 224
    check_sum(example)


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


def segmenter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """Make a folder with code beside its weights, and the model in it, of 4 x 4 outputs."""
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


@pytest.mark.slow
def test_a_model_that_segments_images(
    tmp_path: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, model = segmenter(tmp_path, monkeypatch)
    out, mask = tmp_path / "out.json", tmp_path / "mask.png"
    shown = torch.zeros(16, 16, 3)
    shown[4:12, 8:] = 1  # pixels 1 and 2 down, 2 and 3 across
    mask.write_bytes(png(shown))
    arguments = [str(folder), "--image", str(picture), "--trust-remote-code", "--target", "car"]
    arguments += ["--method", "LatimFlow"]
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
        (example,) = explained(out, *arguments, *options)
        assert example["explained"] == "the logit of “car”" and len(example["tokens"]) == 16
        expected = pytest.approx(float(output), rel=1e-4, abs=1e-5)
        assert example["accounts"]["LatimFlow"]["output"] == expected
        check_sum(example)
    mask.write_bytes(png(torch.zeros(16, 16, 3)))
    for options, said in (
        (["--target-pixel", "4", "0"], "the model answers for 4 rows and 4 columns"),
        (["--target-mask", str(mask)], "mask.png has no light pixels"),
    ):
        assert main(["explain", *arguments, *options, "--out", str(out), "--force"]) == 1
        assert said in capsys.readouterr().err


#: Mistakes, and the words that name each.
OF_RECALL = [
    ("--out x.pdf", ".html (a report)"),
    ("--method Magic", "which is no method"),
    ("--method latinflow", "Did you mean LatimFlow?"),
    ("--target anna,bob", "is 2 tokens"),
    ("--target id:5000", "out of range"),
    ("--target zebra", "--target 'zebra': unknown word"),
    ("--contrast zebra", "--contrast 'zebra': unknown word"),
    ("--method LatimNorm --contrast all", "--contrast is taken by LatimFlow"),
    ("--layers 9 --out x.html", "layers names 9"),
    ("--layers 0", "--layers says"),
    ("--maps --out x.png", "--maps says"),
    ("--device quantum", "--device quantum"),
    ("--rule half --method MambaLRP", "--rule is LatimFlow's"),
    ("--baselines 0 --method LatimNorm", "--baselines is for LatimFlow"),
    ("--baselines zero", "--baselines zero: use mean, or a number"),
    ("--baselines nan", "baselines=nan cannot stand in for embeddings"),
    ("--option n_steps", "--option n_steps: write NAME=VALUE"),
    ("--option n_steps=5", "is taken by IntegratedGradients, and none of them is named"),
    ("--option colour=red", "is taken by no method"),
    ("--method integrated-gradients --option n_steps=many", "use a whole number"),
    ("--method guided_backprop", "GuidedBackprop: it changes how torch.nn.ReLU"),
    ("--generate 0", "--generate 0"),
    ("--generate 3 --answer lamp", "--generate 3"),
    ("--spans sentence --target lamp", "--target"),
    ("--hops 1 --method MambaAttribution", "hops=1"),
    ("--spans all --method LatimFlow MambaLRP", "one method"),
    ("--title T --generate 1", "--title is for a page"),
    ("--hops -1 --answer lamp", "hops=-1"),
    ("--answer elephant", "elephant"),
    ("--generate 2 --out x.txt", "the ending: .html (a page), .json (numbers)"),
]
OTHERS = [
    ("no-such-model --text anna", "add --hub"),
    ("recal-mamba --text anna", "Did you mean recall-mamba?"),
    ("recall-mamba --image x.png", "reads texts"),
    ("recall-mamba --text zebra", "unknown word 'zebra'"),
    ("recall-mamba --file no-such-file", "--file no-such-file cannot be read: No such"),
    ("recall-mamba --file {picture}", "--file {picture} is no text in UTF-8"),
    ("recall-mamba --text anna --labels /", "--labels / cannot be read: Is a"),
    ("{vim} --text a", "reads images"),
    ("{vim} --image {vim} --target 0", "cannot be read as an image"),
    ("{vim} --image {picture} --target-pixel 0 0", "models that answer for every pixel"),
    ("{bert} --text good --target x", "classes (bad, good)"),
    ("{bert} --text good --spans all", "models that write texts"),
]
MISTAKES = [(f"recall-mamba --text anna {each}", said) for each, said in OF_RECALL]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES + OTHERS)
def test_a_mistake_is_named_in_a_sentence(
    arguments: str,
    said: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    names = (name for name in ("picture", "vim", "bert") if f"{{{name}}}" in arguments)
    files = {name: request.getfixturevalue(name) for name in names}
    words = [word.replace(",", " ") for word in arguments.format(**files).split()]
    out = [] if "--out" in words else ["--out", "x.json"]
    capsys.readouterr()
    assert main(["explain", *words, *out]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("captum-ssm: ") and "Traceback" not in printed
    assert said.format(**files) in printed
    assert not list(folder.iterdir())


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
    local: list[bool] = []

    def asked(name: str, **options: Any) -> None:
        local.append(options["local_files_only"])
        raise OSError("no answer")

    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", asked)
    for arguments, expected in (
        ([str(language_model)], [True]),
        (["somebody/some-mamba"], []),
        (["somebody/some-mamba", "--hub"], [False]),
    ):
        local.clear()
        out = ["--text", "anna", "--out", str(tmp_path / "x.json")]
        assert main(["explain", *arguments, *out]) == 1
        assert local == expected


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
