"""Every check of a change, one session each; .ci/run runs them all."""

from __future__ import annotations

import json
import re
from configparser import ConfigParser
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")

#: All tests that need no environment of their own.
EVERYTHING = "not gpu and not interpreter and not timm"
#: Tests that other versions of packages are asked, too.
CONTRACTS = (
    *("tests/conformance/test_methods.py", "tests/conformance/test_tools.py"),
    *("tests/mixers/test_contract.py", "tests/insights/test_captum08.py"),
)
#: Two processes with one thread each, by pytest-xdist.
PARALLEL = ("-n", "2", "--dist", "worksteal", "--disable-warnings")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

SPECIAL = ("flash-linear-attention", "fla-core", "xlstm")
BUILD = ("ninja", "packaging", "setuptools", "wheel")
#: Extras for whoever works on the package itself.
DEVELOPMENT = {"dev", "docs", "lint", "test"}
#: The last version 4 of transformers, and what it pins.
TRANSFORMERS_4 = ("transformers", "huggingface_hub", "tokenizers")
#: Without these, what imports mamba-ssm and causal-conv1d builds their kernels.
NO_KERNELS = {
    "MAMBA_FORCE_BUILD": "TRUE",
    "MAMBA_SKIP_CUDA_BUILD": "TRUE",
    "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE",
}


# --- environments ----------------------------------------------------------------------------


def install(session: nox.Session, *packages: str, constraints: str = CONSTRAINTS) -> None:
    """Install by pip itself: session.install refuses --no-venv, by which .ci/run shares one."""
    session.run_install("python", "-m", "pip", "install", "-c", constraints, *packages)


def install_mamba_ssm(session: nox.Session) -> None:
    """The Python code of mamba-ssm, without its kernels and what these need."""
    install(session, "einops", "triton", *BUILD)
    options = ("--no-build-isolation", "--no-deps")
    command = ("python", "-m", "pip", "install", "-c", CONSTRAINTS, *options, "mamba-ssm")
    session.run_install(*command, env=NO_KERNELS)


def install_mambapy(session: nox.Session) -> None:
    """mambapy and deeptab, without what deeptab reads tables and trains with."""
    install(session, "--no-deps", "mambapy", "deeptab")


def install_browser(session: nox.Session) -> None:
    """Playwright, which drives the Chromium that is there, and axe-core."""
    install(session, "axe-playwright-python")


def folder_of(session: nox.Session) -> Path:
    """A folder for this session's files, away from the checkout; temporary files go elsewhere."""
    folder = Path(session.cache_dir, session.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pins() -> list[str]:
    lines = Path(CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "==" in line]


def pins_without(session: nox.Session, *names: str) -> str:
    """A file of the constraints but for those of some packages."""
    kept = folder_of(session) / "constraints.txt"
    kept.write_text("\n".join(pin for pin in pins() if pin.partition("==")[0] not in names))
    return str(kept)


def extras() -> dict[str, list[str]]:
    """What each extra asks for; under "", what everyone gets."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    found = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {name: text.split("\n")[1:] for name, text in found.items()}


# --- tests -----------------------------------------------------------------------------------


def pytest(session: nox.Session, *options: str, files: tuple[str, ...] = (), **env: str) -> None:
    """Run pytest; what follows -- replaces the files."""
    arguments = (*PARALLEL, *options, *(session.posargs or files))
    session.run("pytest", *arguments, env={**ONE_THREAD, **env})


def texts_of_others(session: nox.Session) -> str:
    """The rated texts that the experiments on valence read."""
    folder = folder_of(session)
    source = ("vaderSentiment", "--no-deps", "--no-binary", ":all:")
    session.run("pip", "download", "-q", "-c", CONSTRAINTS, *source, "-d", str(folder))
    return str(folder / "vaderSentiment-0.5.zip")


@nox.session
def tests(session: nox.Session) -> None:
    """The quick tests."""
    install(session, "-e", ".[test]", "pytest-xdist")
    pytest(session)


@nox.session
def tests_full(session: nox.Session) -> None:
    """The tests that are not quick, but those of sessions below; a skip is a failure."""
    install(session, "-e", ".[test]", "pytest-xdist", *SPECIAL)
    install_mamba_ssm(session)
    install_mambapy(session)
    install_browser(session)
    others = ("--ignore", "tests/insights/test_captum08.py")  # `oldest` runs these
    chosen = f"(slow or browser) and {EVERYTHING}"
    pytest(session, "-m", chosen, *others, CAPTUM_SSM_NO_SKIPS="1")


@nox.session
def bench(session: nox.Session) -> None:
    """All tests of bench where it has changed since they passed; else each experiment once."""
    install(session, "-e", ".[test]", "-e", "bench", "pytest-xdist")
    said = session.run("python", "bench/passed.py", silent=True, success_codes=[0, 1])
    if "have passed" in str(said):
        pytest(session, files=("bench/tests/test_small.py",), CAPTUM_SSM_NO_SKIPS="1")
        return
    texts = texts_of_others(session)
    options = {"CAPTUM_SSM_VALENCE": texts, "CAPTUM_SSM_NO_SKIPS": "1"}
    pytest(session, "-m", "", files=("bench/tests",), **options)
    session.run("python", "bench/passed.py", "--write")


@nox.session
def faults(session: nox.Session) -> None:
    """Plant faults, one at a time: a test must see each.  By hand; half an hour to an hour."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.faults", *session.posargs, env=ONE_THREAD)


