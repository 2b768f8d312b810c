"""The checks of `make lint` that read words and pages: each finds a planted violation, and passes what is allowed."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tools.checks.__main__ import ROOT, all_findings
from tools.checks.__main__ import main as check
from tools.checks.classes import repeated_classes
from tools.checks.files import text_files
from tools.checks.pages import long_readme, long_sentences, sentences, slow_pages
from tools.checks.words import ALLOWED, RETIRED, Word, retired_words


def planted(folder: Path, files: dict[str, str]) -> list[str]:
    """What the checks find in a tree of these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [str(finding) for finding in all_findings(folder)]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("The purse of it.", "purse"),
        ("purse_of = 1", "purse"),
        ("class PurseRow:", "Purse"),
        ("PURSES = 1", "PURSES"),
        ("isPurse()", "Purse"),
        ("the liars of a round", "liars"),
        ("    class Guard(Interceptor):", "class Guard"),
        ("class PieceOfText:", "class PieceOfText"),
        ("--allow-untranslated", "allow-untranslated"),
    ],
)
def test_a_retired_word_is_found_in_prose_names_and_classes(line: str, word: str, tmp_path: Path) -> None:
    (found,) = planted(tmp_path, {"gym_fed/new.py": f"fine = 1\n{line}\n"})
    assert found.startswith(f"gym_fed/new.py:2: retired word {word!r}: use ")


EXAMPLES = {
    "untranslated": "allow_untranslated",
    "class mixed": "class MixedModel",
    "operand": "class Operand  # an operand",
}


@pytest.mark.parametrize("word", RETIRED, ids=lambda word: word.today)
def test_every_retired_word_is_found_in_its_folders(word: Word) -> None:
    line = EXAMPLES.get(word.today) or re.sub(r"(?<=class )\w", lambda first: first[0].upper(), word.today)
    assert list(retired_words({word.where[-1].replace("*", "new.py"): line}))


def test_a_file_named_by_a_retired_word_is_found() -> None:
    (found,) = retired_words({"server/gym_server/purse.py": ""})
    assert (found.line, found.message) == (0, "retired word 'purse': use balance")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("gym_fed/new.py", "pursed = outstanding = 1"),
        ("gym_fed/new.py", "guard = order = choice = piece"),
        ("gym_fed/new.py", "PRAGMA journal_mode = wal"),
        ("gym_fed/new.py", "both sides"),
    ],
)
def test_ordinary_words_and_allowed_places_pass(file: str, line: str) -> None:
    assert list(retired_words({file: line})) == []


def test_every_place_where_old_words_are_allowed_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.checks.words.ALLOWED", ())
    files = text_files(ROOT)
    lines = [(f.file, files[f.file].splitlines()[f.line - 1]) for f in retired_words(files) if f.line]
    for place in ALLOWED:
        assert any(fnmatch(file, place.path) and re.search(place.line, line) for file, line in lines), place


def test_two_classes_of_one_name_are_found_across_packages(tmp_path: Path) -> None:
    files = {
        "gym_fed/one.py": "class Move:\n    class Config:\n        pass\n",
        "server/gym_server/two.py": "import os\nclass _Move(One):\n    pass\n",
        "quant/gym_quant/three.py": "class Other:\n    class Config:\n        pass\n",
        "tests/four.py": "class Other: pass\n",
    }
    wanted = "server/gym_server/two.py:2: class Move is also in gym_fed/one.py: rename one of them"
    assert planted(tmp_path, files) == [wanted]


def test_a_readme_over_its_length_is_found_by_every_word_too_many() -> None:
    assert len(list(long_readme({"README.md": "word " * 903}))) == 3
    assert list(long_readme({"README.md": "word " * 900})) == []


def test_a_page_of_long_sentences_on_average_is_found() -> None:
    sixteen, fourteen = ("Word " * count + ". " for count in (16, 14))
    (found,) = slow_pages({"docs/page.md": f"# A title\n\n{sixteen * 3}{fourteen}"})
    assert found.message == "sentences of 15.5 words on average, 15 at most"
    assert list(slow_pages({"docs/page.md": f"# A title\n\n{sixteen}{fourteen}"})) == []


PAGE = """# A page

{sentence} Short.
More of the paragraph.

```console
{sentence}
```

| a | b |
|---|---|
| {sentence} | short |

- {sentence}
- short
"""


def test_long_sentences_are_found_in_paragraphs_tables_and_lists_but_not_in_code() -> None:
    text = PAGE.format(sentence=" ".join(["Word"] * 26) + ".")
    assert [f.line for f in long_sentences({"docs/page.md": text})] == [3, 12, 14]
    assert list(long_sentences({"docs/page.md": PAGE.format(sentence=" ".join(["Word"] * 25) + ".")})) == []
    assert list(long_sentences({"SECURITY.md": text})) == []


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("One two. Three `four five.six` [seven eight](nine ten)!", [2, 4]),
        ("It is 0.5 of\nthem. (See there.)", [5, 2]),
        ("Do it. `this` does.", [2, 2]),
        (
            '<picture><source media="(some words)" srcset="a.svg"><img src="a.svg" alt="Two words."></picture>',
            [2],
        ),
        ("e.g. this stays one", [4]),
        ("1. first\n2. second item", [1, 2]),
    ],
)
def test_sentences_are_counted_as_they_are_read(text: str, lengths: list[int]) -> None:
    assert [len(words) for _, words in sentences(text)] == lengths


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gone.md", "there is no docs/gone.md"),
        ("../configs/none.yaml", "there is no configs/none.yaml"),
        ("two.md#nowhere", "docs/two.md has no such heading"),
        ("#nowhere", "docs/one.md has no such heading"),
        ("two.md#keys-and-codes", ""),
        ("two.md", ""),
        ("https://example.org/gone.md", ""),
    ],
)
def test_a_link_to_nothing_is_found(target: str, message: str, tmp_path: Path) -> None:
    files = {
        "README.md": "[one](docs/one.md)\n",
        "docs/one.md": f"# One\n\n```\n[code](gone.md)\n```\n[two](two.md) [it]({target})\n",
        "docs/two.md": "# Two\n\n## Keys, and `codes`\n",
    }
    found = planted(tmp_path, files)
    assert found == ([f"docs/one.md:6: broken link {target}: {message}"] if message else [])


def test_the_command_refuses_a_tree_with_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.checks.__main__.ROOT", tmp_path)
    (tmp_path / "fine.py").write_text("fine = 1\n")
    assert check() == 0
    (tmp_path / "bad.py").write_text("purse = 1\n")
    assert check() == 1
    assert "bad.py:1: retired word 'purse'" in capsys.readouterr().out


def test_files_of_the_checkout_are_read() -> None:
    files = text_files(ROOT)
    assert {
        "README.md",
        "Makefile",
        ".ci/run",
        "gym_fed/core/registries.py",
        "docs/testing.md",
    } <= files.keys()
    assert not any("_generated" in file for file in files)


def test_classes_of_this_repository_are_counted_at_all() -> None:
    doubled = {"gym_fed/core/registries.py": text_files(ROOT)["gym_fed/core/registries.py"]}
    (name,) = re.findall(r"^class (\w+)", doubled["gym_fed/core/registries.py"], re.MULTILINE)[:1]
    assert list(repeated_classes({**doubled, "gym_fed/other.py": f"class {name}:\n"}))
