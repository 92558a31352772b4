"""All that needs a GPU, by one command, on one page.

    python -m benchmarks.gpu --out gpu
    python -m benchmarks.gpu --rehearse --out rehearsal

builds the kernels that are missing, runs the tests marked gpu, holds operators to fused kernels,
measures the tables of docs/speed.md and a model of the size of Mamba 2.8B, and writes ``gpu.md``:
the device, its driver, versions, what each step printed and whether it passed.  With several GPUs
the tests of models that are spread over two are run, too.  The exit status is 1 if a step failed;
no step stops the others.  ``--rehearse`` runs the same steps on a CPU, at small size.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.measure import versions
from benchmarks.report import markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "triton", "transformers", "mamba-ssm", "causal-conv1d", "flash-linear-attention"),
    *("accelerate", "captum", "captum_ssm"),
)
#: Modules without which kernels are missing.
KERNELS = ("mamba_ssm", "selective_scan_cuda", "causal_conv1d", "fla", "accelerate")
#: What the 2.8B row consists of.
CALLS = ("LatimFlow", "ImplicitAttentionRollout")
#: Lines of a step's output on the page; all of it is in a file of its own.
LINES = 400


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the step, and of the file with its output.
        arguments: of Python.
    """

    name: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """What a user would type."""
        return f"python {shlex.join(self.arguments)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.md and the rest")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at small size")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error(
            f"no CUDA device was found by torch {torch.__version__} (built for CUDA "
            f"{torch.version.cuda}). Run this on a machine with an NVIDIA GPU and a torch built "
            "for its CUDA, or pass --rehearse to run every step on the CPU, at small size."
        )
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows, sections = [], []
    for step in small(folder) if options.rehearse else real(folder):
        print(f"{step.name}: {step.command}", flush=True)
        row, section = run(step, folder)
        rows.append(row)
        sections.append(section)
    title = "# A rehearsal on a CPU\n" if options.rehearse else "# Measured on a GPU\n"
    facts = [f"- {name}: {value}" for name, value in about().items()]
    page = folder / "gpu.md"
    page.write_text("\n".join([title, *facts, "", markdown(rows), "", *sections]) + "\n")
    print(f"{markdown(rows)}\n\nwritten to {page}")
    raise SystemExit(any(row["result"] != "passed" for row in rows))


def real(folder: Path) -> Iterator[Step]:
    """The steps on a GPU."""
    if not all(map(find_spec, KERNELS)):
        wanted = ("-e", ".[test,sharded,cuda]", "flash-linear-attention")
        yield Step("build", ("-m", "pip", "install", "--no-build-isolation", *wanted))
    yield Step("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests"))
    yield Step("fused kernels", ("-m", "benchmarks.fused_paths"))
    on_gpu = ("-m", "benchmarks", "--device", "cuda", "--out", str(folder))
    yield Step("speed", on_gpu)
    large = ("--families", "Mamba 2.8B", "--layers", "64", "--lengths", "2048")
    yield Step("2.8B", (*on_gpu[:-1], str(folder / "2.8B"), *large, *_calls()))


def small(folder: Path) -> Iterator[Step]:
    """The same on a CPU: the tests are collected and skipped, and the rest is small."""
    yield Step("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests/conformance/test_cuda.py"))
    yield Step(
        "fused kernels", ("-m", "benchmarks.fused_paths", "--device", "cpu", "--length", "9")
    )
    on_cpu = ("-m", "benchmarks", "--lengths", "16", "--layers", "1", "--out", str(folder))
    yield Step("speed", (*on_cpu, "--families", "Mamba", "GLA"))
    yield Step("2.8B", (*on_cpu[:-1], str(folder / "2.8B"), "--families", "Mamba 2.8B", *_calls()))


def _calls() -> tuple[str, ...]:
    return "--dtype", "bfloat16", "--calls", *CALLS


def run(step: Step, folder: Path) -> tuple[dict[str, object], str]:
    """Run a step: its row of the summary, and its section of the page."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *step.arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (folder / f"{step.name}.log").write_text(done.stdout)
    result = "passed" if done.returncode == 0 else f"FAILED ({done.returncode})"
    row = {"step": step.name, "seconds": time.perf_counter() - began, "result": result}
    printed = done.stdout.strip().splitlines()[-LINES:]
    is_table = any(line.startswith("|") for line in printed)
    told = (
        [line for line in printed if line.startswith("|")] if is_table else ["```", *printed, "```"]
    )
    command = step.command.replace(str(folder), folder.name)  # pages are sent to others
    return row, "\n".join([f"## {step.name}\n", f"`{command}`: {result}\n", *told, ""])


def about() -> dict[str, str]:
    """Date, devices, driver and versions."""
    found = {"date": date.today().isoformat(), **versions(*PACKAGES)}
    found["CUDA of torch"] = str(torch.version.cuda)
    if not torch.cuda.is_available():
        return {**found, "devices": "none"}
    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    asked = ("nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader")
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip().splitlines()
    return {**found, "devices": ", ".join(names), "driver, memory": "; ".join(driver)}


if __name__ == "__main__":
    main()
