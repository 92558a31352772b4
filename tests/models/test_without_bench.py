"""A user of any method needs nothing of the experiments, which stand above."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

USES = {
    "methods": """
import torch
from captum_ssm import LatimFlow, report
from captum_ssm.models import load_bundled

model, vocabulary = load_bundled()
prompt = "anna owns the lamp . ? anna owns the"
ids = torch.tensor([vocabulary.encode(prompt)])
assert LatimFlow(model).attribute(ids, target=(-1, vocabulary.id_of("lamp"))).shape == ids.shape
report(model, prompt, [LatimFlow], tokenizer=vocabulary, path="page.html")
for name in ("scenes-vim", "valence-rwkv"):
    load_bundled(name)
""",
    "explain": """
from captum_ssm.cli import main

for model, text in (("recall-mamba", "anna owns the"), ("valence-mamba", "a dull film")):
    out = ["--method", "LatimFlow", "--out", "numbers.json", "--force"]
    assert main(["explain", model, "--text", text, *out]) == 0
""",
    "help": """
from captum_ssm.cli import main

try:
    main(["--help"])
except SystemExit:
    pass
""",
    "tasks": "import captum_ssm.bench.tasks",
}

SEEN = """
import sys

print([name for name in ("captum_ssm.bench", "torch") if name in sys.modules])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("use", "seen"),
    [
        ("methods", ["torch"]),
        ("explain", ["torch"]),
        ("help", []),
        ("tasks", ["captum_ssm.bench", "torch"]),
    ],
)
def test_what_is_imported(use: str, seen: list[str], tmp_path: Path) -> None:
    code = USES[use] + "\n" + SEEN
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(seen)
