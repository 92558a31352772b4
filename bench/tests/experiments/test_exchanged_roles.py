"""Exchanges of factors between two runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm.operators.coefficients import ROLES
from captum_ssm.tracing import repaired_scans
from captum_ssm_bench import EXPERIMENTS
from captum_ssm_bench.experiments.exchanged_roles import _SHAPLEY, MEMBERS, Exchange

ROLES_EXPERIMENT = EXPERIMENTS["exchanged-roles"]


def exchange(name: str, seed: int) -> tuple[Any, Exchange]:
    (subject,) = (each for each in ROLES_EXPERIMENT.subjects() if each.name == name)
    model = subject.load(torch.device("cpu"))
    example = ROLES_EXPERIMENT.example(subject, 0, seed)
    return model, Exchange(model, example.questions[0])


def logits(model: Any, ids: torch.Tensor, target: Any) -> torch.Tensor:
    with torch.no_grad(), repaired_scans():
        return model(input_ids=ids).logits[(slice(None), *target)].double()


@pytest.mark.parametrize(
    "name",
    [
        "recall-mamba",
        "pairs-mamba2",
        "pairs-gated-deltanet",
        "pairs-rwkv",
        "pairs-griffin",
        "pairs-bamba",
        "pairs-qwen3-next-101",
        "two-passkeys-mamba2",
    ],
)
def test_all_roles_of_one_run_are_that_run(name: str, seed: int) -> None:
    model, one = exchange(name, seed)
    others = one.question.references("a test", 3)
    others[2, 1:] = one.question.inputs[0, 1:]  # the first token alone is another one
    values, target = one.values(others), one.question.target
    own = logits(model, one.question.inputs, target).expand(3)
    torch.testing.assert_close(values[:, -1], own, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values[:, 0], logits(model, others, target), rtol=1e-3, atol=1e-3)
    assert float(values.std(1)[:2].min()) > 0.01, "roles matter"
    shares = values @ _SHAPLEY
    torch.testing.assert_close(shares.sum(1), values[:, -1] - values[:, 0])
    absent = [place for place, role in enumerate(ROLES) if role not in one.present]
    assert not (shares[:, absent].abs() > 1e-9).any()


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_exchanged_as_the_modules_would(role: str, seed: int) -> None:
    """Mamba-2 makes all factors by its first projection, where hooks can exchange them."""
    model, one = exchange("pairs-mamba2", seed)
    others, target = one.question.references("a test", 1), one.question.target
    mixers = [layer.mixer for layer in model.backbone.layers]
    width, heads, state = mixers[0].intermediate_size, mixers[0].num_heads, 32
    sizes = {"gate": width, "content": width, "key": state, "query": state, "step": heads}
    kept: list[torch.Tensor] = []

    def exchanged(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if len(kept) < 2 * len(mixers):  # of the text, then of the other one
            kept.append(output)
            return output
        number = mixers_seen.pop(0)
        own, other = (kept[i].split(list(sizes.values()), -1) for i in (number, number + 2))
        now = output.split(list(sizes.values()), -1)
        each = zip(sizes, now, own, other, strict=True)
        return torch.cat(
            [x if n == "content" else z if n == role else y for n, x, y, z in each], -1
        )

    mixers_seen = list(range(len(mixers)))
    hooks = [m.in_proj.register_forward_hook(exchanged) for m in mixers]
    text = one.question.inputs
    before = logits(model, text, target)
    logits(model, others, target)
    expected = logits(model, others if role == "content" else text, target)
    for hook in hooks:
        hook.remove()
    (row,) = (torch.tensor([each != role for each in ROLES]) == MEMBERS).all(1).nonzero()[0]
    torch.testing.assert_close(one.values(others)[:, row], expected, rtol=1e-3, atol=1e-3)
    assert abs(float(expected - before)) > 0.01
