"""What a GPU that is there for minutes can tell, the most useful first.

    python -m benchmarks.gpu --out gpu
    python -m benchmarks.gpu --out gpu --beside old
    python -m benchmarks.gpu --rehearse --out rehearsal

runs cases, each in a process of its own that is stopped at its limit, and prints and writes every
row as it comes: ``gpu.md`` holds the rows, ``gpu.log`` all else that was printed.
Nothing is installed and no kernel is built: a case whose package is missing is left out.  What a
call takes is told in units of ``f+b``, the model's own forward and backward pass in the same
process.  ``--beside`` names folders that hold another ``captum_ssm`` alone, such as that of an
earlier commit, for which some cases are run as well.  ``--rehearse`` runs one case of each kind on
a CPU, at small size.  The exit status is 1 if a case failed; a method that refuses a model has a
row that says so.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.measure import versions
from benchmarks.report import Row, markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "triton", "transformers", "mamba-ssm", "causal-conv1d", "fla-core"),
    *("captum", "captum_ssm"),
)
#: What a row begins with in what a case prints.
MARK = "ROW "

Call = Callable[[nn.Module, Tensor], Any]
#: Yields a case's rows; it is told whether this is a rehearsal, and whether it is run for another
#: captum_ssm.
Run = Callable[[bool, bool], Iterator[Row]]


# --- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What one process runs.

    Attributes:
        run: yields the rows.
        limit: seconds after which it is stopped.
        needs: packages without which it is left out.
        together: whether it runs at the same time as its neighbors, as they time nothing. Default:
            False.
        beside: whether it is run for another ``captum_ssm`` as well. Default: False.
    """

    run: Run
    limit: float
    needs: tuple[str, ...] = ()
    together: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Size:
    """A model and its input.

    Attributes:
        layers, width, tokens, vocabulary: how many.
    """

    layers: int
    width: int
    tokens: int
    vocabulary: int = 50280


#: What a rehearsal runs in place of every size.
TINY = Size(layers=2, width=16, tokens=9, vocabulary=19)
SMALL = Size(layers=2, width=64, tokens=100, vocabulary=64)
SIZE_130M = Size(layers=24, width=768, tokens=1024)
SIZE_2_8B = Size(layers=64, width=2560, tokens=2048)


def timed(kind: str, size: Size, dtype: torch.dtype, names: Sequence[str] | None = None) -> Run:
    """A case that times calls on a model of random weights.

    Args:
        kind: of :data:`MODELS`.
        size: of the model.
        dtype: of its weights.
        names: of the calls. Default: None, all; of another captum_ssm, those of LatimFlow.
    """

    def run(rehearse: bool, other: bool) -> Iterator[Row]:
        own = TINY if rehearse else size
        device = "cpu" if rehearse else "cuda"
        torch.manual_seed(0)
        model = MODELS[kind](own, device, dtype).eval().requires_grad_(False)
        ids = torch.randint(own.vocabulary, (1, own.tokens), device=device)
        about = {"model": f"{kind}, {own.layers} x {own.width}", "dtype": short(dtype)}
        unit = measured(lambda: models.gradient(model, ids), device)
        yield {**about, "call": "f+b", **unit, **ratios(unit, unit), "says": ""}
        for name, call in calls().items():
            if name not in (_OF_FLOW[:2] if other else names or [name]):
                continue
            try:
                with alarm(20):
                    found = measured(lambda call=call: call(model, ids), device)
                yield {**about, "call": name, **found, **ratios(found, unit), "says": ""}
            except (Exception, Interrupted) as error:
                nothing = dict.fromkeys(unit)
                yield {
                    **about, "call": name, **nothing, **ratios(nothing, unit),
                    "says": first_line(error),
                }  # fmt: skip

    return run


def agreement(kind: str) -> Run:
    """A case that holds small models on the device to float64 on the host, by another package."""

    def run(rehearse: bool, other: bool) -> Iterator[Row]:
        size, device = (TINY, "cpu") if rehearse else (SMALL, "cuda")
        torch.manual_seed(0)
        with torch.no_grad():
            model = MODELS[kind](size, device, torch.float32).eval().requires_grad_(False)
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        ids = torch.randint(size.vocabulary, (1, size.tokens), device=device)
        for dtype in (torch.float32, torch.bfloat16):
            there = copy.deepcopy(model).to(dtype)
            yield from compared(kind, dtype, there, twin(kind, size, there), ids)

    return run


