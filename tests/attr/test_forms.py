"""Forms of models, inputs and targets that users have: taken as they are, or refused with help."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
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
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    PreTrainedTokenizerFast,
    TextClassificationPipeline,
    TextGenerationPipeline,
)
from zoo.small import (
    VOCABULARY,
    classifier,
    images,
    mamba_lm,
    mixers_of,
    randomise,
    token_ids,
    vision,
)

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    compare,
)
from captum_ssm.errors import (
    InputError,
    ModelNotFoundError,
    NoMixerError,
    OptionError,
    TrainingModeError,
    UnsupportedMixerError,
    WeightsError,
)
from captum_ssm.tracing import find_model, require_deterministic

pytestmark = pytest.mark.slow

# --- models that a function refers to ------------------------------------------------------------

GLOBAL: Any = None
UNRELATED = nn.Linear(2, 2)


@pytest.fixture
def model(monkeypatch):
    """A language model, which is a global name of this module too."""
    made = mamba_lm()
    monkeypatch.setitem(globals(), "GLOBAL", made)
    return made


def of_a_global(ids):
    return GLOBAL(ids).logits[:, -1]


def of_a_global_inside(ids):
    return next((lambda x: GLOBAL(x).logits[:, -1])(one) for one in (ids,))


def of_a_function(ids):
    return of_a_global(ids)


class Holder:
    """An object that is no module, but has one among other things."""

    def __init__(self, model: nn.Module) -> None:
        self.words = ["a", "b"]
        self.model = model

    def last(self, ids):
        return self.model(ids).logits[:, -1]

    def __call__(self, ids):
        return self.last(ids)


class Caller:
    """An object that has no module, but calls one."""

    def __call__(self, ids):
        return of_a_global(ids)


def defaulting(model: nn.Module) -> Callable[..., Any]:
    def last(ids, net=model):
        return net(ids).logits[:, -1]

    return last


def keyword_only(model: nn.Module) -> Callable[..., Any]:
    def last(ids, *, net=model):
        return net(ids).logits[:, -1]

    return last


def given(net, ids):
    return net(ids).logits[:, -1]


def given_by_name(ids, net):
    return net(ids).logits[:, -1]


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def calling(function):
    return lambda ids: function(ids)


def indexing(models, key):
    return lambda ids: models[key](ids).logits[:, -1]


def beside(loss, model):
    return lambda ids: loss is not None and model(ids).logits[:, -1]


FUNCTIONS = {
    "closure": lambda model: lambda ids: model(ids).logits[:, -1],
    "def over a global": lambda model: of_a_global,
    "global inside a comprehension": lambda model: of_a_global_inside,
    "function over a function": lambda model: of_a_function,
    "closure over a closure": lambda model: decorated(decorated(lambda x: model(x).logits[:, -1])),
    "default argument": defaulting,
    "keyword argument": keyword_only,
    "partial": lambda model: functools.partial(given, model),
    "partial by name": lambda model: functools.partial(given_by_name, net=model),
    "method of an object": lambda model: Holder(model).last,
    "object": Holder,
    "object without a module": lambda model: Caller(),
    "closure over a dict": lambda model: indexing({"lm": model}, "lm"),
    "model and its part": lambda model: lambda ids: (model.lm_head, model(ids).logits[:, -1])[1],
    "model and a loss": lambda model: beside(nn.CrossEntropyLoss(), model),
    "wrapped": lambda model: calling(Holder(nn.DataParallel(model))),
}


@pytest.mark.parametrize("form", FUNCTIONS)
def test_functions_that_refer_to_a_model(model, form):
    """The model is found, and the explanation is that with the model named beside it."""
    function, ids = FUNCTIONS[form](model), token_ids(2, 5)
    assert find_model(function) is model
    expected = LatimFlow(function, model).attribute(ids, target=2)
    assert torch.equal(LatimFlow(function).attribute(ids, target=2), expected)
    rollout = ImplicitAttentionRollout(function).attribute(ids, query="last")
    expected = ImplicitAttentionRollout(model).attribute(ids, query="last")
    assert torch.equal(rollout, expected)


@pytest.mark.parametrize("form", ["its attribute", "all of it"])
def test_an_object_with_two_models(model, form):
    """The attribute that a function reads says which; an object that it passes on does not."""
    tools = SimpleNamespace(first=model, second=mamba_lm(), count=3)
    if form == "its attribute":
        assert find_model(lambda ids: [tools.first(ids) for _ in range(tools.count)]) is model
    else:
        with pytest.raises(ModelNotFoundError, match="Several modules"):
            find_model(lambda ids: vars(tools)["first"](ids) if tools.count else tools.second(ids))


def test_a_name_that_is_only_an_attribute_is_no_reference(model):
    """``.UNRELATED`` of something is not the module of that name."""

    holder = Holder(model)

    def function(ids):
        return holder.UNRELATED if ids is None else holder(ids)

    assert find_model(function) is model


def test_two_models():
    first, second = mamba_lm(), mamba_lm()

    def both(ids):
        return first(ids).logits - second(ids).logits

    with pytest.raises(ModelNotFoundError) as caught:
        LatimFlow(both)
    message = str(caught.value)
    for part in ("Several modules", "'first' (MambaForCausalLM)", "'second'", "model=module"):
        assert part in message
    assert find_model(both, second) is second


def test_two_modules_without_mixers():
    first, second = nn.Linear(2, 2), nn.Sequential(nn.ReLU())
    with pytest.raises(ModelNotFoundError, match=r"'first' \(Linear\), 'second' \(Sequential\)"):
        LatimFlow(lambda x: second(first(x)))


def test_one_module_without_mixers():
    with pytest.raises(NoMixerError, match="Linear"):
        LatimFlow(lambda x: UNRELATED(x))


@pytest.mark.parametrize(
    "function", [lambda x: x, len, torch.cumsum, functools.partial(F.softmax, dim=-1), "model", 3]
)
def test_functions_that_refer_to_no_model(function):
    with pytest.raises(ModelNotFoundError, match=r"No torch\.nn\.Module.*model=module"):
        LatimFlow(function)


def test_a_class_in_place_of_a_model():
    for call in (lambda: LatimFlow(Holder), lambda: LatimFlow(nn.Linear)):
        with pytest.raises(ModelNotFoundError, match="forward_func"):
            call()
    with pytest.raises(ModelNotFoundError, match=r"the class Linear.*Make an instance"):
        LatimFlow(lambda x: x, nn.Linear)


def test_the_model_itself_as_an_unknown_mixer():
    class UnknownMixer(nn.Module):
        pass

    with pytest.raises(UnsupportedMixerError, match=r"^The model itself, a .*UnknownMixer, mixes"):
        LatimFlow(UnknownMixer())


# --- pipelines of transformers -------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w0")


def test_a_pipeline_that_generates_text():
    model, words = mamba_lm(), tokenizer()
    pipe = TextGenerationPipeline(model=model, tokenizer=words, device="cpu")
    ids = words("w3 w7 w2 w5", return_tensors="pt")["input_ids"]
    assert find_model(pipe) is find_model(pipe.__call__) is pipe.model
    for method in METHODS:
        expected = method(model).attribute(ids, target=(-1, 3))
        assert torch.equal(method(pipe).attribute(ids, target=(-1, 3)), expected)
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = LatimFlow(model).attribute(embeddings, target=(-1, 3))
    assert torch.equal(LatimFlow(pipe).attribute(embeddings, target=(-1, 3)), expected)

    def last(ids):
        return pipe.model(ids).logits[:, -1]

    expected = LatimFlow(last, model).attribute(ids, target=3)
    assert torch.equal(LatimFlow(last).attribute(ids, target=3), expected)


def test_a_pipeline_that_classifies_text():
    words = tokenizer()
    model = classifier("mean")
    model.config = model.backbone.config
    model.config.id2label = {i: f"class {i}" for i in range(5)}
    model.device, model.dtype = torch.device("cpu"), torch.float32
    model.can_generate = lambda: False
    pipe = TextClassificationPipeline(model=model, tokenizer=words, device="cpu")
    ids = words("w3 w7 w2 w5", return_tensors="pt")["input_ids"]
    expected = LatimFlow(model).attribute(ids, target=1)
    assert torch.equal(LatimFlow(pipe).attribute(ids, target=1), expected)
    found = compare(pipe, ["LatimFlow"], ids, target=1)["LatimFlow"]
    assert torch.equal(found, expected)


# --- inputs --------------------------------------------------------------------------------------


def test_a_tokenizers_output_without_padding():
    encoding, model = tokenizer()(["w1 w2 w3"], return_tensors="pt"), mamba_lm()
    expected = LatimFlow(model).attribute(encoding["input_ids"], target=(-1, 3))
    assert torch.equal(LatimFlow(model).attribute(encoding, target=(-1, 3)), expected)
    typed = {**encoding, "token_type_ids": torch.zeros(1, 3).long()}
    assert torch.equal(LatimFlow(model).attribute(typed, target=(-1, 3)), expected)
    typed["token_type_ids"][0, 1] = 1
    with pytest.raises(InputError, match="inputs must be a tensor"):
        LatimFlow(model).attribute(typed, target=(-1, 3))


def test_a_tokenizers_output():
    encoding = tokenizer()(["w1 w2 w3", "w4 w5"], return_tensors="pt", padding=True)
    for given_inputs in (encoding, dict(encoding)):
        with pytest.raises(InputError) as caught:
            LatimFlow(mamba_lm()).attribute(given_inputs, target=(-1, 3))
        for part in (
            "inputs must be a tensor",
            "encoding['input_ids']",
            "additional_forward_args=(encoding['attention_mask'],)",
        ):
            assert part in str(caught.value)
    with pytest.raises(InputError) as caught:
        LatimFlow(mamba_lm()).attribute({"pixel_values": torch.ones(1, 3, 4, 4)})
    assert "inputs=encoding['pixel_values']." in str(caught.value)


# --- methods by name, and Captum's classes -------------------------------------------------------


def test_methods_by_name():
    model, ids = mamba_lm(), token_ids(2, 5)
    found = compare(model, ["LatimFlow", LatimNorm], ids, (-1, 3))
    expected = compare(model, [LatimFlow, LatimNorm], ids, (-1, 3))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for name in ("latimflow", "latim_flow", "LATIM-FLOW", "Latim Flow"):
        assert torch.equal(compare(model, name, ids, (-1, 3))["LatimFlow"], found["LatimFlow"])
    with pytest.raises(OptionError, match=r"names 'latinflow'.*Did you mean LatimFlow\?"):
        compare(model, ["latinflow"], ids, (-1, 3))


def test_gradients_at_ids():
    """Classes are made on the embeddings; what else would be given ids that have no gradient."""
    model, ids = mamba_lm(), token_ids(2, 5)
    embeddings = model.get_input_embeddings()(ids).detach()
    methods = [InputXGradient, "integrated_gradients"]
    expected = compare(model, methods, embeddings, (-1, 3))
    found = compare(model, methods, ids, (-1, 3), per_token=False)
    for name, relevance in expected.items():
        torch.testing.assert_close(found[name], relevance)
    for forward, method in (
        (lambda x: model(x).logits, InputXGradient),
        (model, InputXGradient(lambda x: model(x).logits)),
    ):
        with pytest.raises(InputError, match="Input X Gradient takes gradients at the inputs"):
            compare(forward, [method], ids, (-1, 3))


def test_methods_of_captum_that_are_made_on_a_module():
    model, pictures = vision("middle"), images(1)
    found = compare(model, ["deep_lift"], pictures, 3, per_token=False)["Deep Lift"]
    expected = DeepLift(model).attribute(pictures.clone(), target=3).detach()
    torch.testing.assert_close(found, expected)


# --- random modules ------------------------------------------------------------------------------


class DropPath(nn.Module):
    """As timm's, by its name and attribute."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob


