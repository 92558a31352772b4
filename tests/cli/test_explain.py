"""``captum-ssm explain``, of predictions and of whole answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import read_page
from matplotlib.image import imread
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
from zoo.language import word_tokenizer
from zoo.small import randomise
from zoo.vision_language import vision_language_model

from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, MambaLRP, SSMLLMAttribution
from captum_ssm.attr.catalogue import DEFAULT, QUESTIONS
from captum_ssm.cli import main
from captum_ssm.explain.loading import Source, load
from captum_ssm.models import load_bundled
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


Run = Callable[..., str]
RECALL = ("recall-mamba", "--text")


@pytest.mark.slow
def test_numbers_are_those_of_the_methods(tmp_path: Path, run: Run) -> None:
    out, texts = tmp_path / "new" / "numbers.json", [PROMPT, "bob owns the kite"]
    decomposing: list[Any] = [LatimFlow, MambaLRP, LatimLogit]
    methods = [*decomposing, ImplicitAttentionRollout]
    chosen = ["--method", "latimflow", *(method.__name__ for method in methods[1:])]
    arguments = [*RECALL, *texts, *chosen, "--target", "lamp", "--dtype", "float64"]
    printed = run("explain", *arguments, "--out", out)
    assert "Explained: the logit of “lamp”, predicted after token 8." in printed
    assert f"wrote {out}" in printed and read(out)["model"] == "recall-mamba"
    model, vocabulary = load_bundled()
    target = (-1, vocabulary.id_of("lamp"))
    for example, text in zip(read(out)["examples"], texts, strict=True):
        ids = torch.tensor([vocabulary.encode(text)])
        assert example["tokens"] == text.split() and example["ids"] == ids[0].tolist()
        assert list(example["relevance"]) == [method.name for method in methods]
        assert list(example["accounts"]) == [method.name for method in decomposing]
        for method in methods:
            expected = method(model.double()).attribute(ids, target=target)[0].numpy()
            np.testing.assert_allclose(example["relevance"][method.name], expected, rtol=1e-12)
            own = method is ImplicitAttentionRollout
            expected[-1] *= not own  # mostly the identity
            best = text.split()[np.abs(expected).argmax()]
            left_out = f" (without query token {len(ids[0]) - 1}, " if own else ": "
            line = next(x for x in printed.splitlines() if x.startswith(f"  {method.name}"))
            assert line.startswith(f"  {method.name}{left_out}")
            assert line.split(": ", 1)[1].startswith(f"{best} (")
            printed = printed.replace(line, "", 1)  # the next example's comes first
        for method in decomposing:
            found, sums = method(model).decompose(ids, target), example["accounts"][method.name]
            wanted = pytest.approx([found.output.item(), found.bias.item()], rel=1e-9)
            assert [sums["output"], sums["bias"]] == wanted
            check_sum(example, method.name, rel=1e-9)


@pytest.mark.slow
def test_two_rules_side_by_side(tmp_path: Path, run: Run) -> None:
    asked = ["explain", *RECALL, PROMPT, "--target", "lamp", "--method", "LatimFlow", "MambaLRP"]
    asked += ["--rule", "frozen", "centered", "--dtype", "float64", "--force", "--out"]
    out, centered = tmp_path / "numbers.json", "LatimFlow, centered"
    printed = run(*asked, out)
    (example,) = read(out)["examples"]
    model, vocabulary = load_bundled()
    ids, target = torch.tensor([vocabulary.encode(PROMPT)]), (-1, vocabulary.id_of("lamp"))
    assert list(example["relevance"]) == ["LatimFlow, frozen", centered, "MambaLRP"]
    assert list(example["roles"]) == [centered, "MambaLRP"]
    found = LatimFlow(model.double()).decompose(ids, target, rule="centered")
    told = {role: pytest.approx(x[0].tolist(), rel=1e-9) for role, x in found.roles.items()}
    assert example["roles"][centered] == told
    for name in ("references", "baselines"):
        share = example["accounts"][centered][name]
        assert share == pytest.approx(found.biases[name].item(), rel=1e-9) and share
        assert example["accounts"]["LatimFlow, frozen"][name] == 0
    check_sum(example, centered, rel=1e-9)
    for role, token in (("key", 0), ("query", 6)):  # matched, and asking
        assert f"    {role}: anna (+{found.roles[role][0, token]:.3g}, token {token})" in printed
    run(*asked, out, "--baselines", "0")
    assert read(out)["examples"][0]["accounts"][centered]["baselines"] == 0


@pytest.mark.slow
def test_pictures(tmp_path: Path, run: Run) -> None:
    """Roles have pictures of their own."""
    asked = ["explain", *RECALL, "anna owns the", "--out", tmp_path / "picture.png"]
    run(*asked, "--rule", "half", "centered")
    stems = ("picture", "picture-roles", "picture-roles-2")
    assert {path.stem for path in tmp_path.iterdir()} == set(stems)
    first, halves, centered = (imread(tmp_path / f"{stem}.png") for stem in stems)
    assert halves.shape != centered.shape or not np.array_equal(halves, centered)
    assert first.shape[1] > 1000 and float(first.std()) > 0.02  # not an empty page
    run(*asked[:-1], tmp_path / "drawn.svg", "--rule", "half", "centered")
    for path in map(tmp_path.joinpath, ("drawn.svg", "drawn-roles.svg", "drawn-roles-2.svg")):
        assert "<svg" in path.read_text()[:500] and path.stat().st_size > 5000


@pytest.mark.slow
def test_reports(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "report.html"
    asked = ["explain", *RECALL, PROMPT, "--out", out, "--force"]
    run(*asked, "--title", "<T>")
    page = read_page(out)
    assert page.texts("h1") == ["<T>"]
    (example,) = page.facts["examples"]
    asking = {m["name"]: m["question"] for m in example["methods"]}
    assert asking == dict(zip(DEFAULT, QUESTIONS.values(), strict=True))
    assert [m["name"] for m in example["maps"]] == ["Implicit attention"]
    run(*asked, "--maps", "contributions", "--layers", "-1")
    (contributions,) = read_page(out).facts["examples"][0]["maps"]
    assert [layer["index"] for layer in contributions["layers"]] == [1]
    run(*asked, "--maps", "--cuts", "3")
    (example,) = read_page(out).facts["examples"]
    assert example["maps"] == [] and len(example["cuts"]["rows"]) == 3


@pytest.mark.slow
def test_folders_of_transformers(
    tmp_path: Path, language_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "prompt.txt", tmp_path / "numbers.json"
    text.write_text("anna owns the $5", encoding="utf-8")
    for target in ("lamp", "id:4"):
        asked = [str(language_model), "--file", str(text), "--target", target]
        (example,) = explained(out, *asked)
        assert example["tokens"] == ["<s>", "anna", "owns", "the", "$5"]
        assert example["explained"] == "the logit of “lamp”, predicted after token 4"
        assert read(out)["model"] == language_model.name  # no path, which may be private
    folder = tmp_path / "seeing"
    vision_language_model("lfm2_vl", monkeypatch).float().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    (example,) = explained(out, str(folder), "--text", "anna owns the", "--target", "lamp")
    assert example["explained"] == "the logit of “lamp”, predicted after token 3"


@pytest.mark.slow
def test_vision_mamba(tmp_path: Path, vim: Path, picture: Path, labels: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [str(vim), "--image", str(picture), str(picture), "--labels", str(labels)]
    arguments += ["--method", "ImplicitAttentionRollout", "LatimFlow", "--target"]
    for example in explained(out, *arguments, "cat"):
        assert example["explained"] == "the logit of “cat”"
        assert {each["label"] for each in example["predictions"]} == {"ant", "cat", "dog"}
        assert len(example["tokens"]) == 10  # a cls token among 3 x 3 patches
        for values in example["relevance"].values():
            assert sum(value is not None for value in values) == 9
        check_sum(example)
    assert main(["explain", *arguments, "1", "--out", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out-2.png").exists()


@pytest.mark.slow
def test_classifiers_of_transformers(tmp_path: Path, bert: Path, picture: Path) -> None:
    asked = ["--text", "good film", "--target", "good", "--method", "LatimFlow", "--quiet"]
    (example,) = explained(tmp_path / "sentence.json", str(bert), *asked)
    assert example["explained"] == "the logit of “good”" and example["tokens"] == ["good", "film"]
    check_sum(example)
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
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    folder, model = segmenter(tmp_path, monkeypatch)
    out, mask = tmp_path / "out.json", tmp_path / "mask.png"
    shown = torch.zeros(16, 16, 3)
    shown[4:12, 8:] = 1  # pixels 1 and 2 down, 2 and 3 across
    mask.write_bytes(png(shown))
    arguments = [str(folder), "--image", str(picture), "--trust-remote-code", "--target", "car"]
    arguments += ["--method", "LatimFlow"]
    image = load(Source(str(folder), trust_remote_code=True)).read_images([picture])
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
    asked = ["explain", *arguments, "--out", out, "--force"]
    said = "a row from 0 to 3 and a column from 0 to 3"
    assert said in run(*asked, "--target-pixel", "4", "0", code=1)
    assert "mask.png has no light pixels" in run(*asked, "--target-mask", mask, code=1)


#: Mistakes, and the words that name each.
OF_RECALL = [
    ("--out x.pdf", ".html (a report)"),
    ("--method latinflow", "Did you mean LatimFlow?"),
    ("--target anna,bob", "has 2 tokens"),
    ("--target zebra", "--target 'zebra': unknown word"),
    ("--contrast zebra", "--contrast 'zebra': unknown word"),
    ("--method LatimNorm --contrast all", "--contrast is accepted by LatimFlow"),
    ("--layers 0", "--layers only applies to reports"),
    ("--rule half --method MambaLRP", "--rule half is an option of LatimFlow"),
    ("--baselines 0 --method LatimNorm", "--baselines 0 is an option of LatimFlow"),
    ("--baselines zero", "--baselines zero: pass mean, or a number"),
    ("--option n_steps", "--option n_steps: write NAME=VALUE"),
    ("--option n_steps=5", "is accepted by IntegratedGradients, but none of these is selected"),
    ("--method integrated-gradients --option n_steps=many", "use a whole number"),
    ("--method guided_backprop", "GuidedBackprop: it changes gradients of torch.nn.ReLU"),
    ("--generate 3 --answer lamp", "--generate 3"),
    ("--spans sentence --target lamp", "--target"),
    ("--spans all --method LatimFlow MambaLRP", "one method"),
    ("--generate 2 --out x.txt", "an ending that is not accepted. Use .html (a page), .json"),
]
OTHERS = [
    ("no-such-model --text anna", "add --hub"),
    ("recal-mamba --text anna", "Did you mean recall-mamba?"),
    ("recall-mamba --image x.png", "reads texts"),
    ("recall-mamba --file no-such-file", "--file no-such-file cannot be read: No such"),
    ("recall-mamba --file {picture}", "--file {picture} is not UTF-8 text"),
    ("recall-mamba --text anna --labels /", "--labels / cannot be read: Is a"),
    ("{vim} --text a", "reads images"),
    ("{vim} --image {vim} --target 0", "cannot be read as an image"),
    ("{vim} --image {picture} --target-pixel 0 0", "need a segmentation model"),
    ("{bert} --text good --target x", "classes (bad, good)"),
    ("{bert} --text good --spans all", "need a language model"),
]
MISTAKES = [(f"recall-mamba --text anna {each}", said) for each, said in OF_RECALL]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES + OTHERS)
def test_a_mistake_is_named_in_a_sentence(
    arguments: str,
    said: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    names = (name for name in ("picture", "vim", "bert") if f"{{{name}}}" in arguments)
    files = {name: request.getfixturevalue(name) for name in names}
    words = [word.replace(",", " ") for word in arguments.format(**files).split()]
    out = [] if "--out" in words else ["--out", "x.json"]
    assert said.format(**files) in run("explain", *words, *out, code=1)
    assert not list(folder.iterdir())


CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import MambaConfig
class Own(MambaConfig):
    model_type = "own"
"""


