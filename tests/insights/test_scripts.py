"""Scripts written for Captum 0.8's Insights, and how a script with a page ends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import captum
import pytest
from helpers.insights_examples import ask

import captum_ssm.insights
from captum_ssm.insights import AttributionVisualizer, install_alias, methods

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py"))
CAPTUM_HAS_ITS_OWN = importlib.util.find_spec("captum.insights") is not None


def check_images(visualizer: AttributionVisualizer) -> None:
    found = ask(visualizer.url, "/api/examples", {}).json
    actual = [each["models"][0]["actual"]["label"] for each in found["examples"]]
    assert actual == ["Plane", "Car", "Bird", "Cat"]
    pages = [ask(visualizer.url, "/api/examples", {}).json for _ in range(2)]
    assert [len(page["examples"]) for page in pages] == [4, 2] and pages[1]["ended"]
    for output in (each["models"][0] for each in found["examples"]):
        assert len(output["predicted"]) == 4 and output["feature_outputs"][0]["type"] == "image"


def check_texts(visualizer: AttributionVisualizer) -> None:
    (first, *_) = ask(visualizer.url, "/api/examples", {}).json["examples"]
    (output,) = first["models"]
    (feature,) = output["feature_outputs"]
    assert len(feature["base"]) == 6 == len(feature["modified"])
    assert max(abs(percent) for percent in feature["modified"]) == pytest.approx(100)
    assert {score["label"] for score in output["predicted"]} == {"negative", "positive"}


def check_tables(visualizer: AttributionVisualizer) -> None:
    chosen = {"attribution_method": "Deep Lift", "num_examples": 2}
    found = ask(visualizer.url, "/api/examples", {"filter": chosen}).json
    for each in found["examples"]:
        assert [output["model_index"] for output in each["models"]] == [0, 1]
        for output in each["models"]:
            features = output["feature_outputs"]
            assert [feature["type"] for feature in features] == ["image", "general", "empty"]
            assert sum(abs(feature["contribution"]) for feature in features) == pytest.approx(1)
            assert features[1]["base"][0].startswith("sepal length: ")


CHECKS = {"images": check_images, "tables": check_tables, "texts": check_texts}


def run(name: str, package: str) -> dict[str, Any]:
    """The names of a script that was run with this package in the place of captum.insights."""
    text = (HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    text = text.replace("from captum.insights", f"from {package}")
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, f"{name}.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_import_changed(name):
    names = run(name, "captum_ssm.insights")
    with closing(names["visualizer"]) as visualizer:
        assert isinstance(visualizer, AttributionVisualizer)
        CHECKS[name](visualizer)
    if name == "tables":
        results = names["results"]
        assert len(results) == 6 and all(len(outputs) == 2 for outputs in results)
        actual = [outputs[0].actual.label for outputs in results[:3]]
        assert actual == ["setosa", "versicolor", "virginica"]


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


@pytest.mark.slow
def test_scripts_run_unchanged_after_the_alias(alias):
    if CAPTUM_HAS_ITS_OWN:
        assert importlib.util.find_spec("captum.insights").origin.startswith(captum.__path__[0])
        return
    for name, check in CHECKS.items():
        with closing(run(name, "captum.insights")["visualizer"]) as visualizer:
            check(visualizer)
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
