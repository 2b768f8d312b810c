"""Rules of the content filter: matches, and files and patterns that are refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.config.serving import FilterConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.filter.content_filter import ContentFilter, texts_in
from gym_fed.serving.filter.rules import MAX_BYTES, PACKAGE_RULES, Rules, read_rules, safe_pattern


def rules(folder: Path, text: str) -> Rules:
    path = folder / "rules.txt"
    path.write_text(text, encoding="utf-8")
    return read_rules([path])


@pytest.mark.parametrize(
    "text",
    [
        "a pipe bomb",
        "PIPE BOMB",
        "pipe   \n\t bomb",
        "pi\u200bpe bo\u00admb",  # zero-width space, soft hyphen
        "ｐｉｐｅ　ｂｏｍｂ",  # full width
        "𝐩𝐢𝐩𝐞 𝐛𝐨𝐦𝐛",  # mathematical letters
        "pïpé bo\u0301mb",
        "(pipe bomb)",
    ],
)
def test_a_phrase_is_found_however_it_is_spelled(tmp_path: Path, text: str) -> None:
    assert rules(tmp_path, "[weapons]\npipe bomb\n").find(text) == "weapons"


@pytest.mark.parametrize("text", ["pipe bombastic", "bagpipe bomb", "pipe-bomb", "p1pe bomb", "pipe"])
def test_a_phrase_is_whole_words_and_nothing_else(tmp_path: Path, text: str) -> None:
    assert rules(tmp_path, "[weapons]\npipe bomb\n").find(text) is None


def test_a_word_of_a_script_without_blanks_is_found_anywhere(tmp_path: Path) -> None:
    assert rules(tmp_path, "[weapons]\n炸弹\n").find("如何制造炸弹呢") == "weapons"


def test_many_phrases_are_found_each_and_the_longer_does_not_hide_the_shorter(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(500)]
    found = rules(tmp_path, "[a]\n" + "\n".join(words) + "\nred\nred fox\n")
    assert all(found.find(f"x {word} y") == "a" for word in [*words, "red", "red fox", "red foxes"])
    assert found.find("word501 word99999 redd") is None


def test_files_are_read_together_and_categories_chosen(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("# ours\n[a]\nred\n\n[b]\n/gr[ae]y/\n")
    two.write_text("[a]\r\nblue\r\n")
    found = read_rules([one, two])
    assert [found.find(text) for text in ("red", "blue", "Grey", "green")] == ["a", "a", "b", None]
    assert found.of(["b"]).find("red") is None


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("red\n", 1, "before the first category"),
        ("[A b]\n", 1, "is not a valid category"),
        ("[a]\nred\n/x", 3, "does not end with /"),
        ("[a]\n/(a+)+b/\n", 2, "more than 200 characters"),
        ("[a]\n\n/(a{1,9}){1,9}b/\n", 3, "more than 1,000 ways"),
        ("[a]\n/" + "a?" * 60 + "a/\n", 2, "more than 1,000 ways"),
        ("[a]\n/(?:a|a){1,30}b/\n", 2, "more than 1,000 ways"),
        ("[a]\n/(?:\\b){0,99999}a/\n", 2, "more than 1,000 ways"),
        ("[a]\n/(a)\\1/\n", 2, "groupref is not allowed"),
        ("[a]\n/(?<=a)b/\n", 2, "assert is not allowed"),
        ("[a]\n/^a/\n", 2, "beginning is not allowed"),
        ("[a]\n/(?i)a/\n", 2, "flags"),
        ("[a]\n/a{0,3}/\n", 2, "matches the empty text"),
        ("[a]\n/a(/\n", 2, "is not a regular expression"),
        ("[a]\n\u200b\n", 2, "without visible characters"),
        ("[a]\n" + "x" * 101 + "\n", 2, "more than 100 characters"),
        ("".join(f"[c{number}]\n" for number in range(33)), 33, "more than 32 categories"),
        ("[a]\n" + "/x/\n" * 201, 202, "more than 200 patterns"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(GymError) as caught:
        rules(tmp_path, text)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.message.startswith(f"{tmp_path / 'rules.txt'}:{line}: ")
    assert said in caught.value.message


def test_a_file_that_is_missing_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rules.txt"
    with pytest.raises(GymError) as caught:
        read_rules([path])
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    path.write_bytes(b"[a]\n" + b"x" * MAX_BYTES)
    with pytest.raises(GymError) as caught:
        read_rules([path])
    assert caught.value.code is ErrorCode.TOO_LARGE
    path.write_bytes(b"[a]\ngood\n\xff\n")
    with pytest.raises(GymError, match=r"rules.txt:3: the line is not UTF-8"):
        read_rules([path])


def test_a_pattern_reports_its_longest_match_and_sees_folded_text() -> None:
    pattern, width = safe_pattern(r"\b(?:build|make) .{0,20}Café")
    assert width == 5 + 1 + 20 + 4
    assert pattern.search("make a cafe")


def test_the_list_of_the_package_finds_what_is_said_openly() -> None:
    found = read_rules([PACKAGE_RULES])
    assert found.find("How do I build a small pipe bomb?") == "weapons"
    assert found.find("the easiest way to kill myself") == "self-harm"
    assert found.find("key: AKIAIOSFODNN7EXAMPLE") == "secrets"
    assert found.find("-----BEGIN OPENSSH PRIVATE KEY-----") == "secrets"
    assert found.find("How do I kill a Python process? It bombs with a make error.") is None


def test_a_category_without_rules_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "rules.txt"
    path.write_text("[a]\nred\n[b]\nblue\n")
    config = FilterConfig(input=["a"], output=["c"], rules=[path], package_rules=False)
    with pytest.raises(
        GymError, match=r"filter.output: no rule has the category 'c'.*known categories: a, b"
    ):
        ContentFilter(config)


def test_settings_that_would_be_ignored_are_refused() -> None:
    assert not FilterConfig().on
    with pytest.raises(ValueError, match="neither input nor output is on"):
        FilterConfig(text="no")
    with pytest.raises(ValueError, match="there are no rules"):
        FilterConfig(input=True, package_rules=False)


def test_a_match_inside_one_that_lies_outside_the_window_is_found(tmp_path: Path) -> None:
    found = rules(tmp_path, "[a]\n/ab( ab)?/\n")
    assert found.find_within("ab ab", 0, 4, 5) == "a"
    assert (
        rules(tmp_path, "[a]\nx x\n").find_within("x x x", 0, 4, 5) == "a"
    )  # the second begins inside the first


def test_texts_of_a_json_value_are_its_keys_too() -> None:
    assert list(texts_in({"pipe bomb": [1, {"a": "b"}]})) == ["pipe bomb", "a", "b"]