def trained(rehearse: bool, other: bool) -> Iterator[Row]:
    """Models that the package ships, on the device, held to float64 of the same weights."""
    from captum_ssm.models import load_bundled

    for name in TRAINED[:1] if rehearse else TRAINED:
        model, _ = load_bundled(name)
        model.requires_grad_(False)
        torch.manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, 9 if rehearse else 40))
        for dtype in (torch.float32, torch.bfloat16):
            half = copy.deepcopy(model).to(dtype)
            there = copy.deepcopy(half).to("cpu" if rehearse else "cuda")
            yield from compared(name, dtype, there, half.double(), ids.to(there.device))


def of_fla(family: str) -> Run:
    """A case that holds a model of flash-linear-attention to its references on the host."""

    def run(rehearse: bool, other: bool) -> Iterator[Row]:
        import pytest
        from zoo import fla_cpu

        with pytest.MonkeyPatch.context() as patch:
            made = fla_cpu.install(patch) if rehearse else fla_cpu.as_it_is()
            torch.manual_seed(0)
            sizes = {"hidden_size": 16 if rehearse else 64, "fuse_norm": True}
            heads = {} if rehearse else FLA[family]
            host = made.model(family, **sizes | heads).requires_grad_(False)
            ids = torch.randint(19, (1, 9 if rehearse else 100))
            there = copy.deepcopy(host).to("cpu" if rehearse else "cuda")
            found = answers(there, ids.to(next(there.parameters()).device))
        with pytest.MonkeyPatch.context() as patch:
            fla_cpu.install(patch)
            yield from errors(f"fla {family}", torch.float32, found, answers(host, ids))

    return run


def tests(rehearse: bool, other: bool) -> Iterator[Row]:
    """The tests marked gpu."""
    # without the packages' own kernels, which take no model as small as those of the tests
    code = (
        "import sys, pytest; sys.modules.update(mamba_ssm=None, causal_conv1d=None); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = ["-c", code, "-q", "-m", "gpu", "tests/conformance/test_cuda.py"]
    command += ["--collect-only"] if rehearse else []
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    yield {"tests": "marked gpu", "says": done.stdout.strip().splitlines()[-1]}
    if done.returncode:
        raise SystemExit(1)


#: Models that the package ships.
TRAINED = ("recall-mamba",)
#: Options of fla's models that their kernels take on a device.
FLA: dict[str, dict[str, Any]] = {
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 32},
    "GLA": {"num_heads": 2},
    "RetNet": {"num_heads": 2},
    "HGRN2": {"expand_ratio": 32},
    "RWKV7": {"head_dim": 32},
}


# --- models --------------------------------------------------------------------------------------


def _mamba_ssm(layer: str) -> Callable[[Size, str, torch.dtype], nn.Module]:
    """mamba_ssm's language model with its own defaults; its references stand in on a processor."""

    def build(size: Size, device: str, dtype: torch.dtype) -> nn.Module:
        if device == "cpu":
            import pytest
            from zoo import mamba_ssm_cpu

            mamba_ssm_cpu.install(pytest.MonkeyPatch(), causal_conv1d=True)
        package = importlib.import_module("mamba_ssm")
        small = {"headdim": 16} if size is TINY and layer == "Mamba2" else {}
        config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig(
            d_model=size.width,
            n_layer=size.layers,
            vocab_size=size.vocabulary,
            ssm_cfg={"layer": layer, **small},
        )
        model: nn.Module = package.MambaLMHeadModel(config, device=device, dtype=dtype)
        return model

    return build


def _gpt_neox(size: Size, device: str, dtype: torch.dtype) -> nn.Module:
    options: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_attention_heads": max(1, size.width // 64),
        "intermediate_size": 4 * size.width,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    with torch.device(device):
        return models.build("softmax", size.layers, **options).to(dtype)


MODELS: dict[str, Callable[[Size, str, torch.dtype], nn.Module]] = {
    "mamba-ssm Mamba": _mamba_ssm("Mamba1"),
    "mamba-ssm Mamba-2": _mamba_ssm("Mamba2"),
    "GPT-NeoX": _gpt_neox,
}


