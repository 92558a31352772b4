"""Reports: what the page holds is what methods, matrices and the model say."""

from __future__ import annotations

import base64
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from captum.attr import Saliency
from helpers.pages import read_page
from helpers.pictures import AWKWARD
from zoo.language import word_tokenizer
from zoo.small import CLASSES, VOCABULARY, classifier, images, mamba_lm, token_ids, vision

from captum_ssm import (
    EdgeEffects,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    report,
)
from captum_ssm.errors import InputError, OptionError, TargetError
from captum_ssm.models import load_bundled

METHODS = [LatimFlow, MambaAttribution]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "report.html"


def values(method: dict, missing: float = float("nan")) -> np.ndarray:
    return np.array([missing if v is None else v for v in method["values"]])


def test_a_language_model(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(2, 13)
    names = [[f"a{i}" for i in range(13)], [f"b{i}" for i in range(13)]]
    assert report(model, ids, METHODS, tokens=names, path=path, title="T & U") == path
    page = read_page(path)
    facts = page.facts
    assert page.texts("title") == page.texts("h1") == ["T & U"]
    assert (facts["model"], facts["layers"], facts["families"]) == (
        "MambaForCausalLM",
        3,
        ["Mamba"],
    )
    logits = model(ids).logits[:, -1].detach().double()
    for b, example in enumerate(facts["examples"]):
        answer = int(logits[b].argmax())
        assert example["name"] == f"Example {b + 1}"
        assert example["explained"] == f"the logit of “{answer}”, predicted after token 12"
        best = example["predictions"]
        assert [p["label"] for p in best] == [str(k) for k in logits[b].topk(5).indices.tolist()]
        assert best[0]["probability"] == pytest.approx(float(logits[b].softmax(-1).max()), rel=1e-4)
        assert best[0]["logit"] == pytest.approx(float(logits[b].max()), rel=1e-4)
        assert example["tokens"] == names[b]
        for method, kind in zip(example["methods"], METHODS, strict=True):
            found = kind(model).attribute(ids[b : b + 1], target=(-1, answer), per_token=True)[0]
            assert method["name"] == kind.name
            np.testing.assert_allclose(values(method), found.numpy(), rtol=1e-4, atol=1e-12)
        (attention,) = example["maps"]
        for index, layer in enumerate(attention["layers"]):
            (exact,) = ImplicitAttention(model).matrices(ids[b : b + 1], layers=[index])
            matrix, known = page.matrix(layer)
            assert known.all()
            limit = exact[0].abs().amax(-1, keepdim=True).numpy() / 254
            assert (np.abs(matrix - exact[0].numpy()) <= limit * 1.001).all()
            assert (layer["index"], layer["family"]) == (index, "Mamba")
            assert layer["module"] == f"backbone.layers.{index}.mixer"


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["last", "mean"])
def test_the_identity_is_told_from_sources(path: Path, pool: str) -> None:
    """Of the asking token in rollouts: where the head reads it, or a language model predicts."""
    model, ids = classifier(pool), token_ids(2, 11)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    methods = {"a": ImplicitAttentionRollout, "b": MambaAttribution(model), "c": LatimFlow}
    report(model, ids, methods, additional_forward_args=mask, path=path)
    for example, length in zip(read_page(path).facts["examples"], [11, 7], strict=True):
        wanted = length - 1 if pool == "last" else None
        assert [m["own"] for m in example["methods"]] == [wanted, wanted, None]
    report(mamba_lm(), ids[:1, :9], [ImplicitAttentionRollout], target=(4, 2), path=path)
    (example,) = read_page(path).facts["examples"]
    assert example["methods"][0]["own"] == 4 and not any(example["methods"][0]["values"][5:])


