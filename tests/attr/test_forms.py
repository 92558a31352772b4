"""Forms of models, functions and inputs that users have: taken, or refused with help."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captum.attr import DeepLift, InputXGradient
from helpers.every_method import METHODS, each_method
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TextGenerationPipeline
from zoo.attention import attention_model
from zoo.small import VOCABULARY, images, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimNorm, compare
from captum_ssm.errors import (
    InputError,
    ModelNotFoundError,
    NoMixerError,
    OptionError,
    TrainingModeError,
    UnsupportedMixerError,
)
from captum_ssm.tracing import find_model, require_deterministic

pytestmark = pytest.mark.slow


# --- models that a function refers to ------------------------------------------------------------

GLOBAL: Any = None
UNRELATED, FIRST, SECOND = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.ReLU())


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = mamba_lm()
    monkeypatch.setitem(globals(), "GLOBAL", made)
    return made


def last(net: Any, ids: Tensor) -> Tensor:
    return net(ids).logits[:, -1]


def of_a_global(ids: Tensor) -> Tensor:
    return GLOBAL(ids).logits[:, -1]


class Holder:
    def __init__(self, model: nn.Module) -> None:
        self.words, self.model = ["a", "b"], model

    def last(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits[:, -1]

    def __call__(self, ids: Tensor) -> Tensor:
        return self.last(ids)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args: function(*args))


def indexing(models: Any, key: str) -> Callable[..., Any]:
    return lambda ids: models[key](ids).logits[:, -1]


def beside(loss: nn.Module, model: Any) -> Callable[..., Any]:
    return lambda ids: loss is not None and model(ids).logits[:, -1]


FUNCTIONS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "closure": lambda model: lambda ids: model(ids).logits[:, -1],
    "def over a global": lambda model: of_a_global,
    "closure over a closure": lambda model: decorated(decorated(lambda x: last(model, x))),
    "default argument": lambda model: lambda ids, net=model: last(net, ids),
    "keyword argument": lambda model: lambda ids, *, net=model: last(net, ids),
    "partial": lambda model: functools.partial(last, model),
    "method of an object": lambda model: Holder(model).last,
    "object": Holder,
    "closure over a dict": lambda model: indexing({"lm": model}, "lm"),
    "model and its part": lambda model: lambda ids: (model.lm_head, model(ids).logits[:, -1])[1],
    "model and a loss": lambda model: beside(nn.CrossEntropyLoss(), model),
    "wrapped": lambda model: decorated(Holder(nn.DataParallel(model)).last),
}


@pytest.mark.parametrize("form", FUNCTIONS)
def test_functions_that_refer_to_a_model(model, form):
    function, ids = FUNCTIONS[form](model), token_ids(2, 5)
    assert find_model(function) is model
    expected = LatimFlow(function, model).attribute(ids, target=2)
    assert torch.equal(LatimFlow(function).attribute(ids, target=2), expected)
    rollout = ImplicitAttentionRollout(function).attribute(ids, query="last")
    expected = ImplicitAttentionRollout(model).attribute(ids, query="last")
    assert torch.equal(rollout, expected)


class UnknownMixer(nn.Module):
    pass


#: What refers to no model with mixers, and fragments of the error.
NONE: dict[str, tuple[Any, type[Exception], str]] = {
    "two modules": (lambda x: FIRST(SECOND(x)), ModelNotFoundError,
                    r"Several modules.*'FIRST' \(Linear\), 'SECOND' \(Sequential\).*model=module"),
    "one module": (lambda x: UNRELATED(x), NoMixerError, "Linear"),
    **{
        name: (function, ModelNotFoundError, r"No torch\.nn\.Module.*model=module")
        for name, function in {
            "a lambda": lambda x: x, "a builtin": len, "torch's": torch.cumsum,
            "a partial": functools.partial(F.softmax, dim=-1), "a number": 3,
        }.items()
    },
    "a word": ("model", ModelNotFoundError, "'model' is a string. Load the model"),
    "a class": (Holder, ModelNotFoundError, "forward_func"),
    "an unknown mixer": (UnknownMixer(), UnsupportedMixerError,
                         r"^The model itself, a .*UnknownMixer, mixes"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_what_refers_to_no_model(name: str) -> None:
    function, error, said = NONE[name]
    with pytest.raises(error, match=said):
        LatimFlow(function)


def test_a_class_in_place_of_a_model() -> None:
    with pytest.raises(ModelNotFoundError, match=r"the class Linear.*Make an instance"):
        LatimFlow(lambda x: x, nn.Linear)


# --- other ways to name a model, and what it returns ---------------------------------------------


class Returning(nn.Module):
    def __init__(self, model: nn.Module, form: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, ids: Tensor) -> Any:
        return self.form(self.model(ids))


FORMS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda out: out.logits,
    "tuple": lambda out: (out.logits, "more"),
    "list": lambda out: [out.logits],
    "HF tuple": lambda out: out.to_tuple(),
    "HF output": lambda out: out,
}


@each_method
def test_forms_of_output(method: Any) -> None:
    model, ids = mamba_lm(), token_ids(2, 5)
    expected = method(model).attribute(ids, target=(3, 2))
    for form, make in FORMS.items():
        found = method(Returning(model, make)).attribute(ids, target=(3, 2))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=form)


# --- pipelines and tokenizers of transformers ----------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w0")


def test_a_pipeline_that_generates_text() -> None:
    model, words = mamba_lm(), tokenizer()
    pipe = TextGenerationPipeline(model=model, tokenizer=words, device="cpu")
    ids = words("w3 w7 w2 w5", return_tensors="pt")["input_ids"]
    assert find_model(pipe) is find_model(pipe.__call__) is pipe.model
    for method in METHODS:
        expected = method(model).attribute(ids, target=(-1, 3))
        assert torch.equal(method(pipe).attribute(ids, target=(-1, 3)), expected)
    found = LatimFlow(lambda ids: pipe.model(ids).logits).attribute(ids, target=(-1, 3))
    assert torch.equal(found, LatimFlow(model).attribute(ids, target=(-1, 3)))


def test_a_tokenizers_output_without_padding():
    encoding, model = tokenizer()(["w1 w2 w3"], return_tensors="pt"), mamba_lm()
    expected = LatimFlow(model).attribute(encoding["input_ids"], target=(-1, 3))
    assert torch.equal(LatimFlow(model).attribute(encoding, target=(-1, 3)), expected)
    typed = {**encoding, "token_type_ids": torch.zeros(1, 3).long()}
    assert torch.equal(LatimFlow(model).attribute(typed, target=(-1, 3)), expected)
    typed["token_type_ids"][0, 1] = 1
    with pytest.raises(
        InputError, match=r"token_type_ids= is given, but .* has no positional parameter"
    ):
        LatimFlow(model).attribute(typed, target=(-1, 3))


# --- methods by name, and Captum's classes -------------------------------------------------------


def test_methods_by_name():
    model, ids = mamba_lm(), token_ids(2, 5)
    found = compare(model, ids, ["LatimFlow", LatimNorm], (-1, 3))
    expected = compare(model, ids, [LatimFlow, LatimNorm], (-1, 3))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for name in ("latimflow", "latim_flow", "LATIM-FLOW", "Latim Flow"):
        assert torch.equal(compare(model, ids, name, (-1, 3))["LatimFlow"], found["LatimFlow"])
    with pytest.raises(OptionError, match=r"contains 'latinflow'.*Did you mean LatimFlow\?"):
        compare(model, ids, ["latinflow"], (-1, 3))


def test_gradients_at_ids():
    model, ids = mamba_lm(), token_ids(2, 5)
    embeddings = model.get_input_embeddings()(ids).detach()
    methods = [InputXGradient, "integrated_gradients"]
    expected = compare(model, embeddings, methods, (-1, 3))
    found = compare(model, ids, methods, (-1, 3), per_token=False)
    for name, relevance in expected.items():
        torch.testing.assert_close(found[name], relevance)
    for forward, method in (
        (lambda x: model(x).logits, InputXGradient),
        (model, InputXGradient(lambda x: model(x).logits)),
    ):
        with pytest.raises(InputError, match="Input X Gradient needs gradients at inputs"):
            compare(forward, ids, [method], (-1, 3))


def test_methods_of_captum_that_are_made_on_a_module():
    model, pictures = vision("middle"), images(1)
    found = compare(model, pictures, ["deep_lift"], 3, per_token=False)["Deep Lift"]
    expected = DeepLift(model).attribute(pictures.clone(), target=3).detach()
    torch.testing.assert_close(found, expected)


# --- random modules ------------------------------------------------------------------------------


def module(name: str, **attributes: Any) -> nn.Module:
    made = type(name, (nn.Module,), {})()
    vars(made).update(attributes)
    return made


def lora(dropout: float) -> nn.Module:
    adapter = LoraConfig(r=2, target_modules=["in_proj"], lora_dropout=dropout)
    return get_peft_model(mamba_lm(), adapter)


RANDOM = {
    "dropout": (nn.Dropout, "Dropout"),
    "stochastic depth": (lambda p: module("StochasticDepth", p=p), "p=0.5"),
    "paths": (lambda p: module("DropPath", drop_prob=p), "drop_prob=0.5"),
    "attention of torch": (lambda p: nn.MultiheadAttention(4, 2, dropout=p), "dropout=0.5"),
    "LoRA": (lora, "lora_dropout"),
    "attention of Jamba": (
        lambda p: attention_model("jamba", attention_dropout=p),
        "attention_dropout=0.5",
    ),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_modules(kind):
    make, named = RANDOM[kind]
    model = nn.ModuleDict({"inner": make(0.5)})
    require_deterministic(model.eval())
    with pytest.raises(TrainingModeError, match=r"training mode.*Call model\.eval\(\)") as caught:
        require_deterministic(model.train())
    assert named in str(caught.value) and "inner" in str(caught.value)
    require_deterministic(nn.ModuleDict({"inner": make(0.0)}).train())


def test_parts_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    model[1].train()
    with pytest.raises(TrainingModeError, match=r"^The module '1' of class Dropout"):
        require_deterministic(model)
    with pytest.raises(TrainingModeError, match=r"^The model itself, a Dropout, is"):
        require_deterministic(model[1])
    for norm in (nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)):
        with pytest.raises(TrainingModeError, match="examples mix"):
            require_deterministic(nn.Sequential(norm).train())
        require_deterministic(nn.Sequential(norm).eval())
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(TrainingModeError, match=r"'0' of class BatchNorm1d keeps no running.*mix"):
        require_deterministic(model)
    require_deterministic(mamba_lm().train())
    require_deterministic(nn.Sequential(nn.LayerNorm(3), nn.LSTM(2, 2)).train())


class Told(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.model, self.function = mamba_lm(), function

    def forward(self, ids):
        return self.function(self.model(ids).logits)


TOLD = {
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "dropout by default": lambda x: F.dropout(x),
    "torch's own": lambda x: torch.dropout(x, 0.5, train=True),
    "alpha": lambda x: F.alpha_dropout(x, training=True),
    "slopes": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "batch": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
}


@pytest.mark.parametrize("kind", TOLD)
def test_functions_told_to_be_random(kind: str) -> None:
    said = r"^The model itself, a Told, calls torch's \w+ with"
    with pytest.raises(TrainingModeError, match=said):
        LatimFlow(Told(TOLD[kind]).eval()).attribute(token_ids(), (-1, 3))
    told = Told(lambda x: F.dropout(F.dropout(x, 0.0), 0.5, False)).eval()
    LatimFlow(told).attribute(token_ids(), (-1, 3))
    with pytest.raises(TrainingModeError, match=r"^forward_func calls torch's \w+"):
        LatimFlow(lambda ids: TOLD[kind](told(ids))).attribute(token_ids(), (-1, 3))
