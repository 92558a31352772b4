"""The pages that several files of tests open, and visualizers of sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.insights_examples import softmax
from zoo.small import VOCABULARY, mamba_lm, token_ids, vision

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    report,
)
from captum_ssm.attr import Comparison
from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature
from captum_ssm.models import load_bundled

HOSTILE = [
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "$x_1$", "\u200b",
    "שלום", "👩\u200d🚀", "a\nb", "\"'&amp;", "<!--", "",
]  # fmt: skip
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
METHODS = [LatimFlow, MambaAttribution, ImplicitAttentionRollout]
KINDS = ["attention", "contributions"]


def of_recall(path: Path, texts: str | list[str] = PROMPT, **options: Any) -> object:
    """A report of the bundled model, such as that of the README's example."""
    model, vocabulary = load_bundled()
    return report(model, texts, tokenizer=vocabulary, path=path, **options)


def short_texts(path: Path) -> object:
    names = [[f"{letter}{i}" for i in range(17)] for letter in "wv"]
    options: dict[str, Any] = {"tokens": names, "matrices": KINDS}
    options |= {"options": {LatimFlow.get_name(): {"rule": "frozen"}}}  # which tells no roles
    return report(mamba_lm(), token_ids(2, 17), METHODS, **options, path=path)


def lines(path: Path) -> object:
    """A report of a text that scrolls, whose asking token is in its middle."""
    given: dict[str, Any] = {"tokens": [f"word{i}" for i in range(640)], "target": (330, 3)}
    return report(mamba_lm(), token_ids(1, 640), [LatimFlow], **given, graph=4, path=path)


def many_sentences(path: Path) -> object:
    """A report of 41 sentences and a question."""
    text = " . ".join(f"{['bob', 'dora', 'lena'][i % 3]} owns the kite" for i in range(40))
    asked = f"{text} . anna owns the lamp . ? anna owns the"
    return of_recall(path, asked, methods={"it": LatimFlow}, options={"it": {"rule": "frozen"}})


def decomposition(path: Path, method: Any = LatimFlow, **options: Any) -> object:
    model, vocabulary = load_bundled()
    texts = [PROMPT, PROMPT.replace("lamp", "drum")]
    ids = torch.tensor([vocabulary.encode(text) for text in texts])
    targets = [(-1, vocabulary.id_of(word)) for word in ("lamp", "drum")]
    found = method(model).decompose(ids, targets, **options)
    return found.named([text.split() for text in texts]).to_html(path)


def maps(path: Path) -> object:
    found = {"one": torch.randn(1, 4, 6), "two": torch.zeros(1, 4, 6)}
    return Comparison(found).to_html(path)


#: What makes the page of each name.
MAKE: dict[str, Callable[[Path], object]] = {
    "questions": of_recall,  # two by default
    "readme": lambda path: of_recall(path, methods=[LatimFlow, LatimNorm]),
    "short": short_texts,
    "long": lambda path: report(mamba_lm(), token_ids(2, 410), METHODS, matrices=KINDS, path=path),
    "lines": lines,
    "sentences": many_sentences,
    "image": lambda path: report(
        vision("middle", (4, 6)), torch.rand(2, 3, 16, 18), METHODS, path=path
    ),
    "answers": lambda path: of_recall(
        path, [PROMPT, PROMPT.replace("lamp", "drum")], methods=LatimFlow, generate=8, hops=2
    ),
    "results": lambda path: decomposition(path, rule="centered"),
    "layers": lambda path: decomposition(path, LatimLogit),
    "maps": maps,
}


def sentences(
    ids: Sequence[Sequence[int]], words: Sequence[str] = (), models: int = 1, **chosen: Any
) -> AttributionVisualizer:
    """A visualizer of texts, a batch each, which so many models read."""
    words = words or [f"w{i}" for i in range(VOCABULARY)]
    feature = TextFeature("prompt", None, None, lambda ids: [words[i] for i in ids[0]])
    readers = [mamba_lm(vocab_size=len(words)) for _ in range(models)]
    batches = [Batch(torch.tensor([each]), None) for each in ids]
    made = AttributionVisualizer(readers, list(words), feature, batches, softmax)
    rule = {"rule": "frozen"}  # which tells no roles
    made.config = FilterConfig("LatimFlow", **({"attribution_arguments": rule} | chosen))
    return made


def number(text: str) -> float:
    """A number as a page writes it."""
    return float(text.replace("−", "-"))