def test_code_beside_the_weights_runs_only_if_it_is_trusted(
    tmp_path: Path, language_model: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr("sys.stdin", None)  # nobody answers a question
    marker, settings = tmp_path / "marker", read(language_model / "config.json")
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (language_model / "config.json").write_text(json.dumps(settings))
    (language_model / "own.py").write_text(CODE.format(marker=str(marker)))
    asked = ["explain", str(language_model), "--text", "anna", "--out", str(tmp_path / "x.json")]
    run(*asked, code=1)
    assert not marker.exists()
    main([*asked, "--trust-remote-code"])
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


ASKED_OF = "anna owns the lamp . bob owns the kite . ? anna owns the"
ANSWER = "lamp . ? bob owns the kite ."
ASKED = ("explain", "recall-mamba", "--text", ASKED_OF, "--out")


def test_numbers_of_a_given_answer(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "answers.json"
    said = run(*ASKED, out, "--answer", ANSWER, "--hops", "2", "--rule", "half")
    (found,) = json.loads(out.read_text())["answers"]
    model, vocabulary = load_bundled()
    expected = SSMLLMAttribution(LatimFlow(model), vocabulary).attribute(
        ASKED_OF, ANSWER, spans="sentence", prompt_spans="sentence", hops=2, rule="half",
        contrast="all",
    )  # fmt: skip
    assert found["names"] == ["lamp .", "?", "bob owns the kite ."]
    assert found["features"] == expected.input_tokens
    assert len(found["hops"]) == len(expected.spans.hops) > 1
    last = torch.tensor(found["hops"][-1]["prompt"])
    assert torch.allclose(last, expected.token_attr, atol=1e-5)
    assert "'bob owns the kite .'" in said and f"wrote {out}" in said


@pytest.mark.slow
def test_what_is_generated(tmp_path: Path, run: Run) -> None:
    out, picture = tmp_path / "answers.html", tmp_path / "answers.png"
    run(*ASKED, out, "--generate", "3", "--hops", "1", "--title", "Who owns what?")
    page = read_page(out)
    assert page.texts("h1") == ["Who owns what?"]
    assert page.facts["about"].startswith("recall-mamba: relevance by LatimFlow, for each token")
    (example,) = page.facts["examples"]
    assert example["prompt"]["labels"] == ASKED_OF.split()
    assert len(example["answer"]["labels"]) == 3 and example["answer"]["labels"][0] == "lamp"
    assert len(example["blocks"]) == 2
    spans = ["--spans", "token", "--prompt-spans", "token"]
    method = ["--method", "ImplicitAttentionRollout"]
    run(*ASKED[:4], ASKED_OF, "--generate", "1", *spans, *method, "--out", picture)
    assert picture.stat().st_size > 1000 and (tmp_path / "answers-2.png").exists()
