"""Explain one example for a report. Shapes: L tokens without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from ...attr import LatimFlow, compare
from ...attr.call.layout import patch_sums
from ...attr.call.progress import step
from ...attr.catalogue import QUESTIONS, holds_identity
from ...attr.comparison import Comparison, Method, Named
from ...attr.text.spans import split_pieces
from ...attr.text.tokens import Tokens
from ...errors import InputError
from ..figure import finite_numbers
from ..labels import as_words, direction_of, visible_text, word_continuations
from ..overlay import rgb_image
from .answers import AnswerParts, answer_facts, explains_several, layer_moves, relevance_by_answer
from .example import ShownExample, Subject
from .graph import graph_of
from .lens import predictions_by_block
from .outline import LayerOutline, Outline, patch_names
from .packing import MAPS, maps_of
from .page import Facts, short
from .parts import (
    Account,
    account,
    decomposes,
    decomposition,
    is_negligible,
    roles_of,
    tells_pixels,
    tells_roles,
)
from .pictures import in_base64, raster
from .scissors import cuts_of

#: Methods as :func:`captum_ssm.compare` takes them.
Methods: TypeAlias = Method | Sequence[Method] | Mapping[str, Method]

#: A number for each token, or None for a token without a number.
Values: TypeAlias = list[float | None]

#: Steps of an example's progress bar: methods, other predictions, cuts, the graph and maps.
_STEPS = 5


@dataclass(frozen=True, eq=False)
class Contents:
    """Checked options of :func:`explain_all`; ``kept`` is the number of entries per map row."""

    methods: Named
    options: Mapping[str, Mapping[str, Any]] | None
    maps: Sequence[str]
    shown_layers: Sequence[int]
    kept: int
    cuts: int
    graph: int
    accounts: bool
    answers: bool


@dataclass(frozen=True, eq=False)
class Explanation:
    """The explanation of one example, as :mod:`captum_ssm.viz.html.writing` writes it to files.

    Attributes:
        facts: everything except the maps' entries, as JSON values.
        tokens: the unchanged tokens; ``facts`` has them with invisible characters as escapes.
        ids: the tokens' ids, or None.
        layers: the mixers, in the order in which they ran.
        blocks: the maps' entries as bytes, by the names that ``facts`` uses.
        accounts: the parts of the explained number, by method. Default: empty.
    """

    facts: Facts
    tokens: Sequence[str]
    ids: list[int] | None
    layers: list[LayerOutline]
    blocks: dict[str, bytes]
    accounts: dict[str, Account] = field(default_factory=dict)

    @property
    def page_facts(self) -> Facts:
        """The JSON values in ``facts``, rounded to the digits that a page shows."""
        methods = [
            _rounded(method) | {"answers": [_rounded(answer) for answer in method["answers"]]}
            for method in self.facts["methods"]
        ]
        return self.facts | {"methods": methods}


def explain_example(
    subject: Subject, example: ShownExample, outline: Outline, contents: Contents, number: int
) -> Explanation:
    """Explain an example with all methods, for a page; ``number`` is its index in the report."""
    has_grid = outline.grid is not None
    with step(0, _STEPS):
        comparison = compare(
            subject.forward_func,
            example.inputs,
            contents.methods,
            outline.target,
            example.additional or None,
            model=subject.module,
            layers=subject.layers,
            options=_patch_options(contents) if has_grid else contents.options,
            per_token=not has_grid,
        )
    names = _token_names(example, outline)
    words = as_words(names)
    with step(1, _STEPS, "other predictions"):
        accounts, roles, answers = _parts(subject, example, outline, contents, list(comparison))
    with step(2, _STEPS, "cuts"):
        cuts = cuts_of(subject, example, outline, contents.cuts)
    with step(3, _STEPS, "graph"):
        explained = (x[outline.explained_index] for x in answers.values())
        moves_by_method = (layer_moves(x.streams, outline.query) for x in explained)
        moves = next(moves_by_method, None)  # of the first method that has answers
        graph = graph_of(subject, example, outline, contents.graph, moves)
    blocks: dict[str, bytes] = {}
    facts: Facts = {
        "name": f"Example {number + 1}",
        "explained": visible_text(outline.explained),
        "predictions": [
            p._asdict() | {"label": visible_text(p.label)} for p in outline.predictions
        ],
        "asked": outline.explained_index,
        "asking": outline.query,
        "tokens": words.labels,
        "joined": words.joined,
        "marks": words.marks,
        "breaks": words.breaks,
        "shards": word_continuations(words),
        "sentences": sentences_of(names),
        "direction": direction_of("".join(names)),
        "methods": _method_facts(comparison, roles, contents, outline),
        "start": None if moves is None else moves.index(max(moves)),
        "image": _image_facts(example, outline),
        "cuts": cuts,
        "graph": graph,
        "lens": predictions_by_block(subject, example, outline) if contents.maps else [],
        "maps": [],
    }
    for i, (name, method) in enumerate(zip(comparison, facts["methods"], strict=True)):
        to_list, prefix = partial(_token_values, name, outline=outline), f"streams-{number}-{i}"
        method["answers"], streams = answer_facts(answers.get(name, []), to_list, prefix)
        blocks |= streams
    for kind in contents.maps:
        layers = []
        with step(4, _STEPS, "maps"):
            indices = contents.shown_layers
            maps = maps_of(subject, example, outline, kind, indices, contents.kept)
            for facts_of_layer, data in maps:
                block = f"map-{number}-{kind}-{facts_of_layer['index']}"
                blocks[block] = data
                layers.append(facts_of_layer | {"block": block})
        facts["maps"].append({"name": MAPS[kind], "layers": layers})
    ids = example.inputs[0, outline.unpadded].tolist() if example.inputs.dim() == 2 else None
    return Explanation(facts, names, ids, outline.layers, blocks, accounts)


def _parts(
    subject: Subject, example: ShownExample, outline: Outline, contents: Contents, names: list[str]
) -> tuple[dict[str, Account], dict[str, dict[str, Values]], dict[str, list[AnswerParts]]]:
    """Return, by method name, accounts, roles and answers of methods that decompose the output.

    Methods run again for them, once for all predictions if the page needs these.
    """
    accounts, roles, answers = {}, {}, {}
    for name, method_or_class in zip(names, contents.methods.values(), strict=True):
        method: Any = method_or_class
        options = dict((contents.options or {}).get(name, {}))
        with_roles = tells_roles(method, options, example.inputs)
        all_predictions = contents.answers and explains_several(method, options)
        if not (with_roles or all_predictions or (contents.accounts and decomposes(method))):
            continue
        if isinstance(method, type):
            method = method(subject.forward_func, subject.module, subject.layers)
        if all_predictions:
            answers[name] = relevance_by_answer(
                method, subject, example, outline, options=options, roles=with_roles
            )
            explained = answers[name][outline.explained_index]
            totals, by_role = explained.account, explained.roles
        else:
            arguments = example.inputs, outline.target, example.additional or None
            parts = decomposition(method, *arguments, options=options, roles=with_roles)
            totals, by_role = account(parts), roles_of(parts)
        accounts[visible_text(name)] = totals
        roles[name] = {role: _token_values(name, x, outline) for role, x in by_role.items()}
    return accounts if contents.accounts else {}, roles, answers


def _token_names(example: ShownExample, outline: Outline) -> Sequence[str]:
    """Return the tokens' names without padding; ids or positions if there are no names."""
    if example.is_image:
        return patch_names(outline)
    if example.names is None:
        ids = example.inputs[0].tolist() if example.inputs.dim() == 2 else None
        return [str(i if ids is None else ids[i]) for i in outline.unpadded]
    if len(example.names) == len(outline.unpadded):
        return example.names
    if len(example.names) == outline.layers[0].tokens:
        tokens = example.names if isinstance(example.names, Tokens) else Tokens(example.names)
        return tokens.chosen(outline.unpadded)
    raise InputError(
        f"tokens has {len(example.names)} names for a sequence of {outline.layers[0].tokens} "
        f"tokens, {len(outline.unpadded)} of them not padding. Pass one name per token."
    )


