"""Scripts written for Captum 0.8's Insights, and how a script with a page ends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import captum
import pytest
from helpers.insights_examples import ask, run_script

import captum_ssm.insights
from captum_ssm.insights import AttributionVisualizer, install_alias, methods

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py"))
CAPTUM_HAS_ITS_OWN = importlib.util.find_spec("captum.insights") is not None


@pytest.fixture
def alias() -> Iterator[None]:
    before = dict(sys.modules)
    install_alias()
    yield
    for name in [n for n in sys.modules if n.startswith("captum.insights")]:
        if name not in before:
            del sys.modules[name]
    if not CAPTUM_HAS_ITS_OWN:
        del captum.insights


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_import_changed(name):
    """It is served, and each method says something; Captum's own page is compared elsewhere."""
    with run_script(name, "captum_ssm.insights")["visualizer"] as visualizer:
        visualizer.serve()
        found = ask(visualizer.url, "/api/examples", {}).json["examples"]
        outputs = [output for each in found for output in each["models"]]
        assert outputs and all(output["feature_outputs"] for output in outputs)


@pytest.mark.slow
def test_scripts_run_unchanged_after_the_alias(alias):
    if CAPTUM_HAS_ITS_OWN:
        assert importlib.util.find_spec("captum.insights").origin.startswith(captum.__path__[0])
        return
    for name in SCRIPTS:
        assert isinstance(run_script(name, "captum.insights")["visualizer"], AttributionVisualizer)
    assert importlib.import_module("captum.insights") is captum_ssm.insights
    install_alias()  # may be done twice, and is all or nothing
    ours = [m.__name__ for n, m in sys.modules.items() if n.startswith("captum.insights")]
    assert ours.count("captum_ssm.insights") == 1
    from captum.insights.attr_vis import config
    from captum.insights.attr_vis.attribution_calculation import AttributionCalculation

    assert AttributionCalculation.__module__ == "captum_ssm.insights.calculation"
    for name in config.__all__:  # the tables that a script changes are those that are used
        if name.isupper():
            assert getattr(config, name) is getattr(methods, name), name


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from helpers.insights_examples import Always, ask, numbers, table
visualizer = table(Always(1), [numbers(1)])
visualizer.serve()
assert ask(visualizer.url, "/api/examples", {{}}).status == 200
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_script_that_does_not_block_ends_at_its_end():
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", SCRIPT.format(tests=str(HERE.parent))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("done"), done.stderr