@pytest.mark.slow
def test_padding_is_left_out_on_either_side(path: Path) -> None:
    model = classifier("mean")
    ids, mask = token_ids(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:], mask[2, :4] = 0, 0
    names = [[f"t{i}" for i in range(11)]] * 3
    report(model, ids, METHODS, tokens=names, additional_forward_args=mask, path=path)
    page = read_page(path)
    for b, example in enumerate(page.facts["examples"]):
        real = mask[b].bool()
        alone = ids[b : b + 1, real]
        assert example["tokens"] == [name for name, r in zip(names[b], real, strict=True) if r]
        answer = int(model(ids[b : b + 1], mask[b : b + 1]).argmax())
        assert answer == int(model(alone).argmax())
        for method, kind in zip(example["methods"], METHODS, strict=True):
            found = kind(model).attribute(alone, target=answer)[0]
            scale = float(found.abs().max())
            np.testing.assert_allclose(values(method), found.numpy(), atol=1e-4 * scale)
        layer = example["maps"][0]["layers"][1]
        exact = ImplicitAttention(model).matrices(alone, layers=[1])[0][0]
        error = np.abs(page.matrix(layer)[0] - exact.numpy())
        assert (error <= exact.abs().amax(-1, keepdim=True).numpy() / 254 * 1.01).all()


@pytest.mark.parametrize("cls", ["middle", None])
def test_images_have_patches(path: Path, cls: str | None) -> None:
    model, pictures = vision(cls, (3, 5)), images(2, (3, 5))
    methods = [MambaAttribution, ImplicitAttentionRollout]
    labels = [f"class {i}" for i in range(CLASSES)]
    report(model, pictures, methods, target=[1, 4], labels=labels, path=path)
    facts = read_page(path).facts
    for b, example in enumerate(facts["examples"]):
        tokens = model.patch_tokens()
        image = example["image"]
        assert image["grid"] == [3, 5]
        assert image["cells"] == tokens
        assert (image["height"], image["width"]) == (12, 15)
        assert image["source"].startswith("data:image/png;base64,")
        assert example["explained"] == f"the logit of “class {[1, 4][b]}”"
        assert example["tokens"][tokens[7]] == "row 1, column 2"
        if cls is not None:
            assert example["tokens"][model.cls_position] == "class token"
        for method, kind in zip(example["methods"], methods, strict=True):
            found = kind(model).attribute(pictures[b : b + 1], target=[1, 4][b], per_token=True)
            np.testing.assert_allclose(values(method)[tokens], found.flatten().numpy(), rtol=1e-4)
            others = set(range(len(example["tokens"]))) - set(tokens)
            assert all(method["values"][token] is None for token in others)
        assert example["maps"][0]["layers"][0]["size"] == len(example["tokens"])


@pytest.mark.slow
def test_pixels_are_there_where_a_method_tells_them_apart(path: Path) -> None:
    model, picture = vision("head", (3, 5)), images(1, (3, 5))
    report(model, picture, [LatimFlow, MambaAttribution, Saliency], target=1, path=path)
    flow, row, saliency = read_page(path).facts["examples"][0]["methods"]
    assert row["pixels"] is None
    wanted = [
        LatimFlow(model).attribute(picture, target=1),
        Saliency(model).attribute(picture, target=1),
    ]
    for method, relevance in zip((flow, saliency), wanted, strict=True):
        pixels, exact = method["pixels"], relevance.sum(1)[0].detach().numpy()
        assert (pixels["rows"], pixels["columns"]) == exact.shape
        steps = np.frombuffer(base64.b64decode(pixels["steps"]), "i1").reshape(exact.shape)
        end = pixels["largest"]
        assert np.abs(steps / 127 * end - exact.clip(-end, end)).max() <= end / 254 * 1.01
        patches = exact.reshape(3, 4, 5, 3).sum((1, 3)).flatten()
        np.testing.assert_allclose(values(method)[model.patch_tokens()], patches, rtol=1e-4)


