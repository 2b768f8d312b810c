"""Seeds of evaluations in a ledger: what was promised before a round is what is revealed after it."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.evaluations import EvaluationCheck, commitment, drawn_rows, rows_digest

SEED = bytes(range(32))
FEW_ROWS = {"total_rows": 3, "rows_sha256": rows_digest(drawn_rows(SEED, "a", 3, 1))}
MANY_ROWS = {"total_rows": 1_000_000, "rows_sha256": "ab"}


def revealed(**changes: Any) -> dict[str, Any]:
    task = {"total_rows": 300, "rows_sha256": rows_digest(drawn_rows(SEED, "sums", 300, 64))}
    body = {"server_round": 3, "seed": SEED.hex(), "suites": [{"limit": 64, "tasks": {"sums": task}}]}
    return {**body, **changes}


def promised(**changes: Any) -> dict[str, Any]:
    return {"server_round": 3, "commitment": commitment(SEED, 3), "state": "open", **changes}


def check(*entries: tuple[str, dict[str, Any]]) -> list[int]:
    """The rounds whose seed came late."""
    checked, last = EvaluationCheck(), None
    for kind, body in entries:
        entry = Entry.following(last, kind, body)
        checked.add(entry, body)
        last = (entry.sequence, entry.hash)
    return checked.late


def test_a_seed_draws_as_many_distinct_rows_as_asked_and_others_for_each_task_and_seed() -> None:
    rows = drawn_rows(SEED, "sums", 300, 64)
    assert rows == sorted(set(rows))
    assert (len(rows), rows[0] >= 0, rows[-1] < 300) == (64, True, True)
    assert rows != drawn_rows(SEED, "words", 300, 64)
    assert rows != drawn_rows(os.urandom(32), "sums", 300, 64)
    assert drawn_rows(SEED, "sums", 5, 64) == [0, 1, 2, 3, 4]


def test_rows_of_a_seed_are_the_same_in_every_release() -> None:
    assert drawn_rows(SEED, "sums", 20, 5) == [8, 9, 10, 12, 18]


def test_promise_and_rows_are_those_of_the_page_without_our_code() -> None:
    def digest(value: Any) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    promise = {"gym-evaluation-seed-1": {"seed": SEED.hex(), "server_round": 3}}
    assert commitment(SEED, 3) == digest(promise)
    places = {
        hashlib.sha256(SEED + b"s\xc3\xbcms" + number.to_bytes(8, "big")).digest(): number
        for number in range(300)
    }
    rows = sorted(places[place] for place in sorted(places)[:64])
    assert drawn_rows(SEED, "s\u00fcms", 300, 64) == rows
    assert rows_digest(rows) == digest(rows)


def test_a_promise_that_is_kept_is_valid() -> None:
    check(("evaluation-seed", promised()), ("verdict", {"server_round": 3}), ("evaluated", revealed()))


def test_an_evaluation_without_a_seed_of_a_round_needs_no_promise() -> None:
    check(("evaluated", {"height": 2, "suites": []}))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([("evaluated", revealed())], "no earlier entry commits to the seed of round 3"),
        (
            [("evaluation-seed", promised()), ("evaluated", revealed(seed=bytes(32).hex()))],
            "does not match the commitment of round 3",
        ),
        (
            [("evaluation-seed", promised(commitment=commitment(SEED, 4))), ("evaluated", revealed())],
            "does not match the commitment of round 3",
        ),
        (
            [("verdict", {"server_round": 3}), ("evaluation-seed", promised())],
            "round 3 had already begun",
        ),
        ([("evaluation-seed", promised()), ("evaluation-seed", promised())], "already has a commitment"),
        (
            [
                ("evaluation-seed", promised()),
                (
                    "evaluated",
                    revealed(
                        suites=[{"limit": 64, "tasks": {"sums": {"total_rows": 300, "rows_sha256": "ab"}}}]
                    ),
                ),
            ],
            "the rows do not match the seed",
        ),
        (
            [
                ("evaluation-seed", promised()),
                ("evaluated", revealed(suites=[{"limit": 1, "tasks": {"a": FEW_ROWS, "b": MANY_ROWS}}])),
            ],
            "task b has 1,000,000 rows; one evaluation has at most 1000000",
        ),
        (
            [("evaluation-seed", promised()), ("evaluated", revealed()), ("evaluated", revealed())],
            "the seed of round 3 was already revealed",
        ),
        (
            [("evaluation-seed", promised()), ("evaluated", revealed(suites=[{"tasks": {"sums": {}}}]))],
            "not a valid evaluation record",
        ),
    ],
)
def test_a_promise_that_is_not_kept_is_found(entries: list[tuple[str, dict[str, Any]]], problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        check(*entries)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


@pytest.mark.parametrize("state", ["collecting", "merging"])
def test_a_promise_in_the_middle_of_a_round_is_a_finding_unless_the_round_before_had_none(state: str) -> None:
    late = [
        ("verdict", {"server_round": 3}),
        ("evaluation-seed", promised(state=state)),
        ("evaluated", revealed()),
    ]
    assert check(*late) == []
    before = ("evaluation-seed", promised(server_round=2))
    assert check(before, *late) == [3]
