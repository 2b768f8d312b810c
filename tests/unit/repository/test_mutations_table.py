"""The table of known faults keeps up with the code: every text is where the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import mutations

TABLE = mutations.load()


def test_every_fault_of_the_table_can_be_planted() -> None:
    assert mutations.misplaced(TABLE) == []


def test_every_fault_leaves_code_that_python_reads() -> None:
    for one in TABLE:
        text = (mutations.ROOT / one.file).read_text()
        if one.file.endswith(".py"):
            compile(text.replace(one.before, one.after), one.file, "exec")


def test_a_fault_whose_text_is_gone_or_whose_tests_are_is_named(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    lost = mutations.Mutation("lost", "code.py", "c = 1", "", ("tests/test_x.py",))
    twice = mutations.Mutation("twice", "code.py", " = 1", "", ("-k", "x"))
    assert mutations.misplaced([lost, twice], tmp_path) == [
        "lost: the text is 0 times in code.py",
        "lost: no tests/test_x.py",
        "twice: the text is 2 times in code.py",
    ]


@pytest.mark.parametrize(("after", "tests"), [("a", '["t"]'), ("b", "[]")])
def test_an_entry_that_changes_or_runs_nothing_is_refused(tmp_path: Path, after: str, tests: str) -> None:
    table = tmp_path / "mutations.toml"
    table.write_text(
        f'[[mutation]]\nname = "x"\nfile = "f"\nbefore = "a"\nafter = "{after}"\ntests = {tests}\n'
    )
    with pytest.raises(ValueError, match="entries without a change or tests: x"):
        mutations.load(table)
