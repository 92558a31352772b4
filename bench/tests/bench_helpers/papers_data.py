"""Stand-ins of the checkpoints and data that docs/howto/papers.md reads, in the same layouts.

Models have random weights and a few channels, data sets one to three examples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from captum_ssm.models import VisionMamba

#: Classes of the image classifiers, sides of their images and patches, blocks of Vision Mamba.
CLASSES, SIDE, PATCH, BLOCKS = 5, 224, 112, 17

QUESTION = {"stem": "what is blue ?", "choices": [("the sky", "A"), ("the grass", "B")]}
PAIRS = [("das ist blau", "that is blue", "1-1 2-2 3p3"), ("ja", "yes", "1-1")]
PROMPTS = {
    "niah_single_1": ("the key is 4 . what is the key ?", ["4"]),
    "niah_multikey_1": ("the key of anna is 4 . the key of bob is 2 . what is the key ?", ["2"]),
    "fwe": ("pilo . . gema pilo . what are the words ?", ["pilo", "gema"]),
}


def make(folder: Path) -> None:
    """Write ``models`` and ``data`` into a folder."""
    for name in ("models", "data"):
        (folder / name).mkdir()
    _models(folder / "models")
    _images(folder / "data")
    _texts(folder / "data")


def _models(folder: Path) -> None:
    sizes: dict[str, Any] = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 8}
    vim = VisionMamba(**sizes, depth=BLOCKS, num_classes=CLASSES)
    torch.save({"model": vim.state_dict()}, folder / "vim_small.pth")
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    heads = {"num_attention_heads": 2}
    deit = ViTConfig(**small, **heads, image_size=SIDE, patch_size=PATCH, num_labels=CLASSES)
    ViTForImageClassification(deit).save_pretrained(folder / "deit-small")
    prepares = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
    }
    (folder / "deit-small" / "preprocessor_config.json").write_text(json.dumps(prepares), "utf-8")
    words = _tokenizer()
    known = {"vocab_size": len(words), "num_hidden_layers": 2, "eos_token_id": None}
    made = {
        "mamba": MambaForCausalLM(MambaConfig(**known, hidden_size=16, state_size=4)),
        "mamba2": Mamba2ForCausalLM(
            Mamba2Config(**known, hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1)
        ),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


def _tokenizer() -> Any:
    """One token per word of the stand-ins."""
    texts = [QUESTION["stem"], "Question: Answer: A. B. A B ="]
    texts += [text for text, _ in QUESTION["choices"]]
    texts += [text for pair in PAIRS for text in pair[:2]]
    texts += [text for text, _ in PROMPTS.values()]
    words = ["<unk>", *dict.fromkeys(" ".join(texts).split())]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def _images(folder: Path) -> None:
    with h5py.File(folder / "gtsegs_ijcv.mat", "w") as data:
        kept = data.create_group("#refs#")
        cells: dict[str, list[Any]] = {"img": [], "gt": []}
        for number, (height, width) in enumerate([(40, 60), (50, 30)]):
            picture = kept.create_dataset(f"img{number}", data=_noise(height, width).T)
            mask = kept.create_dataset(f"mask{number}", data=_labels(height, width).T)
            inner = kept.create_dataset(f"gt{number}", (1, 1), dtype=h5py.ref_dtype)
            inner[0, 0] = mask.ref
            cells["img"].append(picture.ref)
            cells["gt"].append(inner.ref)
        for name, references in cells.items():
            found = data.create_dataset(f"value/{name}", (len(references), 1), dtype=h5py.ref_dtype)
            for number, reference in enumerate(references):
                found[number, 0] = reference


def _texts(folder: Path) -> None:
    choices = [{"text": text, "label": label} for text, label in QUESTION["choices"]]
    question = {"stem": QUESTION["stem"], "choices": choices}
    record = {"id": "7", "question": question, "answerKey": "A"}
    _write(folder / "ARC-Easy-Test.jsonl", [json.dumps(record)])
    for name, lines in zip(("de", "en", "links.talp"), zip(*PAIRS, strict=True), strict=True):
        _write(folder / "alignment" / name, lines)
    links = [link for _, _, link in PAIRS]
    _write(folder / "iwslt17" / "links.talp", links)
    for place, language in enumerate(("de", "en")):
        segments = [f'<seg id="{i}"> {pair[place]} </seg>' for i, pair in enumerate(PAIRS, start=1)]
        lines = ["<mteval><srcset><doc>", *segments, "</doc></srcset></mteval>"]
        _write(folder / "iwslt17" / f"IWSLT17.TED.tst2015.de-en.{language}.xml", lines)
    for task, (text, answers) in PROMPTS.items():
        entry = {"index": 0, "input": text, "outputs": answers, "length": 32}
        _write(folder / "ruler" / task / "validation.jsonl", [json.dumps(entry)])


def _noise(height: int, width: int) -> Any:
    return np.random.randint(0, 256, (height, width, 3), dtype=np.uint8)


def _labels(height: int, width: int) -> Any:
    """1 for an object in the middle, else 0."""
    labels = np.zeros((height, width), dtype=np.uint8)
    labels[height // 4 : height // 2, width // 4 : width // 2] = 1
    return labels


def _write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
