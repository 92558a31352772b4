"""What ``captum-ssm demo`` shows: a trained Mamba, its answers, and where they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ._files import make_folder, replacing
from .attr import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution
from .models.bundled import load_bundled
from .tasks.recall import Example, generate, parse_prompt
from .tasks.recall_batch import accuracy
from .viz import plot_matrices, plot_text

PROMPT = (
    "anna owns the red lamp . today bob owns the kite . carl owns the old drum . "
    "perhaps dora owns the clock . ? bob owns the"
)
#: Fresh prompts on which the methods are scored.
_SCORED = 100
_SEED = 2024

#: token ids (1, L) and the answer's id in, relevance (1, L) out
Method = Callable[[Tensor, int], Tensor]


def run(prompt: str | None, out: Path) -> None:
    """Explain one prompt, score the methods on fresh ones, write pictures to ``out``.

    Args:
        prompt: a prompt of the recall task. Default (None): a built-in one.
        out: folder for the pictures; made if missing.
    """
    example = parse_prompt(PROMPT if prompt is None else prompt)
    make_folder(out)
    torch.set_num_threads(1)  # the model is small: threads would wait for each other
    model, vocabulary = load_bundled()
    fresh = generate(_SCORED, _SEED)
    ids = torch.tensor([example.tokens])
    with torch.no_grad():
        chances = model(ids).logits[0, -1].softmax(-1)
    answer = int(chances.argmax())
    evidence = example.value_position
    print("A two-layer Mamba trained to recall who owns what (bundled, nothing is downloaded).")
    print(f"It answers {accuracy(model, fresh):.0%} of {_SCORED} fresh prompts correctly.\n")
    print(f"Prompt    {example.text}")
    print(f"Answer    {vocabulary.vocab[answer]}   (probability {float(chances[answer]):.3f})")
    print(f"Evidence  the word {example.words[evidence]!r} at position {evidence}\n")

    methods = _methods(model)
    found = {name: method(ids, answer)[0] for name, method in methods.items()}
    for name, relevance in found.items():
        print(f"{name}: where the answer comes from")
        _print_largest(example, relevance)
        share = _share_found(method=methods[name], examples=fresh)
        print(f"  names the evidence first in {share:.0%} of the fresh prompts\n")

    captions = {f"{name}: evidence framed": _without_query(r) for name, r in found.items()}
    text, _ = plot_text(example.words, captions, marked=[evidence], title="Who owns what?")
    layers = ImplicitAttention(model).matrices(ids)
    grid, _ = plot_matrices(layers, example.words, absolute=True)
    for figure, name in ((text, "relevance.png"), (grid, "matrices.png")):
        with replacing(out / name) as file:
            figure.savefig(file, dpi=150)
        print(f"wrote {out / name}")


def _methods(model: nn.Module) -> dict[str, Method]:
    attention, rollout = ImplicitAttention(model), ImplicitAttentionRollout(model)
    attribution = MambaAttribution(model)
    return {
        "Implicit attention": lambda ids, answer: attention.attribute(ids),
        "Rollout": lambda ids, answer: rollout.attribute(ids),
        # As the published scripts have it, from the second layer on, which does the recalling.
        "Mamba-Attribution": lambda ids, answer: attribution.attribute(
            ids, target=(-1, answer), recipe="published_code", start_layer=1
        ),
    }


def _without_query(relevance: Tensor) -> Tensor:
    """The asking token's own entry says nothing about where the answer comes from."""
    out = relevance.clone()
    out[-1] = 0
    return out


def _share_found(method: Method, examples: list[Example]) -> float:
    hits = 0
    for example in examples:
        relevance = _without_query(method(torch.tensor([example.tokens]), example.answer_id)[0])
        hits += int(relevance.argmax()) == example.value_position
    return hits / len(examples)


def _print_largest(example: Example, relevance: Tensor, count: int = 5) -> None:
    relevance = _without_query(relevance)
    largest = float(relevance.max().clamp_min(1e-30))
    for i in relevance.topk(min(count, len(relevance))).indices.tolist():
        bar = "#" * max(0, round(24 * float(relevance[i]) / largest))
        mark = "  <- evidence" if i == example.value_position else ""
        print(f"  {i:3d} {example.words[i]:10s} {float(relevance[i]):9.4f} {bar}{mark}")
