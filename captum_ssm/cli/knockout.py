"""The subcommand ``captum-ssm knockout``, which cuts messages between tokens."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from .explain import add_source_to, escape_unprintable, load_model

if TYPE_CHECKING:
    from ..edges import Edge, EdgeEffects, Edges
    from ..explain.knockout import Cut
    from ..explain.loading import Loaded
    from ..viz.html.example import ShownExample, Subject
    from ..viz.html.outline import Outline

_DESCRIPTION = """Run a model on a text or an image without some of the messages between tokens,
and print how the prediction changes.  Without --from and --to, the command finds the strongest
messages and cuts each one separately.  MODEL is the same as for captum-ssm explain.

Name tokens by words of the text, by positions from 0 (-1 is the last), or by a slice such as 0:4,
or : for all.  Name patches by positions, or as in "row 2, column 3".

Examples:
  captum-ssm knockout recall-mamba "anna owns the lamp . bob owns the kite . ? anna owns the"
  captum-ssm knockout recall-mamba "anna owns the lamp . bob owns the kite . ? anna owns the" \\
      --layers 1 --from lamp --to -1"""

#: Components of a mixer, repeated here so that ``--help`` does not import torch.
_COMPONENTS = ("activation", "conv", "gate", "norm", "scan", "skip")
_NUMBER = re.compile(r"-?\d+")
_FIRST_ORDER = (
    "≈ The estimate is of first order: it ignores that later norms change if a large message "
    "is removed."
)
#: Options that need --from or --to, because they select parts of the named messages.
_OF_NAMED = ("heads", "component", "selection", "replace")


def add_to(commands: Any) -> None:
    """Add the subcommand ``knockout`` to the parser's subcommands."""
    parser = commands.add_parser(
        "knockout",
        help="cut messages between tokens, and print the new prediction",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT|IMAGE", help="the text, or an image file")
    parser.add_argument(
        "--target",
        help="class or next token whose logit is measured: a class's name or number, a token's "
        "text, or its id as id:NUMBER (default: the model's prediction)",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        metavar="L",
        help="numbers or names of mixers, a family's name, attention, or ssm (default: all)",
    )
    parser.add_argument(
        "--from", nargs="+", dest="sources", metavar="T", help="source tokens (default: "
        "all; the mixers' biases at the tokens of --to are removed, too)"
    )  # fmt: skip
    parser.add_argument(
        "--to", nargs="+", dest="targets", metavar="T", help="receiving tokens (default: all)"
    )
    parser.add_argument(
        "--heads", nargs="+", type=int, help="cut only these heads (Mamba-1: channels)"
    )
    parser.add_argument(
        "--component", nargs="+", choices=_COMPONENTS, help="cut only what passes these components"
    )
    parser.add_argument(
        "--selection",
        action="store_true",
        help="also remove the effect of the source tokens on B, C, steps and gates",
    )
    parser.add_argument(
        "--replace",
        metavar="mean|TEXT|IMAGE",
        help="replace messages instead of removing them: by the mean token's messages, or by those "
        "from a run on a different text or image with the same number of tokens",
    )
    parser.add_argument(
        "--top",
        type=int,
        default=8,
        metavar="N",
        help="number of messages to list without --from and --to (default: 8)",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_source_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run ``captum-ssm knockout``: load, cut, and print the model's new output.

    Raises:
        CaptumSSMError: when an option or the text cannot be used; the message names it.
    """
    selects_edges = options.sources is not None or options.targets is not None
    for name in () if selects_edges else _OF_NAMED:
        if getattr(options, name):
            raise OptionError(
                f"--{name} selects parts of the messages that --from and --to name, but both are "
                f"missing. Pass --from or --to, or leave --{name} out."
            )
    if options.top < 1:
        raise OptionError(f"--top {options.top}: pass a number of at least 1.")
    loaded = load_model(options)
    from ..edges import EdgeEffects
    from ..explain.typed_target import read_target
    from ..viz.html.example import find_subject
    from ..viz.html.outline import outline, patch_names

    subject = find_subject(loaded.model, None, None, loaded.tokenizer, loaded.labels)
    target = None
    if options.target is not None:
        target = read_target(subject, options.target, language=loaded.is_language)
    example = _read_example(loaded, subject, options.text, target)
    outlined = outline(subject, example)
    method = EdgeEffects(loaded.model)
    if example.is_image:
        example = replace(example, names=patch_names(outlined))
    names = list(example.names or ())
    facts = {"model": options.model, "explained": outlined.explained, "tokens": names}
    if selects_edges:
        cut = _cut_edges(options, loaded, subject, example, outlined, method)
        lines, facts = _cut_lines(cut), facts | _facts_of_cut(cut)
    else:
        layers = None if options.layers is None else _parse_layers(options.layers)
        edges = _strongest_edges(method, example.inputs, outlined.target, options.top, layers)
        lines = _edge_lines(edges, names, outlined)
        facts |= {"edges": [edge._asdict() | {"true": true} for edge, true in edges]}
    escape_unprintable()
    if options.json:
        print(json.dumps(facts, indent=1, allow_nan=False))
    else:
        print(f"Explained: {outlined.explained}.")
        print("\n".join(lines))


def _read_example(loaded: Loaded, subject: Subject, typed: str, target: Any = None) -> ShownExample:
    """Read a text, or the image in a file, as an example; the model decides which."""
    from ..viz.html.example import read_examples

    inputs: Any = typed if loaded.tokenizer is not None else loaded.read_images([Path(typed)])
    (example,) = read_examples(subject, inputs, target, None, None)
    return example


def _cut_edges(
    options: argparse.Namespace,
    loaded: Loaded,
    subject: Subject,
    example: ShownExample,
    outlined: Outline,
    method: EdgeEffects,
) -> Cut:
    """Cut the messages that the options name, all together."""
    from ..explain.knockout import cut_edges
    from ..viz.html.outline import label_of

    return cut_edges(
        method,
        example.inputs,
        outlined.target,
        _named_edges(options, example),
        lambda index, output: label_of(subject, index, output),
        replace=_replacement(options.replace, loaded, subject, example),
    )


def _named_edges(options: argparse.Namespace, example: ShownExample) -> Edges:
    """Return the messages that the options --layers, --from, --to and so on select."""
    from ..edges import Edges
    from ..explain.knockout import read_tokens

    def tokens(option: str, items: list[str] | None) -> Any:
        names = example.names or []
        return None if items is None else read_tokens(option, items, names, options.text)

    return Edges(
        None if options.layers is None else _parse_layers(options.layers),
        tokens("--from", options.sources),
        tokens("--to", options.targets),
        heads=options.heads,
        component=options.component,
        selection=options.selection,
    )


def _parse_layers(items: list[str]) -> Any:
    """Convert indices and names of layers on the command line to a value of ``Edges.layers``."""
    layers = [int(item) if _NUMBER.fullmatch(item) else item for item in items]
    return layers[0] if len(layers) == 1 else layers


def _replacement(typed: str | None, loaded: Loaded, subject: Subject, example: ShownExample) -> Any:
    """Return the argument ``replace`` of :func:`captum_ssm.knock_out`: the inputs of ``typed``."""
    if typed is None or typed == "mean":
        return typed
    other = _read_example(loaded, subject, typed)
    counts = [x.inputs.shape[1] for x in (other, example)]
    if counts[0] != counts[1]:
        raise OptionError(
            f"--replace {typed!r} has {counts[0]} tokens ({', '.join(other.names or ())}), but the "
            f"text has {counts[1]} ({', '.join(example.names or ())}). Pass a text with "
            f"{counts[1]} tokens."
        )
    return other.inputs


def _facts_of_cut(cut: Cut) -> dict[str, Any]:
    """Return the numbers of a cut for ``--json``."""
    return {
        "before": cut.before,
        "without": cut.without,
        "estimated": cut.estimated,
        "true": cut.true,
        "answers": [answer._asdict() for answer in cut.answers],
    }


def _cut_lines(cut: Cut) -> list[str]:
    """Return the lines to print for a cut: probabilities, and the change of the logit."""
    rows = [(_spelled(a.label), f"{a.before:.4f}", f"{a.without:.4f}") for a in cut.answers]
    lines = _table_lines(("probability of", "before", "after"), rows) if rows else []
    effect = f"The logit changes by {-cut.true:+.4g}"
    if not cut.answers:
        effect = (
            f"The output changes from {cut.before:.4g} to {cut.without:.4g}, by {-cut.true:+.4g}"
        )
    if cut.estimated is None:
        return [*lines, f"{effect}; there is no estimate with --selection or --replace."]
    return [*lines, f"{effect}; the estimate was {-cut.estimated:+.4g}."]


def _strongest_edges(
    method: EdgeEffects, inputs: Any, target: Any, count: int, layers: Any
) -> list[tuple[Edge, float]]:
    """Return the edges with the largest estimated effects, and the effects of cutting each one."""
    from ..edges import Edges

    edges = method.attribute(inputs, target).top(count, layers)[0]
    if not edges:
        return []
    cuts = [Edges(edge.name, edge.source, edge.target) for edge in edges]
    true = method.validate(inputs, target, edges=cuts).true
    return list(zip(edges, true.tolist(), strict=True))


def _edge_lines(edges: list[tuple[Edge, float]], names: Any, outlined: Outline) -> list[str]:
    """Return the lines to print for edges, each with the measured effect of cutting it."""
    if not edges:
        return ["No message has an effect on the output."]
    chances = [
        f"{_spelled(answer.label)} {answer.probability:.4f}" for answer in outlined.predictions[:3]
    ]
    rows = [
        (
            str(edge.layer),
            f"{_spelled(names[edge.source])} ({edge.source})",
            f"{_spelled(names[edge.target])} ({edge.target})",
            f"{'≈' * edge.first_order}{edge.effect:+.4g}",
            f"{true:+.4g}",
        )
        for edge, true in edges
    ]
    return [
        *([f"Probabilities: {', '.join(chances)}."] if chances else []),
        "The output falls by these numbers when each of the strongest messages is cut:",
        *_table_lines(("layer", "from", "to", "estimated", "measured"), rows),
        *([_FIRST_ORDER] if any(edge.first_order for edge, _ in edges) else []),
    ]


def _spelled(name: str) -> str:
    """Return a token as it is printed within a line: without surrounding spaces."""
    from ..viz.labels import visible_text

    return visible_text(name).strip()


def _table_lines(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with words in the first column and values in the others."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_left = [not _is_number(column[1]) for column in columns]
    return [
        "  "
        + "  ".join(
            cell.ljust(size) if left else cell.rjust(size)
            for cell, size, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def _is_number(cell: str) -> bool:
    try:
        float(cell.removeprefix("≈"))
    except ValueError:
        return False
    return True
