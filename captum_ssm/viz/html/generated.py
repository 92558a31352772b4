"""Make a page of generated answers that shows the sources of each word or sentence.

Shapes: S explained parts of the answer, F features of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...attr import LatimFlow, SSMLLMAttribution, SSMLLMAttributionResult
from ...attr.call import checks
from ...attr.catalogue import DEFAULT, holds_identity
from ...attr.comparison import named_methods
from ...attr.text.codec import Pieces
from ...attr.text.spans import Spans
from ...attr.text.tokens import Tokens
from ...errors import InputError, OptionError
from ..figure import check_labels
from ..labels import as_words, direction_of
from .answers import pack_rows
from .example import Subject
from .explanation import Methods, sentences_of
from .page import Facts, short, whole_page

#: Files that are joined, in this order, to one style sheet and one script.
_STYLES = ("common.css", "generated.css")
_SCRIPTS = ("common.js", "svg.js", "maps.js", "tables.js", "panes.js", "generated.js")


def explain_answers(
    explain: SSMLLMAttribution,
    texts: Sequence[Any],
    *,
    answer: Any = None,
    generate: int | None = None,
    spans: Spans = "word",
    prompt_spans: Spans = "word",
    hops: int = 0,
    contrast: str = "mean",
    options: Mapping[str, Any] | None = None,
    show_progress: bool = False,
) -> list[SSMLLMAttributionResult]:
    """Explain the parts of an answer to each prompt in ``texts``.

    Args:
        answer: the text that follows every prompt. Default: None, the model's generation.
        generate: number of generated tokens. Default: None, 25.
        spans, prompt_spans, hops, show_progress: see
            :meth:`~captum_ssm.SSMLLMAttribution.attribute`. Default: words, no hops, no bar.
        contrast: the contrast for methods that decompose an output. With ``"all"``, relevance
            vanishes if the model is nearly certain. Default: ``"mean"``.
    """
    arguments = dict(options or {})
    if hasattr(explain.attr_method, "answer_in_turn"):  # the methods with a contrast
        arguments.setdefault("contrast", contrast)
    if answer is None and generate is not None:
        arguments["gen_args"] = {"max_new_tokens": generate, "do_sample": False}
    arguments = {"spans": spans, "prompt_spans": prompt_spans, "hops": hops} | arguments
    results = []
    for text in texts:
        result = explain.attribute(text, answer, show_progress=show_progress, **arguments)
        assert isinstance(result, SSMLLMAttributionResult)
        results.append(result)
    return results


def about_answers(model: str, method: str, contrast: str | None, identity: bool) -> str:
    """Describe the model, the method and the explained number in the line below a heading."""
    by_contrast = {
        None: "",
        "mean": ", for each token's logit minus the mean logit",
        "all": ", for each token's log-probability",
    }
    explained = by_contrast.get(contrast, f", with contrast {contrast}")
    omission = ", without the query words' own values (mostly the identity)" if identity else ""
    return f"{model}: relevance by {method}{explained}{omission}"


def report_answers(
    subject: Subject,
    inputs: Any,
    methods: Methods,
    options: Mapping[str, Mapping[str, Any]] | None,
    tokenizer: Any,
    generate: int,
    *,
    title: str,
    names: Sequence[str] | None,
    show_progress: bool,
    **span_options: Any,
) -> str:
    """Return the HTML of a report with ``generate=``; see :func:`captum_ssm.viz.report`."""
    if checks.integer("generate", generate) < 1:
        raise OptionError(f"generate={generate} is below 1. Pass an integer of at least 1.")
    if tokenizer is None:
        raise InputError(f"generate={generate} needs a tokenizer, not None. Pass the model's.")
    named = named_methods(LatimFlow if methods is DEFAULT else methods)
    if len(named) != 1:
        raise OptionError(
            f"methods has {len(named)} methods, but generate= needs exactly one. Pass one, such "
            "as [LatimFlow]."
        )
    name, method = next(iter(named.items()))
    if isinstance(method, type):
        method = method(subject.forward_func, subject.module, subject.layers)
    unknown = set(options or {}) - {name}
    if unknown:
        raise OptionError(f"options has {sorted(unknown)[0]!r}. Pass only options for {name!r}.")
    texts = _as_list(inputs)
    check_labels(names, len(texts), "names")
    method_options = dict((options or {}).get(name, {}))
    results = explain_answers(
        SSMLLMAttribution(method, tokenizer),
        texts,
        generate=generate,
        options=method_options,
        show_progress=show_progress,
        **span_options,
    )
    contrast = method_options.get("contrast", "mean") if hasattr(method, "answer_in_turn") else None
    identity = holds_identity(method)
    about = about_answers(type(subject.module).__name__, name, contrast, identity)
    return answers_page(results, title, about=about, identity=identity, names=names)


def answers_page(
    results: Sequence[SSMLLMAttributionResult],
    title: str,
    *,
    about: str = "",
    identity: bool = False,
    names: Sequence[str] | None = None,
) -> str:
    """Return the HTML page of explained answers.

    Args:
        about: the line below the heading ``title``. Default: nothing.
        identity: leave out each word's entries for itself and the word before, as needed for
            methods that add the identity. Default: False.
        names: names of the answers. Default: None, ``Example 1``, ...
    """
    check_labels(names, len(results), "names")
    examples: list[Facts] = []
    blocks: dict[str, bytes] = {}
    for number, result in enumerate(results):
        name = f"Example {number + 1}" if names is None else names[number]
        hops = _rows_by_hop(result)
        block_names = [f"rows-{number}-{hop}" for hop in range(len(hops))]
        for block, (rows, _) in zip(block_names, hops, strict=True):
            values = _without_query_entries(rows) if identity else rows
            blocks[block] = pack_rows(values.detach().cpu().double())
        example = {
            "name": name,
            "prompt": _text_facts(result.input_tokens, result.input_pieces),
            "answer": _text_facts(result.output_tokens, result.output_pieces),
            "blocks": block_names,
            "constants": [[*map(short, c.tolist())] for _, c in hops if c is not None] or None,
        }
        examples.append(example)
    facts = {"about": about, "examples": examples}
    return whole_page("generated.html", _STYLES, _SCRIPTS, title, facts, blocks)


def _as_list(inputs: Any) -> list[Any]:
    """Return the prompts: texts, or token ids (B, L)."""
    if isinstance(inputs, str):
        return [inputs]
    if not isinstance(inputs, list | tuple | Tensor):
        raise InputError(
            f"inputs is of type {type(inputs).__name__}. Pass a text, a list of texts, or token "
            "ids (B, L)."
        )
    if not len(inputs):
        raise InputError("inputs is empty. Pass at least one text.")
    return list(inputs)


def _rows_by_hop(result: SSMLLMAttributionResult) -> list[tuple[Tensor, Tensor | None]]:
    """Return by hop: relevance of prompt and answer (S, F + S), and of constants (S,) or None."""
    if result.spans is None:
        assert result.token_attr is not None
        return [(torch.cat([result.token_attr, result.generated_attr], 1), None)]
    hops = result.spans.hops
    return [(torch.cat([hop.prompt, hop.text + hop.unresolved], 1), hop.constants) for hop in hops]


def _without_query_entries(rows: Tensor) -> Tensor:
    """Return rows (S, F + S) with 0 for each answer part's own column and the column before.

    A word is predicted at the word before and, from its second token on, at the word itself.
    Methods that add the identity add it there.
    """
    parts, columns = rows.shape
    own = torch.arange(parts) + columns - parts
    values = rows.clone()
    for omitted in (own, (own - 1).clamp_min(0)):
        values[torch.arange(parts), omitted] = 0.0
    return values


def _text_facts(names: Sequence[str], pieces: Pieces | None) -> Facts:
    """Return a text's words, direction and first words of sentences, as JSON values."""
    tokens = Tokens(names, pieces)
    words = as_words(tokens)
    return {
        **words._asdict(),
        "direction": direction_of("".join(names)),
        "sentences": sentences_of(tokens),
    }
