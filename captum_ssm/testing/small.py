"""Small models with random weights, and their inputs, on which methods are checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, CLASSES, WIDTH, CHANNELS = 19, 5, 8, 16
#: Number of tokens of an input, and number of padding tokens at the start of the second example.
TOKENS, HIDDEN = 7, 3


def padded_ids() -> tuple[Tensor, Tensor]:
    """Return token ids (2, 7) and a mask; the second example begins with 3 padding tokens."""
    ids, mask = torch.randint(VOCABULARY, (2, TOKENS)), torch.ones(2, TOKENS).long()
    mask[1, :HIDDEN] = 0
    return ids, mask


def _config() -> Any:
    from transformers import MambaConfig

    return MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=3, num_hidden_layers=2,
        time_step_rank=2, residual_in_fp32=False,
    )  # fmt: skip


def language() -> Any:
    """Return a small Mamba language model with a vocabulary of 19 tokens."""
    from transformers import MambaForCausalLM

    return randomized(MambaForCausalLM(_config()))


class Vision(nn.Module):
    """An image classifier: patches with a class token in the middle, Mamba blocks and a head."""

    def __init__(self) -> None:
        from transformers.models.mamba.modeling_mamba import MambaBlock

        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=(4, 3), stride=(4, 3))
        self.cls, self.positions = nn.Parameter(torch.ones(1, 1, WIDTH)), nn.Embedding(13, WIDTH)
        blocks = (MambaBlock(_config(), layer_idx=i) for i in range(2))  # type: ignore[no-untyped-call]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Any:
        x = self.patch(images).flatten(2).mT
        x = torch.cat([x[:, :6], self.cls.expand(len(x), -1, -1), x[:, 6:]], 1)
        x = x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 6])


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """Set random weights, scaled so that all earlier tokens affect the output; return the model."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith(("A_log", "dt_proj.bias")):
            noise = 0.5 * noise - 0.5
        elif "norm" in name:
            noise = 1 + 0.3 * noise
        elif parameter.dim() > 1:
            noise = noise * parameter[0].numel() ** -0.5
        parameter.copy_(noise)
    return model.eval()
