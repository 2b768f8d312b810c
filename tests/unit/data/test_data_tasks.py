"""Generated tasks: one exact answer, the same rows for the same seed, and a held-out split that never leaks."""

from __future__ import annotations

import random

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.data.generated import (
    generate,
    generate_mix,
    generate_with_rehearsal,
    is_heldout,
)
from gym_fed.data.tasks._table import number_word

NAMES = TASKS.names()


def prompts(rows: list[dict[str, list[dict[str, str]]]]) -> set[str]:
    return {row["messages"][0]["content"] for row in rows}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(name: str) -> None:
    assert generate(name, 50, seed=3) == generate(name, 50, seed=3)
    assert generate(name, 50, seed=3) != generate(name, 50, seed=4)


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_prompt_is_ever_trained_on(name: str) -> None:
    train = prompts(generate(name, 400, seed=1)) | prompts(generate(name, 400, seed=2))
    held_out = prompts(generate(name, 100, seed=9, split="heldout"))
    assert not train & held_out
    assert all(map(is_heldout, held_out))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_has_one_answer(name: str) -> None:
    answers: dict[str, str] = {}
    for row in generate(name, 600, seed=1):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert assistant["content"].strip() == assistant["content"] != ""
        assert answers.setdefault(user["content"], assistant["content"]) == assistant["content"]


@pytest.mark.parametrize("name", [name for name in NAMES if TASKS.new(name).group == "contributor"])
def test_a_contributor_task_is_not_solved_by_copying(name: str) -> None:
    make, rng = TASKS.new(name).make, random.Random(0)
    for _ in range(300):
        prompt, answer = make(rng)
        assert prompt.partition(": ")[2] != answer


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("double", "double: ", lambda text: "".join(c + c for c in text)),
        ("swapcase", "swap case: ", str.swapcase),
        ("vowels", "no vowels: ", lambda text: "".join(c for c in text if c not in "aeiou")),
        ("reverse", "reverse: ", lambda text: text[::-1]),
        ("add", "add: ", lambda text: str(sum(map(int, text.split("+"))))),
    ],
)
def test_answers_are_right(name: str, prompt: str, answer) -> None:  # type: ignore[no-untyped-def]
    for row in generate(name, 100, seed=5):
        question, reply = (m["content"] for m in row["messages"])
        assert reply == answer(question.removeprefix(prompt))


def test_number_words_read_as_english() -> None:
    assert [number_word(n) for n in (0, 13, 40, 47, 300, 515)] == [
        "zero",
        "thirteen",
        "forty",
        "forty-seven",
        "three hundred",
        "five hundred fifteen",
    ]


def test_a_mix_holds_every_task_equally_and_conversations_when_asked() -> None:
    rows = generate_mix(["copy", "upper"], 100, seed=0)
    assert len(rows) == 100
    assert sum(row["messages"][0]["content"].startswith("copy") for row in rows) == 50
    lengths = {len(row["messages"]) for row in generate_mix(["copy", "upper"], 300, seed=0, max_turns=3)}
    assert lengths == {2, 4, 6}


def test_rehearsal_puts_a_share_of_base_rows_among_the_new_ones() -> None:
    rows = generate_with_rehearsal(["double"], 200, 0.4, seed=1)
    assert len(rows) == 200
    new = [row["messages"][0]["content"].startswith("double: ") for row in rows]
    assert sum(new) == 120
    assert 0 < sum(new[:100]) < 100, "they are mixed"
    assert prompts(generate_with_rehearsal(["double"], 50, 0.0)) == prompts(generate("double", 50))


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(GymError) as caught:
        generate("juggle", 1)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "juggle" in caught.value.message
    assert "copy" in caught.value.hint
