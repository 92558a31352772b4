"""The subcommand ``captum-ssm explain``, which explains predictions for texts or images."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import make_folder
from ..errors import OptionError
from .surroundings import add_force_to, check_new

if TYPE_CHECKING:
    from torch import Tensor

    from ..explain.loading import Loaded
    from ..viz.html.explanation import Explanation

_DESCRIPTION = """Explain a model's predictions for texts or images, and write a report, pictures or
numbers.  MODEL is a bundled model, a folder of a transformers model, a file of Vision Mamba or
VMamba weights, or with --hub a name on the Hugging Face hub.

Examples:
  captum-ssm explain recall-mamba --text "anna owns the lamp . ? anna owns the" --out report.html
  captum-ssm explain ./my-mamba --file prompt.txt --method LatimFlow MambaLRP --target " lamp"
  captum-ssm explain ./my-mamba --file prompt.txt --target " lamp" --contrast " kite"
  captum-ssm explain recall-mamba --file prompt.txt --rule balanced frozen --out roles.png
  captum-ssm explain recall-mamba --file prompt.txt --generate 20 --hops 3 --out answers.html
  captum-ssm explain ./my-segmenter --image street.png --target car --target-mask car.png
  captum-ssm explain vim_small.pth --image cat.png dog.png --labels classes.txt --out cats.png"""

#: Rules of LatimFlow, repeated here so that ``--help`` does not import torch.
_RULES = ("frozen", "half", "centered", "balanced")
#: The values of ``--spans``, repeated here so that ``--help`` does not import torch.
_SPANS = ("token", "word", "sentence", "paragraph", "all")
#: Options that have no effect when an answer is explained, and are refused.
_NOT_OF_ANSWERS = (
    "target", "contrast", "option", "target_mask", "target_pixel", "maps", "layers", "cuts",
    "labels",
)  # fmt: skip
_DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")


def add_to(commands: Any) -> None:
    """Add the subcommand ``explain`` to the parser's subcommands."""
    parser = commands.add_parser(
        "explain",
        help="explain predictions for texts or images, and write a report, pictures or numbers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--text", nargs="+", metavar="TEXT", help="texts, one example each")
    inputs.add_argument("--file", nargs="+", type=Path, help="text files, one example each")
    inputs.add_argument("--image", nargs="+", type=Path, help="image files")
    parser.add_argument(
        "--method", nargs="+", metavar="M", help="methods, as listed by: captum-ssm methods"
    )
    parser.add_argument(
        "--rule",
        nargs="+",
        type=lambda name: name.replace("centred", "centered"),
        choices=_RULES,
        help="rules of LatimFlow, side by side: frozen shows which token was copied, balanced "
        "which tokens mattered (default: both; with --method, the method's own)",
    )
    parser.add_argument(
        "--baselines",
        metavar="B",
        help="baseline of LatimFlow and MambaLRP: mean, or a number for all features (default: "
        "chosen by the rule)",
    )
    parser.add_argument(
        "--target",
        help="explained class or next token: a class's name or number, a token's text, or an id as "
        "id:NUMBER (default: the model's prediction)",
    )
    parser.add_argument(
        "--contrast",
        help="alternative to the target: a class or token in the same forms, or mean, others, all "
        "or runner-up (default: none)",
    )
    parser.add_argument(
        "--option",
        nargs="+",
        metavar="NAME=VALUE",
        help="options of the methods, such as n_steps=50 or start_layer=1",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--target-mask",
        type=Path,
        metavar="FILE",
        help="for segmentation models: explain the target's mean over the light pixels of this "
        "image (default: the pixels that the model assigns to the class)",
    )
    where.add_argument(
        "--target-pixel",
        nargs=2,
        type=int,
        metavar=("ROW", "COLUMN"),
        help="for segmentation models: explain one pixel of the output",
    )
    parser.add_argument(
        "--generate", type=int, metavar="N", help="generate N tokens, and explain each part"
    )
    parser.add_argument("--answer", metavar="TEXT", help="explain each part of this answer")
    parser.add_argument(
        "--spans",
        choices=_SPANS,
        help="parts of the answer, each explained as a whole (default: word for .html, whose "
        "page also shows sentences; else sentence)",
    )
    parser.add_argument(
        "--prompt-spans", choices=_SPANS, help="parts of the prompt (default: as for --spans)"
    )
    parser.add_argument(
        "--hops",
        type=int,
        help="how often to pass relevance of answer tokens on to earlier tokens (default: 0)",
    )
    parser.add_argument("--labels", type=Path, help="file with one class name per line")
    parser.add_argument(
        "--maps",
        nargs="*",
        choices=("attention", "contributions"),
        help="token-to-token maps of the report (default: attention); none if no value follows",
    )
    parser.add_argument("--layers", nargs="+", type=int, help="layers whose maps are shown")
    parser.add_argument(
        "--cuts", type=int, metavar="N", help="cuts of messages in a report (default: 20 with maps)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write: .html, .png, .svg, .json, .csv, or - to print JSON "
        "(default: report.html, or answers.html for answers)",
    )
    parser.add_argument("--title", help="heading of the report (default: the model's name)")
    add_source_to(parser)
    add_force_to(parser)
    parser.add_argument("--quiet", action="store_true", help="hide progress bars")
    parser.set_defaults(run=run)