def sentences_of(names: Sequence[str]) -> list[int]:
    """Return the index of each sentence's first token; empty if sentences are unknown."""
    pieces = names.pieces if isinstance(names, Tokens) else None
    return [] if pieces is None else [x.start for x in split_pieces(pieces, "sentence")]


def _method_facts(
    comparison: Comparison,
    roles: Mapping[str, Mapping[str, Values]],
    contents: Contents,
    outline: Outline,
) -> list[Facts]:
    """Return one dict of JSON values for each method: name, relevance, sum, roles and options.

    The entry ``"own"`` of a dict is the query token if the method adds the identity, else None.
    """
    methods = []
    for name, method in zip(comparison, contents.methods.values(), strict=True):
        relevance = comparison[name]
        values = _token_values(name, relevance, outline)
        own = outline.query if holds_identity(method) else None  # not comparable with others
        facts: Facts = {"name": visible_text(name), "values": values, "own": own}
        facts |= {"silent": is_negligible(values, own), "pixels": _packed_pixels(relevance)}
        options = (contents.options or {}).get(name, {})
        facts["contrast"] = _as_json(options.get("contrast"))
        if method is LatimFlow:  # its rules answer different questions
            facts["question"] = QUESTIONS.get(options.get("rule", ""))
        facts["sum"] = comparison.sums[name][0].facts if name in comparison.sums else None
        methods.append({**facts, "roles": roles.get(name, {})})
    return methods


