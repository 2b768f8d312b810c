"""Audits in the ledger: the odds, the draw, and draws and verdicts that a hub or an auditor made up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.ledger.audits import (
    DRAW_KIND,
    AuditCheck,
    AuditVerdict,
    SignedVerdict,
    chance_of_catching,
    draw,
    drawn_steps,
    step_leaf,
    training_root,
)
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.evaluations import commitment
from gym_fed.trust.ledger.merkle import Tree, verify_inclusion

SEED, UPDATES = bytes(range(32)), [f"{number:064x}" for number in range(400)]
KEY = SigningKey.generate()
TERMS = {"rate": 0.5, "steps": 2}


def test_the_odds_are_those_of_drawing_every_pair_of_steps() -> None:
    for num_false in range(7):
        pairs = list(itertools.combinations(range(6), 2))
        caught = sum(any(step < num_false for step in pair) for pair in pairs)
        assert chance_of_catching(6, num_false, 2) == pytest.approx(caught / len(pairs))
    assert chance_of_catching(40, 1, 2) == pytest.approx(0.05)
    assert chance_of_catching(40, 40, 1) == 1.0
    with pytest.raises(ValueError, match="7 false"):
        chance_of_catching(6, 7, 2)


def test_the_draw_takes_the_stated_share_of_updates_and_distinct_steps() -> None:
    drawn = draw(SEED, UPDATES, 40, 0.25, 3)
    assert 70 <= len(drawn) <= 130
    assert all(len(set(steps)) == 3 and steps == sorted(steps) for steps in drawn.values())
    assert {step for steps in drawn.values() for step in steps} == set(range(1, 41))
    assert draw(SEED, UPDATES, 40, 1.0, 3).keys() == set(UPDATES)
    assert drawn_steps(SEED, UPDATES[0], 2, 1.0, 5) == [1, 2]


def test_the_draw_depends_on_seed_and_update() -> None:
    first = drawn_steps(SEED, UPDATES[0], 1000, 1.0, 4)
    assert first == drawn_steps(SEED, UPDATES[0], 1000, 1.0, 4)
    assert first != drawn_steps(SEED, UPDATES[1], 1000, 1.0, 4)
    assert first != drawn_steps(bytes(32), UPDATES[0], 1000, 1.0, 4)


def test_a_leaf_is_proved_and_bound_to_its_step() -> None:
    leaves = [step_leaf(step, "ab" * 32, "cd" * 32) for step in range(5)]
    path = Tree(leaves).inclusion(3, 5)
    assert verify_inclusion(leaves[3], 3, 5, path, training_root(leaves))
    assert not verify_inclusion(step_leaf(2, "ab" * 32, "cd" * 32), 3, 5, path, training_root(leaves))


def draw_body(**changes: Any) -> dict[str, Any]:
    updates = UPDATES[:20]
    body = {
        "server_round": 1,
        "seed": SEED.hex(),
        "num_steps": 10,
        "terms": TERMS,
        "updates": updates,
        "drawn": draw(SEED, updates, 10, 0.5, 2),
    }
    return {**body, **changes}


def verdict_body(update: str, key: SigningKey = KEY, **changes: Any) -> dict[str, Any]:
    steps = draw_body()["drawn"][update]
    fields: dict[str, Any] = {
        "auditor": KEY.contributor,
        "server": server_id(KEY.public_key),
        "server_round": 1,
        "update": update,
        "outcome": "passed",
        "distances": {str(step): 0.0 for step in steps},
        "tolerance": 1e-3,
        "issued_at_seconds": 0,
    }
    signed = SignedVerdict.of(AuditVerdict(**{**fields, **changes}), key)
    return {"update": update, "contributor": "c" + "0" * 32, "signed": signed.model_dump(mode="json")}


def check(
    *entries: tuple[str, dict[str, Any]], promised: bytes = SEED, merged: list[str] = UPDATES[:20]
) -> None:
    history = History()
    history.add("enrolled", {"contributor": KEY.contributor, "public_key": KEY.public_key.hex(), "at": 0})
    audits = AuditCheck({1: commitment(promised, 1)}, history)
    version = ("version", {"server_round": 1, "updates": merged})
    for number, (kind, body) in enumerate((version, *entries), 1):
        audits.add(Entry(number, kind, "", "", ""), body)


DRAWN = next(iter(draw_body()["drawn"]))


def test_a_draw_with_its_verdict_is_accepted() -> None:
    check((DRAW_KIND, draw_body()), ("audited", verdict_body(DRAWN)))
    failed = verdict_body(DRAWN, outcome="failed", reason="step 3", distances={"3": 0.5})
    check((DRAW_KIND, draw_body()), ("audit-failed", failed))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (draw_body(seed=bytes(32).hex()), "does not match the commitment of round 1"),
        (draw_body(drawn={}), "are not those of the seed"),
        (draw_body(drawn={**draw_body()["drawn"], DRAWN: [1, 2, 3]}), "are not those of the seed"),
        (draw_body(updates=UPDATES[1:20]), "its updates are not those of round 1"),
        (draw_body(num_steps=10**9), "it draws from more than"),
        (draw_body(terms=None), "it is not a valid audit record"),
    ],
)
def test_a_draw_that_is_not_the_promised_seeds_is_found(body: dict[str, Any], message: str) -> None:
    with pytest.raises(GymError, match=message) as caught:
        check((DRAW_KIND, body))
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_an_update_whose_id_is_a_path_is_found_before_a_file_is_named_after_it() -> None:
    updates = ["../../../tmp/x"]
    body = draw_body(updates=updates, drawn=draw(SEED, updates, 10, 1.0, 2))
    with pytest.raises(GymError, match="an update's id is not a digest"):
        check((DRAW_KIND, body), merged=updates)


def test_a_second_draw_of_a_round_is_found() -> None:
    with pytest.raises(GymError, match="were drawn before"):
        check((DRAW_KIND, draw_body()), (DRAW_KIND, draw_body()))


def test_verdicts_that_nobody_signed_or_that_cover_too_little_are_found() -> None:
    good = verdict_body(DRAWN)
    undrawn = next(update for update in UPDATES[:20] if update not in draw_body()["drawn"])
    cases = [
        (("audit-failed", good), "is about something else"),
        (("audited", {**good, "update": UPDATES[-1]}), "is about something else"),
        (("audited", verdict_body(DRAWN, SigningKey.generate())), "not signed by the auditor's key"),
        (("audited", verdict_body(DRAWN, server_round=2)), "was not drawn in that round"),
        (("audited", verdict_body(DRAWN, distances={})), "passed without all drawn steps"),
    ]
    assert undrawn
    for entry, message in cases:
        with pytest.raises(GymError, match=message):
            check((DRAW_KIND, draw_body()), entry)
    with pytest.raises(GymError, match="was audited before"):
        check((DRAW_KIND, draw_body()), ("audited", good), ("audited", good))
    tampered = verdict_body(DRAWN)
    tampered["signed"]["verdict"]["issued_at_seconds"] = 1
    with pytest.raises(GymError, match="not signed by the auditor"):
        check((DRAW_KIND, draw_body()), ("audited", tampered))


def test_a_verdict_that_contradicts_itself_cannot_be_signed() -> None:
    with pytest.raises(ValueError, match="reason"):
        verdict_body(DRAWN, outcome="failed")
    with pytest.raises(ValueError, match="should match pattern"):
        verdict_body(DRAWN, distances={"../1": 0.0})
    with pytest.raises(ValueError, match="above the tolerance"):
        verdict_body(DRAWN, distances={"1": 0.5})


def test_a_file_that_is_no_verdict_is_refused_by_name() -> None:
    for text, message in (
        ("{}", "verdict.json is not a verdict"),
        ("[" * 5000, "verdict.json is not a verdict"),
        (" " * 40_000, "verdict.json is larger"),
    ):
        with pytest.raises(GymError, match=message) as caught:
            SignedVerdict.parse(text, "verdict.json")
        assert caught.value.code is ErrorCode.AUDIT_INVALID
