"""The subcommand ``captum-ssm demo``, which explains answers of the bundled Mamba model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._files import make_folder, replacing
from .surroundings import add_force_to, check_new

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..models.recall import Example

PROMPT = (
    "anna owns the red lamp . today bob owns the kite . carl owns the old drum . "
    "perhaps dora owns the clock . ? bob owns the"
)
_TEXT_TITLE = "Who owns what? The evidence is framed."
_GRID_TITLE = (
    "Implicit attention: how much each word receives from earlier words "
    "(absolute values; the largest in each layer is 1)"
)
#: File names of the pictures: relevance of words, and implicit attention matrices of the layers.
_PICTURES = ("relevance.png", "matrices.png")
#: The number of random prompts on which the methods are scored.
_SCORED = 100
_SEED = 2024


class _Method(NamedTuple):
    """A method; ``relevance`` is a function of ids (1, L) and the answer's id, and returns (L,)."""

    name: str
    says: str
    relevance: Callable[[Tensor, int], Tensor]


def add_to(commands: Any) -> None:
    """Add the subcommand ``demo`` to the parser's subcommands."""
    parser = commands.add_parser(
        "demo",
        help="explain the bundled trained Mamba model and write pictures",
        description="Explain the bundled trained Mamba model. Example: captum-ssm demo --out demo",
    )
    parser.add_argument("--prompt", help="a prompt for the model's task; see the model card")
    parser.add_argument(
        "--out", type=Path, default=Path("captum-ssm-demo"), help="folder for the pictures"
    )
    add_force_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Explain one prompt, score the methods on random prompts, and write pictures."""
    import torch

    from ..models.recall import parse_prompt

    example = parse_prompt(PROMPT if options.prompt is None else options.prompt)
    check_new((options.out / name for name in _PICTURES), options)
    make_folder(options.out)
    torch.set_num_threads(1)  # the model is so small that one thread is fastest
    _print_and_plot(example, options.out)


def _print_and_plot(example: Example, out: Path) -> None:
    """Print the answer to one prompt and its relevance, and write two pictures to ``out``."""
    import torch

    from ..attr import ImplicitAttention
    from ..models import load_bundled
    from ..models.recall import accuracy, generate
    from ..viz import plot_matrices, plot_text

    model, vocabulary = load_bundled()
    new_prompts = generate(_SCORED, _SEED)
    ids = _token_ids(example)
    with torch.no_grad():
        chances = model(ids).logits[0, -1].softmax(-1)
    answer = int(chances.argmax())
    evidence = example.value_position
    print("A two-layer Mamba trained to recall who owns what (bundled, nothing is downloaded).")
    print(f"It answers {accuracy(model, new_prompts):.0%} of {_SCORED} new prompts correctly.\n")
    print(f"Prompt    {example.text}")
    print(f"Answer    {vocabulary.vocab[answer]}   (probability {float(chances[answer]):.3f})")
    print(f"Evidence  the word {example.words[evidence]!r} at position {evidence}\n")

    methods = _methods(model)
    relevance = {method.name: method.relevance(ids, answer) for method in methods}
    for method in methods:
        print(f"{method.name}: {method.says}")
        _print_strongest_words(example, relevance[method.name])
        share = _share_with_evidence_first(method, new_prompts)
        print(f"  the evidence is its strongest word in {share:.0%} of the new prompts\n")

    layers = ImplicitAttention(model).matrices(ids)
    text, _ = plot_text(example.words, relevance, marked=[evidence], title=_TEXT_TITLE)
    grid, _ = plot_matrices(layers, example.words, title=_GRID_TITLE, absolute=True)
    for figure, name in zip((text, grid), _PICTURES, strict=True):
        with replacing(out / name) as file:
            figure.savefig(file, dpi=150)
        print(f"wrote {out / name}")


def _methods(model: nn.Module) -> list[_Method]:
    """Return the two compared methods for a model."""
    from ..attr import LatimFlow, LatimNorm

    flow, norm = LatimFlow(model), LatimNorm(model)
    return [
        _Method(
            "LatimFlow",
            "how much each word adds to the answer's logit; words and biases sum to it",
            lambda ids, answer: flow.attribute(ids, target=(-1, answer))[0],
        ),
        _Method(
            "LatimNorm",
            "how much each word adds to the last token's residual stream, for any answer",
            lambda ids, answer: norm.attribute(ids)[0],
        ),
    ]


def _share_with_evidence_first(method: _Method, examples: Sequence[Example]) -> float:
    """Return the share of examples whose most relevant word is the evidence for the answer."""
    hits = 0
    for example in examples:
        relevance = method.relevance(_token_ids(example), example.answer_id)
        hits += int(relevance.abs().argmax()) == example.value_position
    return hits / len(examples)


def _token_ids(example: Example) -> Tensor:
    """Return the token ids of a prompt, (1, L)."""
    import torch

    return torch.tensor([example.tokens])


def _print_strongest_words(example: Example, relevance: Tensor, count: int = 5) -> None:
    """Print the words with the largest absolute relevance, each with a bar of + or - signs."""
    strength = relevance.abs()
    longest = float(strength.max().clamp_min(1e-30))
    for i in strength.topk(min(count, len(strength))).indices.tolist():
        bar = ("#" if relevance[i] > 0 else "-") * round(24 * float(strength[i]) / longest)
        mark = "  <- evidence" if i == example.value_position else ""
        print(f"  {i:3d} {example.words[i]:10s} {float(relevance[i]):+9.4f} {bar}{mark}")
