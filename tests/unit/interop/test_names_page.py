"""docs/names.md is made of the table in the code."""

from __future__ import annotations

from gym_fed.interop.words import rows
from tools.names import PAGE, page


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run tools/names.py"


def test_every_row_has_a_word_of_ours_or_two_lines_to_write_instead() -> None:
    known = list(rows())
    assert [row.theirs for row in known if not row.ours or len(row.instead) not in (0, 2)] == []
    assert len({(row.where, row.theirs) for row in known}) == len(known)
