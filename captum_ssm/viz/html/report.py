"""Write a report of examples, predictions and explanations in one HTML file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..._files import make_folder, write_whole
from ...attr.call import checks
from ...attr.call.given import with_argument_advice
from ...attr.call.inputs import batch_parts
from ...attr.call.progress import bar, shown
from ...attr.catalogue import DEFAULT, with_rules
from ...attr.comparison import named_methods
from ...attr.engine.fold import at_indices as layers_wanted
from ...attr.text.spans import Spans
from ...errors import OptionError
from ..figure import check_labels
from .answers import estimated_size
from .example import Names, ShownExample, Subject, find_subject, read_examples, transformed
from .explanation import Contents, Explanation, Methods, explain_example
from .generated import report_answers
from .outline import Outline, outline
from .packing import MAPS, entries_kept
from .writing import ANSWERS, FORMATS, check_format, is_page, write

#: Default numbers of cut messages and of followed graph nodes, if the page has maps.
_DEFAULT_CUTS, _DEFAULT_NODES = 20, 24
#: The largest number of cuts; more of them would take over 20 kB in a page.
_MAX_CUTS = 60
#: Arguments that are not accepted with ``generate=``.
_NOT_WITH_GENERATE = "target additional_forward_args tokens labels shown_layers cuts graph matrices"


@with_argument_advice
def report(
    forward_func: Callable[..., Any],
    inputs: Any,
    methods: Methods = DEFAULT,
    *,
    target: Any = None,
    additional_forward_args: Any = None,
    model: nn.Module | None = None,
    layers: Sequence[str | nn.Module] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    transform: Callable[[Any], Any] | None = None,
    tokens: Names | None = None,
    labels: Sequence[str] | None = None,
    matrices: bool | Sequence[str] = True,
    shown_layers: Sequence[int] | None = None,
    megabytes: float = 12.0,
    cuts: int | None = None,
    graph: int | None = None,
    generate: int | None = None,
    spans: Spans = "word",
    prompt_spans: Spans = "word",
    hops: int = 0,
    names: Sequence[str] | None = None,
    title: str = "Explanation",
    path: str | Path = "report.html",
    show_progress: bool = False,
) -> Path:
    """Explain examples by several methods and write one self-contained HTML file.

    The page shows the model's predictions, and each method's relevance of every token or patch,
    with its sum. It shows each layer's input, the prediction after each block, token-to-token
    maps, for a text the :func:`~captum_ssm.attribution_graph`, and messages between tokens. A click
    cuts messages and shows the true outputs without them, from stored runs. With LatimFlow and
    MambaLRP a click explains a different prediction, or one rather than another, and each role of
    tokens has a row. The page makes no requests and can be used with only a keyboard.

    With ``generate=`` the page explains texts that the model writes: pointing at a word or sentence
    colors the prompt, and the text up to there, by relevance.

    An image shows relevance per patch, as outlines of the strongest patches, or, with LatimFlow,
    MambaLRP and Captum's methods, per pixel. In rollouts the query's own entry is about 1, from the
    identity. It is listed, but has no color.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of one
            such tensor. With a tokenizer a text, a conversation, or a list of these of any lengths;
            with a transform a PIL image or a list of them.
        methods: one or several methods, as in :func:`captum_ssm.compare`, with the same default.
        target: the explained output, in Captum's forms, or the text of a token or the name of a
            class; a list has one for each example. Default: None, the model's prediction, after the
            last token for a language model.
        additional_forward_args: further positional arguments of forward_func, for example an
            attention mask. Default: None.
        model: the module, if forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        options: a mapping from methods' names in the result to further arguments of ``attribute``,
            as in :func:`captum_ssm.compare`. Default: None.
        tokenizer: the tokenizer for the names of tokens and predictions: any object with
            ``encode(text)`` and ``decode(ids)``. Default: None.
        transform: a function from an image to the model's input (C, H, W), such as torchvision's
            transforms, or a transformers image processor. Default: None, for tensors.
        tokens: names of the tokens of one sequence, or a list of names for each. Default: None, the
            tokenizer's names, else ids.
        labels: names of the classes. Default: None, the model's names of classes, else numbers.
        matrices: show token-to-token maps: True or ``"attention"`` for the implicit attention,
            ``"contributions"`` for LATIM's norms; several in a list; False for none. Default: True.
        shown_layers: indices of the layers whose maps are shown, in the order in which they ran;
            negative ones count from the end. Default: None, all.
        megabytes: the largest size of maps, layers' inputs and other predictions in the file. If
            not all entries of maps fit, the strongest of each row are kept, with a note.
            Default: 12.
        cuts: number of cuts of messages between tokens, by effect in
            :class:`~captum_ssm.EdgeEffects`; a quarter of them cut all messages from a token. At
            most 60, and 0 for none. Default: None, 20 with maps, and none without.
        graph: number of activations to follow from the words to the output, each by a backward
            pass, in texts of at most 2000 tokens; 0 for no graph. Default: None, 24 with maps, and
            none without.
        generate: the number of tokens to generate after every text. One method then explains each
            generated token's logit minus the mean logit, instead of a prediction; arguments for
            predictions are refused. Default: None, explain predictions.
        spans: the parts of an answer that are explained, each by one backward pass; see
            :meth:`~captum_ssm.SSMLLMAttribution.attribute`. The page sums words up to sentences.
            Default: ``"word"``.
        prompt_spans: the parts of the prompt, in the same forms. Default: ``"word"``.
        hops: how often relevance of the answer's words is passed on to earlier words. Default: 0.
        names: names of the examples. Default: None, ``Example 1``, ...
        title: the page's heading. Default: ``"Explanation"``.
        path: the file to write; its folder is created. Ending .html writes a page, .json or .csv
            numbers, .png or .svg pictures, numbered from the second on. Default: ``"report.html"``.
        show_progress: show progress bars. Default: False.

    Returns:
        The path of the file, or of the first of several.

    Raises:
        InputError: for inputs of a different form, or a wrong number of labels, names or tokens.
        OptionError: for an unknown value of an option.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.
        WriteError: when the file cannot be written; an old file is then unchanged.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from captum_ssm import report
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled()
        >>> prompt = "anna owns the lamp . ? anna owns the"
        >>> with TemporaryDirectory() as folder:
        ...     path = report(model, prompt, tokenizer=vocabulary, path=Path(folder) / "lamp.html")
        ...     path.read_text(encoding="utf-8").startswith("<!doctype html>")
        True
    """
    file = Path(path)
    check_format(file, FORMATS if generate is None else ANSWERS, "path")
    make_folder(file.parent)
    inputs = inputs if transform is None else transformed(inputs, transform)
    subject = find_subject(forward_func, model, layers, tokenizer, labels)
    if generate is not None:
        maps = None if matrices is True else matrices  # True, the default, is ignored
        values = target, additional_forward_args, tokens, labels, shown_layers, cuts, graph, maps
        for name, value in zip(_NOT_WITH_GENERATE.split(), values, strict=True):
            if value is not None:
                raise OptionError(
                    f"{name} is not accepted with generate={generate}. Leave {name} out."
                )
        text = report_answers(
            subject,
            inputs,
            methods,
            options,
            tokenizer,
            generate,
            title=title,
            names=names,
            show_progress=show_progress,
            spans=spans,
            prompt_spans=prompt_spans,
            hops=hops,
        )
        write_whole(file, text)
        return file
    examples = read_examples(subject, inputs, target, additional_forward_args, tokens)
    check_labels(names, len(examples), "names")
    explanations = explain_all(
        subject,
        examples,
        methods,
        options,
        matrices=matrices if is_page(file) else False,
        shown_layers=shown_layers,
        megabytes=megabytes,
        cuts=cuts,
        graph=graph,
        accounts=file.suffix.lower() == ".json",
        answers=is_page(file),
        show_progress=show_progress,
    )
    for name, explanation in zip(names or (), explanations, strict=names is not None):
        explanation.facts["name"] = name
    return write(subject, examples, explanations, type(subject.module).__name__, title, file)[0]


def explain_all(
    subject: Subject,
    examples: Sequence[ShownExample],
    methods: Methods,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    matrices: bool | Sequence[str] = True,
    shown_layers: Sequence[int] | None = None,
    megabytes: float = 12.0,
    cuts: int | None = None,
    graph: int | None = None,
    accounts: bool = False,
    answers: bool = False,
    show_progress: bool = False,
) -> list[Explanation]:
    """Explain a report's examples with all methods; other arguments are those of :func:`report`.

    Args:
        accounts: also compute the bias and other parts of the explained number. Default: False.
        answers: also explain the other predictions, with methods that need no further run for them.
            Default: False.
    """
    kinds = _map_kinds(matrices)
    cuts = _checked_count("cuts", cuts, _DEFAULT_CUTS * bool(kinds), _MAX_CUTS)
    graph = _checked_count("graph", graph, _DEFAULT_NODES * bool(kinds))
    if shown_layers is not None and not len(shown_layers):
        raise OptionError("shown_layers is empty. Pass at least one, or matrices=False.")
    outlines = []
    for part, example in zip(batch_parts(len(examples), 1), examples, strict=True):
        with part.counting():  # so that errors have the example's index
            outlines.append(outline(subject, example))
    indices = layers_wanted(range(len(outlines[0].layers)), shown_layers)
    by_name, options = named_methods(methods), with_rules(methods, options)
    other_bytes = estimated_size(outlines, by_name) if answers else 0
    entries = _entries_per_row(outlines, indices, kinds, megabytes, other_bytes)
    contents = Contents(
        by_name, options, kinds, indices, entries, cuts, graph, accounts=accounts, answers=answers
    )
    numbered = list(enumerate(zip(examples, outlines, strict=True)))
    labels = [f"example {n + 1} of {len(examples)}" * (len(examples) > 1) for n, _ in numbered]
    with bar("Report", show_progress):
        return [
            explain_example(subject, example, run_facts, contents, number)
            for number, (example, run_facts) in shown(numbered, labels)
        ]


def _map_kinds(matrices: bool | Sequence[str]) -> list[str]:
    """Return the kinds of maps that the option ``matrices`` selects."""
    if isinstance(matrices, bool):
        return ["attention"] if matrices else []
    kinds = [matrices] if isinstance(matrices, str) else list(matrices)
    for kind in kinds:
        if kind not in MAPS:
            raise OptionError(f"matrices={matrices!r}: pass True, False, or some of {tuple(MAPS)}.")
    return kinds


def _checked_count(name: str, value: int | None, default: int, most: int = sys.maxsize) -> int:
    """Check an option that is an integer of at least 0; return it, or the default for None."""
    count = default if value is None else checks.integer(name, value)
    if not 0 <= count <= most:
        limit = "" if most == sys.maxsize else f" and at most {most}"
        raise OptionError(f"{name}={value}: pass an integer of at least 0{limit}, or None.")
    return count


def _entries_per_row(
    outlines: Sequence[Outline],
    layer_indices: Sequence[int],
    kinds: Sequence[str],
    megabytes: float,
    other_bytes: int,
) -> int:
    """Return the number of entries per map row that fit into the file; 0 without maps."""
    sizes = [x.layers[i].tokens for x in outlines for i in layer_indices] * len(kinds)
    if not sizes:
        return 0
    # base64 takes 4 bytes for 3
    return entries_kept(sizes, int(megabytes * 1e6 * 3 / 4) - other_bytes)