@nox.session
def interpreter(session: nox.Session) -> None:
    """Triton kernels in Triton's interpreter, which settles it at its import.

    ``-- -m interpreter tests/interpreter`` adds more sizes and options of each kernel.
    """
    install(session, "-e", ".[test]", "pytest-xdist", *SPECIAL)
    install_mamba_ssm(session)
    env = {"TRITON_INTERPRET": "1", "CAPTUM_SSM_NO_SKIPS": "1"}
    pytest(session, "-m", "interpreter and not slow", files=("tests/interpreter",), **env)


@nox.session
def constraints(session: nox.Session) -> None:
    """Write constraints.txt; lines that are deleted before get the newest version."""
    session.run("python", "tools/constraints.py", "python3.10", "python3.11", external=True)


@nox.session
def coverage(session: nox.Session) -> None:
    """How much all tests run, with the special packages; setup.cfg sets the least."""
    install(session, "-e", ".[test]", "coverage", "pytest-xdist", *SPECIAL)
    install_mamba_ssm(session)
    install_mambapy(session)
    install_browser(session)
    env = {**ONE_THREAD}
    env["COVERAGE_FILE"] = str(folder_of(session) / "coverage")
    session.run("coverage", "erase", env=env)
    chosen = (*PARALLEL, "-m", EVERYTHING, *session.posargs)
    session.run("coverage", "run", "-m", "pytest", *chosen, env=env)
    session.run("coverage", "combine", "-q", env=env)
    session.run("coverage", "report", env=env)


@nox.session
def timm(session: nox.Session) -> None:
    """The tests with timm and mambavision, which need torchvision's operators named first."""
    install(session, "-e", ".[test]", "pytest-xdist")
    install_mamba_ssm(session)
    install(session, "--no-deps", "timm", "torchvision", "mambavision")
    mixers = ("tests/mixers/test_timm_attention.py", "tests/mixers/test_mambavision.py")
    files = (*mixers, "tests/mixers/test_contract.py")
    pytest(session, "-m", "timm", files=files, CAPTUM_SSM_NO_SKIPS="1")


@nox.session
def oldest(session: nox.Session) -> None:
    """The contracts with Captum 0.8, NumPy 1 and transformers 4, and the Insights of Captum 0.8.

    ``-- torch`` takes torch 2.4, too, which is there for CUDA alone: 5 GB.
    """
    pinned = {"captum": "captum==0.8.*", "numpy": "numpy<2"}
    pinned |= dict.fromkeys(TRANSFORMERS_4, "") | {"transformers": "transformers==4.57.6"}
    if session.posargs == ["torch"]:
        pinned |= {"torch": "torch==2.4.0", "triton": ""}
    constraints = pins_without(session, *pinned)
    old = (*filter(None, pinned.values()), "flask", "flask-compress")
    install(session, "-e", ".[test]", "pytest-xdist", *old, constraints=constraints)
    session.run("pip", "check")
    run = ("pytest", *PARALLEL, *CONTRACTS)
    session.run(*run, env=ONE_THREAD)


@nox.session
def speed(session: nox.Session) -> None:
    """Linear costs are linear, gradients cost 8 maps at most, a GPU's script runs."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "benchmarks", "--check", env=ONE_THREAD)
    rehearsal = ("python", "-m", "benchmarks.gpu", "--rehearse")
    session.run(*rehearsal, "--out", str(folder_of(session)), env=ONE_THREAD)


# --- pages and code --------------------------------------------------------------------------


@nox.session
def docs(session: nox.Session) -> None:
    """Pages and notebooks as a reader would run them, the examples in docstrings, and defaults."""
    install(session, "-e", ".[test,docs]", "-e", "bench", "pytest-xdist")
    folder = folder_of(session)
    command = ("sphinx-build", "-W", "--keep-going", "-q", "-c", "docs")
    session.run(*command, "-d", f"{folder}/doctrees", ".", f"{folder}/site", env=ONE_THREAD)
    install_browser(session)
    session.run("python", "tools/check_site.py", f"{folder}/site")
    pytest(session, "--doctest-modules", "captum_ssm")


@nox.session
def lint(session: nox.Session) -> None:
    """Layout; which module may import which, by relative imports; names that two classes have."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    # No linter tells an absolute import from a relative one of the same module.
    absolute = ("grep", "-rnE", "--include=*.py", r"^\s*(from|import) captum_ssm\b", "captum_ssm")
    session.run(*absolute, external=True, success_codes=[1])
    # Nor does one tell two classes of one name.
    classes = (
        "grep -rhoE --include=*.py '^ *class \\w+' captum_ssm | sed 's/^ *//' | sort | uniq -d"
    )
    session.run("bash", "-c", f"! {{ {classes}; }} | grep .", external=True)


