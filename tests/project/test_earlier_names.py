"""What earlier versions offered is found by the same names."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from captum_ssm.models.bundled import BUNDLED

#: By module, the public names of version 0.1.
NAMES = {
    "captum_ssm.tasks": """
    CLASS_WORDS CLS FREQUENT_WORD LONG_COPIES NUMBER_WORDS ONE_PASSKEY SCENES SHORT_COPIES
    TWO_PASSKEYS VOC_CLASSES VOC_IGNORED Accuracy AlignedPair Batch ChoiceQuestion CopyAccuracy
    CopyBatch CopyingTask Example Fact FrequentWordTask LabelledImage LinkedBatch LinkedTask
    LinkedText Links LongPrompt PasskeyTask RatedText RecallTask Review SceneBatch SceneTask
    SegmentedImage SwapCheck Targets TextReader TranslationTask WordVocabulary accuracy
    answer_accuracy class_vocabulary collate copy_accuracy generate load_arc load_gold_alignment
    load_image_folders load_imagenet_segmentation load_imdb load_lexicon load_pascal_voc
    load_ruler load_valence parse_prompt predict recall_vocabulary swap_check text_words
    translated with_value
    """,
    "captum_ssm.evaluation": """
    EXPERIMENTS Cell Column Comparison Entry Experiment Key Line Numbers Outcome Plan Processes
    Records Rows Side Subject Verdict lines run verdicts write_tables
    """,
    "captum_ssm.models": """
    VisionMamba load_bundled load_vim vim_small vim_tiny
    """,
}
EACH = [(module, name) for module, names in NAMES.items() for name in names.split()]

MODELS = """
    recall-mamba copying-mamba copying-mamba2 translation-mamba translation-mamba2 passkey-mamba
    passkey-mamba2 two-passkeys-mamba two-passkeys-mamba2 frequent-word-mamba frequent-word-mamba2
    pairs-mamba pairs-mamba2 pairs-gated-deltanet pairs-rwkv pairs-griffin pairs-bamba
    chains-mamba chains-mamba2
    copying-bamba translation-gated-deltanet translation-rwkv passkey-gated-deltanet
    two-passkeys-gated-deltanet scenes-vim scenes-vim-first scenes-vmamba scenes-vit valence-mamba
    valence-rwkv valence-bert motifs-caduceus motifs-hyenadna
"""


@pytest.mark.parametrize(("module", "name"), EACH)
def test_a_name_is_found(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None
    assert name in import_module(module).__all__


def test_bundled_models() -> None:
    assert set(BUNDLED) == set(MODELS.split())


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("from captum_ssm.tasks import CopyingTask as x", "bench.tasks.copying"),
        ("from captum_ssm.tasks import load_arc as x", "bench.data.arc"),
        ("from captum_ssm.tasks import TextReader as x", "models.sentences"),
        ("from captum_ssm.tasks import *; x = RecallTask", "bench.tasks.recall_task"),
        ("from captum_ssm.evaluation import Plan as x", "bench.harness.runner"),
        ("from captum_ssm.evaluation import verdicts as x", "bench.harness.verdicts"),
    ],
)
def test_it_is_the_thing_itself(statement: str, found: str) -> None:
    scope: dict[str, Any] = {}
    exec(statement, scope)
    assert scope["x"].__module__ == f"captum_ssm.{found}"


MODULES = """
import sys
import captum_ssm.tasks.recall
import captum_ssm.evaluation.verdicts
assert "torch" not in sys.modules, "nothing was asked for yet"
from captum_ssm.evaluation.verdicts import Side
from captum_ssm.tasks.recall import generate
from captum_ssm.evaluation import verdicts
print(generate.__module__, captum_ssm.tasks.recall.Fact.__module__, Side.__module__, verdicts)
"""


@pytest.mark.processes
def test_modules_that_documents_named() -> None:
    result = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    recall, again, verdicts, what = result.stdout.split(maxsplit=3)
    assert recall == again == "captum_ssm.bench.tasks.recall"
    assert verdicts == "captum_ssm.bench.harness.verdicts"
    assert what.startswith("<function verdicts")


@pytest.mark.parametrize("module", NAMES)
def test_other_names_are_unknown(module: str) -> None:
    with pytest.raises(AttributeError, match=f"{module}.*no_such_name"):
        _ = import_module(module).no_such_name
