"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Generator, Iterator

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import is_hypothesis_test, settings
from zoo import fla_cpu, mamba_ssm_cpu, triton_interpreter, xlstm_cpu

#: "1": every skip is a failure; "core": except of tests whose package has special install steps.
NO_SKIPS = os.environ.get("CAPTUM_SSM_NO_SKIPS", "")
FIXED_SEED = os.environ.get("CAPTUM_SSM_SEED")

#: Fixtures of packages that pip does not simply install: their tests are not quick.
SPECIAL = {"fla", "mamba_ssm", "mamba_ssm_fused"}

_seed_key = pytest.StashKey[int]()

settings.register_profile("quick", deadline=None, print_blob=True)
settings.register_profile("long", settings.get_profile("quick"))
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The fresh seed this test runs with; CAPTUM_SSM_SEED fixes it."""
    seed = int(FIXED_SEED) if FIXED_SEED else int.from_bytes(os.urandom(4), "big")
    request.node.stash[_seed_key] = seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def transformers_own_xlstm() -> None:
    """transformers' layers of its own, whether the package that it prefers is there or not."""
    if xlstm_cpu.is_installed():
        xlstm_cpu.import_transformers_own()


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> fla_cpu.FLA:
    """flash-linear-attention on the CPU."""
    return fla_cpu.install(monkeypatch)


@pytest.fixture
def mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> mamba_ssm_cpu.MambaSSM:
    """mamba_ssm on the CPU, where causal_conv1d is not installed."""
    return mamba_ssm_cpu.install(monkeypatch, causal_conv1d=False)


@pytest.fixture
def mamba_ssm_fused(monkeypatch: pytest.MonkeyPatch) -> mamba_ssm_cpu.MambaSSM:
    """mamba_ssm on the CPU, as if causal_conv1d were installed: mixers are fused by default."""
    return mamba_ssm_cpu.install(monkeypatch, causal_conv1d=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("browser", "interpreter"):
            item.add_marker(item.path.parent.name)
        elif SPECIAL & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    if FIXED_SEED:
        for test in {getattr(item, "function", None) for item in items}:
            if is_hypothesis_test(test):
                hypothesis.seed(int(FIXED_SEED))(test)


@pytest.fixture(autouse=True)
def private_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    from captum_ssm.mixers import registry

    monkeypatch.setattr(registry, "_architectures", dict(registry._architectures))
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets an interrupt raise; processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("interpreter") and not triton_interpreter.is_on():
        pytest.skip(triton_interpreter.SKIP_REASON)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _must_run(item, report):
        _fail(report)
    if report.failed and _seed_key in item.stash:
        report.sections.append(("Seed", f"run again with CAPTUM_SSM_SEED={item.stash[_seed_key]}"))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_SKIPS and report.skipped:
        _fail(report)
    return report


def _must_run(item: pytest.Item, report: pytest.TestReport) -> bool:
    special = item.get_closest_marker("gpu") or "see CONTRIBUTING.md" in str(report.longrepr)
    return NO_SKIPS == "1" or (NO_SKIPS == "core" and not special)


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{reason} (CAPTUM_SSM_NO_SKIPS counts a skip as a failure)"
