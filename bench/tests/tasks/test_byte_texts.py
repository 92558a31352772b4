"""The answers of byte texts follow from their prompts, and from their sources."""

from __future__ import annotations

import random
import re

import pytest

from captum_ssm_bench.tasks.byte_texts import CLOSING, KINDS, MECHANISMS, ByteText, drawn


def solved(mechanism: str, prompt: str) -> str:
    """Answer a prompt."""
    if mechanism == "pairs":
        *stated, asked = prompt.split(";")
        return dict(each.split("=") for each in stated)[asked.removesuffix("=")]
    if mechanism == "names":
        found = re.fullmatch(r"(\w+) \w+ (\w+) a \w+ at the \w+; (\w+) \w+ a \w+ to ", prompt)
        assert found is not None
        one, other, giver = found.groups()
        return {one: other, other: one}[giver]
    opened: list[str] = []
    for part in prompt.split():
        if part in CLOSING:
            opened.append(part)
        elif part in CLOSING.values():
            assert CLOSING[opened.pop()] == part
    return CLOSING[opened[-1]]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_answers_follow_from_prompts(mechanism: str, seed: int) -> None:
    rng = random.Random(seed)
    for text in (drawn(mechanism, rng) for _ in range(200)):
        prompt = text.prompt.decode()
        assert text.answer == solved(mechanism, prompt)
        word, kind = text.words[text.source]
        assert text.answer == (CLOSING[word] if kind == "open" else word)
        assert sum(text.movable) >= 6


def test_the_last_bracket_is_not_the_one_to_close(seed: int) -> None:
    rng = random.Random(seed)
    for text in (drawn("brackets", rng) for _ in range(50)):
        after = [kind for _, kind in text.words[text.source + 1 :]]
        assert "open" in after and after.count("open") == after.count("close")


@pytest.mark.parametrize("mechanism", ["pairs", "names"])
def test_what_is_asked_further_is_answered(mechanism: str, seed: int) -> None:
    text = drawn(mechanism, random.Random(seed))
    said = text.prompt.decode()
    assert text.further
    for prompt, answer in text.further:
        if mechanism == "pairs":
            assert answer == solved(mechanism, said.rpartition(";")[0] + prompt)
        else:
            first, giver = said.partition("; ")[0], prompt.split()[1]
            assert {giver, answer} == {first.split()[0], first.split()[2]}


def test_words_of_a_kind_can_replace_each_other() -> None:
    for words in KINDS.values():
        assert len({len(word) for word in words}) == 1
        assert len({word[0] for word in words}) == len(words)


def test_bytes_are_those_of_the_parts() -> None:
    text = ByteText((("fox", "key"), ("=", "")), 0, "cup")
    assert bytes(text.ids()) == b"fox=cup" and text.movable == [True, False]
