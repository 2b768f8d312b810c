"""All calls of a hub, in any order, right and wrong: credits are conserved, and a refused call changes nothing.

The hub is real, with gRPC over TLS and SQLite. ``GYM_HUB_CALLS_EXAMPLES`` sets the number of sequences (12 by default).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gym_server.ledger.checks import verify_database
from gym_server.store.tables import credits, metadata, rounds, transfers
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import func, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.statements import Revocation, Rotation, TransferOrder
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, update_records
from tests.support.loopback_hub import (
    LoopbackHub,
    forged,
    manifest_of,
    some_delta,
    task_of_open_round,
    update_of,
)

EXAMPLES = int(os.environ.get("GYM_HUB_CALLS_EXAMPLES", "12"))
LIMITS = {
    "calls_per_second": 1e6,
    "calls_per_second_of_account": 1e6,
    "calls_per_account": 10_000,
    "calls_per_address": 10_000,
    "enrolments_per_minute": 1e6,
    "enrolment_work_bits": 0,
    "unreferenced_bytes_per_account": 1 << 20,
}
MAX_ACCOUNTS = 4
RECORDED = {"ledger", "ledger_heads", "ledger_signatures", "ledger_subjects", "updates", "messages"}
"""Changed by the refusal of an update, which is recorded, and by nothing else that is refused."""
DEFECTS = {ErrorCode.INTERNAL, ErrorCode.STATE_CORRUPT, ErrorCode.LEDGER_FORKED}
WHO = st.integers(0, MAX_ACCOUNTS - 1)


class HubCalls(RuleBasedStateMachine):
    """Up to four accounts at one hub; ``earned`` is the model of all credits together."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="gym-hub-calls-"))
        self.hub = LoopbackHub(self.folder / "hub", limits=LIMITS, rewards={"hold_seconds": 0})
        self.people: list[RawContributor] = []
        self.accounts: list[str] = []
        self.earned = 0
        self.rounds = 0
        self.delta = some_delta(self.folder)

    def teardown(self) -> None:
        self.ledger_is_valid()
        for one in self.people:
            one.close()
        self.hub.close()
        shutil.rmtree(self.folder)

    @initialize()
    def begin_with_two(self) -> None:
        self.enrol()
        self.enrol()

    # ---- accounts and keys

    @precondition(lambda self: len(self.people) < MAX_ACCOUNTS)
    @rule()
    def enrol(self) -> None:
        one = RawContributor(self.hub.address, f"p{len(self.people)}").enrol()
        self.people.append(one)
        self.accounts.append(one.key.contributor)

    @rule(who=WHO, signed=st.booleans())
    def rotate(self, who: int, signed: bool) -> None:
        one, account = self.person(who)
        new = SigningKey.generate()
        said = Rotation(rotate=account, new_key=new.public_key.hex(), **self.stamp(one))
        request = pb.RotateKeyRequest(
            new_public_key=new.public_key,
            statement_json=said.to_json(),
            signature=said.sign(one.key),
            new_signature=said.sign(new if signed else one.key),
        )
        if self.code(one, "RotateKey", request, expect_refusal=not signed) is None:
            one.key = new
            assert (
                refusal(lambda: one.call(one.stub.Account, pb.AccountRequest())) is ErrorCode.UNAUTHENTICATED
            )
            one.log_in(account)

    @rule(who=WHO, other=WHO)
    def revoke_the_key_of_another(self, who: int, other: int) -> None:
        one, _ = self.person(who)
        victim, account = self.person(other)
        if victim is one:
            return
        said = Revocation(revoke=account, key=one.key.public_key.hex(), **self.stamp(one))
        request = pb.RevokeKeyRequest(
            contributor=account,
            signing_key=one.key.public_key,
            statement_json=said.to_json(),
            signature=said.sign(one.key),
        )
        self.code(one, "RevokeKey", request, expect_refusal=True)

    @rule(who=WHO)
    def leave_and_come_back(self, who: int) -> None:
        one, _ = self.person(who)
        if self.code(one, "Leave", pb.LeaveRequest()) is None:
            refused = refusal(one.enrol)
            assert refused in (None, ErrorCode.BUSY)  # too often within an hour
            if refused:
                one.session = ""

    # ---- credits

    @rule(who=WHO, amount=st.integers(1, 1000))
    def earn(self, who: int, amount: int) -> None:
        _, account = self.person(who)
        fed = self.hub.fed
        self.rounds += 1
        with fed.database.transaction() as tx:
            row = {
                "server_round": self.rounds,
                "state": "merging",
                "base_height": 0,
                "opened_at": fed.clock.now(),
            }
            tx.execute(rounds.insert().values(**row, closed_at=fed.clock.now(), reason=""))
            paid = {"server_round": self.rounds, "contributor": account, "amount": amount}
            tx.execute(credits.insert().values(**paid))
            fed.ledger.append(tx, "credit", paid)
        self.earned += amount

    @rule(
        who=WHO,
        to=st.one_of(WHO, st.sampled_from(["c" + "0" * 32, "", "\x00"])),
        amount=st.one_of(st.integers(-5, 1500), st.sampled_from([2**53, 2**63 - 1, 2**63, -(2**63)])),
        fault=st.sampled_from([None, None, None, "signature", "server", "sender", "time"]),
    )
    def transfer(self, who: int, to: int | str, amount: int, fault: str | None) -> None:
        one, account = self.person(who)
        stamp = self.stamp(one)
        if fault == "server":
            stamp["server"] = "s" + "0" * 16
        if fault == "time":
            stamp["issued_at"] -= 10**6
        order = TransferOrder(
            sender=self.accounts[(who + 1) % len(self.accounts)] if fault == "sender" else account,
            to=to if isinstance(to, str) else self.person(to)[1],
            amount=amount,
            **stamp,
        )
        signature = bytes(64) if fault == "signature" else order.sign(one.key)
        request = pb.TransferRequest(statement_json=order.to_json(), signature=signature)
        found = self.code(one, "Transfer", request, expect_refusal=fault is not None or amount <= 0)
        if found is None:  # the same order again is no second transfer
            before = self.rows()
            self.code(one, "Transfer", request)
            assert self.rows() == before

    # ---- objects, tasks and updates

    @rule(
        who=WHO, size=st.sampled_from([0, 1, 100, 600_000]), fault=st.sampled_from([None, "hash", "longer"])
    )
    def upload(self, who: int, size: int, fault: str | None) -> None:
        one, _ = self.person(who)
        declared = max(0, size - 1) if fault == "longer" else None
        sha256 = "0" * 64 if fault == "hash" else None
        assert refusal(lambda: one.upload(bytes(size), declared, sha256)) not in DEFECTS

    @rule(who=WHO, fault=st.sampled_from([None, None, "signature", "contributor", "base", "delta", "replay"]))
    def answer_a_task(self, who: int, fault: str | None) -> None:
        one, account = self.person(who)
        if not one.session:
            return
        self.rounds += 1
        with self.hub.fed.database.transaction() as tx:
            assert (tx.scalar(select(func.max(rounds.c.server_round))) or 0) < self.rounds
        task = task_of_open_round(self.hub, one.session, self.rounds)
        delta = self.delta.read_bytes()
        author = self.person(who + 1)[1] if fault == "contributor" else account
        changes = {"base": {"base_digest": "sha256:" + "1" * 64}, "delta": {"delta_sha256": "2" * 64}}
        manifest = update_of(self.hub, author, task, delta, self.rounds, **changes.get(fault or "", {}))
        assert refusal(lambda: one.upload(delta)) in (None, ErrorCode.QUOTA_EXCEEDED)
        signature = bytes(64) if fault == "signature" else manifest.sign(one.key)
        request = pb.SubmitRequest(
            message_id=task, content=update_records(manifest, signature, one.key.public_key)
        )
        self.code(one, "Submit", request, may_change=RECORDED)
        if fault == "replay":
            before = self.rows()
            self.code(one, "Submit", request, may_change=RECORDED)
            assert self.rows() == before

    @rule(who=WHO, message=st.sampled_from(["", "1", "../x", "f" * 64]))
    def calls_about_unknown_tasks(self, who: int, message: str) -> None:
        one, _ = self.person(who)
        self.code(one, "Heartbeat", pb.HeartbeatRequest(message_id=message), expect_refusal=True)
        self.code(one, "Submit", pb.SubmitRequest(message_id=message), expect_refusal=True)

    # ---- variants

    @rule(
        who=WHO,
        name=st.sampled_from(["mine", "other", "../x", ""]),
        fault=st.sampled_from([None, "signature"]),
    )
    def put_variant(self, who: int, name: str, fault: str | None) -> None:
        one, account = self.person(who)
        try:
            manifest = manifest_of(self.delta, name, owner=account, issued_at=int(time.time()))
        except ValueError:
            return
        with suppress(GymError):  # a quota; the call below is then refused
            one.upload(self.delta.read_bytes())
        signed = SignedVariant.sign(manifest, one.key)
        request = pb.PutVariantRequest(variant_json=(forged(signed) if fault else signed).to_json())
        self.code(one, "PutVariant", request, expect_refusal=fault is not None)

    @rule(who=WHO, owner=WHO, name=st.sampled_from(["mine", "other", "\x00"]))
    def read_variants(self, who: int, owner: int, name: str) -> None:
        one, account = self.person(who)
        _, whose = self.person(owner)
        found = self.code(one, "GetVariant", pb.GetVariantRequest(owner=whose, name=name))
        assert account == whose or found is not None, "another account's variant was readable"
        self.code(one, "ListVariants", pb.ListVariantsRequest())

    @rule(who=WHO, name=st.sampled_from(["mine", "other", "\x00"]))
    def delete_variant(self, who: int, name: str) -> None:
        one, _ = self.person(who)
        self.code(one, "DeleteVariant", pb.DeleteVariantRequest(name=name))

    # ---- queries

    @rule(who=WHO, number=st.sampled_from([0, 1, 2, 10**6, 2**63, 2**64 - 1]))
    def queries(self, who: int, number: int) -> None:
        one, _ = self.person(who)
        before = self.rows()
        self.code(one, "Status", pb.StatusRequest())
        self.code(one, "Account", pb.AccountRequest())
        self.code(one, "LedgerProof", pb.LedgerProofRequest(sequence=number, size=number))
        for method, request in (
            ("Ledger", pb.LedgerRequest(from_sequence=number)),
            ("LedgerHeads", pb.LedgerHeadsRequest(from_size=number)),
            ("Download", pb.DownloadRequest(sha256="3" * 64, offset=number)),
            ("Base", pb.BaseRequest()),
            ("Seed", pb.SeedRequest(port=number % 2**32, sha256=["3" * 64])),
            ("FindSeeder", pb.FindSeederRequest(sha256="3" * 64)),
        ):
            self.code(one, method, request)
        changed = {name for name, rows in self.rows().items() if rows != before[name]}
        assert not changed, changed

    @rule(who=WHO)
    def a_stranger_has_no_session(self, who: int) -> None:
        one, _ = self.person(who)
        session, one.session = one.session, one.session[:-1] + "x"
        for method, request in (("Account", pb.AccountRequest()), ("Leave", pb.LeaveRequest())):
            self.code(one, method, request, expect_refusal=True)
        one.session = session

    @rule()
    def restart(self) -> None:
        self.hub.close()
        self.hub = LoopbackHub(self.folder / "hub")
        for number, one in enumerate(self.people):
            again = RawContributor(self.hub.address, one.name, one.key)
            again.session = one.session  # sessions survive a restart
            one.close()
            self.people[number] = again

    # ---- what holds after every call

    @invariant()
    def credits_are_conserved(self) -> None:
        if not self.people:
            return
        with self.hub.fed.database.transaction() as tx:
            balances = self.hub.fed.payouts.balances(tx)
            reserved = select(func.sum(transfers.c.amount)).where(transfers.c.status == "pending")
            pending = tx.scalar(reserved) or 0
        assert all(amount >= 0 for amount in balances.values()), balances
        assert sum(balances.values()) + pending == self.earned

    def ledger_is_valid(self) -> None:
        fed = self.hub.fed
        verify_database(fed.database, fed.ledger.public_key)

    # ---- helpers

    def person(self, who: int) -> tuple[RawContributor, str]:
        return self.people[who % len(self.people)], self.accounts[who % len(self.people)]

    def stamp(self, one: RawContributor) -> dict[str, Any]:
        return {"server": one.server, "tls": one.tls, "issued_at": int(time.time())}

    def rows(self) -> dict[str, list[Any]]:
        """All rows, after the transfers that are due were settled: any call does that."""
        self.hub.fed.payouts.settle_due()
        with self.hub.fed.database.transaction() as tx:
            return {
                name: sorted(map(repr, tx.execute(select(table)).all()))
                for name, table in metadata.tables.items()
                if name != "settings"  # has the hub's clock
            }

    def code(
        self,
        one: RawContributor,
        method: str,
        request: Any,
        *,
        expect_refusal: bool = False,
        may_change: frozenset[str] | set[str] = frozenset(),
    ) -> ErrorCode | None:
        """Call; None if it was answered. A call that was refused has changed no row."""
        before = self.rows()
        call: Callable[..., Any] = getattr(one.stub, method)
        streams = method in ("Ledger", "LedgerHeads", "Download", "Base")
        found = refusal(lambda: one.call((lambda *a, **k: list(call(*a, **k))) if streams else call, request))
        assert found not in DEFECTS, f"{method}: {found}"
        if found is None:
            assert not expect_refusal, f"{method} was not refused: {request}"
            return None
        changed = {name for name, rows in self.rows().items() if rows != before[name]}
        assert changed <= may_change, f"{method} was refused with {found.value} and changed {changed}"
        return found


def refusal(call: Callable[[], Any]) -> ErrorCode | None:
    """The code of the error that a call raises."""
    try:
        call()
    except GymError as error:
        return error.code
    return None


def test_calls_in_any_order_conserve_credits_and_a_refused_call_changes_nothing() -> None:
    run_state_machine_as_test(
        HubCalls,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=20,
            derandomize="GYM_HUB_CALLS_EXAMPLES" not in os.environ,
            phases=[Phase.generate] if EXAMPLES <= 12 else list(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
