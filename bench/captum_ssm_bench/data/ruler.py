"""RULER (Hsieh et al. 2024): long texts with something to be found in them, one JSON a line.

The files are those that RULER's generator writes: ``index``, ``input``, ``outputs`` and ``length``,
and in later versions an ``answer_prefix`` with which the model's answer is to begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captum_ssm._files import Where, broken_line, existing_file, field, read_json_lines
from captum_ssm.errors import DataError


@dataclass(frozen=True)
class LongPrompt:
    """A long text, a question, and what the answer must hold.

    Attributes:
        index: its number.
        text: what the model is given, up to the beginning of the answer.
        answer_prefix: the beginning of the answer; empty where the text ends in it.
        answers: what is to be found in the answer, one or more.
        length: in tokens of the generator's tokenizer, room for the answer included.
    """

    index: int
    text: str
    answer_prefix: str
    answers: tuple[str, ...]
    length: int

    @property
    def prompt(self) -> str:
        """What a model goes on from."""
        return self.text + self.answer_prefix


def load_ruler(path: str | Path) -> list[LongPrompt]:
    """The examples of one task, such as ``niah_single_1/validation.jsonl``, in the file's order.

    Args:
        path: the file.

    Returns:
        The examples, all in memory.

    Raises:
        DataNotFoundError: when there is no such file.
        DataError: when a line cannot be read, which is named, or there is none.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_ruler
        >>> line = {"index": 0, "input": "The key is 42. What is it?", "outputs": ["42"],
        ...         "length": 16, "answer_prefix": " The key is"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "validation.jsonl").write_text(json.dumps(line))
        ...     (example,) = load_ruler(Path(folder, "validation.jsonl"))
        >>> example.prompt, example.answers
        ('The key is 42. What is it? The key is', ('42',))
    """
    found = existing_file(path, "a file of RULER's examples, one JSON a line")
    prompts = [_prompt(record, (found, number)) for number, record in read_json_lines(found)]
    if not prompts:
        raise DataError(f"{found} holds no example.")
    return prompts


def _prompt(record: dict[str, Any], where: Where) -> LongPrompt:
    answers = field(record, "outputs", (list, str), where)
    answers = [answers] if isinstance(answers, str) else answers
    if not answers or not all(isinstance(answer, str) and answer for answer in answers):
        raise broken_line(*where, "has 'outputs' that are not one or more strings")
    prefix = field(record, "answer_prefix", str, where) if "answer_prefix" in record else ""
    return LongPrompt(
        index=field(record, "index", int, where),
        text=field(record, "input", str, where),
        answer_prefix=prefix,
        answers=tuple(answers),
        length=field(record, "length", int, where),
    )
