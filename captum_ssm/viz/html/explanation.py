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
from .answers import Answer, answers_of, explains_several, facts_of, moved, packed_size
from .example import ShownExample, Subject
from .graph import graph_of
from .lens import predictions_by_block
from .outline import LayerOutline, Outline, patch_names
from .packing import MAPS, maps_of
from .page import short
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

#: Steps of an example's progress bar: methods, other predictions, cuts, the graph and maps.
_STEPS = 5


@dataclass(frozen=True, eq=False)
class Wanted:
    """The options of :func:`explain_all`, and how many entries per row of a matrix are ``kept``."""

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

    facts: dict[str, Any]
    tokens: Sequence[str]
    ids: list[int] | None
    layers: list[LayerOutline]
    blocks: dict[str, bytes]
    accounts: dict[str, Account] = field(default_factory=dict)

    @property
    def page_facts(self) -> dict[str, Any]:
        """The JSON values in ``facts``, rounded to the digits that a page shows."""
        methods = [
            _shortened(method) | {"answers": [_shortened(answer) for answer in method["answers"]]}
            for method in self.facts["methods"]
        ]
        return self.facts | {"methods": methods}


def explain(
    subject: Subject, example: ShownExample, known: Outline, wanted: Wanted, number: int
) -> Explanation:
    """Explain one example with all methods, and collect the content of the example's page.

    ``known.asked`` is the index of the explained prediction, ``known.asking`` the query token.
    """
    gridded = known.grid is not None
    with step(0, _STEPS):
        found = compare(
            subject.forward_func,
            example.inputs,
            wanted.methods,
            known.target,
            example.additional or None,
            model=subject.module,
            layers=subject.layers,
            options=_patch_options(wanted) if gridded else wanted.options,
            per_token=not gridded,
        )
    names = _names(example, known)
    words = as_words(names)
    with step(1, _STEPS, "other predictions"):
        accounts, roles, answers = _parts(subject, example, known, wanted, list(found))
    with step(2, _STEPS, "cuts"):
        cuts = cuts_of(subject, example, known, wanted.cuts)
    with step(3, _STEPS, "graph"):
        each_moves = (moved(each[known.asked].streams, known.asking) for each in answers.values())
        moves = next(each_moves, None)  # of the first method that has answers
        graph = graph_of(subject, example, known, wanted.graph, moves)
    blocks: dict[str, bytes] = {}
    facts: dict[str, Any] = {
        "name": f"Example {number + 1}",
        "explained": visible_text(known.explained),
        "predictions": [p._asdict() | {"label": visible_text(p.label)} for p in known.predictions],
        "asked": known.asked,
        "asking": known.asking,
        "tokens": words.labels,
        "joined": words.joined,
        "marks": words.marks,
        "breaks": words.breaks,
        "shards": word_continuations(words),
        "sentences": sentences_of(names),
        "direction": direction_of("".join(names)),
        "methods": _methods(found, roles, wanted, known),
        "start": None if moves is None else moves.index(max(moves)),
        "image": _image(example, known),
        "cuts": cuts,
        "graph": graph,
        "lens": predictions_by_block(subject, example, known) if wanted.maps else [],
        "maps": [],
    }
    for place, (name, method) in enumerate(zip(found, facts["methods"], strict=True)):
        values = partial(_values, name, known=known)
        method["answers"], streams = facts_of(
            answers.get(name, []), values, f"streams-{number}-{place}"
        )
        blocks |= streams
    for kind in wanted.maps:
        layers = []
        with step(4, _STEPS, "maps"):
            taken = maps_of(subject, example, known, kind, wanted.shown_layers, wanted.kept)
            for facts_of_layer, data in taken:
                block = f"map-{number}-{kind}-{facts_of_layer['index']}"
                blocks[block] = data
                layers.append(facts_of_layer | {"block": block})
        facts["maps"].append({"name": MAPS[kind], "layers": layers})
    ids = example.inputs[0, known.real].tolist() if example.inputs.dim() == 2 else None
    return Explanation(facts, names, ids, known.layers, blocks, accounts)


def _parts(
    subject: Subject, example: ShownExample, known: Outline, wanted: Wanted, names: Sequence[str]
) -> tuple[dict[str, Account], dict[str, dict[str, list[float | None]]], dict[str, list[Answer]]]:
    """Return, by method name, accounts, roles and answers of methods that decompose the output."""
    accounts, roles, answers = {}, {}, {}
    for name, chosen in zip(names, wanted.methods.values(), strict=True):
        method: Any = chosen
        options = dict((wanted.options or {}).get(name, {}))
        told = tells_roles(method, options, example.inputs)
        each = wanted.answers and explains_several(method, options)
        if not (told or each or (wanted.accounts and decomposes(method))):
            continue
        if isinstance(method, type):
            method = method(subject.forward_func, subject.module, subject.layers)
        if each:
            answers[name] = answers_of(method, subject, example, known, options=options, roles=told)
            sums, by_role = answers[name][known.asked].account, answers[name][known.asked].roles
        else:
            given = example.inputs, known.target, example.additional or None
            found = decomposition(method, *given, options=options, roles=told)
            sums, by_role = account(found), roles_of(found)
        accounts[visible_text(name)] = sums
        roles[name] = {role: _values(name, x, known) for role, x in by_role.items()}
    return accounts if wanted.accounts else {}, roles, answers


