"""What stands between the mixers of real models, held to what changes where a token does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.origins import (
    is_right,
)
from helpers.versions import named
from torch import Tensor, nn
from zoo import attention, mamba

from captum_ssm.operators.kernels.arithmetic import unseen
from captum_ssm.tracing.hooks import swap_first
from captum_ssm.tracing.places import Origin, Places

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class Streams:
    """A model whose mixers return what they are told to; what entered them is noted.

    Args:
        model: the model.
        start: what returns source 0, for a model that is not given it. Default: None.
        dtype: what it computes in. Default: torch.float64.
    """

    def __init__(
        self,
        model: nn.Module,
        start: nn.Module | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model = model.to(dtype).eval()
        self.model.config.use_cache = False
        self.rounding = 100 * torch.finfo(dtype).eps
        named_so = [m for m in model.modules() if type(m).__name__.endswith(MIXERS)]
        self.mixers = [m for m in named_so if not set(named_so) & set([*m.modules()][1:])]
        self.start = start
        self.given: dict[int, Tensor] = {}
        self.origins: list[Origin | None] = []

    def __call__(self, inputs: Tensor, places: Places | None = None) -> list[Tensor]:
        """What entered each mixer, and the model's output; where they come from is noted."""
        seen: list[Tensor] = []
        contexts: list[Any] = []
        self.origins = []

        def note(x: Tensor) -> None:
            self.origins.append(None if places is None else places.origin(x))
            with unseen():
                seen.append(x.clone())

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            note(next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
            contexts.append(unseen())
            contexts[-1].__enter__()

        def returned(source: int, output: Any) -> Any:
            self.given.setdefault(source, swap_first(output, _copy)[1])
            new = self.given[source].clone()
            if places is not None:
                places.declare(new, source)
            return swap_first(output, lambda _: new)[0]

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            contexts.pop().__exit__(None, None, None)
            return returned(len(seen), output)

        with ExitStack() as stack, torch.no_grad():
            for module in self.mixers:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(after).remove)
            if self.start is not None:
                start = self.start.register_forward_hook(lambda m, a, out: returned(0, out))
                stack.callback(start.remove)
            if places is not None:
                stack.enter_context(places)
                places.begin(inputs)
            out = self.model(inputs)
            note(out if isinstance(out, Tensor) else getattr(out, "logits", out[0]))
        return seen

    def changes(self, inputs: Tensor) -> list[list[Tensor]]:
        """Of each tensor, which elements change with which tokens of each source."""
        before = self(inputs)
        found: list[list[Tensor]] = [[] for _ in before]
        if self.start is None:
            self.given[0] = inputs
        for source in range(len(before)):
            x = self.given[source]
            changes: list[list[Tensor]] = [[] for _ in before]
            for token in x.flatten(0, 1):
                kept = token.clone()
                if x.is_floating_point():
                    token += torch.randn_like(token)
                else:
                    token.copy_((token + 1) % 13)
                for change, old, new in zip(changes, before, self(inputs), strict=True):
                    change.append((new - old).abs() > self.rounding)
                token.copy_(kept)
            for all_of, change in zip(found, changes, strict=True):
                all_of.append(torch.stack(change, -1))
        return found


#: How the names of classes end that mix tokens.
MIXERS = ("Mixer", "Attention", "MambaLayer", "DeltaNet")


def _moe(family: str, experts: str) -> Streams:
    config, model = named(f"{family}Config"), named(f"{family}ForCausalLM")
    sizes = {"num_local_experts" if family == "Mixtral" else "num_experts": 4}
    options: dict[str, Any] = {
        "vocab_size": 13,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "experts_implementation": experts,
    }
    dtype = torch.float32 if experts == "grouped_mm" else torch.float64
    return Streams(mamba.randomise(model(config(**options | sizes))), dtype=dtype)


def _of_family(family: str) -> Streams:
    return Streams(attention.attention_model(family))


def _vit() -> Streams:
    model = attention.attention_model("vit")
    return Streams(model, model.vit.embeddings.patch_embeddings)


def _rwkv() -> Streams:
    config = named("RwkvConfig")(vocab_size=13, hidden_size=7, num_hidden_layers=2)
    return Streams(mamba.randomise(named("RwkvForCausalLM")(config)))


MODELS: dict[str, Callable[[], Streams]] = {
    "mamba": lambda: Streams(mamba.transformers_model("mamba")),
    "mixtral": lambda: _moe("Mixtral", "eager"),
    "mixtral batched": lambda: _moe("Mixtral", "batched_mm"),
    "mixtral grouped": lambda: _moe("Mixtral", "grouped_mm"),
    "qwen3_moe": lambda: _moe("Qwen3Moe", "eager"),
    "vit": _vit,
} | {
    family: lambda family=family: _of_family(family)
    for family in ("llama", "gpt2", "bert", "jamba", "zamba2", "qwen3_5_moe", "gpt_neox")
}


@pytest.mark.parametrize("name", [*MODELS, "rwkv"])
def test_real_models(name: str) -> None:
    streams = MODELS[name]() if name in MODELS else _rwkv()
    inputs = torch.randn(2, 3, 12, 12).double() if name == "vit" else torch.randint(13, (2, 4))
    streams(inputs, Places(lambda: "model"))
    origins, truth = streams.origins, streams.changes(inputs)
    assert len(origins) == len(streams.given) >= 3
    for origin, wanted in zip(origins, truth, strict=True):
        assert origin.mixed is None
        assert is_right(origin, wanted)
    if name == "rwkv":  # its feed-forward reads the token before, too
        assert [len(entries) for entries in origins[1].sources.values()] == [2, 2]
    elif name == "vit":  # a token for the class is put in front
        assert origins[0].tokens(0)[0][0].tolist() == [-1, *range(9)]
        assert origins[1].is_identity(1)
    else:
        assert all(o.is_identity(source) for o in origins[:-1] for source in o.sources)
