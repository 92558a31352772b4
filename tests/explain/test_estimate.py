"""The memory that is computed from a configuration alone is the memory that a call takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.versions import transformers5
from transformers import Mamba2Config, MambaConfig, Qwen3NextConfig

from captum_ssm import LatimFlow
from captum_ssm.cli import main
from captum_ssm.errors import OptionError
from captum_ssm.explain.estimate import Estimate, Live, estimate_memory

pytestmark = transformers5
TOKENS = 600


def hybrid() -> Any:
    return Qwen3NextConfig(
        vocab_size=19, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, intermediate_size=48, num_experts=0,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def mamba() -> Any:
    return MambaConfig(vocab_size=19, hidden_size=24, num_hidden_layers=3, state_size=4)


@pytest.mark.parametrize(("make", "options", "rule"), [
    (mamba, {}, "frozen"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (mamba, {"recompute": True}, "frozen"), (hybrid, {}, "frozen"),
        (hybrid, {"recompute": True}, "frozen"), (mamba, {}, "centered"),
        (hybrid, {"recompute": True}, "centered"), (hybrid, {"chunk_tokens": 300}, "frozen"),
        (hybrid, {"chunk_tokens": 100}, "balanced"), (mamba, {"chunk_tokens": 300}, "frozen"),
    )),
])  # fmt: skip
def test_it_is_what_a_call_holds(make: Any, options: dict[str, Any], rule: Any) -> None:
    """Bytes of live tensors, of a length that is no multiple of the runs' own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make()).eval().requires_grad_(False)
    inputs = torch.randn(1, TOKENS, model.config.hidden_size)
    whole: Any = (lambda x: model(inputs_embeds=x, logits_to_keep=1).logits), model
    given = (model,) if "chunk_tokens" in options else whole
    counted = Live()
    with counted:
        LatimFlow(*given, rule=rule, **options).attribute(inputs, target=(-1, 0), verify=False)
    found = estimate_memory(make(), TOKENS, rule=rule, **options)
    assert abs(found.activations - counted.peak) <= 0.1 * counted.peak
    held = (*model.parameters(), *model.buffers())
    assert found.weights == sum(x.numel() * x.element_size() for x in held)


def test_models_of_any_size_take_no_memory() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=65536, num_hidden_layers=2)
    found = estimate_memory(config, 8)
    assert found.weights > 150 * 2**30 and not found.fits(80)
    assert Estimate(weights=70 * 2**30, activations=2**30).fits(80)
    assert not Estimate(weights=70 * 2**30, activations=8 * 2**30).fits(80)


@pytest.mark.slow
def test_eager_attention_grows_with_the_square() -> None:
    sizes = {"vocab_size": 19, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1}
    mamba2 = Mamba2Config(num_hidden_layers=1, **sizes)
    for config, growth in ((hybrid(), 3.75), (mamba2, 2)):
        config._attn_implementation = "eager"  # as in any model's own configuration
        one, two = (estimate_memory(config, tokens).activations for tokens in (4096, 8192))
        assert abs(two / one - growth) < 0.75


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hybrid().save_pretrained(tmp_path)  # of a kind that no other package replaces
    options = ("--tokens", "300", "--gpu", "1", "--dtype", "bfloat16", "--chunk-tokens", "100")
    assert main(["estimate", str(tmp_path), *options]) == 0
    head, *rows, note = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["rule", "option", "weights"] and len(rows) == 6
    assert [row.split()[1] for row in rows[:3]] == ["none", "recompute=True", "chunk_tokens=100"]
    assert all(row.endswith("yes") for row in rows) and note.startswith("For one example")
    assert main(["estimate", "no-such-model", "--tokens", "300"]) == 1
    assert "neither a folder, a file nor a bundled model" in capsys.readouterr().err


@pytest.mark.parametrize("numbers", [{"tokens": 0}, {"tokens": 9, "chunk_tokens": 0}])
def test_no_tokens(numbers: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="tokens=0"):
        estimate_memory(mamba(), **numbers)
