"""Training of the bundled recall model, from scratch.

Run ``python -m captum_ssm.models.training --out FOLDER`` to make the bundled model again.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from captum_ssm.tasks.recall import (
    MAX_FACTS,
    MIN_FACTS,
    Example,
    accuracy,
    collate,
    generate,
    recall_vocabulary,
)
from captum_ssm.tracing import repaired_scans

# Far from any training seed, and from the seeds of the tests.
HELD_OUT_SEED = 987_654_321


@dataclass(frozen=True)
class ModelSize:
    """The size of the model to train."""

    layers: int = 2
    hidden: int = 64
    state: int = 16
    conv_kernel: int = 4


def new_model(size: ModelSize) -> torch.nn.Module:
    """A freshly initialised ``MambaForCausalLM`` for the recall task.

    The decays start near one (``A_log = -8``) and the step sizes near one: the state then keeps
    what it has seen over the whole prompt from the first training step on, which makes recall
    much quicker to learn than from the usual start.
    """
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=len(recall_vocabulary()),
        hidden_size=size.hidden,
        state_size=size.state,
        num_hidden_layers=size.layers,
        conv_kernel=size.conv_kernel,
        pad_token_id=recall_vocabulary().pad_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = MambaForCausalLM(config)
    with torch.no_grad():
        for block in model.backbone.layers:
            block.mixer.A_log.fill_(-8.0)
            block.mixer.dt_proj.bias.fill_(math.log(math.e - 1))  # softplus of it is 1
    trained: torch.nn.Module = model
    return trained


def train_recall(
    seed: int = 0,
    steps: int = 3000,
    *,
    size: ModelSize | None = None,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    log_every: int = 100,
    log: Callable[[str], None] = print,
) -> torch.nn.Module:
    """Trains a recall model from scratch and returns it in evaluation mode.

    The loss is the cross entropy of the answer alone. All prompts of one batch have the same
    number of facts, which keeps the padding short. The same seed on the same machine and
    versions gives the same model.

    Args:
        seed: of the initial weights and of the data.
        steps: number of optimiser steps.
        size: size of the model.
        batch_size: prompts per step.
        learning_rate: the peak, reached after a short warm-up and followed by a cosine to zero.
        log_every: steps between two lines of progress.
        log: takes a line of progress.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = new_model(size or ModelSize())
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    warm_up = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
    held_out = generate(256, HELD_OUT_SEED)
    started, running = time.monotonic(), math.log(len(recall_vocabulary()))
    model.train()
    with repaired_scans():
        for step in range(1, steps + 1):
            batch = collate(generate(batch_size, rng, rng.randint(MIN_FACTS, MAX_FACTS)))
            output = model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                logits_to_keep=1,
            )
            loss = F.cross_entropy(output.logits[:, -1], batch.answer_ids)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            running += 0.05 * (loss.item() - running)
            if step % log_every == 0 or step == steps:
                model.eval()
                score = accuracy(model, held_out)
                model.train()
                seconds = time.monotonic() - started
                log(f"step {step}/{steps} loss {running:.4f} held-out {score:.4f} {seconds:.0f} s")
    return model.eval()


def accuracy_by_facts(
    model: torch.nn.Module, per_length: int = 512, seed: int = HELD_OUT_SEED + 1
) -> dict[int, float]:
    """The accuracy for each number of facts, on fresh prompts."""
    scores: dict[int, float] = {}
    for n in range(MIN_FACTS, MAX_FACTS + 1):
        examples: list[Example] = generate(per_length, seed + n, n)
        scores[n] = accuracy(model, examples)
    return scores


def save_model(model: torch.nn.Module, folder: str | Path) -> None:
    """Writes weights, configuration and vocabulary as :func:`load_bundled` reads them."""
    saved: Any = model
    saved.save_pretrained(folder)
    # It comes readable by its owner alone, and would be so in a package as well.
    (Path(folder) / "model.safetensors").chmod(0o644)
    recall_vocabulary().to_json(Path(folder) / "vocab.json")
    # Decoding settings that a model with a single next word does not need.
    (Path(folder) / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    """Trains, saves and measures, from the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--layers", type=int, default=ModelSize.layers)
    parser.add_argument("--hidden", type=int, default=ModelSize.hidden)
    parser.add_argument("--state", type=int, default=ModelSize.state)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads change the order of sums, and with it the trained weights
    size = ModelSize(options.layers, options.hidden, options.state)
    model = train_recall(options.seed, options.steps, size=size)
    save_model(model, options.out)
    for n, score in accuracy_by_facts(model).items():
        print(f"{n} facts: accuracy {score:.4f}")


if __name__ == "__main__":
    main()
