"""Do graphs of exact parts say what the model goes by: is the answer lost without their paths?

Two things are held against true interventions: the path that carries most, whose messages are cut,
and the effects of nodes, which are taken away one by one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from captum_ssm.edges import Edges, knock_out
from captum_ssm.inside import Graph, Node, attribution_graph, validate
from captum_ssm.linear import Rule
from captum_ssm.tracing import find_mixers, repaired_scans

from ...harness.experiment import Cell, Column
from ...harness.records import Numbers, Rows
from ...harness.statistics import correlation, ratio
from ..causal.experiment import Questioned
from ..causal.questions import Question
from ..linked_texts import device_of
from .experiment import Knockout, sums_of
from .parts import ANSWER_CUT

#: What the answer's logit is held against.
CONTRAST = "mean"
#: Nodes that are taken away of each graph, those that add most.
NODES = 60
#: Draws of other messages than those of a path.
DRAWS = 4
#: A node's effect is large from this share of the answer's logit on.
LARGE = 0.01

#: How often the model is right as it is.
WHOLE = Cell("nothing cut")
#: The same without anything that the sources of the answer send to other tokens.
SOURCES_CUT = Cell("sources cut")
#: The same without what these send to the token that asks, in all layers.
DIRECT_CUT = Cell(ANSWER_CUT)
#: Who names a token that the answer could come from, whichever it is.
CHANCE = Cell("any token")
PATH, OF_NODES = "path", "nodes"
PATH_RULES: Sequence[Rule] = ("frozen", "centered")
NODE_RULES: Sequence[Rule] = ("frozen", "half", "centered")

_LANGUAGE = Knockout.groups["language models"]
#: Tasks of the models of one block.
_MANY_SOURCES, _ONE_BLOCK = ("frequent-word-",), ("passkey-", "two-passkeys-")


class Message(NamedTuple):
    """What one token sends to another within a block.

    Attributes:
        mixers: the names of the block's mixers.
        source: the token that sends.
        target: the token that receives.
    """

    mixers: tuple[str, ...]
    source: int
    target: int

    @property
    def edges(self) -> Edges:
        """What is cut."""
        return Edges(list(self.mixers), [self.source], [self.target])


class Graphs(Questioned):
    """Paths and nodes of graphs of bundled models, against true interventions."""

    name = "graphs"
    title = "Graphs of exact parts against true interventions"
    examples = 40
    columns = (
        Column("token", ("token",)),
        Column("place", ("place",)),
        Column("accuracy", ("right",), ""),
        Column("others cut", ("others",)),
        Column("messages", ("messages",), ""),
        Column("r", ("n", "x", "y", "xx", "yy", "xy"), statistic=correlation),
        Column("signs", ("agreed", "counted"), statistic=ratio),
        Column("error", ("off", "size"), "low", ratio),
    )
    baselines = (WHOLE.method, SOURCES_CUT.method, DIRECT_CUT.method, CHANCE.method)
    groups = MappingProxyType(
        {
            "two blocks": tuple(
                n for n in _LANGUAGE if not n.startswith((*_ONE_BLOCK, *_MANY_SOURCES))
            ),
            "one block": tuple(n for n in _LANGUAGE if n.startswith(_ONE_BLOCK)),
            "one block, many sources": tuple(n for n in _LANGUAGE if n.startswith(_MANY_SOURCES)),
        }
    )

    def cells(self) -> Sequence[Cell]:
        return [
            WHOLE,
            SOURCES_CUT,
            DIRECT_CUT,
            CHANCE,
            *(Cell(PATH, rule) for rule in PATH_RULES),
            *(Cell(OF_NODES, rule) for rule in NODE_RULES),
        ]

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        rule: Any = cell.formulation
        if cell.method == OF_NODES:
            found = of_nodes(model, example, rule)
        elif cell.method == PATH:
            found = {"": of_path(model, example, rule)}
        elif cell == CHANCE:
            found = {"": {"token": float(example.gold.double().mean())}}
        else:
            sources, last = example.gold.nonzero()[:, 0].tolist(), len(example.gold) - 1
            cut = {
                WHOLE: [],
                SOURCES_CUT: [Edges(sources=sources, targets="other")],
                DIRECT_CUT: [Edges(sources=sources, targets=last)],
            }
            found = {"": {"right": is_right(model, example, *cut[cell])}}
        missing = {name: math.nan for column in self.columns for name in column.numbers}
        return {row: {**missing, **numbers} for row, numbers in found.items()}

    def together(self) -> AbstractContextManager[None]:
        return repaired_scans()


def of_path(model: nn.Module, question: Question, rule: Rule) -> Numbers:
    """Where the path leads that carries most, and whether the answer is right without it."""
    blocks = list(dict.fromkeys(block for m in find_mixers(model) for block in m.blocks))
    path = graph_of(model, question, blocks, rule).path()[:-1]
    messages, last = list(messages_of(model, path)), len(question.gold) - 1
    rng, on_path = random.Random(question.seed("others")), {node.position for node in path}
    others = [drawn for _ in range(DRAWS) if (drawn := other_messages(messages, on_path, rng))]
    right = [is_right(model, question, *(m.edges for m in drawn)) for drawn in others]
    at_source = bool(messages) and bool(question.gold[messages[-1].source])
    return {
        "token": float(bool(path) and bool(question.gold[path[0].position])),
        "place": float(at_source and messages[-1].target == last),
        "right": is_right(model, question, *(m.edges for m in messages)),
        "others": sum(right) / len(right) if right else math.nan,
        "messages": len(messages),
    }


def messages_of(model: nn.Module, path: Sequence[Node]) -> Iterator[Message]:
    """The messages on a path over what blocks return: each is sent within the block it leads to."""
    mixers = find_mixers(model)
    for one, other in itertools.pairwise(path):
        if one.position is not None and other.position is not None:
            block = model.get_submodule(other.layer)
            if one.position != other.position:
                names = tuple(mixer.name for mixer in mixers if block in mixer.blocks)
                yield Message(names, one.position, other.position)


def other_messages(
    messages: Sequence[Message], taken: Collection[int | None], rng: random.Random
) -> list[Message]:
    """As many in the same layers to the same tokens, from earlier ones that are not taken."""
    free = [[i for i in range(message.target) if i not in taken] for message in messages]
    if not all(free):
        return []
    return [
        message._replace(source=rng.choice(sources))
        for message, sources in zip(messages, free, strict=True)
    ]


def of_nodes(model: nn.Module, question: Question, rule: Rule) -> dict[str, Numbers]:
    """The effects of the outputs of mixers for each token, estimated and true, by size.

    Nodes that can do nothing, such as outputs of the last layer that nobody reads, are not counted.
    There is one that does, where there is one mixer; nothing is said of such models.
    """
    mixers = [mixer.module for mixer in find_mixers(model)]
    if len(mixers) < 2:
        return {}
    graph = graph_of(model, question, mixers, rule, top=NODES, keep=None)
    inputs = question.inputs.to(device_of(model))
    truth = validate(graph, model, inputs, question.target, contrast=CONTRAST)
    acts = (truth.estimated != 0) | (truth.true.abs() > truth.rounding)
    large = truth.true.abs() > LARGE * abs(graph.nodes[-1].activation)
    none = torch.full_like(truth.true, torch.nan)
    return {
        name: sums_of(truth.estimated[one], none[one], truth.true[one], truth.rounding)
        for name, one in (("all", acts), ("large", large))
    }


def graph_of(
    model: nn.Module, question: Question, nodes: Sequence[nn.Module], rule: Rule, **options: Any
) -> Graph:
    """The graph of the answer's logit, over whole activations."""
    inputs, target = question.inputs.to(device_of(model)), question.target
    return attribution_graph(
        model, inputs, target, nodes=nodes, contrast=CONTRAST, rule=rule, **options
    )


def is_right(model: nn.Module, question: Question, *edges: Edges) -> float:
    """Whether the answer is right without some messages."""
    place, token = question.target
    with torch.no_grad(), knock_out(model, *edges):
        logits: Any = model(input_ids=question.inputs.to(device_of(model)))
    return float(int(logits.logits[0, place].argmax()) == token)
