"""The subcommand ``captum-ssm estimate``, which computes the memory of LatimFlow on a model."""

from __future__ import annotations

import argparse
from typing import Any

_GIB = 2**30


def add_to(commands: Any) -> None:
    """Add the subcommand ``estimate`` to the parser's subcommands."""
    parser = commands.add_parser(
        "estimate",
        help="estimate the memory that LatimFlow needs for a model",
        description=(
            "Estimate the memory that LatimFlow needs, from the model's configuration. "
            "Example: captum-ssm estimate my-mamba --tokens 8192 --gpu 80"
        ),
    )
    parser.add_argument(
        "model", help="a bundled model, a folder with config.json, or with --hub a model name"
    )
    parser.add_argument("--tokens", type=int, required=True, help="number of tokens of the example")
    parser.add_argument("--chunk-tokens", type=int, help="also estimate it in such chunks")
    parser.add_argument("--gpu", type=float, help="GPU memory in GiB; prints whether the run fits")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: the configuration's"
    )
    parser.add_argument("--hub", action="store_true", help="allow downloading the configuration")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the memory of LatimFlow for two rules, with and without recompute and chunks."""
    import torch

    from ..explain.estimate import estimate_memory
    from ..explain.loading import Source, config_of

    config = config_of(Source(options.model, hub=options.hub))
    if options.dtype is not None:
        config.dtype = getattr(torch, options.dtype)
    fits = () if options.gpu is None else (f"fits {options.gpu:g} GiB",)
    row = "{:<10} {:<18}" + " {:>12}" * (3 + len(fits))
    print(row.format("rule", "option", "weights", "activations", "GiB in all", *fits))
    option_sets: list[dict[str, Any]] = [{}, {"recompute": True}]
    if options.chunk_tokens is not None:
        option_sets.append({"chunk_tokens": options.chunk_tokens})
    for rule in ("balanced", "frozen"):
        for extra in option_sets:
            memory = estimate_memory(config, options.tokens, rule=rule, **extra)
            sizes = memory.weights, memory.activations, memory.weights + memory.activations
            verdict = () if options.gpu is None else ("yes" if memory.fits(options.gpu) else "no",)
            numbers = (f"{size / _GIB:.2f}" for size in sizes)
            option_text = ", ".join(f"{name}={value}" for name, value in extra.items()) or "none"
            print(row.format(rule, option_text, *numbers, *verdict), flush=True)
    print("For one example with PyTorch's own functions. Other kernels use different memory.")
