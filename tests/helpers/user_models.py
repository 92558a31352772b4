"""A user's own language model in a folder, and a classifier."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM, MambaModel, PreTrainedTokenizerFast

TEXT = "anna owns the lamp . bob owns the kite . ? anna owns the"
_WORDS = ("<unk>", "<pad>", "<eos>", *dict.fromkeys(TEXT.split()), "carl", "drum")


class Classifier(nn.Module):
    """A Mamba with a head of the user's own."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.backbone = MambaModel(config)
        self.head = nn.Linear(config.hidden_size, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.backbone(ids).last_hidden_state.mean(1))


class Made:
    """Models, a tokenizer and a folder of transformers."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.tmp = folder / "lm", folder
        raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, "<unk>"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
        self.tok = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
        sizes = {"hidden_size": 24, "state_size": 8, "num_hidden_layers": 2}
        special_ids = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 2}
        self.config = MambaConfig(vocab_size=len(_WORDS), **sizes, **special_ids)
        self.lm = MambaForCausalLM(self.config).eval()
        self.lm.save_pretrained(self.folder)
        self.tok.save_pretrained(self.folder)
        self.ids = self.tok(TEXT, return_tensors="pt").input_ids
        self.emb = self.lm.get_input_embeddings()(self.ids).detach()

    @cached_property
    def classifier(self) -> Classifier:
        return Classifier(self.config).eval()
