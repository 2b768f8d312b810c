"""Refusals of a config as rows of a table."""

from __future__ import annotations

import pytest

from gym_fed.core.errors import ErrorCode, GymError, refuse_first


def test_rows_that_do_not_apply_refuse_nothing() -> None:
    refuse_first((False, "a: is wrong", "remove it"), (None, "b: is wrong", "remove it"))


def test_the_first_row_that_applies_gives_the_error_and_no_other_remedy_is_written() -> None:
    written: list[str] = []

    def remedy(name: str) -> str:
        written.append(name)
        return f"remove {name}"

    with pytest.raises(GymError) as caught:
        refuse_first(
            (False, "a: is wrong", lambda: remedy("a")),
            ([1], "b: is wrong", lambda: remedy("b")),
            (True, "c: is wrong", lambda: remedy("c")),
        )
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert (caught.value.message, caught.value.hint) == ("b: is wrong", "remove b")
    assert written == ["b"]
