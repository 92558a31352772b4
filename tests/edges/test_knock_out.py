"""Cut messages against whole matrices with entries zeroed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import relative_error as close
from oracles.messages import run_without, whole_matrix
from torch import Tensor, nn
from zoo.architectures import QUICK, Case, every, hook_count
from zoo.mamba import transformers_model
from zoo.small import mamba_lm

from captum_ssm import Edges, knock_out, trace
from captum_ssm.attr.call.targets import logits_of
from captum_ssm.errors import (
    GradientModeError,
    InputError,
    NoMixerError,
    OptionError,
    QueryError,
    ReconstructionError,
)
from captum_ssm.mixers import register_mixer
from captum_ssm.mixers.base import Call, LinearMixer
from captum_ssm.mixers.registry import adapter_for
from captum_ssm.operators.base import COMPONENTS
from captum_ssm.tracing import find_mixers


def logits(output: Any) -> Tensor:
    return logits_of(output).detach()


def size_of(case: Case) -> tuple[int, int, int]:
    with torch.no_grad(), trace(case.model) as record:
        case.model(case.inputs)
    return len(record.layers), *record.layers[0].operator.shape[:2]


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    found: dict[str, Tensor] = {}
    handles = []
    for mixer in find_mixers(model):

        def keep(module: Any, args: Any, output: Any, name: str = mixer.name) -> None:
            found[name] = (output if isinstance(output, Tensor) else output[0]).detach()

        handles.append(mixer.module.register_forward_hook(keep))
    yield found
    for handle in handles:
        handle.remove()


@every(QUICK, ("mamba2",))
def test_cutting_nothing_changes_nothing_and_cutting_all_leaves_nothing(case: Case) -> None:
    before, hooks = logits(case.model(case.inputs)), hook_count(case.model)
    layers, *_ = size_of(case)
    with torch.no_grad():
        with knock_out(case.model), knock_out(case.model, Edges(0, slice(0, 0), 1)):
            assert close(logits(case.model(case.inputs)), before) <= 1e-6
        with knock_out(case.model, Edges(layers - 1)), outputs_of(case.model) as outputs:
            case.model(case.inputs)
        assert not list(outputs.values())[-1].any()
        with pytest.raises(KeyError), knock_out(case.model, Edges(1 % layers, 0, -1)):
            case.model(case.inputs)
            raise KeyError
    assert hook_count(case.model) == hooks
    assert torch.equal(logits(case.model(case.inputs)), before)


def test_whole_outputs_at_several_tokens_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captum_ssm.edges.pairs._PAIRS", 60)  # several chunks, as of 5,000 tokens
    model, ids = transformers_model(), torch.randint(19, (1, 12))
    name = find_mixers(model)[0].name
    with knock_out(model, *(Edges(name, targets=i) for i in (1, 10))), outputs_of(model) as outputs:
        model(ids)
    silent = ~outputs[name].any(-1)[0]
    assert silent.nonzero().flatten().tolist() == [1, 10]
    with knock_out(model, *[Edges(name, targets=slice(0, 0))] * 2):
        assert close(logits(model(ids)), logits(model(ids))) == 0  # and none, named twice


@every(QUICK, ("mamba2",))
def test_components_and_heads(case: Case) -> None:
    with torch.no_grad(), trace(case.model) as record:
        case.model(case.inputs)
    batch, tokens, heads, per_head = record.layers[0].operator.shape
    zeroed = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
    zeroed[:, 3:, :3] = True
    head = heads - 1
    kinds = {leaf.component for leaf in record.layers[0].operator.leaves()} & COMPONENTS
    for component in sorted(kinds):

        def share(operator: Any, component: str = component) -> Tensor:
            rest = operator.restrict(COMPONENTS - {component})
            whole = whole_matrix(operator)
            if rest is None:
                rest_of = torch.eye(tokens * heads * per_head, dtype=whole.dtype)
                without = rest_of.view(1, tokens, heads * per_head, tokens, heads * per_head)
            else:
                without = whole_matrix(rest)
            lost = (whole - without).clone()
            lost[:, :, : head * per_head] = 0
            return lost

        expected, _ = run_without(case.model, case.inputs, {0: zeroed}, share)
        edges = Edges(0, slice(0, 3), slice(3, None), heads=-1, component=component)
        with torch.no_grad(), knock_out(case.model, edges):
            found = case.model(case.inputs)
        assert close(logits(found), logits(expected)) <= 1e-5


def later_but_near(target: Tensor, source: Tensor) -> Tensor:
    return (target > source) & (target - source < 4)


def test_relations() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 9))
    i, j = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    rows: list[tuple[Any, Any, Any]] = [
        (3, "later", lambda i, j: (j == 3) & (i > j)),
        ("earlier", -1, lambda i, j: (i == 8) & (j < i)),
        ("same", None, lambda i, j: i == j),
        (None, "same", lambda i, j: i == j),
        ([0, 5], later_but_near, lambda i, j: ((j == 0) | (j == 5)) & later_but_near(i, j)),
        (slice(None), later_but_near, lambda i, j: later_but_near(i, j)),
        (range(2, 5), slice(5, None), lambda i, j: (j >= 2) & (j < 5) & (i >= 5)),
        ("other", [6, 7], lambda i, j: ((i == 6) | (i == 7)) & (i != j)),
    ]
    for sources, targets, meant in rows:
        expected, _ = run_without(model, ids, {1: meant(i, j).expand(2, 9, 9)})
        with torch.no_grad(), knock_out(model, Edges(1, sources, targets)):
            assert close(logits(model(ids)), logits(expected)) <= 2e-6
    # positions of each example
    model, ids = mamba_lm(), torch.randint(15, (3, 8))
    sources, targets = torch.tensor([[0], [2], [-4]]), torch.tensor([[5, 7], [6, 6], [4, 5]])
    zeroed = torch.zeros(3, 8, 8, dtype=torch.bool)
    for b, (j, rows) in enumerate(zip([0, 2, 4], targets.tolist(), strict=True)):
        zeroed[b, rows, j] = True
    expected, _ = run_without(model, ids, {2: zeroed})
    with torch.no_grad(), knock_out(model, Edges(2, sources, targets)):
        assert close(logits(model(ids)), logits(expected)) <= 2e-6


def test_an_edge_named_twice_is_cut_once() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 9))
    zeroed = torch.zeros(2, 9, 9, dtype=torch.bool)
    zeroed[:, 5:8, 2] = True
    zeroed[:, 7, 1:4] = True
    expected, _ = run_without(model, ids, {1: zeroed})
    one, other = Edges(1, 2, range(5, 8)), Edges("backbone.layers.1.mixer", [1, 2, 3], 7)
    with torch.no_grad():
        with knock_out(model, one, other):
            assert close(logits(model(ids)), logits(expected)) <= 2e-6
        with knock_out(model, one), knock_out(model.backbone, Edges(1, [1, 2, 3], 7)):
            assert close(logits(model(ids)), logits(expected)) <= 2e-6
        with knock_out(model, one), knock_out(model, Edges(0, 1, 4)), knock_out(model, other):
            inner = logits(model(ids))
        zeroed_first = torch.zeros(2, 9, 9, dtype=torch.bool)
        zeroed_first[:, 4, 1] = True
        expected, _ = run_without(model, ids, {0: zeroed_first, 1: zeroed})
        assert close(inner, logits(expected)) <= 2e-6


@pytest.mark.slow
def test_what_the_mean_or_another_run_would_have_sent() -> None:
    model, ids, other = mamba_lm(), torch.randint(15, (2, 9)), torch.randint(15, (2, 9))
    edges = Edges(1, [1, 4], [6, 8])
    with torch.no_grad():
        with trace(model) as record:
            model(other)
        donor = record.layers[1].linear
        with trace(model) as record:
            model(ids)
        own = record.layers[1].linear
        entries = torch.zeros(2, 9, 9, dtype=torch.bool)
        entries[:, 6::2, 1:5:3] = True

        def sent(operator: Any, values: Tensor) -> Tensor:
            matrix = whole_matrix(operator) * entries[:, :, None, :, None]
            return torch.einsum("bicjd,bjd->bic", matrix, values.flatten(2))

        mean = own.values.mean(1, keepdim=True).expand_as(own.values)
        for other_run, instead in (
            ("mean", sent(own.operator, mean)),
            (other, sent(donor.operator, donor.values)),
            ((other,), sent(donor.operator, donor.values)),
            ({"input_ids": other}, sent(donor.operator, donor.values)),
        ):
            delta = (instead - sent(own.operator, own.values)).view(own.values.shape)
            at_rest = own.project(torch.zeros_like(delta))
            out = record.layers[1].output + own.project(delta) - at_rest
            with knock_out(model, edges, replace=other_run), outputs_of(model) as outputs:
                model(ids)
            assert close(outputs["backbone.layers.1.mixer"], out) <= 2e-6
        with knock_out(model, edges, replace=ids):
            assert close(logits(model(ids)), logits(model(ids))) <= 1e-6
        with (
            pytest.raises(QueryError, match=r"replace.*8 tokens"),
            knock_out(model, edges, replace=other[:, :8]),
        ):
            model(ids)
        with (
            pytest.raises(InputError, match="Pass replace with"),
            knock_out(model, Edges(1, 1, 6), replace=other[:, :8]),
        ):
            model(ids)


@every(("mamba2", "recurrent_gemma", "gpt_neox"), ("mamba2",))
def test_without_a_share_in_the_selection_either(case: Case) -> None:
    with torch.no_grad(), trace(case.model) as record:
        case.model(case.inputs)
    layer = record.layers[-1]
    hidden = layer.call.hidden_states.clone()
    hidden[:, 2] = 0
    kwargs = {
        k: hidden if v is layer.call.hidden_states else v for k, v in layer.call.kwargs.items()
    }
    args = tuple(hidden if v is layer.call.hidden_states else v for v in layer.call.args)
    with torch.no_grad():
        without = layer.mixer.module(*args, **kwargs)
    without = without if isinstance(without, Tensor) else without[0]
    expected = layer.output.detach().clone()
    expected[:, [4, 6]] = without[:, [4, 6]]
    edges = Edges(layer.name, 2, [4, 6], selection=True)
    with torch.no_grad(), knock_out(case.model, edges), outputs_of(case.model) as outputs:
        case.model(case.inputs)
    assert close(outputs[layer.name], expected) <= 1e-5


@pytest.mark.slow
def test_text_is_generated_without_the_messages() -> None:
    model, ids = mamba_lm(), torch.randint(1, 15, (1, 5))
    edges = Edges(sources=0, targets=lambda target, source: target > 2)
    with torch.no_grad(), knock_out(model, edges):
        found = model.generate(
            ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False
        )
        slow = ids
        for _ in range(4):
            slow = torch.cat([slow, model(slow).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, slow[:, : found.shape[1]])  # the end of a text may come earlier


def test_masked_tokens_keep_their_places() -> None:
    model, ids = mamba_lm(), torch.randint(1, 15, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, attention_mask=mask).logits

    masked, real = Masked(), ids[:1, 3:]
    with torch.no_grad(), knock_out(masked, Edges(1, 4, 6), replace="mean"):
        found = masked(ids)[0, -1]  # of what real tokens send, padding does not count
    with torch.no_grad(), knock_out(model, Edges(1, 1, 3), replace="mean"):
        assert close(found, model(real).logits[0, -1]) <= 2e-6
    zeroed = torch.zeros(2, 7, 7, dtype=torch.bool)
    zeroed[:, 6, 4] = True
    expected, _ = run_without(masked, ids, {1: zeroed})
    with torch.no_grad(), knock_out(masked, Edges(1, 4, 6)):
        assert close(masked(ids), expected) <= 2e-6


@pytest.mark.parametrize("selection", [False, True])
@pytest.mark.parametrize("replacement", [None, "mean"])
def test_a_padded_example_is_cut_as_by_itself(replacement: Any, selection: bool) -> None:
    model, ids = mamba_lm().double(), torch.randint(1, 15, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def cut(ids: Tensor, mask: Any, by: int) -> Tensor:
        edges = Edges(1, [by, 1 + by], [2 + by, 3 + by], selection=selection)
        with torch.no_grad(), knock_out(model, edges, replace=replacement):
            return model(ids, attention_mask=mask).logits[0, -4:]

    alone = cut(ids[:1, 3:], None, 0)
    assert close(cut(ids, mask, 3), alone) <= 1e-6 < close(model(ids[:1, 3:]).logits[0], alone)


def test_what_cannot_be_cut() -> None:
    model, ids = mamba_lm(), torch.randint(15, (2, 9))
    before = logits(model(ids))
    for edges, error, said in (
        (Edges(), OptionError, "has no arguments"),
        (Edges(1, 5, 2), QueryError, "before its source"),
        (Edges(1, 9, 8), QueryError, "sources contains position 9"),
        (Edges(1, 2, -12), QueryError, "targets contains position -12"),
        (Edges(1, torch.ones(4, dtype=torch.bool), 2), QueryError, "sources is a mask"),
        (Edges(1, torch.zeros(3, 1).long(), 2), QueryError, "3 examples"),
        (Edges(7, 1, 2), OptionError, "layers contains 7"),
        (Edges("there", 1, 2), NoMixerError, "'there'"),
        (Edges(1, 1, 2, heads=20), OptionError, "heads contains 20"),
        (Edges(1, 1, 2, component="norm"), OptionError, "norm"),
        (Edges(1, 1, lambda i, j: i - j), OptionError, "booleans"),
    ):
        with pytest.raises(error, match=said), torch.no_grad(), knock_out(model, edges):
            model(ids)
    assert torch.equal(logits(model(ids)), before)
    wrong: list[dict[str, Any]] = [
        {"sources": 1.5},
        {"targets": "behind"},
        {"targets": torch.ones(3)},
        {"heads": [1, 1]},
        {"component": "gates"},
        {"selection": True, "component": "scan"},
    ]
    for options in wrong:
        with pytest.raises(OptionError):
            Edges(**options)
    for given, options in (
        ((1, 2, 3), {}),
        (Edges(1), {"replace": "x"}),
        (Edges(1), {"replace": 3}),
    ):
        said = "replace" if options else "Edges"
        with pytest.raises(OptionError, match=said), knock_out(model, given, **options):
            pass


@pytest.mark.slow
def test_one_message_is_not_cut_in_two_ways() -> None:
    model, ids = mamba_lm(), torch.randint(15, (1, 9))
    with (
        torch.no_grad(),
        pytest.raises(OptionError, match="two ways"),
        knock_out(model, Edges(1, 2, 5), Edges(1, [2, 3], 5, component="scan")),
    ):
        model(ids)
    twice = knock_out(model, Edges(1, 2, 5)), knock_out(model, Edges(1, 2, 5), replace="mean")
    with torch.no_grad(), pytest.raises(OptionError, match="two ways"), twice[0], twice[1]:
        model(ids)
    with torch.no_grad():  # others may be
        with knock_out(model, Edges(1, 2, 5), Edges(1, 3, 5, component="scan")):
            model(ids)
        with knock_out(model, Edges(1, 2, 5, heads=0), Edges(1, 2, 5, heads=1, component="scan")):
            model(ids)
        with knock_out(model, Edges(1)), knock_out(model, Edges(1, 2, 5)):
            model(ids)


def test_no_gradient_is_taken_through_a_cut() -> None:
    model, ids = mamba_lm(), torch.randint(15, (1, 9))
    with knock_out(model, Edges(1, 2, 5)):
        number = model(ids).logits[0, -1, 3]
    with pytest.raises(GradientModeError, match="knock_out"):
        number.backward()
    embeddings = model.backbone.embeddings(ids).detach().requires_grad_()
    with knock_out(model, Edges(1)):  # what is zeroed as a whole has one
        number = model(inputs_embeds=embeddings).logits[0, -1, 3]
    (found,) = torch.autograd.grad(number, embeddings)
    mixer = model.backbone.layers[1].mixer
    hook = mixer.register_forward_hook(lambda module, args, output: 0 * output)
    (expected,) = torch.autograd.grad(model(inputs_embeds=embeddings).logits[0, -1, 3], embeddings)
    hook.remove()
    assert close(found, expected) <= 1e-5


def test_an_operator_that_is_not_its_module_is_refused() -> None:
    model, ids = mamba_lm(), torch.randint(15, (1, 9))
    cls = type(model.backbone.layers[0].mixer)
    found = adapter_for(model.backbone.layers[0].mixer)
    assert found is not None

    def wrong(module: nn.Module, call: Call) -> LinearMixer:
        linear = found[1](module, call)
        return replace(linear, values=linear.values * 1.01)

    register_mixer(cls, wrong)
    with pytest.raises(ReconstructionError), torch.no_grad(), knock_out(model, Edges(1, 2, 5)):
        model(ids)
    with torch.no_grad(), knock_out(model, Edges(1, 2, 5), verify=False):
        model(ids)


def test_an_interrupted_mixer_leaves_no_mode_behind() -> None:
    model, ids = mamba_lm(), torch.zeros(1, 5, dtype=torch.long)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model.backbone.layers[1].mixer.in_proj.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), knock_out(model, Edges(targets=[4], sources=[1])):
        model(ids)
    assert not torch.overrides._get_current_function_mode_stack()
