"""What the ledger of a private round says of its updates: no second, no order, no name, no reason."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gym_server.privacy.merge
import pytest
from gym_client.ledger.receipts import check_receipt
from gym_client.ledger.rewards import Tally
from gym_server.federation import Federation
from gym_server.ledger.times import BUCKET, BUCKET_SECONDS
from gym_server.rounds.admission import Receipt, UpdateSubmission
from gym_server.store.tables import rounds, updates
from sqlalchemy import update

import tests.support.private_hub
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import SEALED, seal
from tests.support.private_hub import NAMES, PrivateRounds, private_hub

HOUR = 1_800_000_000 // BUCKET_SECONDS * BUCKET_SECONDS
KEYS = {name: SigningKey.generate() for name in NAMES}
SEED = b"\7" * 32


class Clock:
    """Time that a test sets; every look at it is a millisecond later."""

    def __init__(self) -> None:
        self.now = float(HOUR)

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "time", found)
    return found


@pytest.fixture
def folder(tmp_path: Path, tiny_base: Path) -> Path:
    return private_hub(tmp_path / "hub", tiny_base)


class Run:
    """One private round over a copy of a hub's folder; whatever is drawn is drawn alike."""

    def __init__(self, folder: Path, copy: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.receipts = clock, dict[str, Receipt]()
        self._patch = monkeypatch
        monkeypatch.setattr(tests.support.private_hub, "lifetime", lambda now: (HOUR, HOUR + 86_400))
        monkeypatch.setattr(gym_server.privacy.merge.os, "urandom", lambda count: SEED[:count])
        self.folder = folder.parent / copy
        shutil.copytree(folder, self.folder)
        self.fed = Federation.open(self.folder)
        self.fed.clock.wall = clock
        self.hub = PrivateRounds(self.fed)
        self.hub.keys = KEYS

    def whole(
        self,
        seconds: Sequence[float],
        names: Sequence[str] = NAMES,
        alter: Callable[[str, Path], None] = lambda name, path: None,
        deadline: float = 1800.0,
    ) -> list[dict[str, Any]]:
        """Updates at these seconds of the hour, the merge after them; the ledger's lines as they are published."""
        self.clock.now = float(HOUR)
        for key in self.hub.keys.values():
            self.fed.accounts.get_or_create(key.public_key)
        self.clock.now = HOUR + 300.0
        number = self.hub.collect(send=False)
        with self.fed.database.transaction() as tx:
            tx.execute(update(rounds).values(deadline=HOUR + deadline))
        for name, second in zip(names, seconds, strict=True):
            self.clock.now = HOUR + second
            nonce = f"{NAMES.index(name):032x}"
            self._patch.setattr(tests.support.private_hub, "new_nonce", lambda nonce=nonce: nonce)
            path = self.hub.delta(name, number)
            alter(name, path)
            self.receipts[name] = self.hub.send(name, number, path)
        self.hub.finish(number)
        heads = [json.loads(head.to_json()) for head in self.fed.ledger.heads()]
        entries = [
            {"kind": entry.kind, "hash": entry.hash, "body": entry.body}
            for entry in self.fed.ledger.entries()
            if entry.kind != "enrolled"
        ]
        assert self.fed.ledger.verify()["sealed verdicts"] == len(names)
        self.fed.close()
        return [*entries, *heads]


def without_seals(lines: list[dict[str, Any]]) -> list[Any]:
    """The entries' bodies, seals taken out."""
    bodies = [(line["kind"], dict(line["body"])) for line in lines if "kind" in line]
    for kind, body in bodies:
        if kind == SEALED:
            del body["seal"], body["record"]
    return bodies


@pytest.fixture
def run(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    return lambda copy: Run(folder, copy, clock, monkeypatch)


def test_the_ledgers_of_two_runs_that_differ_in_submission_times_alone_are_equal(
    run: Callable[[str], Run],
) -> None:
    early = run("early").whole([301, 302, 303])
    late = run("late").whole([777, 1500, 3300])
    assert [line["kind"] for line in early if "kind" in line].count(SEALED) == 3
    assert early == late


def test_the_order_in_which_updates_arrive_changes_nothing_but_sealed_digests(
    run: Callable[[str], Run],
) -> None:
    forth = run("forth").whole([400, 500, 600], NAMES)
    back = run("back").whole([400, 500, 600], NAMES[::-1])
    assert without_seals(forth) == without_seals(back)
    assert sorted(line["body"]["seal"] for line in forth if line.get("kind") == SEALED) == sorted(
        line["body"]["seal"] for line in back if line.get("kind") == SEALED
    )


def spoil(name: str, path: Path) -> None:
    if name == "cat":
        path.write_bytes(path.read_bytes()[:-1])


def poison(name: str, path: Path) -> None:
    if name == "cat":
        data = bytearray(path.read_bytes())
        data[-4:] = b"\x00\x00\xc0\x7f"  # NaN
        path.write_bytes(data)


def test_a_refusal_is_the_same_entry_whatever_is_in_the_delta_and_its_contributor_alone_learns_why(
    run: Callable[[str], Run], folder: Path
) -> None:
    lines, reasons = [], []
    for copy, alter in (("spoilt", spoil), ("poisoned", poison)):
        one = run(copy)
        lines.append(without_seals(one.whole([400, 500, 600], alter=alter)))
        receipt = one.receipts["cat"]
        assert (receipt.verdict, receipt.code) == ("refused", ErrorCode.DELTA_INVALID.value)
        reasons.append(receipt.reason)
        text = json.dumps(lines[-1])
        assert KEYS["cat"].contributor not in text
        assert "delta-invalid" not in text
    assert lines[0] == lines[1]
    assert reasons[0] != reasons[1]
    honest = without_seals(run("honest").whole([400, 500, 600]))
    at_the_door = [entry for entry in honest if entry[0] == SEALED]
    assert at_the_door == [entry for entry in lines[0] if entry[0] == SEALED]


def test_what_is_wrong_with_a_forged_submission_is_not_public_either(run: Callable[[str], Run]) -> None:
    """Nothing is sealed for it, since nobody who could open the seal sent it: the entry itself says one code."""
    fed = run("copy").fed
    number = PrivateRounds(fed).collect(send=False)
    said = set()
    for text in ("{}", "not JSON at all"):
        key = SigningKey.generate()
        forged = UpdateSubmission(key.contributor, key.public_key, "task", number, text, b"forged")
        with pytest.raises(GymError) as caught:
            fed.admission.judge(forged, lambda tx, receipt: None)
        said.add(caught.value.message)
    entries = [entry.body for entry in fed.ledger.entries() if entry.kind == "verdict"]
    assert len(said) == len(entries) == 2, "its sender is given the reason"
    assert {(body["verdict"], body["reason"]) for body in entries} == {("refused", "update-refused")}
    fed.close()


def test_entries_about_updates_say_hours_and_nothing_says_the_second(run: Callable[[str], Run]) -> None:
    """The last update comes hours after the others, within the deadline, and ends the round."""
    lines = run("copy").whole([401, 502, 4 * BUCKET_SECONDS + 3], deadline=5 * BUCKET_SECONDS + 1)
    admitted = [line["body"] for line in lines if line.get("kind") == SEALED]
    spans = {(body["at"], body[BUCKET]) for body in admitted}
    assert spans == {(HOUR, 6 * BUCKET_SECONDS)}, "from the hour of the opening to that of the deadline"
    ends = [line["body"] for line in lines if line.get("kind") in ("version", "verdict", "credit", "privacy")]
    assert {(body["at"], body[BUCKET]) for body in ends} == {(HOUR + 4 * BUCKET_SECONDS, BUCKET_SECONDS)}
    heads = {line["head"]["at"] for line in lines if "head" in line}
    assert max(heads) == HOUR + 4 * BUCKET_SECONDS
    assert not [at for at in heads if at % BUCKET_SECONDS and at > HOUR + 300]


def test_an_update_that_comes_after_the_deadline_says_its_own_hour(run: Callable[[str], Run]) -> None:
    lines = run("copy").whole([401, 502, 4 * BUCKET_SECONDS + 3], deadline=900)
    spans = [(line["body"]["at"], line["body"][BUCKET]) for line in lines if line.get("kind") == SEALED]
    late = (HOUR + 4 * BUCKET_SECONDS, BUCKET_SECONDS)
    assert spans == [(HOUR, BUCKET_SECONDS), (HOUR, BUCKET_SECONDS), late]


def test_a_receipt_opens_its_seal_for_its_holder_and_no_other_words_do(run: Callable[[str], Run]) -> None:
    one = run("copy")
    one.whole([400, 500, 600], alter=spoil)
    key = one.fed.key.public_key
    for name in NAMES:
        receipt = json.loads(one.receipts[name].to_json())
        assert check_receipt(receipt, key) is not None
        other = json.loads(one.receipts[NAMES[NAMES.index(name) - 1]].manifest)
        for changed in (
            {"verdict": "admitted" if receipt["verdict"] == "refused" else "refused"},
            {"reason": "another"},
            {"code": "stale"},
            {"update": "0" * 64},
            {"manifest": json.dumps(other)},
            {"manifest": ""},
        ):
            with pytest.raises(GymError) as refused:
                check_receipt({**receipt, **changed}, key)
            assert refused.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_verdict_at_the_door_that_the_hub_reports_is_held_against_its_seal(
    run: Callable[[str], Run],
) -> None:
    one = run("copy")
    one.whole([400, 500, 600], alter=spoil)
    tally = Tally(KEYS["cat"].contributor)
    with Federation.open(one.folder) as fed:
        for entry in fed.ledger.entries():
            tally(entry, entry.body)
    receipt = one.receipts["cat"]
    reported = {
        "update": receipt.update,
        "server_round": 1,
        "verdict": "refused",
        "reason": receipt.reason,
        "code": receipt.code,
        "manifest": receipt.manifest,
    }
    assert tally.contradictions(tally.balance, [reported]) == []
    assert tally.contradictions(tally.balance, [{**reported, "verdict": "admitted"}])
    assert tally.contradictions(tally.balance, [{**reported, "reason": "too late"}])


@pytest.mark.parametrize("column", ["manifest", "code", "reason", "verdict", "server_round"])
def test_a_changed_row_of_a_sealed_refusal_is_found(run: Callable[[str], Run], column: str) -> None:
    one = run("copy")
    one.whole([400, 500, 600], alter=spoil)
    changed: dict[str, Any] = {column: 2 if column == "server_round" else "admitted"}
    with Federation.open(one.folder) as fed:
        with fed.database.transaction() as tx:
            tx.execute(update(updates).where(updates.c.verdict == "refused").values(changed))
        with pytest.raises(GymError) as found:
            fed.ledger.verify()
    assert found.value.code is ErrorCode.STATE_CORRUPT


def test_an_end_of_a_round_that_is_not_within_its_hour_is_found(run: Callable[[str], Run]) -> None:
    one = run("copy")
    one.whole([400, 500, 600])
    with Federation.open(one.folder) as fed:
        with fed.database.transaction() as tx:
            tx.execute(update(rounds).values(closed_at=HOUR - 7200.0))
        with pytest.raises(GymError, match="ended at a different time"):
            fed.ledger.verify()


def test_a_seal_is_over_every_word_of_the_verdict() -> None:
    words = ["{}", "refused", "stale", "too late"]
    changed = [seal(*(word + "x" if i == j else word for j, word in enumerate(words))) for i in range(4)]
    assert len({seal(*words), *changed}) == 5