@nox.session
def types(session: nox.Session) -> None:
    install(session, "-e", ".[test,lint]")
    session.run("mypy")


# --- dependencies ----------------------------------------------------------------------------


@nox.session
def licences(session: nox.Session) -> None:
    """The licences of what users get are among those that pyproject.toml permits.

    In an environment of its own, beside torch's build for CPUs: CUDA comes under NVIDIA's terms.
    """
    install(session, "-e", ".[all]", "pip-licenses")
    session.run("pip-licenses", "--order", "license")


@nox.session
def dependencies(session: nox.Session) -> None:
    """What is installed is pinned and fits; what is imported is declared in an extra for users."""
    install(session, "-e", ".[all,dev,docs]", "deptry")
    session.run("pip", "check")
    frozen = session.run("pip", "freeze", "--exclude-editable", silent=True) or ""
    pinned = {normal(pin) for pin in pins()}
    if unpinned := [line for line in frozen.split() if normal(line) not in pinned]:
        session.error(f"installed, and not what constraints.txt pins: {', '.join(unpinned)}")
    asked = [line for name, lines in extras().items() if name not in DEVELOPMENT for line in lines]
    declared = folder_of(session) / "requirements.txt"
    declared.write_text("\n".join(line for line in asked if not line.startswith("captum_ssm[")))
    session.run("deptry", "captum_ssm", "--requirements-files", str(declared))


def normal(pin: str) -> str:
    """A name as pip compares it, and a version without the build, such as +cpu."""
    name, _, version = pin.partition(";")[0].strip().partition("==")
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version.partition('+')[0]}"


@nox.session
def resolve(session: nox.Session) -> None:
    """The constraints admit all extras together, and so each by itself.

    The sources of cuda's packages import torch to say what they need, so it is there before.
    """
    install(session, "-e", ".[all]", *BUILD)
    options = ("-q", "--dry-run", "--no-build-isolation", "-c", CONSTRAINTS)
    every = ",".join(filter(None, extras()))
    session.run("pip", "install", *options, "-e", f".[{every}]", env=NO_KERNELS)


@nox.session
def audit(session: nox.Session) -> None:
    """No vulnerability of what is pinned is known.  Where nobody answers, that is no failure."""
    install(session, "pip-audit")
    folder = folder_of(session)
    asked, answer = folder / "requirements.txt", folder / "answer.json"
    asked.write_text("\n".join(pins()))
    answer.write_text('{"dependencies": []}')
    options = ("--no-deps", "--disable-pip", "--progress-spinner=off", "--timeout=15")
    command = ("pip-audit", *options, "-r", str(asked), "-f", "json", "-o", str(answer))
    session.run(*command, success_codes=[0, 1])
    found = json.loads(answer.read_text())["dependencies"]
    answered = [each for each in found if "vulns" in each]
    if len(answered) < len(found) or not found:
        silent = len(found) - len(answered) or "all"
        session.warn(f"NOT AUDITED: {silent} packages, of which the service says nothing")
    if vulnerable := [each for each in answered if each["vulns"]]:
        session.error(json.dumps(vulnerable, indent=2))


# --- release ---------------------------------------------------------------------------------


@nox.session
def release(session: nox.Session) -> None:
    """Build the distributions, check them, and run the wheel's demo and README's example."""
    install(session, "-e", ".[demo]", "build", "check-wheel-contents", "pytest", "twine")
    folder = folder_of(session)
    session.run("rm", "-rf", str(folder / "dist"), external=True)
    build = ("python", "-m", "build", "--outdir", str(folder / "dist"))
    session.run(*build, env={"PIP_CONSTRAINT": CONSTRAINTS}, silent=True)
    (wheel,) = map(str, folder.glob("dist/*.whl"))
    session.run("twine", "check", "--strict", *map(str, folder.glob("dist/*")))
    # Every file of the package is in it, and no other; models may share a vocabulary (W002).
    contents = ("--package", "captum_ssm", "--toplevel", "captum_ssm", "--ignore", "W002")
    session.run("check-wheel-contents", *contents, wheel)
    # Beside what .[demo] asks for, which README's command for the demo tries where nothing else is.
    alone = ("--no-deps", "--upgrade", "--target", f"{folder}/alone")
    session.run("python", "-m", "pip", "install", "-q", *alone, wheel)
    session.chdir(folder)
    env = {"PYTHONPATH": f"{folder}/alone"}
    where = session.run("python", "-c", "print(__import__('captum_ssm'))", silent=True, env=env)
    if f"{folder}/alone" not in str(where):
        session.error(f"the demo would not be the wheel's: {where}")
    session.run("python", "-m", "captum_ssm", "demo", env=env)
    # By a random model in place of the checkpoint, as tests do.
    example = (
        "from pathlib import Path; from helpers.documents import run; "
        "from project.test_documents import CHECKPOINT, save_checkpoint; "
        "run('README.md', {CHECKPOINT: save_checkpoint(Path('checkpoint'))})"
    )
    env = {"PYTHONPATH": f"{folder}/alone:{ROOT}/tests"}
    session.run("python", "-c", example, env=env)
