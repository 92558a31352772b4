"""BIG-bench's tasks of several choices, such as Snarks and Formal Fallacies, one file of JSON each.

Two layouts are read: that of the authors' ``task.json``, whose examples score every choice, and
that of the harder subset, whose inputs end in a list of options::

    {"examples": [{"input": "Which is sarcastic? (a) ... (b) ...", "target_scores": {"(a)": 1,
     "(b)": 0}}]}
    {"examples": [{"input": "Is it valid?\\nOptions:\\n- valid\\n- invalid", "target": "valid"}]}
"""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

from captum_ssm._files import existing_file, read_text
from captum_ssm.errors import DataError

from .arc import ChoiceQuestion, load_arc

_OPTION = re.compile(r"\((\w)\)\s*(.+)|-\s*(.+)")
_OPTIONS = "\nOptions:\n"


def load_big_bench(path: str | Path) -> list[ChoiceQuestion]:
    """The questions of a task, in the order of the file.

    Args:
        path: ``task.json`` of a task of several choices, in either layout.

    Returns:
        The questions, all in memory; choices that have no names are called A, B, C and so on.

    Raises:
        DataNotFoundError: when there is no such file.
        DataError: when it is not such a task; it names the example.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_big_bench
        >>> task = {"examples": [{"input": "Is ice cold?", "target_scores": {"yes": 1, "no": 0}}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "task.json").write_text(json.dumps(task))
        ...     (question,) = load_big_bench(Path(folder, "task.json"))
        >>> question.choices, question.labels, question.answer
        (('yes', 'no'), ('A', 'B'), 0)
    """
    found = existing_file(path, "a task of BIG-bench")
    try:
        whole = json.loads(read_text(found))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{found} is not JSON ({error}).") from None
    examples = whole.get("examples") if isinstance(whole, dict) else None
    if not isinstance(examples, list) or not examples:
        raise DataError(f"{found} has no list 'examples', or an empty one.")
    return [_question(f"{found}, example {i}", i, one) for i, one in enumerate(examples)]


def load_choices(path: str | Path) -> list[ChoiceQuestion]:
    """Questions with choices, of BIG-bench (``.json``) or of a line each, as ARC and CommonsenseQA.

    Args:
        path: the file.

    Returns:
        The questions, all in memory.

    Raises:
        DataNotFoundError, DataError: as :func:`load_big_bench`.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_choices
        >>> choices = [{"text": "ice", "label": "A"}, {"text": "air", "label": "B"}]
        >>> line = {"question": {"stem": "A gas?", "choices": choices}, "answerKey": "B"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "train.jsonl").write_text(json.dumps(line))
        ...     (question,) = load_choices(Path(folder, "train.jsonl"))
        >>> question.choices[question.answer]
        'air'
    """
    return load_big_bench(path) if Path(path).suffix == ".json" else load_arc(path)


def _question(where: str, number: int, record: Any) -> ChoiceQuestion:
    if not isinstance(record, dict) or not isinstance(record.get("input"), str):
        raise DataError(f"{where} has no text 'input'.")
    text, scores = record["input"], record.get("target_scores")
    if isinstance(scores, dict) and scores:
        choices, best = list(scores), [name for name, score in scores.items() if score == 1]
        labels = list(string.ascii_uppercase[: len(choices)])
    else:
        text, _, listed = text.partition(_OPTIONS)
        parts = [_OPTION.fullmatch(line.strip()) for line in listed.splitlines() if line.strip()]
        if not parts or None in parts:
            raise DataError(
                f"{where} has neither 'target_scores' nor options behind 'Options:', such as "
                "'(A) ...' or '- ...'."
            )
        read = [part for part in parts if part is not None]
        choices = [part[2] or part[3] for part in read]
        labels = [part[1] or string.ascii_uppercase[i] for i, part in enumerate(read)]
        target = str(record.get("target", ""))
        best = [
            choice
            for choice, label in zip(choices, labels, strict=True)
            if target in (choice, f"({label})")
        ]
    if len(best) != 1 or len(choices) > len(string.ascii_uppercase):
        raise DataError(
            f"{where} has {len(best)} right answers among {choices[:9]}; one is needed."
        )
    return ChoiceQuestion(
        str(number), text.strip(), tuple(choices), tuple(labels), choices.index(best[0])
    )
