"""Real tokenizers that need no download, with no more ids than the small models embed."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

#: Ids below the smallest vocabulary of the tests' models.
SIZE = 15
WORDS = ["<s>", "<unk>", "owns", "the", "lamp", "anna", "bob", "$5", ".", "^$", "user", ":", "bot"]
CHAT = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} . {% endfor %}"
    "{% if add_generation_prompt %}bot : {% endif %}"
)


def word_tokenizer(chat: bool = False) -> Any:
    """One token per word, and ``<s>`` in front of every text."""
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    own = {"bos_token": "<s>", "unk_token": "<unk>", "chat_template": CHAT if chat else None}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **own)


def piece_tokenizer() -> Any:
    """Byte-pair pieces of words out of a, b and $, spaces included."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["<unk>"], show_progress=False)
    raw.train_from_iterator(["ab abb a$ aab bab $a bb aba abab b$b"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def word_piece_tokenizer() -> Any:
    """WordPiece, whose pieces inside a word begin with ##."""
    words = ["[UNK]", "[CLS]", "go", "##ing", "##es", "home", ".", "你", "好"]
    raw = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", cls_token="[CLS]")


def byte_tokenizer() -> Any:
    """One token per byte, so that a character may be several tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=256, show_progress=False)
    raw.train_from_iterator([""], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw)