def twin(kind: str, size: Size, model: nn.Module) -> nn.Module:
    """transformers' model of the same weights as mamba_ssm's, in float64 on the host."""
    import transformers

    sizes = {
        "vocab_size": model.lm_head.weight.shape[0],
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "tie_word_embeddings": True,
    }
    mixer = model.backbone.layers[0].mixer
    if kind.endswith("2"):
        more = {"num_heads": mixer.nheads, "head_dim": mixer.headdim, "n_groups": mixer.ngroups}
        config = transformers.Mamba2Config(**sizes, **more, state_size=mixer.d_state, chunk_size=32)
        made: nn.Module = transformers.Mamba2ForCausalLM(config)
    else:
        config = transformers.MambaConfig(**sizes, state_size=mixer.d_state)
        made = transformers.MambaForCausalLM(config)
    state = {k.replace("embedding.", "embeddings."): v for k, v in model.state_dict().items()}
    made.load_state_dict(state)
    return made.double().cpu().eval().requires_grad_(False)


# --- calls ---------------------------------------------------------------------------------------


def calls() -> dict[str, Call]:
    """Every method of the catalogue at the last token, and the rules that cost something else."""
    from captum_ssm import LatimFlow
    from captum_ssm.attr.catalogue import METHODS

    def ask(method: Any, **options: Any) -> Call:
        return lambda model, ids: method(model).attribute(ids, target=(-1, models.WORD), **options)

    rule = {"LatimFlow, centered": ask(LatimFlow, rule="centered")}
    every = {entry.name: ask(entry.method) for entry in METHODS}
    order = ("LatimFlow", "LatimFlow, centered", "ImplicitAttentionRollout", "MambaAttribution")
    known = rule | every
    return {name: known[name] for name in dict.fromkeys((*order, *every))}


def answers(model: nn.Module, ids: Tensor) -> dict[str, Tensor | str]:
    """What every call finds, or by what words it refuses the model."""
    found: dict[str, Tensor | str] = {}
    for name, call in calls().items():
        try:
            with alarm(60), by_torch() if ids.device.type == "cpu" else nullcontext():
                found[name] = call(model, ids).detach().double().cpu()
        except (Exception, Interrupted) as error:
            found[name] = first_line(error)
    return found