class StochasticDepth(nn.Module):
    """As torchvision's."""

    def __init__(self, p):
        super().__init__()
        self.p = p


def jamba(attention_dropout: float) -> nn.Module:
    config = JambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=3,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
        attention_dropout=attention_dropout,
    )
    return JambaForCausalLM(config)


def lora(dropout: float) -> nn.Module:
    adapter = LoraConfig(r=2, target_modules=["in_proj"], lora_dropout=dropout)
    return get_peft_model(mamba_lm(), adapter)


RANDOM = {
    "dropout": (nn.Dropout, "Dropout"),
    "of channels": (nn.Dropout1d, "Dropout1d"),
    "alpha": (nn.AlphaDropout, "AlphaDropout"),
    "stochastic depth": (StochasticDepth, "p=0.5"),
    "paths": (DropPath, "drop_prob=0.5"),
    "attention of torch": (lambda p: nn.MultiheadAttention(4, 2, dropout=p), "dropout=0.5"),
    "LoRA": (lora, "lora_dropout"),
    "attention of Jamba": (jamba, "attention_dropout=0.5"),
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


def test_a_random_part_of_a_model_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    model[1].train()
    with pytest.raises(TrainingModeError, match=r"^The module '1' of class Dropout"):
        require_deterministic(model)
    with pytest.raises(TrainingModeError, match=r"^The model itself, a Dropout, is"):
        require_deterministic(model[1])


def test_modules_that_mix_the_batch():
    for norm in (nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)):
        with pytest.raises(TrainingModeError, match="examples mix"):
            require_deterministic(nn.Sequential(norm).train())
        require_deterministic(nn.Sequential(norm).eval())


