"""The steps of .ci/run, one session each."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types", "strata"]


#: Two processes with one thread each, by pytest-xdist.
PARALLEL = ("-n", "2", "--dist", "worksteal")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FLA = ("flash-linear-attention", "fla-core")


def install(session: nox.Session, *packages: str, constraints: str = "constraints.txt") -> None:
    session.install("-c", constraints, *packages)


def install_mamba_ssm(session: nox.Session) -> None:
    """The Python code of mamba-ssm, without its kernels."""
    install(session, "einops", "triton", "ninja", "packaging", "setuptools", "wheel")
    session.install(
        "--no-build-isolation",
        "--no-deps",
        "mamba-ssm==2.3.2.post1",
        env={"MAMBA_FORCE_BUILD": "TRUE", "MAMBA_SKIP_CUDA_BUILD": "TRUE"},
    )


def texts_of_others(session: nox.Session) -> dict[str, str]:
    """The rated texts, as the environment names them."""
    folder = session.create_tmp()
    source = ("vaderSentiment", "--no-deps", "--no-binary", ":all:")
    session.run("pip", "download", "-c", "constraints.txt", *source, "-d", folder)
    return {"CAPTUM_SSM_VALENCE": str(Path(folder, "vaderSentiment-0.5.zip").resolve())}


@nox.session
def tests(session: nox.Session) -> None:
    """The quick tests; what follows -- goes to pytest."""
    install(session, "-e", ".[test]", "pytest-xdist")
    session.run("pytest", *PARALLEL, *session.posargs, env=ONE_THREAD)


@nox.session
def tests_full(session: nox.Session) -> None:
    """All tests but those for a GPU or timm, with the special packages; a skip is a failure."""
    install(session, "-e", ".[test]", "pytest-xdist", *FLA)
    install_mamba_ssm(session)
    selection = "not gpu and not timm and not mambavision and not captum08"
    env = {**ONE_THREAD, **texts_of_others(session), "CAPTUM_SSM_NO_SKIPS": "1"}
    session.run("pytest", *PARALLEL, "-m", selection, *session.posargs, env=env)


@nox.session
def coverage(session: nox.Session) -> None:
    """How much the quick tests run, with the special packages; setup.cfg sets the least."""
    install(session, "-e", ".[test]", "coverage", "pytest-xdist", *FLA)
    install_mamba_ssm(session)
    folder = Path(session.create_tmp(), "coverage").resolve()
    env = {**ONE_THREAD, **texts_of_others(session), "COVERAGE_FILE": str(folder)}
    session.run("coverage", "erase", env=env)
    session.run("coverage", "run", "-m", "pytest", *PARALLEL, *session.posargs, env=env)
    session.run("coverage", "combine", "-q", env=env)
    session.run("coverage", "report", env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Pages, notebooks and the examples in docstrings."""
    install(session, "-e", ".[test,docs]", "pytest-xdist")
    strict = ("-W", "--keep-going", "-q")
    session.run("sphinx-build", *strict, "-c", "docs", ".", "docs/_build", *session.posargs)
    session.run("pytest", *PARALLEL, "--nbmake", "tutorials", env=ONE_THREAD)
    session.run("pytest", *PARALLEL, "--doctest-modules", "captum_ssm", env=ONE_THREAD)
    session.run("python", "tools/check_docstrings.py")


@nox.session
def timm(session: nox.Session) -> None:
    """The tests with timm and mambavision, which need torchvision's operators named first."""
    install(session, "-e", ".[test]")
    install_mamba_ssm(session)
    vision = ("timm", "torchvision", "mambavision")
    session.install("-c", "constraints.txt", "--no-deps", *vision)
    files = (
        "tests/mixers/test_timm_attention.py",
        "tests/mixers/test_mambavision.py",
        "tests/fuzz/test_vision_mixers.py",
    )
    session.run("pytest", "-m", "timm or mambavision", *files, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    install(session, "-e", ".[test,lint]")
    session.run("mypy")


@nox.session(venv_backend="none")
def strata(session: nox.Session) -> None:
    session.run("python", "tools/check_strata.py")


def pins_without(session: nox.Session, *names: str) -> str:
    """A file of the constraints but for those of some packages."""
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = Path(session.create_tmp(), "constraints.txt").resolve()
    kept.write_text("".join(pin for pin in pins if pin.partition("==")[0] not in names))
    return str(kept)


@nox.session
def transformers4(session: nox.Session) -> None:
    """The mixers, the whole network, and conformance, with the last version 4 of transformers."""
    pins = pins_without(session, "transformers", "huggingface_hub", "tokenizers")
    packages = ("-e", ".[test]", "pytest-xdist", "transformers==4.57.6")
    install(session, *packages, constraints=pins)
    folders = ("mixers", "linear", "tracing", "conformance")
    methods = ("errors", "flow_models", "mamba_attribution", "wrapped_models")
    chosen = session.posargs or (
        *(f"tests/{folder}" for folder in folders),
        *(f"tests/attr/test_{method}.py" for method in methods),
    )
    session.run("pytest", *PARALLEL, *chosen, env=ONE_THREAD)


@nox.session
def dependencies(session: nox.Session) -> None:
    """What the package imports, what is pinned, under which licences."""
    install(session, "-e", ".[dev,docs]")
    session.run("pip", "check")
    session.run("python", "tools/check_dependencies.py")


@nox.session
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of what is pinned."""
    install(session, "pip-audit")
    session.run("python", "tools/audit_dependencies.py", "constraints.txt")


@nox.session
def captum08(session: nox.Session) -> None:
    """The quick tests with the oldest Captum supported."""
    insights = ("flask", "flask-compress")
    packages = ("-e", ".[test]", "pytest-xdist", "captum==0.8.*", "numpy<2", *insights)
    install(session, *packages, constraints=pins_without(session, "captum", "numpy"))
    folders = ("tests/attr", "tests/conformance", "tests/insights")
    core = (*folders, "tests/cli/test_cli.py", "tests/project/test_documents.py")
    session.run("pytest", *PARALLEL, *(session.posargs or core), env=ONE_THREAD)


@nox.session
def demo(session: nox.Session) -> None:
    install(session, "-e", ".[demo]")
    session.run("captum-ssm", "demo", "--out", session.create_tmp(), *session.posargs)