def add_source_to(parser: argparse.ArgumentParser) -> None:
    """Add the options for loading MODEL, which several subcommands have."""
    parser.add_argument("--device", default="cpu", help="device of the model (default: cpu)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="default: the model's own")
    parser.add_argument("--hub", action="store_true", help="allow downloading MODEL from the hub")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python files that come with MODEL"
    )


def load_model(options: argparse.Namespace) -> Loaded:
    """Load the model that the arguments name, with its tokenizer or image processor."""
    from ..explain.loading import Source, load

    source = Source(options.model, options.tokenizer, options.hub, options.trust_remote_code)
    return load(source).move_to(options.device, options.dtype)


def run(options: argparse.Namespace) -> None:
    """Run ``captum-ssm explain``: load, explain, print the most relevant tokens, and write.

    Raises:
        CaptumSSMError: when an option or an input cannot be used; the message names it.
    """
    from ..attr.call.targets import CONTRASTS
    from ..attr.catalogue import QUESTIONS
    from ..explain.methods import add_option, method_classes, methods_and_options, name_contrasts
    from ..explain.pixels import explained_function
    from ..explain.typed_target import read_target
    from ..viz.html.example import find_subject, read_examples
    from ..viz.html.report import explain_all
    from ..viz.html.writing import check_format, is_page, json_of, write
    from .method_options import set_options

    if _explains_answers(options):
        _explain_answers(options)
        return
    options.out = options.out or Path("report.html")
    to_stdout = str(options.out) == "-"
    if not to_stdout:
        check_format(options.out)
    _check_maps(options, is_page(options.out))
    rules = options.rule if options.method or options.rule else tuple(QUESTIONS)
    classes = method_classes(options.method)
    methods, their_options = methods_and_options(classes, rules, options.baselines)
    check_new(_output_files(options, methods, their_options), options)
    make_folder(options.out.parent)
    loaded = load_model(options)
    labels = loaded.labels
    if options.labels is not None:
        labels = _read_text("--labels", options.labels).splitlines()
    inputs = _read_inputs(loaded, options)
    explained = explained_function(loaded, inputs, options.target_mask, options.target_pixel)
    subject = find_subject(explained, loaded.model, None, loaded.tokenizer, labels)
    target = None
    if options.target is not None:
        target = read_target(subject, options.target, language=loaded.is_language)
    if options.contrast is not None:
        contrast = options.contrast
        if contrast not in CONTRASTS:
            language = loaded.is_language
            contrast = read_target(subject, contrast, language=language, option="--contrast")
        add_option(methods, their_options, "contrast", contrast, "--contrast")
        methods, their_options = name_contrasts(methods, their_options, options.contrast)
    examples = read_examples(subject, inputs, target, None, None)
    typed, inputs_of_one = options.option or (), examples[0].inputs
    set_options(methods, their_options, typed, loaded.model, inputs_of_one)
    maps = ["attention"] if options.maps is None else options.maps
    explanations = explain_all(
        subject,
        examples,
        methods,
        their_options,
        matrices=maps if is_page(options.out) else False,
        shown_layers=options.layers,
        cuts=options.cuts,
        accounts=options.out.suffix.lower() in ("", ".json"),
        answers=is_page(options.out),
        show_progress=not options.quiet and sys.stderr.isatty(),
    )
    name = _name_of(options.model)
    if to_stdout:
        print(json_of(explanations, name), end="")
        return
    _print_summary(explanations)
    title = name if options.title is None else options.title
    for path in write(subject, examples, explanations, name, title, options.out):
        print(f"wrote {path}")


def _name_of(model: str) -> str:
    """Return a model's name without its folder, because written files may be shared."""
    return Path(model).resolve().name if Path(model).exists() else model


def _output_files(
    options: argparse.Namespace, methods: Mapping[str, Any], their_options: Mapping[str, Any]
) -> list[Path]:
    """Return the files to write; pictures of texts have a second file for methods with roles."""
    from ..viz.html.parts import tells_roles
    from ..viz.html.writing import PICTURES, picture_files

    if options.out.suffix.lower() not in PICTURES:
        return [options.out]
    with_roles = [
        name
        for name, method in methods.items()
        if not options.image and tells_roles(method, their_options.get(name, {}))
    ]
    count = len(options.text or options.file or options.image)
    return picture_files(options.out, count, len(with_roles))


def _explains_answers(options: argparse.Namespace) -> bool:
    """Return True if options request explanations of a generated or given answer's spans."""
    names = ("generate", "answer", "spans", "prompt_spans", "hops")
    return any(getattr(options, name) is not None for name in names)


