"""Compare the results of all methods on the models of the tests, in two trees.

Usage: python tools/compare_results.py COMMIT [MODEL ...]

COMMIT is checked out in a git worktree of its own, and compared with the working tree. Each tree
runs in a process of its own, in float64. Printed are the largest relative differences, by model and
method. Without models, all of the zoo are compared.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Rounding of two runs in float64.
LIMIT = 1e-12


def results(models: list[str]) -> dict[tuple[str, str], Any]:
    """Relevance by model and method; the error's name where a method refuses a model."""
    import pytest
    import torch
    from zoo.adapters import ADAPTERS

    import captum_ssm
    from captum_ssm.attr.catalogue import METHODS
    from captum_ssm.linear import FAMILY

    assert Path(captum_ssm.__file__).is_relative_to(Path.cwd()), "another tree's package"
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        **{each.method.__name__: (each.method, {}) for each in METHODS},
        **{f"LatimFlow, {rule}": (captum_ssm.LatimFlow, {"rule": rule}) for rule in FAMILY},
    }
    found: dict[tuple[str, str], Any] = {}
    for name in models or ADAPTERS:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                case = ADAPTERS[name](patch)
            except (Exception, pytest.skip.Exception) as error:
                found[name, "model"] = type(error).__name__
                continue
            case.model.double()
            x = case.inputs.double() if case.inputs.is_floating_point() else case.inputs
            for title, (method, options) in calls.items():
                try:
                    relevance = method(case.model).attribute(x, **case.target, **options)
                    found[name, title] = relevance.detach().double()
                except Exception as error:
                    found[name, title] = type(error).__name__
    return found


def run_in(tree: Path, models: list[str], out: Path) -> dict[tuple[str, str], Any]:
    """The results of a tree, found by a process of its own."""
    import torch

    code = (
        "import sys, runpy; sys.path[:0] = ['.', 'tests']; import torch; "
        f"tool = runpy.run_path({str(Path(__file__).resolve())!r}); "
        f"torch.save(tool['results']({models!r}), {str(out)!r})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, stderr=subprocess.DEVNULL)
    found: dict[tuple[str, str], Any] = torch.load(out, weights_only=False)
    return found


def difference(one: Any, other: Any) -> float | str:
    """The largest difference per largest number, or what became what."""
    told = [x if isinstance(x, str) else tuple(x.shape) for x in (one, other)]
    if told[0] != told[1]:
        return f"{told[0]} -> {told[1]}"
    if isinstance(one, str):
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-300))


def main(commit: str, models: list[str]) -> int:
    """Print what differs, and return 1 if anything does.

    Args:
        commit: the commit to compare with.
        models: names of models of the zoo; all if empty.
    """
    with tempfile.TemporaryDirectory() as folder:
        before, out = Path(folder, "before"), Path(folder, "results.pt")
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(before), commit],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        try:
            old, new = run_in(before, models, out), run_in(ROOT, models, out)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT)
    keys = old.keys() | new.keys()
    found = {key: difference(old.get(key, "none"), new.get(key, "none")) for key in keys}
    refused = sum(isinstance(result, str) for result in new.values())
    largest = max((x for x in found.values() if not isinstance(x, str)), default=0.0)
    print(f"{len(found)} results ({refused} refusals), largest difference {largest:.1e}")
    changed = {k: x for k, x in found.items() if isinstance(x, str) or not x <= LIMIT}
    for (model, method), size in sorted(changed.items()):
        print(f"{model}, {method}: {size if isinstance(size, str) else f'{size:.1e}'}")
    return bool(changed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
