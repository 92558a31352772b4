"""Our methods in the Insights that Captum 0.8 has itself."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from helpers.insights_examples import run_script
from zoo.small import CLASSES, classifier, token_ids, vision

from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.errors import OptionError
from captum_ssm.insights import register_with_captum
from captum_ssm.insights.api import plain
from captum_ssm.insights.methods import SUPPORTED_ATTRIBUTION_METHODS

NEEDED = ("captum.insights", "flask", "flask_compress")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_captum08 = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: Captum 0.8; see CONTRIBUTING.md"
)
NAMES = [m.get_name() for m in SUPPORTED_ATTRIBUTION_METHODS if issubclass(m, SSMAttribution)]
LABELS = [f"class {i}" for i in range(CLASSES)]


def test_where_captum_has_no_insights_or_ours_it_says_so(monkeypatch):
    import captum_ssm.insights.attr_vis.config as ours

    with monkeypatch.context() as without:
        for name in ("captum.insights", "captum.insights.attr_vis"):
            without.setitem(sys.modules, name, None)
        with pytest.raises(OptionError, match=r"Captum 0.8, with flask and flask-compress"):
            register_with_captum()
    for name in ("captum.insights", "captum.insights.attr_vis"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name.replace("captum", "captum_ssm")])
    monkeypatch.setitem(sys.modules, "captum.insights.attr_vis.config", ours)
    with pytest.raises(OptionError, match=r"is captum_ssm.insights"):
        register_with_captum()


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captum's tables, as they are before and after the test."""
    from captum.insights.attr_vis import config

    tables = [config.ATTRIBUTION_NAMES_TO_METHODS, config.ATTRIBUTION_METHOD_CONFIG]
    before = [dict(table) for table in tables]
    for table in tables:
        for name in NAMES:
            table.pop(name, None)
    known = [*config.SUPPORTED_ATTRIBUTION_METHODS]
    monkeypatch.setattr(config, "SUPPORTED_ATTRIBUTION_METHODS", known)
    yield config
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def visualizer(model: Any, feature: Any, inputs: torch.Tensor, name: str, **options: Any) -> Any:
    from captum.insights import AttributionVisualizer, Batch
    from captum.insights.attr_vis.app import FilterConfig

    batch = Batch(inputs, torch.zeros(len(inputs), dtype=torch.long))
    made = AttributionVisualizer([model], LABELS, [feature], [batch])
    made._config = FilterConfig(name, options, num_examples=len(inputs))
    return made


@needs_captum08
def test_methods_are_offered_by_name_once(config):
    before = len(config.SUPPORTED_ATTRIBUTION_METHODS)
    assert register_with_captum() == NAMES == register_with_captum()
    assert len(config.SUPPORTED_ATTRIBUTION_METHODS) == before + len(NAMES)
    assert set(NAMES) <= set(config.ATTRIBUTION_NAMES_TO_METHODS)
    from captum.insights.attr_vis.features import EmptyFeature

    told = visualizer(vision(), EmptyFeature(), torch.rand(1, 3, 12, 12), NAMES[0])
    assert set(NAMES) <= set(told.get_insights_config()["methods"])


@needs_captum08
def test_every_method_explains_with_what_the_page_sends(config):
    from captum.insights.attr_vis.features import TextFeature

    register_with_captum()
    model, ids = classifier("mean"), token_ids(1, 6)
    feature = TextFeature("text", None, None, lambda ids: [f"w{i}" for i in ids.squeeze(0)])
    for name in NAMES:
        offered = config.ATTRIBUTION_METHOD_CONFIG[name].params.items()
        sent = {key: kind.value for key, kind in offered}  # if nothing is changed
        ((output,),) = visualizer(model, feature, ids, name, **sent).visualize()
        method = config.ATTRIBUTION_NAMES_TO_METHODS[name]
        wanted = method(model).attribute(ids, target=int(output.active_index))[0]
        percent = 100 * wanted / wanted.abs().max()
        assert output.feature_outputs[0].modified == pytest.approx(percent.tolist(), abs=1e-3)


def shown_by(script: str, package: str) -> list[list[dict[str, Any]]]:
    """What a script's visualizer shows, without pictures."""
    torch.manual_seed(20)
    names = run_script(script, package)
    results = names["results"] if "results" in names else names["visualizer"].visualize()
    return [[plain(output) for output in outputs] for outputs in results]


@needs_captum08
@pytest.mark.parametrize("script", ["tables", "texts"])
def test_a_script_shows_what_captum_shows_for_the_first_model(script):
    theirs, ours = (shown_by(script, name) for name in ("captum.insights", "captum_ssm.insights"))
    assert len(ours) <= len(theirs)  # Captum shows whole batches
    for (own, *_), (other, *_) in zip(ours, theirs, strict=False):
        assert own["actual"] == other["actual"] | {"score": 100.0}
        assert own["active_index"] == other["active_index"]
        for mine, captums in zip(own["predicted"], other["predicted"], strict=True):
            assert mine == captums | {"score": pytest.approx(captums["score"], rel=1e-5)}
        for mine, captums in zip(own["feature_outputs"], other["feature_outputs"], strict=True):
            assert mine["contribution"] == pytest.approx(captums["contribution"], abs=1e-5)
            assert (mine["name"], mine["type"]) == (captums["name"], captums["type"])
            if mine["type"] in ("text", "general"):
                assert mine["base"] == captums["base"]
                assert mine["modified"] == pytest.approx(captums["modified"], abs=1e-3)
