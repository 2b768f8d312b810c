"""Rows in Arrow: they are read back as they were, by index, in order and in selections, from memory or a file."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import arrow_rows
from gym_fed.data.arrow_rows import ArrowRows, SelectedRows, collect_rows, write_rows
from gym_fed.data.rows import PlacedDict

CALLS = [
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"x": 1}]}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"t": 2}]}]},
]
OTHERS: list[dict[str, Any]] = [
    {"text": "é\0 😀"},
    {"images": [{"bytes": b"\x00\xff", "path": None}, "a.png"], "text": "<image><image>"},
    {"prompt": "p", "when": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)},
    {"prompt": "p", "day": datetime.date(2026, 1, 2), "hour": datetime.time(3, 4)},
    {"prompt": "p", "cost": Decimal("1.10"), "took": datetime.timedelta(days=1, microseconds=3)},
]


def in_file(rows: list[dict[str, Any]], file: Path) -> ArrowRows:
    with file.open("wb") as sink:
        assert sum(write_rows(rows, sink)) == len(rows)
    return ArrowRows(file)


def test_rows_are_read_back_as_they_were_with_their_places(tmp_path: Path) -> None:
    placed = PlacedDict.of({"text": "a"}, "f.jsonl:3", ["unread"], {"text": "body"})
    rows = [*CALLS, *OTHERS, placed]
    for stored in (collect_rows(rows), in_file(rows, tmp_path / "rows.arrow")):
        assert list(stored) == stored[:] == [stored[i] for i in range(len(rows))] == rows
        last: Any = stored[-1]
        assert (last.place, last.unread, dict(last.columns)) == ("f.jsonl:3", ("unread",), {"text": "body"})
        assert type(stored[0]) is dict


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text(), VALUES, min_size=1, max_size=3), max_size=4))
def test_any_json_and_bytes_come_back(rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if "\0arrow" not in repr(row) and not _has_surrogate(row)]
    assert list(collect_rows(rows)) == rows


def _has_surrogate(value: Any) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in str(value))


def test_more_than_fits_in_memory_goes_to_a_file_and_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{number} " * 50} for number in range(2500)]
    small = collect_rows(rows)
    monkeypatch.setattr(arrow_rows, "MAX_MEMORY_BYTES", 1000)
    spilled = collect_rows(rows)
    assert list(spilled) == rows
    assert spilled[2100] == rows[2100]
    assert spilled.digest == small.digest


@pytest.mark.parametrize("value", [{"\0arrow": ["bytes", 0]}, object(), {1, 2}])
def test_a_row_that_would_not_come_back_is_refused_with_its_place(value: Any) -> None:
    row = PlacedDict.of({"text": "a", "more": value, "blob": b"x"}, "rows.jsonl:7")
    with pytest.raises(GymError, match=r"rows\.jsonl:7 cannot be stored") as caught:
        collect_rows([row])
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_a_text_that_looks_like_a_stored_value_stays_a_text() -> None:
    rows = [{"text": '{"\0arrow":["bytes",0]}', "blob": b"x"}, {"text": '"\\u0000arrow":'}]
    assert list(collect_rows(rows)) == rows


def test_selections_repeat_order_and_mark_rows(tmp_path: Path) -> None:
    store = in_file([{"text": letter} for letter in "abcd"], tmp_path / "rows.arrow")
    chosen = SelectedRows(
        [(store, np.arange(4), False), (store, np.array([2, 0]), False), (store, np.array([1]), True)]
    )
    assert "".join(row["text"] for row in chosen) == "abcdcab"
    assert [chosen[i] for i in range(len(chosen))] == list(chosen) == chosen[:]
    assert chosen[-1] == {"text": "b", "forget": True}
    contents = chosen.content_digests().tolist()
    assert contents[2] == contents[4]
    assert contents[1] != contents[6]  # one of them is to be forgotten
    held = chosen.take(np.array([0, 3, 4, 6]))
    assert list(held) == [chosen[i] for i in (0, 3, 4, 6)]
    assert held.digest != chosen.digest


def test_the_digest_depends_on_rows_and_order() -> None:
    one, other = {"text": "a", "n": 1}, {"text": "b", "n": 1}
    assert collect_rows([one, other]).digest == collect_rows([one, dict(reversed(other.items()))]).digest
    assert collect_rows([one, other]).digest != collect_rows([other, one]).digest
    assert collect_rows([{"blob": b"a"}]).digest != collect_rows([{"blob": b"b"}]).digest