def streams_size(outlines: Sequence[Outline], methods: Named) -> int:
    """Return an upper bound of the bytes that the relevance of layers' inputs takes in a page."""
    count = sum(explains_several(method, {}) for method in methods.values())
    return count * sum(packed_size(known) for known in outlines)


def _names(example: ShownExample, known: Outline) -> Sequence[str]:
    """Return the tokens' names, without padding."""
    if example.is_image:
        return patch_names(known)
    if example.names is None:
        ids = example.inputs[0].tolist() if example.inputs.dim() == 2 else None
        return [str(i if ids is None else ids[i]) for i in known.real]
    if len(example.names) == len(known.real):
        return example.names
    if len(example.names) == known.layers[0].tokens:
        named = example.names if isinstance(example.names, Tokens) else Tokens(example.names)
        return named.chosen(known.real)
    raise InputError(
        f"tokens has {len(example.names)} names for a sequence of {known.layers[0].tokens} "
        f"tokens, {len(known.real)} of them not padding. Pass one name per token."
    )


def sentences_of(names: Sequence[str]) -> list[int]:
    """Return the index of each sentence's first token; empty if sentences are unknown."""
    pieces = names.pieces if isinstance(names, Tokens) else None
    return [] if pieces is None else [x.start for x in split_pieces(pieces, "sentence")]


def _methods(
    found: Comparison,
    roles: Mapping[str, Mapping[str, list[float | None]]],
    wanted: Wanted,
    known: Outline,
) -> list[dict[str, Any]]:
    """Return one dict of JSON values for each method: name, relevance, sum, roles and options.

    The entry ``"own"`` of a dict is the query token if the method adds the identity, else None.
    """
    facts = []
    for (name, relevance), kind in zip(found.items(), wanted.methods.values(), strict=True):
        values = _values(name, relevance, known)
        own = known.asking if holds_identity(kind) else None
        said: dict[str, Any] = {"name": visible_text(name), "values": values, "own": own}
        said |= {"silent": is_negligible(values, own), "pixels": _pixels(relevance)}
        chosen = (wanted.options or {}).get(name, {})
        said["contrast"] = _plain(chosen.get("contrast"))
        if kind is LatimFlow:
            said["question"] = QUESTIONS.get(chosen.get("rule", ""))
        said["sum"] = found.sums[name][0].facts if name in found.sums else None
        facts.append({**said, "roles": roles.get(name, {})})
    return facts


def _plain(contrast: Any) -> Any:
    """Convert the option ``contrast`` to a JSON value."""
    is_plain = contrast is None or isinstance(contrast, str)
    return contrast if is_plain else np.asarray(contrast).tolist()


def _patch_options(wanted: Wanted) -> dict[str, Mapping[str, Any]]:
    """Return the options, with ``per_token=True`` for methods without relevance per pixel."""
    options = dict(wanted.options or {})
    for name, method in wanted.methods.items():
        if not tells_pixels(method):
            options[name] = {"per_token": True, **options.get(name, {})}
    return options


def _pixels(relevance: Tensor) -> dict[str, Any] | None:
    """Sum an image's relevance (1, C, H, W) over channels and pack it; None for other shapes."""
    if relevance.dim() != 4:
        return None
    return raster(relevance[0].sum(0), extremes=False)._asdict()


def _values(name: str, relevance: Tensor, known: Outline) -> list[float | None]:
    """Return relevance as a list, one number per token, and None for tokens without a patch."""
    if relevance.dim() == 4 and known.grid is not None:
        relevance = patch_sums(relevance, known.grid.size)
    scores = finite_numbers(relevance[0], f"the relevance by {name}")
    if scores.dim() == 2 and known.grid is not None and tuple(scores.shape) == known.grid.size:
        placed: list[float | None] = [None] * len(known.real)
        for token, score in zip(known.grid.tokens.tolist(), scores.flatten().tolist(), strict=True):
            placed[token] = score
        return placed
    if scores.dim() != 1 or len(scores) != known.layers[0].tokens:
        raise InputError(
            f"methods: {name} returned relevance of shape {tuple(relevance.shape)}. Pass methods "
            f"that return one number for each of the {known.layers[0].tokens} tokens."
        )
    return list(scores[known.real].tolist())


def _shortened(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Round the relevance in a method's JSON values to a few digits."""
    rows = {"": facts["values"], **facts["roles"]}
    roles = {name: [None if x is None else short(x) for x in row] for name, row in rows.items()}
    return {**facts, "values": roles.pop(""), "roles": roles}


def _image(example: ShownExample, known: Outline) -> dict[str, Any] | None:
    """Return the image as a data URL, with its size and grid of patches; None for a text."""
    if not example.is_image:
        return None
    picture = rgb_image(example.inputs[0])
    return {
        "source": f"data:image/png;base64,{in_base64(picture)}",
        "height": picture.shape[0],
        "width": picture.shape[1],
        "grid": None if known.grid is None else list(known.grid.size),
        "cells": [] if known.grid is None else known.grid.tokens.tolist(),
    }