def _explain_answers(options: argparse.Namespace) -> None:
    """Explain the spans of generated or given answers, print their sources, and write files."""
    from ..attr import SSMLLMAttribution
    from ..attr.catalogue import holds_identity
    from ..explain.answers import FORMATS, answer_lines, write_answers
    from ..explain.methods import method_classes, methods_and_options
    from ..viz.html.generated import about_answers, explain_answers
    from ..viz.html.writing import PICTURES, check_format, picture_files

    for name in _NOT_OF_ANSWERS:
        if getattr(options, name) is not None:
            raise OptionError(
                f"--{name.replace('_', '-')} has no effect on explained answers. Leave it out."
            )
    if options.generate is not None and (options.answer is not None or options.generate < 1):
        raise OptionError(
            f"--generate {options.generate} and --answer {options.answer!r}: pass a number of at "
            "least 1 to --generate, or only --answer."
        )
    methods = method_classes(options.method)
    by_name, their_options = methods_and_options(methods, options.rule, options.baselines)
    if len(by_name) > 1:
        raise OptionError(
            f"--method and --rule name {', '.join(by_name)}, but answers are explained with one "
            "method. Name one."
        )
    ((name, method),) = by_name.items()
    out = options.out or Path("answers.html")
    check_format(out, FORMATS)
    count = len(options.text or options.file or ()) if out.suffix.lower() in PICTURES else 1
    check_new(picture_files(out, count), options)
    is_page = out.suffix.lower() == ".html"
    if options.title is not None and not is_page:
        raise OptionError(
            f"--title is only for pages, and {out} is not a .html file. Leave --title out."
        )
    default_spans, contrast = ("word", "mean") if is_page else ("sentence", "all")
    accepts_contrast = hasattr(method, "answer_in_turn")  # other methods ignore the contrast
    make_folder(out.parent)
    loaded = load_model(options)
    texts = _read_inputs(loaded, options)
    assert isinstance(texts, list)
    if not loaded.is_language or loaded.tokenizer is None:
        raise OptionError(
            f"--generate, --answer and --spans need a language model, and {options.model} is "
            "none. Leave them out."
        )
    results = explain_answers(
        SSMLLMAttribution(method(loaded.model), loaded.tokenizer),
        texts,
        answer=options.answer,
        generate=options.generate,
        spans=options.spans or default_spans,
        prompt_spans=options.prompt_spans or default_spans,
        hops=options.hops or 0,
        contrast=contrast,
        options=their_options.get(name),
        show_progress=not options.quiet and sys.stderr.isatty(),
    )
    escape_unprintable()
    for result in results if not is_page else ():
        print(f"Sources of the answer, by {name}:")
        print(answer_lines(result))
    identity = holds_identity(method)
    page_options = {
        "title": options.title,
        "about": about_answers(
            _name_of(options.model), name, contrast if accepts_contrast else None, identity
        ),
        "identity": identity,
    }
    for path in write_answers(results, _name_of(options.model), out, **page_options):
        print(f"wrote {path}")


def _print_summary(explanations: list[Explanation]) -> None:
    """Print the explained output, and the most relevant tokens by each method."""
    from ..viz.html.writing import summary_lines

    escape_unprintable()
    for explanation in explanations:
        print(f"Explained: {explanation.facts['explained']}. Most relevant tokens:")
        for method in explanation.facts["methods"]:
            print(summary_lines(explanation.facts, method))


def escape_unprintable() -> None:
    """Print letters that the terminal's encoding lacks as escapes, instead of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _read_inputs(loaded: Loaded, options: argparse.Namespace) -> Tensor | list[str]:
    """Return the texts, or a tensor of the images (B, C, H, W), that the options name."""
    if options.image:
        if loaded.prepare is None:
            raise OptionError(f"--image: {options.model} reads texts. Use --text or --file.")
        return loaded.read_images(options.image)
    if loaded.tokenizer is None:
        raise OptionError(f"--text and --file: {options.model} reads images. Use --image.")
    return options.text or [_read_text("--file", file) for file in options.file]


def _check_maps(options: argparse.Namespace, is_page: bool) -> None:
    """Raise if an option that applies only to reports is combined with a different format."""
    for name in ("maps", "layers", "cuts"):
        if not is_page and getattr(options, name) is not None:
            raise OptionError(
                f"--{name} only applies to reports, and {options.out} is not a .html file. Leave "
                f"--{name} out, or let --out end in .html."
            )


def _read_text(option: str, file: Path) -> str:
    """Read the UTF-8 text file that an option names."""
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise OptionError(
            f"{option} {file} cannot be read: {error.strerror}. Pass a text file that you may read."
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{option} {file} is not UTF-8 text: {error}. Save it as UTF-8, or pass an image with "
            "--image."
        ) from error