@pytest.mark.slow
def test_roles_stand_where_a_rule_tells_some(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 9)
    methods = {"content": LatimFlow, "cause": LatimFlow, "lrp": MambaLRP(model)}
    rules = {"content": {"rule": "frozen"}, "cause": {"rule": "centred", "baselines": 0.0}}
    methods["row"] = ImplicitAttentionRollout
    report(model, ids, methods, target=(-1, 4), options=rules, path=path)
    (example,) = read_page(path).facts["examples"]
    content, cause, lrp, row = example["methods"]
    assert content["roles"] == row["roles"] == {}
    assert set(cause["roles"]) == {"content", "key", "query", "gate", "step"}
    assert set(lrp["roles"]) == {"content", "gate"}  # what else its rule tells is all zero
    found = LatimFlow(model).decompose(ids, (-1, 4), rule="centred", baselines=0.0).roles
    assert found is not None
    for role, relevance in cause["roles"].items():
        np.testing.assert_allclose(relevance, found[role][0].numpy(), rtol=1e-4, atol=1e-12)
    for method in (cause, lrp):
        total = np.sum(list(method["roles"].values()), axis=0)
        np.testing.assert_allclose(total, method["values"], atol=1e-4 * np.abs(total).max())


@pytest.mark.slow
def test_tokenizers_of_transformers_and_a_given_target(path: Path) -> None:
    model, vocabulary = load_bundled()
    texts = ["anna owns the lamp . ? anna owns the", "bob owns the kite . ? bob owns the red kite"]
    report(model, texts, METHODS, tokenizer=vocabulary, names=["x", "$y$"], path=path)
    facts = read_page(path).facts
    for example, text, name in zip(facts["examples"], texts, ["x", "$y$"], strict=True):
        assert example["tokens"] == text.split() and example["name"] == name
    assert "“lamp”, predicted after token 8" in facts["examples"][0]["explained"]
    model, tokenizer = mamba_lm().double(), word_tokenizer()
    text = "anna owns the $5 lamp"
    report(model, text, [LatimFlow], tokenizer=tokenizer, target=(3, 7), matrices=False, path=path)
    page = read_page(path)
    (example,) = page.facts["examples"]
    assert example["tokens"] == ["<s>", "anna", "owns", "the", "$5", "lamp"]
    assert example["explained"] == "the logit of “$5”, predicted after token 3"
    assert example["maps"] == []
    ids = torch.tensor([tokenizer.encode(text)])
    chances = model(ids).logits[0, 3].detach().double().softmax(-1)
    found = {p["label"]: p["probability"] for p in example["predictions"]}
    assert found["$5"] == pytest.approx(float(chances[7]), rel=1e-4)


@pytest.mark.slow
def test_awkward_tokens_are_spelled(path: Path) -> None:
    report(mamba_lm(), token_ids(1, len(AWKWARD)), [LatimFlow], tokens=AWKWARD, path=path)
    (example,) = read_page(path).facts["examples"]
    assert example["tokens"][:4] == ["$x_1$", "<script>", r"a\nb", "∅"]
    assert example["breaks"] == [2]
    assert example["direction"] == "ltr"
    report(mamba_lm(), token_ids(1, 3), [LatimFlow], tokens=["שלום", "a", "סוף"], path=path)
    assert read_page(path).facts["examples"][0]["direction"] == "rtl"


@pytest.mark.slow
def test_contributions_and_chosen_layers(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 9)
    kinds = ["contributions", "attention"]
    report(model, ids, [LatimFlow], matrices=kinds, shown_layers=[-1, 0], path=path)
    page = read_page(path)
    maps = page.facts["examples"][0]["maps"]
    assert [m["name"] for m in maps] == ["LATIM contributions", "Implicit attention"]
    assert [layer["index"] for layer in maps[0]["layers"]] == [2, 0]
    exact = LatimNorm(model).maps(ids, layers=[2])[0][0]
    error = np.abs(page.matrix(maps[0]["layers"][0])[0] - exact.numpy())
    assert (error <= exact.abs().amax(-1, keepdim=True).numpy() / 254 * 1.01).all()


@pytest.mark.slow
def test_little_room_keeps_the_strongest(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 150)
    report(model, ids, [LatimFlow], path=path, megabytes=0.1)
    page = read_page(path)
    layer = page.facts["examples"][0]["maps"][0]["layers"][2]
    exact = ImplicitAttention(model).matrices(ids, layers=[2])[0][0].numpy()
    matrix, known = page.matrix(layer)
    assert known.sum(1).tolist() == [layer["kept"]] * 150
    assert 8 <= layer["kept"] < 50
    for row in (20, 149):
        strongest = np.abs(exact[row]).argsort()[::-1][: layer["kept"]]
        np.testing.assert_allclose(
            matrix[row, strongest],
            exact[row, strongest],
            atol=np.abs(exact[row]).max() / 254 * 1.01,
        )


