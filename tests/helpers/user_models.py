"""What users bring along: a language model in a folder, a classifier of their own, an image."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM, MambaModel, PreTrainedTokenizerFast
from zoo.folders import shapes

from captum_ssm.explain.loading import Source, load

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
    """Models, a tokenizer, a folder of transformers and an image, each made when it is needed."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.picture, self.folder, self.tmp = folder / "scene.png", folder / "lm", folder
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

    @cached_property
    def shapes(self) -> Path:
        """A folder of a classifier of images."""
        return shapes(self.tmp / "shapes")

    @cached_property
    def vim(self) -> nn.Module:
        return load(Source(str(self.shapes))).model

    @cached_property
    def image(self) -> Tensor:
        pixels = (np.random.default_rng(0).random((64, 64, 3)) * 255).astype("uint8")
        Image.fromarray(pixels).save(self.picture)
        return load(Source(str(self.shapes))).prepared([self.picture])
