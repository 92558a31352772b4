"""Methods find where each copied token comes from, on models trained to copy."""

from __future__ import annotations

import random

import pytest
import torch

from captum_ssm import LatimFlow, LatimNorm
from captum_ssm_bench import load_bundled
from captum_ssm_bench.tasks import LONG_COPIES, SHORT_COPIES, CopyingTask

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def _found(name: str, task: CopyingTask, length: int, strings: int) -> torch.Tensor:
    """Whether the gold source is the most relevant of all tokens, (strings, length)."""
    model, _ = load_bundled(name)
    batch = task.batch(task.draw(strings, random.randrange(10**9), length))
    queries = batch.links.queries.reshape(strings, length)
    sources = batch.links.sources.reshape(strings, length)
    tokens = batch.links.tokens.reshape(strings, length)
    targets = [
        list(zip(queries[:, j].tolist(), tokens[:, j].tolist(), strict=True)) for j in range(length)
    ]
    parts = LatimFlow(model).decompose_each(batch.input_ids, targets, rule="frozen")
    return torch.stack([part.tokens.argmax(-1) for part in parts], dim=1) == sources


@pytest.mark.parametrize(
    ("name", "task", "share"),
    [("copying-mamba", SHORT_COPIES, 0.9), ("copying-mamba2", LONG_COPIES, 0.95)],
)
def test_gold_sources_are_the_most_relevant_tokens(
    name: str, task: CopyingTask, share: float
) -> None:
    lengths = (task.shortest, (task.shortest + task.longest) // 2, task.longest)
    found = torch.cat([_found(name, task, n, strings=100).flatten() for n in lengths])
    assert float(found.double().mean()) >= share


def test_the_map_of_the_learnt_layer_finds_them_in_mamba_2() -> None:
    """The second layer alone copies; in Mamba-1 two layers share the work."""
    model, _ = load_bundled("copying-mamba2")
    strings, length = 40, 17
    batch = LONG_COPIES.batch(LONG_COPIES.draw(strings, random.randrange(10**9), length))
    queries = batch.links.queries.reshape(strings, length)
    sources = batch.links.sources.reshape(strings, length)
    (rows,) = LatimNorm(model).maps(batch.input_ids, layers=[1], positions=queries)
    assert float((rows.argmax(-1) == sources).double().mean()) >= 0.9