def _as_json(contrast: Any) -> Any:
    """Convert the option ``contrast`` to a JSON value."""
    is_plain = contrast is None or isinstance(contrast, str)
    return contrast if is_plain else np.asarray(contrast).tolist()


def _patch_options(contents: Contents) -> dict[str, Mapping[str, Any]]:
    """Return the options, with ``per_token=True`` for methods without relevance per pixel."""
    options = dict(contents.options or {})
    for name, method in contents.methods.items():
        if not tells_pixels(method):
            options[name] = {"per_token": True, **options.get(name, {})}
    return options


def _packed_pixels(relevance: Tensor) -> Facts | None:
    """Sum an image's relevance (1, C, H, W) over channels and pack it; None for other shapes."""
    if relevance.dim() != 4:
        return None
    return raster(relevance[0].sum(0), extremes=False)._asdict()


def _token_values(name: str, relevance: Tensor, outline: Outline) -> Values:
    """Return relevance as a list, one number per token, and None for tokens without a patch."""
    if relevance.dim() == 4 and outline.grid is not None:
        relevance = patch_sums(relevance, outline.grid.size)
    scores = finite_numbers(relevance[0], f"the relevance by {name}")
    if scores.dim() == 2 and outline.grid is not None and tuple(scores.shape) == outline.grid.size:
        by_token: Values = [None] * len(outline.unpadded)
        tokens, patch_scores = outline.grid.tokens.tolist(), scores.flatten().tolist()
        for token, score in zip(tokens, patch_scores, strict=True):
            by_token[token] = score
        return by_token
    if scores.dim() != 1 or len(scores) != outline.layers[0].tokens:
        raise InputError(
            f"methods: {name} returned relevance of shape {tuple(relevance.shape)}. Pass methods "
            f"that return one number for each of the {outline.layers[0].tokens} tokens."
        )
    return list(scores[outline.unpadded].tolist())


def _rounded(facts: Mapping[str, Any]) -> Facts:
    """Round the relevance in a method's JSON values to a few digits."""
    rows = {"": facts["values"], **facts["roles"]}
    roles = {name: [None if x is None else short(x) for x in row] for name, row in rows.items()}
    return {**facts, "values": roles.pop(""), "roles": roles}


def _image_facts(example: ShownExample, outline: Outline) -> Facts | None:
    """Return the image as a data URL, with its size and grid of patches; None for a text."""
    if not example.is_image:
        return None
    picture = rgb_image(example.inputs[0])
    return {
        "source": f"data:image/png;base64,{in_base64(picture)}",
        "height": picture.shape[0],
        "width": picture.shape[1],
        "grid": None if outline.grid is None else list(outline.grid.size),
        "cells": [] if outline.grid is None else outline.grid.tokens.tolist(),
    }
