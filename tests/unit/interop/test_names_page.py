"""`gym docs aliases` shows the table in the code."""

from __future__ import annotations

from gym_fed.cli.docs import aliases_page
from gym_fed.interop.words import rows


def test_the_page_has_every_row_of_the_table() -> None:
    shown = aliases_page().replace("\\|", "|")
    assert [row.theirs for row in rows() if f"| `{row.theirs}` | {row.ours}" not in shown] == []


def test_every_row_has_a_word_of_ours_or_two_lines_to_write_instead() -> None:
    known = list(rows())
    assert [row.theirs for row in known if not row.ours or len(row.instead) not in (0, 2)] == []
    assert len({(row.where, row.theirs) for row in known}) == len(known)
