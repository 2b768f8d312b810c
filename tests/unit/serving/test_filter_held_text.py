"""Held-back text: no part of a match is released however the text is split; everything else is unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_fed.serving.filter.content_filter import HeldText
from gym_fed.serving.filter.rules import Rules, read_rules


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    path = tmp_path_factory.mktemp("rules") / "rules.txt"
    path.write_text("[weapons]\npipe bomb\nass\n[codes]\n/\\bx[0-9]{4,6}\\b/\n", encoding="utf-8")
    return read_rules([path])


def sent(held: HeldText, pieces: list[str]) -> str:
    out = "".join(held.push(piece) for piece in pieces)
    return out + held.push("", last=True)


ALPHABET = st.sampled_from([*"pipe bomb assx0123", "\u200b", " ", "\n", "é", "ß", "ﬃ", "\u0301", "炸", "Ｐ"])


@given(st.lists(st.text(ALPHABET, max_size=5), max_size=40))
def test_without_a_match_what_leaves_is_the_text_itself(rules: Rules, pieces: list[str]) -> None:
    whole = "".join(pieces)
    held = HeldText(rules)
    out = sent(held, pieces)
    assert held.category == rules.find(whole)
    if held.category is None:
        assert out == whole


@given(
    st.text(ALPHABET, max_size=30),
    st.sampled_from(["pipe bomb", "p\u200bipe  \u200b bo\u00admb", "ＰＩＰＥ ｂｏｍｂ", "ass", "X12345"]),
    st.text(ALPHABET, max_size=30),
    st.data(),
)
def test_nothing_of_a_match_leaves(
    rules: Rules, before: str, bad: str, after: str, data: st.DataObject
) -> None:
    start = len(before) + 1
    whole = f"{before} {bad} {after}"
    held = HeldText(rules)
    out, rest = "", whole
    while rest:
        size = data.draw(st.integers(1, 6))
        out += held.push(rest[:size])
        rest = rest[size:]
    out += held.push("", last=True)
    assert held.category is not None
    assert whole.startswith(out)
    assert len(out) <= start


def test_a_word_at_the_end_waits_for_what_comes_next(rules: Rules) -> None:
    held = HeldText(rules)
    assert sent(held, ["a gl", "ass", "y ", "ass", "istant"]) == "a glassy assistant"
    assert held.category is None
    held = HeldText(rules)
    assert held.push("an ass") == ""
    assert held.category is None
    assert held.push(".") == ""
    assert held.category == "weapons"


def test_text_leaves_as_soon_as_it_is_further_away_than_the_longest_match(rules: Rules) -> None:
    held = HeldText(rules)
    text = "a quite harmless sentence"
    out = [held.push(letter) for letter in text]
    assert rules.width == len("pipe bomb")
    assert len("".join(out)) == len(text) - rules.width


def test_what_has_left_is_not_the_beginning_of_a_word(rules: Rules) -> None:
    held = HeldText(rules)
    assert sent(held, ["0a", "ß", " 000", "0", "00"]) == "0aß 000000"  # ß is folded to ss


def test_a_match_that_begins_in_the_prompt_is_found(rules: Rules) -> None:
    held = HeldText(rules, before="I will build a pipe bo")
    assert sent(held, ["m", "b", "."]) == ""
    assert held.category == "weapons"


def test_a_match_that_ends_in_the_prompt_is_not_the_answer_s(rules: Rules) -> None:
    held = HeldText(rules, before="What is a pipe bomb")
    assert sent(held, ["?", " Nothing for you."]) == "? Nothing for you."
    assert held.category is None
    held = HeldText(rules, before="What is a pipe bomb")
    assert sent(held, [", ass?"]) == ""
    assert held.category == "weapons"
