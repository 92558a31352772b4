"""No line of the package runs code that a file brings along."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import captum_ssm

ROOT = Path(captum_ssm.__file__).parent

#: Modules whose readers run code, and what of them is harmless.
BARRED = {
    "pickle": {"UnpicklingError"},
    "cPickle": set(),
    "dill": set(),
    "joblib": set(),
    "marshal": set(),
    "shelve": set(),
    "yaml": {"safe_load"},
}
BUILTINS = {"eval", "exec", "compile", "__import__"}


def complaints(source: str) -> list[str]:
    """What of a file could run code that it reads, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [f"line {node.lineno}: {what}" for what in _of(node)]  # type: ignore[attr-defined]
    return found


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module in BARRED:
        yield from (
            f"imports {node.module}.{each.name}"
            for each in node.names
            if each.name not in BARRED[node.module]
        )
    if isinstance(node, ast.Import):
        yield from (f"renames {n.name}" for n in node.names if n.name in BARRED and n.asname)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module, name = node.value.id, node.attr
        if module in BARRED and name not in BARRED[module]:
            yield f"uses {module}.{name}"
        if (module, name) in (("os", "system"), ("os", "popen")):
            yield f"uses {module}.{name}"
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        defaults = node.args.defaults + node.args.kw_defaults
        named = zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from ("trusts code by default" for a, d in named if _trusts(a.arg, d))
    if isinstance(node, ast.AnnAssign) and _trusts(ast.unparse(node.target), node.value):
        yield "trusts code by default"
    if isinstance(node, ast.Dict):
        yield from (
            "trusts code"
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and _trusts(key.value, value)
        )


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    options = {each.arg: each.value for each in node.keywords}
    if called in BUILTINS:
        yield f"calls {called}"
    if called.endswith("torch.load") and not _is(options.get("weights_only"), True):
        yield "calls torch.load without weights_only=True"
    if called.endswith(("np.load", "numpy.load")) and _is(options.get("allow_pickle"), True):
        yield "unpickles arrays"
    if _is(options.get("shell"), True):
        yield "runs a shell"
    yield from ("trusts code" for name, value in options.items() if _trusts(name, value))


def _trusts(name: object, value: ast.expr | None) -> bool:
    return name == "trust_remote_code" and _is(value, True)


def _is(value: ast.expr | None, wanted: object) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


@pytest.mark.full
def test_the_package_runs_no_code_that_it_reads() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    found = {
        str(path.relative_to(ROOT)): bad
        for path in files
        if (bad := complaints(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import pickle\npickle.load(f)", "line 2: uses pickle.load"),
        ("from pickle import loads", "line 1: imports pickle.loads"),
        ("import pickle as p", "line 1: renames pickle"),
        ("import yaml\nyaml.load(f)", "line 2: uses yaml.load"),
        ("import joblib\njoblib.load(f)", "line 2: uses joblib.load"),
        ("eval('1')", "line 1: calls eval"),
        ("exec(text)", "line 1: calls exec"),
        ("torch.load(f)", "line 1: calls torch.load without weights_only=True"),
        ("torch.load(f, weights_only=no)", "line 1: calls torch.load without weights_only=True"),
        ("np.load(f, allow_pickle=True)", "line 1: unpickles arrays"),
        ("subprocess.run(c, shell=True)", "line 1: runs a shell"),
        ("os.system(c)", "line 1: uses os.system"),
        ("A.from_pretrained(n, trust_remote_code=True)", "line 1: trusts code"),
        ("def f(a, *, trust_remote_code=True): ...", "line 1: trusts code by default"),
        ("def f(a, trust_remote_code=True): ...", "line 1: trusts code by default"),
        ("class S:\n    trust_remote_code: bool = True", "line 2: trusts code by default"),
        ("o = {'trust_remote_code': True}", "line 1: trusts code"),
    ],
)
def test_what_is_complained_of(source: str, complaint: str) -> None:
    assert complaints(source) == [complaint]


def test_what_is_not_complained_of() -> None:
    harmless = """
import pickle
model.eval()
torch.load(path, map_location="cpu", weights_only=True)
try: ...
except pickle.UnpicklingError: ...
def load(name, trust_remote_code=False, *, plain, shell=False): ...
A.from_pretrained(name, trust_remote_code=asked)
"""
    assert complaints(harmless) == []
