"""Refusals of a config as rows of a table."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from gym_fed.core.errors import ErrorCode, GymError, refuse_first, refuse_set


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


def test_a_table_adds_its_prefix_suffix_and_remedy_to_a_row_without_a_remedy() -> None:
    with pytest.raises(GymError) as caught:
        refuse_first(
            (False, "is low"), (True, "is high"), prefix="a: ", suffix=", and b is set", remedy="set it"
        )
    assert (caught.value.message, caught.value.hint) == ("a: is high, and b is set", "set it")


def test_a_key_is_refused_when_it_is_neither_none_nor_its_default() -> None:
    class Config(BaseModel):
        rate: float = 0.5
        path: str | None = None

    refuse_set(Config(rate=0.5), ("rate", "path"), "is not read")
    with pytest.raises(GymError, match=r"^path: is not read") as caught:
        refuse_set(Config(path="a"), ("rate", "path"), "is not read", "leave it out")
    assert caught.value.hint == "leave it out"
