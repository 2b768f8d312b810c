"""What a hub sends as JSON: any text is either what it should be, or a GymError."""

from __future__ import annotations

import json

import pytest
from gym_client.hub.replies import parse_account, parse_object, parse_receipt, parse_verdicts
from gym_client.privacy.terms import Promises, SecureTerms

from gym_fed.core.errors import ErrorCode, GymError

VERDICT = {
    "update": "ab" * 32,
    "server_round": 1,
    "verdict": "merged",
    "reason": "",
    "bytes": 10,
    "credit": 3,
    "entries": [4],
}
HOSTILE = ["", "null", "[]", "7", '"x"', "{", "[" * 100_000, '{"a":' * 50_000, "9" * 6_000, "\ud800"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(GymError) as caught:
        parse_object(text, "a receipt")
    assert caught.value.code is ErrorCode.INTERNAL
    assert "the hub sent a receipt that" in caught.value.message


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-9223372036854775808", "NaN", "-Infinity", "1e999"])
def test_no_document_has_a_number_that_cannot_be_displayed(number: str) -> None:
    for text in (f'{{"a": [{{"b": {number}}}]}}', f'{{"central": {{"epsilon": {number}}}}}'):
        with pytest.raises(GymError, match="finite numbers"):
            parse_object(text, "a recipe")
        with pytest.raises(GymError, match="finite numbers"):
            Promises.parse(text)


@pytest.mark.parametrize("key", [key for key in VERDICT if key != "entries"])
@pytest.mark.parametrize("value", [None, [], {"a": 1}, True])
def test_a_verdict_without_a_field_or_with_another_type_is_refused(key: str, value: object) -> None:
    for odd in ({**VERDICT, key: value}, {k: v for k, v in VERDICT.items() if k != key}):
        with pytest.raises(GymError, match=repr(key)):
            parse_verdicts([json.dumps(odd)])


@pytest.mark.parametrize("entries", ["x", [1.5], [True], {"1": 1}])
def test_entries_of_a_verdict_that_are_no_numbers_are_refused(entries: object) -> None:
    with pytest.raises(GymError, match="entries"):
        parse_verdicts([json.dumps({**VERDICT, "entries": entries})])


def test_a_verdict_is_read_as_it_was_sent() -> None:
    assert parse_verdicts([json.dumps(VERDICT)]) == [VERDICT]


def test_a_receipt_keeps_none_of_the_fields_that_the_home_adds_itself() -> None:
    receipt = {"verdict": "received", "reason": "r"}
    added = {
        "restored": {},
        "commitment": {},
        "server": "x",
        "held": True,
        "entry": 1,
        "event": "x",
        "text": "y",
    }
    assert parse_receipt(json.dumps({**receipt, **added})) == receipt


@pytest.mark.parametrize("odd", [{"proof": 5}, {"update": 7}, {"reason": []}, {"verdict": None}])
def test_a_receipt_with_a_field_of_another_type_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(GymError, match=repr(next(iter(odd)))):
        parse_receipt(json.dumps({"verdict": "received", **odd}))


ROUND = {
    "server_round": 1,
    "update": "ab" * 32,
    "verdict": "merged",
    "credit": 5,
    "score": None,
    "error": 0.1,
}


@pytest.mark.parametrize(
    "odd",
    [
        {"rounds": 5},
        {"rounds": [5]},
        {"rounds": [{**ROUND, "score": "high"}]},
        {"rounds": [{**ROUND, "score": float("nan")}]},
        {"rounds": [{**ROUND, "credit": 10**400}]},
        {"reputation": "good"},
        {"privacy": {"epsilon": "much", "rounds": 1, "target_delta": 1e-5}},
        {"privacy": {"epsilon": 1.0, "rounds": 1}},
        {"owed": 10**400},
        {"privacy": [1]},
    ],
    ids=range(10),
)
def test_an_account_with_a_field_of_another_type_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(GymError, match="an account"):
        parse_account(json.dumps(odd))


def test_an_account_is_read_as_it_was_sent() -> None:
    account = {"balance": 7, "reputation": 0.5, "is_new": False, "rounds": [ROUND]}
    assert parse_account(json.dumps({**account, "server": "x", "num_receipts": "y"})) == account
    assert parse_account("") == {}


@pytest.mark.parametrize("parse", [Promises.parse, SecureTerms.parse])
@pytest.mark.parametrize("text", ["[" * 100_000, "7", "{"])
def test_a_promise_that_cannot_be_read_is_refused_before_joining(parse: object, text: str) -> None:
    with pytest.raises(GymError) as caught:
        parse(text)  # type: ignore[operator]
    assert caught.value.code is ErrorCode.POLICY_REFUSED