@contextmanager
def by_torch() -> Iterator[None]:
    """Let transformers' functions be its own, which else are kernels that know no processor."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if not name.startswith("transformers.models."):
                continue
            for key, value in list(vars(module).items()):
                code = getattr(value, "__code__", None)
                if code is not None and code.co_filename.endswith("hub_kernels.py"):
                    patch.setattr(module, key, getattr(value, "__wrapped__", value))
        yield


def compared(
    kind: str, dtype: torch.dtype, there: nn.Module, host: nn.Module, ids: Tensor
) -> Iterator[Row]:
    """The rows of a model on the device beside one on the host."""
    yield from errors(kind, dtype, answers(there, ids), answers(host, ids.cpu()))


def errors(
    kind: str,
    dtype: torch.dtype,
    found: dict[str, Tensor | str],
    wanted: dict[str, Tensor | str],
) -> Iterator[Row]:
    """How far each answer is from the one that is wanted: max|a - b| / max|b|."""
    for name, right in wanted.items():
        row = {"model": kind, "dtype": short(dtype), "call": name, "error": None, "says": ""}
        own = found[name]
        if isinstance(own, Tensor) and isinstance(right, Tensor):
            row["error"] = float((own - right).abs().max() / right.abs().max())
        elif isinstance(own, str) and isinstance(right, str) and own == right:
            row["says"] = f"both refuse: {own}"
        else:
            row["says"] = f"there: {_outcome(own)}; on the host: {_outcome(right)}"
        yield row


def _outcome(found: Tensor | str) -> str:
    return found if isinstance(found, str) else "runs"


# --- measuring -----------------------------------------------------------------------------------


class Interrupted(BaseException):
    """A call has taken too long."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise :class:`Interrupted` if the ``with`` takes longer."""

    def ring(*_: Any) -> None:
        raise Interrupted(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measured(call: Callable[[], Any], device: str, repeats: int = 5) -> dict[str, Any]:
    """Wall and device milliseconds, peak MiB, copies to the host and waits of a call.

    The wall time is the median of calls after the first, as many as fit in three seconds.
    """
    on_device = device == "cuda"
    wait = torch.cuda.synchronize if on_device else (lambda: None)
    call()
    wait()
    if on_device:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    times: list[float] = []
    while len(times) < repeats and sum(times) < 3:
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    row = {"wall ms": 1e3 * statistics.median(times)}
    row |= dict.fromkeys(("device ms", "peak MiB", "to host", "from host", "waits", "launches"))
    if on_device:
        row["peak MiB"] = (torch.cuda.max_memory_allocated() - held) / 2**20
        row |= _profiled(call)
    return row


def _profiled(call: Callable[[], Any]) -> Row:
    """What the device did in a call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    busy, names = 0.0, []
    for event in profile.profiler.kineto_results.events():
        names.append(event.name())
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            busy += event.duration_ns() / 1e6
    return {
        "device ms": busy,
        "to host": sum("Memcpy DtoH" in name for name in names),
        "from host": sum("Memcpy HtoD" in name for name in names),
        "waits": sum(name in ("cudaStreamSynchronize", "cudaEventSynchronize") for name in names),
        "launches": sum("LaunchKernel" in name for name in names),
    }


def ratios(found: Row, unit: Row) -> Row:
    """A call in units of f+b: by the clock, on the device, and at its peak."""
    keys = {"wall": "wall ms", "device": "device ms", "peak": "peak MiB"}
    return {f"{name} / f+b": _ratio(found[key], unit[key]) for name, key in keys.items()}


def _ratio(found: float | None, unit: float | None) -> float | None:
    return None if found is None or not unit else found / unit


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


# --- all of it -----------------------------------------------------------------------------------

_SSM, _FLA = ("mamba_ssm", "triton"), ("fla", "triton")
#: What is timed of other packages, too, beside the large model.
_BESIDE = "Mamba", torch.bfloat16
_OF_FLOW = ("LatimFlow", "LatimFlow, centered", "ImplicitAttentionRollout")
_MOST = (*_OF_FLOW, "MambaAttribution", "MambaLRP", "ImplicitAttention", "LatimNorm")
_LARGE = timed("mamba-ssm Mamba", SIZE_2_8B, torch.bfloat16, _OF_FLOW)
_NEOX = timed("GPT-NeoX", SIZE_130M, torch.float32, (*_OF_FLOW, "MambaAttribution", "LatimNorm"))
CASES: dict[str, Case] = {
    "Mamba agrees": Case(agreement("mamba-ssm Mamba"), 90, _SSM, together=True),
    "Mamba-2 agrees": Case(agreement("mamba-ssm Mamba-2"), 150, _SSM, together=True),
    "trained models agree": Case(trained, 90, ("transformers",), together=True, beside=True),
    **{
        f"{kind} 130M {short(dtype)}": Case(
            timed(f"mamba-ssm {kind}", SIZE_130M, dtype, _MOST),
            150 if kind == "Mamba-2" else 90,
            _SSM,
            beside=(kind, dtype) == _BESIDE,
        )
        for dtype in (torch.bfloat16, torch.float32)
        for kind in ("Mamba", "Mamba-2")
    },
    "Mamba 2.8B bfloat16": Case(_LARGE, 75, _SSM, beside=True),
    "GPT-NeoX 130M float32": Case(_NEOX, 60, ("transformers",)),
    **{f"fla {family}": Case(of_fla(family), 150, _FLA, together=True) for family in FLA},
    "tests": Case(tests, 150, ("transformers",), together=True),
}
#: One of each kind.
REHEARSED = (
    *("Mamba-2 agrees", "trained models agree", "Mamba 130M bfloat16", "GPT-NeoX 130M float32"),
    *("fla GLA", "tests"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for what is found")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="folders of another captum_ssm alone"
    )
    parser.add_argument("--minutes", type=float, default=9, help="after which no case is begun")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="of all cases")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at small size")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--of-another", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        _be(options.case, options.rehearse, options.of_another)
        return
    if not options.rehearse and not torch.cuda.is_available():
        parser.error(
            f"no CUDA device was found by torch {torch.__version__} (built for CUDA "
            f"{torch.version.cuda}). Run this on a machine with an NVIDIA GPU and a torch built "
            "for its CUDA, or pass --rehearse to run every case on the CPU, at small size."
        )
    if options.out is None:
        parser.error("--out is wanted: a folder for what is found")
    options.out.mkdir(parents=True, exist_ok=True)
    page = Page(options.out, options.rehearse)
    until = time.monotonic() + 60 * options.minutes

    def run(case: tuple[str, Path | None]) -> None:
        _run(*case, page, options.rehearse, until)

    chosen = options.only or (REHEARSED if options.rehearse else CASES)
    for together, names in groupby(chosen, lambda name: CASES[name].together):
        # what is timed has the device for itself
        with ThreadPoolExecutor(16 if together else 1) as pool:
            others = ((name, [None, *options.beside * CASES[name].beside]) for name in names)
            list(pool.map(run, (case for name, of in others for case in product([name], of))))
    print(f"\nwritten to {options.out}", flush=True)
    raise SystemExit(page.failed)


def _be(name: str, rehearse: bool, other: bool) -> None:
    """Run a case in this process, and print its rows."""
    sys.path.insert(0, str(ROOT / "tests"))  # for models on a processor
    if not rehearse and find_spec("triton") is not None:
        _tune_less(timed=not CASES[name].together)
    torch.backends.cudnn.allow_tf32 = False  # errors are those of float32
    for row in CASES[name].run(rehearse, other):
        print(MARK + json.dumps(row), flush=True)


def _tune_less(*, timed: bool) -> None:
    """Let Triton choose among few configurations of a kernel, else it tries them for minutes.

    Args:
        timed: whether times count; else the smallest configuration serves.
    """
    from triton.runtime.autotuner import Autotuner

    own = Autotuner.__init__

    def size(config: Any) -> int:
        numbers = [x for x in config.kwargs.values() if isinstance(x, int)]
        return math.prod(numbers) * config.num_stages

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        some = configs[:2] if timed else sorted(configs, key=size)[:1]
        own(self, fn, names, some, *args, **kwargs)

    Autotuner.__init__ = init


class Page:
    """What is found, printed and written as it comes.

    Args:
        folder: where it is written.
        rehearse: whether this is a rehearsal.

    Attributes:
        failed: whether a case did not end as it should.
    """

    def __init__(self, folder: Path, rehearse: bool) -> None:
        self.failed = False
        self._folder = folder
        self._title = "# A rehearsal on a CPU" if rehearse else "# Measured on a GPU"
        self._lock = threading.Lock()
        self._tables: dict[str, list[Row]] = {}
        self._said: list[str] = []
        (folder / "gpu.log").write_text("")
        for name, value in about().items():
            self.say(f"{name}: {value}")

    def take(self, name: str, line: str) -> None:
        """Take a line that a case has printed: a row, or a line for the log."""
        with self._lock:
            if not line.startswith(MARK):
                with (self._folder / "gpu.log").open("a") as file:
                    file.write(f"{name}: {line}")
                return
            rows = self._tables.setdefault(name, [])
            rows.append(json.loads(line.removeprefix(MARK)))
            print(markdown(rows[-1:], header=len(rows) == 1), flush=True)
            self._write()

    def say(self, line: str) -> None:
        """Take a line about a case."""
        with self._lock:
            print(line, flush=True)
            self._said.append(f"- {line}")
            self._write()

    def _write(self) -> None:
        tables = [f"## {name}\n\n{markdown(rows)}\n" for name, rows in self._tables.items()]
        text = "\n".join([self._title, "", *self._said, "", *tables])
        (self._folder / "gpu.md").write_text(text + "\n")


def _run(name: str, other: Path | None, page: Page, rehearse: bool, until: float) -> None:
    """Run a case in a process, which is stopped at its limit.

    Args:
        name: of the case.
        other: a folder that holds another captum_ssm; None for this one.
        page: takes its rows.
        rehearse: whether this is a rehearsal.
        until: when no case is begun any more, by the monotonic clock; 20 seconds later it ends.
    """
    case, began = CASES[name], time.monotonic()
    title = name if other is None else f"{name}, {other.name}"
    if missing := [package for package in case.needs if find_spec(package) is None]:
        page.say(f"{title}: left out, for {', '.join(missing)} is not installed")
        return
    if began > until:
        page.say(f"{title}: left out, for the time is over")
        page.failed = True
        return
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", name]
    command += ["--rehearse"] * rehearse + ["--of-another"] * (other is not None)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # what autotuning has found is kept for the cases that follow
    more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TRITON_CACHE_AUTOTUNING": "1"}
    if case.together:  # else float32 is multiplied with 10 bits
        more["TRITON_F32_DEFAULT"] = "ieee"
    process = subprocess.Popen(
        command,
        cwd=ROOT if other is None else other,  # where -m looks for captum_ssm first
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    limit = min(case.limit, until + 20 - began)
    stop = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    stop.start()
    for line in process.stdout:
        page.take(title, line)
    status = process.wait()
    stop.cancel()
    seconds = time.monotonic() - began
    result = "done" if status == 0 else f"FAILED ({status}), see gpu.log"
    if status and seconds > limit:
        result = "FAILED: stopped at its limit"
    page.failed |= status != 0
    page.say(f"{title}: {result} after {seconds:.0f} s")


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
