"""Models of the width of Mamba 130M, one for each kind of operator.

Their weights are random, which changes no cost; the vocabulary is small, for its logits would
outweigh a few layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, VOCABULARY, WORD = 768, 256, 5


def build(family: str, layers: int, **options: Any) -> nn.Module:
    """A frozen model with so many layers of the family; ``options`` replace those of its config."""
    torch.manual_seed(0)
    return {**FAMILIES, **HYBRIDS}[family](layers, **options).eval().requires_grad_(False)


def example(family: str, length: int) -> Tensor:
    """One random input: an image for Vim, whatever ``length`` is, else ids (1, length)."""
    if family == "Vim-S":
        return torch.randn(1, 3, 224, 224)
    return torch.randint(VOCABULARY, (1, length))


def target(family: str) -> Any:
    """What is explained of :func:`example`, in Captum's form."""
    return WORD if family == "Vim-S" else (-1, WORD)


def gradient(model: Any, x: Tensor) -> Tensor:
    """One forward and backward: the target's gradient with respect to pixels or embeddings."""
    if x.is_floating_point():
        start = x.clone().requires_grad_()
        return torch.autograd.grad(model(start)[0, WORD], start)[0]
    table = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    uncached = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    begun: list[Tensor] = []

    def begin(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        begun.append(out.detach().requires_grad_())
        return begun[-1]

    hook = table.register_forward_hook(begin)
    try:
        number = model(x, **uncached).logits[0, -1, WORD]
    finally:
        hook.remove()
    return torch.autograd.grad(number, begun[0])[0]


def _language(family: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH}

    def built(layers: int, **replaced: Any) -> nn.Module:
        import transformers

        counted = {k: v(layers) if callable(v) else v for k, v in options.items()}
        given = {**sizes, "num_hidden_layers": layers, **counted, **replaced}
        made = getattr(transformers, config)(**given)
        model: nn.Module = getattr(transformers, family)(made)
        return model

    return built


def _qwen3_next(kinds: list[str]) -> Callable[..., nn.Module]:
    return _language(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        layer_types=lambda layers: [kinds[i % len(kinds)] for i in range(layers)],
        linear_num_key_heads=6,
        linear_num_value_heads=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=128,
        intermediate_size=2 * WIDTH,
        num_experts=0,
    )


def _vim(layers: int) -> nn.Module:
    from captum_ssm.models import vim_small

    model: nn.Module = vim_small(depth=layers)
    return model


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "Mamba": _language("MambaForCausalLM", "MambaConfig"),
    "Vim-S": _vim,
    "Mamba-2": _language(
        "Mamba2ForCausalLM", "Mamba2Config", head_dim=64, num_heads=24, n_groups=1
    ),
    "RG-LRU": _language(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        lru_width=2 * WIDTH,
        num_attention_heads=12,
        intermediate_size=2 * WIDTH,
        block_types=["recurrent"],
    ),
    "RWKV-4": _language("RwkvForCausalLM", "RwkvConfig"),
    "Gated DeltaNet": _qwen3_next(["linear_attention"]),
    "softmax": _language(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        num_attention_heads=12,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=2**17,
        attn_implementation="eager",
    ),
}
#: Of several kinds, which tables of kinds leave out.
HYBRIDS = {"hybrid 3:1": _qwen3_next(["linear_attention"] * 3 + ["full_attention"])}