class Told(nn.Module):
    """A Mamba, and a function that is told to be random whatever mode the model is in."""

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


@pytest.mark.parametrize("method", [LatimFlow])
@pytest.mark.parametrize("kind", TOLD)
def test_functions_told_to_be_random(kind, method):
    model = Told(TOLD[kind]).eval()
    with pytest.raises(
        TrainingModeError, match=r"^The model itself, a Told, calls torch's \w+ with"
    ):
        method(model).attribute(token_ids(), (-1, 3))
    told = Told(lambda x: F.dropout(F.dropout(x, 0.0), 0.5, False)).eval()
    method(told).attribute(token_ids(), (-1, 3))


def test_a_function_around_the_model_told_to_be_random():
    model = mamba_lm()
    with pytest.raises(TrainingModeError, match=r"^forward_func calls torch's dropout"):
        LatimFlow(lambda ids: F.dropout(model(ids).logits)).attribute(token_ids(), (-1, 3))


def test_batch_norms_without_statistics():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(TrainingModeError, match=r"'0' of class BatchNorm1d keeps no running.*mix"):
        require_deterministic(model)


def test_training_mode_without_chance():
    require_deterministic(mamba_lm().train())
    require_deterministic(nn.Sequential(nn.LayerNorm(3), nn.LSTM(2, 2)).train())
    model = nn.Sequential(nn.Dropout(0.5), nn.RReLU(), nn.BatchNorm1d(3)).train()
    for module in model:
        module.eval()
    require_deterministic(model)


