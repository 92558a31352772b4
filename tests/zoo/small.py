"""Small models with random parameters: nothing in them is zero, one or the same twice.

They are real transformers models; the classifiers and the vision model put real Mamba layers
between small modules of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaBlock, MambaModel

VOCABULARY = 19
WIDTH = 10
CLASSES = 5

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 3, "num_hidden_layers": 3,
    "time_step_rank": 2, "conv_kernel": 4,
}  # fmt: skip


@torch.no_grad()
def randomise(model: nn.Module) -> Any:
    """Random parameters for which tokens matter to each other over several steps."""
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        noise = torch.randn_like(parameter)
        if kind == "A_log":
            parameter.copy_(0.5 * noise - 0.5)
        elif name.endswith("dt_proj.bias"):
            parameter.copy_(noise - 0.5)
        elif "norm" in name.lower() and kind == "weight":
            parameter.copy_(1 + 0.3 * noise)
        elif "conv1d" in name:
            parameter.copy_(0.5 * noise)
        elif parameter.dim() > 1 and "embed" not in name:
            parameter.copy_(noise * parameter[0].numel() ** -0.5)
        else:
            parameter.copy_(noise)
    return model.eval()


def mamba_lm(**options: Any) -> Any:
    return randomise(MambaForCausalLM(MambaConfig(**(SMALL | options))))


def falcon_lm(**options: Any) -> Any:
    return randomise(FalconMambaForCausalLM(FalconMambaConfig(**(SMALL | options))))


class Classifier(nn.Module):
    """MambaModel, the last or the mean real token, a linear head."""

    def __init__(self, pool: str, **options: Any) -> None:
        super().__init__()
        self.backbone = MambaModel(MambaConfig(**(SMALL | options)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.pool = pool

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        out = self.backbone(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        tokens = out.last_hidden_state.to(self.head.weight.dtype)  # residuals are float32
        real = torch.ones(tokens.shape[:2]) if attention_mask is None else attention_mask
        real = real.to(tokens)
        if self.pool == "mean":
            return self.head((tokens * real[..., None]).sum(1) / real.sum(1, keepdim=True))
        last = (torch.arange(1, tokens.shape[1] + 1) * real).argmax(1)
        return self.head(tokens[torch.arange(len(tokens)), last])


def classifier(pool: str = "last", **options: Any) -> Any:
    return randomise(Classifier(pool, **options))


class VisionMamba(nn.Module):
    """Patches, maybe a cls token, positions, Mamba blocks, a norm, a linear head."""

    def __init__(self, cls: str | None, grid: tuple[int, int], layers: int = 2) -> None:
        super().__init__()
        config = MambaConfig(**(SMALL | {"num_hidden_layers": layers}))
        patches = grid[0] * grid[1]
        self.cls_position = {"head": 0, "middle": patches // 2, None: None}[cls]
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=(4, 3), stride=(4, 3))
        if cls is not None:
            self.cls_embed = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position_embed = nn.Parameter(torch.zeros(1, patches + (cls is not None), WIDTH))
        self.blocks = nn.ModuleList(MambaBlock(config, layer_idx=i) for i in range(layers))
        self.norm = nn.RMSNorm(WIDTH)  # a LayerNorm's gradient has no mean over channels
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        at = self.cls_position
        if at is not None:
            cls = self.cls_embed.expand(len(x), -1, -1)
            x = torch.cat([x[:, :at], cls, x[:, at:]], dim=1)
        x = x + self.position_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.to(self.norm.weight.dtype))  # residuals are float32
        return self.head(x.mean(1) if at is None else x[:, at])

    def patch_tokens(self) -> list[int]:
        tokens = range(self.position_embed.shape[1])
        return [t for t in tokens if t != self.cls_position]


GRID = (3, 4)


def vision(cls: str | None = "middle", grid: tuple[int, int] = GRID, layers: int = 2) -> Any:
    return randomise(VisionMamba(cls, grid, layers))


def images(batch: int = 2, grid: tuple[int, int] = GRID) -> Tensor:
    return torch.randn(batch, 3, 4 * grid[0], 3 * grid[1])


def token_ids(batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randint(VOCABULARY, (batch, tokens))


def mixers_of(model: nn.Module) -> list[Any]:
    """The mixer modules, in the order in which they run."""
    return [m for m in model.modules() if hasattr(m, "A_log")]
