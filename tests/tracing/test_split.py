"""Models whose weights transformers splits between processes, explained in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.every_method import INSIDE, NAMES
from helpers.tensor_parallel import PROCESSES, explain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from zoo import delta, mamba2
from zoo.mamba import transformers_model

from captum_ssm import ImplicitAttentionRollout, LatimFlow
from captum_ssm.errors import InputError

pytest.importorskip("transformers.distributed.tensor_parallel")


def qwen3_5(monkeypatch: pytest.MonkeyPatch) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64}
    return delta.Family("qwen3_5", monkeypatch).model(**heads, **linear, **sizes)


def nemotron_h(monkeypatch: pytest.MonkeyPatch) -> Any:
    experts = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
    }
    return mamba2.make_model("nemotron_h", **experts, vocab_size=24)


#: Of several methods these say what each of them says.
SEVERAL = ("compare", "report")
OF_TOKENS = ["ImplicitAttentionRollout", "ImplicitAttention", "MambaAttribution", "LatimNorm"]


#: Models, and what is asked of each.
ASKED: list[tuple[Any, list[str]]] = [
    (qwen3_5, [x for x in [*NAMES, *INSIDE, "without room"] if x not in SEVERAL]),
    (nemotron_h, [*OF_TOKENS, "LatimFlow", "effects"]),
]


@pytest.mark.slow
def test_every_process_explains_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)  # the processes add up in other orders, and of some weights more is left
    asked = [(tmp_path / make.__name__, names) for make, names in ASKED]
    for (make, _), (folder, _) in zip(ASKED, asked, strict=True):
        make(monkeypatch).save_pretrained(folder)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    given = ((rank, queue, tmp_path / "store", asked) for rank in range(PROCESSES))
    processes = [context.Process(target=explain, args=each, daemon=True) for each in given]
    try:
        for process in processes:
            process.start()
        found = [queue.get(timeout=150) for _ in processes]
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()
    for of_process in found:
        assert not isinstance(of_process, str), of_process
        for errors, (_, names) in zip(of_process, asked, strict=True):
            assert set(errors) == set(names)
            assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize("method", [ImplicitAttentionRollout, LatimFlow])
def test_weights_split_in_another_way_are_refused(method: Any) -> None:
    """Of the heads that this process has the mean is another, and no operator shows it."""
    model, ids = transformers_model("mamba"), torch.randint(19, (1, 9))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        projection = model.backbone.layers[1].mixer.in_proj
        split = distribute_tensor(projection.weight.detach(), mesh, [Shard(0)])
        projection.weight = nn.Parameter(split)
        with pytest.raises(InputError, match=r"layers\.1\.mixer.*split between.*device_map"):
            method(model).attribute(ids, target=(-1, 3))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("method", [ImplicitAttentionRollout, LatimFlow])
def test_weights_split_into_plain_tensors_are_refused(method: Any) -> None:
    """Earlier versions of transformers leave no other trace on the module."""
    model, ids = transformers_model("mamba"), torch.randint(19, (1, 9))
    model.backbone.layers[1].mixer.in_proj._hf_tp_plan = "colwise"
    with pytest.raises(InputError, match=r"layers\.1\.mixer.*split between.*device_map"):
        method(model).attribute(ids, target=(-1, 3))