# --- weights of a class of their own -------------------------------------------------------------


class Int8Weight(Tensor):
    """A weight held in 8 bits, which knows how to be multiplied with, and no more."""

    held: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, held, scale):
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=scale.dtype)

    def __init__(self, held, scale):
        self.held, self.scale = held, scale

    @classmethod
    def of(cls, weight: Tensor) -> nn.Parameter:
        scale = weight.detach().abs().amax(1) / 127
        held = (weight.detach() / scale[:, None]).round().to(torch.int8)
        return nn.Parameter(cls(held, scale), requires_grad=False)

    @classmethod
    def serves(cls, x: Tensor) -> bool:
        """Whether inputs can be multiplied."""
        return True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear and cls.serves(args[0]):
            x, weight, *bias = args
            return F.linear(x, weight.held.to(x) * weight.scale[:, None], *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held, args[0].scale)
        return cls.unknown(func)

    @classmethod
    def unknown(cls, func):
        raise NotImplementedError(f"{cls.__name__} dispatch: no implementation of {func}")


class Forward(Int8Weight):
    """One for inference, whose product has no backward."""

    @classmethod
    def serves(cls, x):
        return not x.requires_grad


class SilentForward(Forward):
    """One that leaves it to torch to say what is missing."""

    @classmethod
    def unknown(cls, func):
        return NotImplemented


def quantised(kind: type[Int8Weight]) -> tuple[nn.Module, nn.Module]:
    """A model with quantised weights, and the same one with plain tensors."""
    model, plain = mamba_lm(), mamba_lm()
    plain.load_state_dict(model.state_dict())
    for mixer, same in zip(mixers_of(model), mixers_of(plain), strict=True):
        for name in ("in_proj", "out_proj"):
            weight = kind.of(getattr(mixer, name).weight)
            getattr(mixer, name).weight = weight
            getattr(same, name).weight = nn.Parameter(weight.held * weight.scale[:, None])
    return model, plain


@each_method
def test_weights_that_are_only_multiplied_with(method):
    model, plain = quantised(Int8Weight)
    ids = token_ids(2, 5)
    expected = method(plain).attribute(ids, target=(-1, 3))
    found = method(model).attribute(ids, target=(-1, 3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [Forward, SilentForward])
@pytest.mark.parametrize("method", [LatimFlow, LatimLogit, LatimNorm])
def test_weights_that_lack_operations(method, kind):
    """Right where the method can do without, else an error that names layer, class and way out."""
    model, plain = quantised(kind)
    ids = token_ids(2, 5)
    if not method.needs_gradient and method is not LatimLogit:
        expected = method(plain).attribute(ids, target=(-1, 3))
        found = method(model).attribute(ids, target=(-1, 3))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        return
    named = (
        rf"^Layer 'backbone\.layers\.\d\.mixer\.in_proj': its weight is of class {kind.__name__}"
    )
    with pytest.raises(WeightsError, match=named + r".*without quantisation"):
        method(model).attribute(ids, target=(-1, 3))


def test_a_mixer_named_twice():
    model = randomise(mamba_lm())
    names = ["backbone.layers.1.mixer", mixers_of(model)[1]]
    with pytest.raises(NoMixerError, match=r"layers names 'backbone\.layers.1\.mixer' twice"):
        ImplicitAttention(model, layers=names)