@pytest.mark.slow
def test_the_strongest_edges_are_estimated(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    for given in ({"target": (-1, 4)}, {"target": (-1, 4), "edges": 3}):
        report(model, ids, METHODS, additional_forward_args=_masking(mask), path=path, **given)
        for b, example in enumerate(read_page(path).facts["examples"]):
            real = mask[b].bool()
            alone = EdgeEffects(model).attribute(ids[b : b + 1, real], (-1, 4))
            expected = alone.top(given.get("edges", 10))[0]
            found = example["edges"]["rows"]
            assert example["edges"]["obstacle"] is None
            effects = [row["effect"] for row in found]
            np.testing.assert_allclose(effects, [edge.effect for edge in expected], rtol=1e-3)
            at = [(row["layer"], row["module"], row["source"], row["target"]) for row in found]
            assert at == [(e.layer, e.name, e.source, e.target) for e in expected]


def _masking(mask: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Further arguments of a transformers Mamba up to its attention mask."""
    names = list(inspect.signature(mamba_lm().forward).parameters)
    return (*[None] * (names.index("attention_mask") - 1), mask)


@pytest.mark.slow
def test_edges_that_are_not_listed_or_cannot_be_estimated(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 6)
    for options in ({"matrices": False}, {"edges": 0}):
        report(model, ids, METHODS, path=path, **options)
        (example,) = read_page(path).facts["examples"]
        assert example["edges"] == {"rows": [], "obstacle": None}
    report(model, ids, METHODS, matrices=False, edges=2, path=path)
    assert len(read_page(path).facts["examples"][0]["edges"]["rows"]) == 2
    run = torch.no_grad()(lambda x: model(x).logits)
    report(run, ids, [ImplicitAttentionRollout], model=model, path=path)
    (example,) = read_page(path).facts["examples"]
    assert example["edges"]["rows"] == []
    assert "records no gradients" in example["edges"]["obstacle"]
    with pytest.raises(OptionError, match="edges=-1"):
        report(model, ids, METHODS, edges=-1, path=path)


@pytest.mark.slow
def test_refusals(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(2, 5)
    with pytest.raises(OptionError, match="matrices='all'"):
        report(model, ids, METHODS, matrices="all", path=path)
    with pytest.raises(OptionError, match="layers names 7"):
        report(model, ids, METHODS, shown_layers=[7], path=path)
    with pytest.raises(OptionError, match="shown_layers is empty"):
        report(model, ids, METHODS, shown_layers=[], path=path)
    with pytest.raises(InputError, match="pass the model's tokenizer"):
        report(model, "a text", METHODS, path=path)
    with pytest.raises(InputError, match="inputs is an empty list"):
        report(model, [], METHODS, tokenizer=word_tokenizer(), path=path)
    with pytest.raises(InputError, match="tokens names one sequence, but inputs holds 2"):
        report(model, ids, METHODS, tokens=["a"] * 5, path=path)
    with pytest.raises(InputError, match="3 names for a sequence of 5"):
        report(model, ids[:1], METHODS, tokens=["a"] * 3, path=path)
    with pytest.raises(InputError, match="names has 1 labels for 2"):
        report(model, ids, METHODS, names=["a"], path=path)
    with pytest.raises(TargetError):
        report(model, ids, METHODS, target=3, path=path)
    with pytest.raises(TargetError, match="out of range"):
        report(model, ids, METHODS, target=(-1, VOCABULARY), path=path)
    assert not path.exists()
    path.parent.parent.joinpath("file").write_text("")
    unusable = path.parent.parent / "file" / "r.html"
    with pytest.raises(OSError, match="file"):  # before the work
        report(lambda x: 1 / 0, ids, METHODS, model=model, path=unusable)
