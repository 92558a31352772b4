"""Models in folders and files, and an image, as users give them to the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from zoo.language import word_tokenizer
from zoo.small import mamba_lm, randomise

from captum_ssm.cli import main
from captum_ssm.models import VisionMamba
from captum_ssm.viz.html.pictures import png


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, and returns its output, or its message where it is to fail."""

    def run(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        printed = capsys.readouterr()
        if code:
            assert printed.err.startswith("captum-ssm: ") and "Traceback" not in printed.err
        return printed.err if code else printed.out

    return run


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A folder as transformers writes it."""
    folder = tmp_path / "language"
    mamba_lm().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder of a small sentence classifier with a tokenizer of words."""
    words = {word: i for i, word in enumerate(["[UNK]", "[PAD]", "good", "bad", "film"])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=5, intermediate_size=8, id2label={0: "bad", 1: "good"}, **sizes)
    fast.save_pretrained(tmp_path / "bert")
    randomise(BertForSequenceClassification(config)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def vim(tmp_path: Path) -> Path:
    """The weights of a VisionMamba of 3 x 3 patches and three classes."""
    model = VisionMamba(img_size=24, patch_size=8, depth=2, embed_dim=12, num_classes=3)
    save_file(randomise(model).state_dict(), tmp_path / "vim.safetensors")
    return tmp_path / "vim.safetensors"


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """The names of three classes."""
    path = tmp_path / "labels.txt"
    path.write_text("ant\ncat\ndog\n")
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """An image file."""
    path = tmp_path / "picture.png"
    path.write_bytes(png(torch.rand(50, 40, 3)))
    return path
