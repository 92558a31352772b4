"""The subcommand ``captum-ssm serve``, which serves a page of examples and explanations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError

if TYPE_CHECKING:
    from ..explain.loading import Loaded
    from ..insights.visualizer import AttributionVisualizer

_DESCRIPTION = """Show and explain models' predictions for texts or images on a page that only this
machine can open.  MODEL is a bundled model, a folder of a transformers model, or a file of Vision
Mamba weights; nothing is downloaded.  The name of a file's folder is its label if it is the name of
a class.  Press Ctrl-C to stop.

Examples:
  captum-ssm serve recall-mamba --texts prompts.txt
  captum-ssm serve vim_tiny.pth vim_small.pth --images val --labels classes.txt"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``serve`` to the parser's subcommands."""
    parser = commands.add_parser(
        "serve",
        help="browse explanations of texts or images on a page",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="models to show side by side")
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--texts", type=Path, help="file with a text per line, or folder of *.txt")
    inputs.add_argument("--images", type=Path, help="folder of image files")
    parser.add_argument("--labels", type=Path, help="file with one class name per line")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="default: each model's own")
    parser.add_argument("--device", default="cpu", help="device of the models (default: cpu)")
    parser.add_argument("--port", type=int, help="port of the page (default: a free one)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Serve the page until the command is interrupted."""
    visualizer_of(options).serve(blocking=True, debug=options.debug, port=options.port)


def visualizer_of(options: argparse.Namespace) -> AttributionVisualizer:
    """Load the models and examples that the options name, and return their visualizer."""
    from ..explain.loading import Source, load
    from ..insights.files import Images, TextFiles, common_classes
    from ..insights.visualizer import AttributionVisualizer

    names = None if options.labels is None else options.labels.read_text("utf-8").splitlines()
    loaded = [
        load(Source(model, options.tokenizer)).move_to(options.device, "float32")
        for model in options.models
    ]
    _check_kinds(loaded, options)
    classes = common_classes(options.models, loaded, names)
    dataset: TextFiles | Images
    if options.texts:
        dataset = TextFiles(options.texts, loaded, classes)
    else:
        dataset = Images(options.images, loaded, classes)
    return AttributionVisualizer(
        [entry.model for entry in loaded],
        classes,
        dataset.feature,
        dataset,
        score_func=lambda output: output.float().softmax(-1),
    )


def _check_kinds(loaded: list[Loaded], options: argparse.Namespace) -> None:
    for name, entry in zip(options.models, loaded, strict=True):
        if options.texts and entry.tokenizer is None:
            raise OptionError(f"--texts: {name} reads images. Use --images.")
        if options.images and entry.prepare is None:
            raise OptionError(f"--images: {name} reads texts. Use --texts.")
