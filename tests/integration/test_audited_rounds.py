"""A whole audit: the draw of a round, the answer, the verdict, and what hub and ledger make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_client.agent.global_model import GlobalModel
from gym_client.agent.tasks import TaskFolder
from gym_client.audits.answer import AuditAnswer, write_answer
from gym_client.audits.check import repeat_steps, signed_verdict, unanswered
from gym_client.audits.draws import Draw, Draws
from gym_client.audits.evidence import Evidence, keep_evidence
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rewards.audits import AuditVerdicts
from gym_server.strategy.durable import DurableDeltaSoup

from gym_fed.config.hub.credits import ReputationConfig, RewardsConfig
from gym_fed.config.hub.server import CONFIG_NAME
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.audits import SignedVerdict
from gym_fed.trust.ledger.export import first_line, lines, verify_file
from gym_fed.trust.ledger.heads import SignedHead
from tests.support.local_grid import LocalGrid
from tests.support.wait import SECONDS

NAMES = ["ann", "bob", "eve", "dan"]
AUDIT: dict[str, Any] = {"rows": "disclosed", "rate": 1.0, "steps": 2, "answer_seconds": 3600}
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 1, "min_contributors": 3, "deadline_seconds": SECONDS},
    "recipe": {
        "finetuning": "lora",
        "lora": {"r": 2},
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "max_length": 32,
    },
    "codec": {"error_feedback": False},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "gate": {"screen_updates": False},
}


@dataclass
class Room:
    """A hub after a round with audits, and its contributors; eve is the auditor, and dan commits to no training."""

    fed: Federation
    grid: LocalGrid
    model: GlobalModel
    folder: Path

    def draws(self) -> dict[str, Draw]:
        """The draws in a verified export of the ledger, by contributor's name."""
        path = self.folder / "ledger.jsonl"
        with self.fed.database.transaction() as tx:
            head = self.fed.ledger.sign_head(tx)
        assert head is not None
        with self.fed.database.reading() as tx:
            from gym_server.ledger.rows import heads_from

            heads = [SignedHead.from_json(row.head) for row in tx.execute(heads_from(0))]
        key = self.fed.key.public_key
        text = [first_line(key), *lines(self.fed.ledger.entries(), heads)]
        path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
        draws = Draws()
        verify_file(path, key, draws)
        names = {self.key(name).contributor: name for name in NAMES}
        return {names[draw.contributor]: draw for draw in draws.drawn.values()}

    def key(self, name: str) -> SigningKey:
        return self.grid.homes[name].key

    def verdict(self, name: str, auditor: str = "eve") -> SignedVerdict:
        """The auditor's verdict on a contributor's honest answer."""
        draw = self.draws()[name]
        home = self.grid.homes[name]
        path = self.folder / f"{name}-by-{auditor}.gymaudit"
        write_answer(path, Evidence(home.audits / draw.update), draw)
        answer = AuditAnswer.open(path, draw, 64 << 20)
        distances, problem = repeat_steps(answer, draw, self.model, lambda sha256: path, None, "cpu")
        return signed_verdict(
            draw, self.fed.server, self.key(auditor), self.fed.clock.now(), distances, problem
        )

    def reputation(self, name: str) -> float:
        from gym_server.rewards.reputations import reputations_before

        with self.fed.database.reading() as tx:
            who = self.key(name).contributor
            return reputations_before(tx, [who], 2, self.fed.config.rewards.reputation)[who]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("audits")
    grid = LocalGrid(folder, tiny_base, NAMES)
    init_hub(folder / "hub", HubChoices(str(tiny_base), "test", "open"))
    rounds = {**CONFIG["rounds"], "audit": {**AUDIT, "auditors": [grid.homes["eve"].key.contributor]}}
    config = {"name": "test", "base_model": str(tiny_base), "enrolment": {"policy": "open"}, **CONFIG}
    (folder / "hub" / CONFIG_NAME).write_text(yaml.safe_dump({**config, "rounds": rounds}))
    with Federation.open(folder / "hub") as fed:

        def keep(name: str, reply: Any) -> None:
            """Do what the agent does when it has the receipt of an admitted update."""
            update = reply.content.config_records["update"]
            manifest = json.loads(update["manifest"])
            if name == "dan":
                del manifest["training_root"]
                update["manifest"] = json.dumps(manifest)
                update["signature"] = grid.homes[name].key.sign(manifest)
                return
            task = TaskFolder(grid.homes[name].task_folder(manifest["task"]))
            finished = task.finished()
            assert finished is not None
            keep_evidence(grid.homes[name], task, finished.manifest.digest)

        grid.after = keep
        DurableDeltaSoup(fed).start(grid.serve(fed))
        yield Room(fed, grid, GlobalModel(str(tiny_base)), folder)


def test_a_round_with_audits_commits_then_draws_and_an_honest_update_passes(room: Room) -> None:
    entries = [entry for entry in room.fed.ledger.entries()]
    kinds = [entry.kind for entry in entries]
    assert kinds.index("evaluation-seed") < kinds.index("verdict") < kinds.index("audit-draw")
    draws = room.draws()
    assert set(draws) == {"ann", "bob", "eve"}
    assert all(len(draw.steps) == 2 for draw in draws.values())
    before = room.reputation("ann")
    signed = room.verdict("ann")
    assert signed.verdict.outcome == "passed"
    assert set(signed.verdict.distances) == {str(step) for step in draws["ann"].steps}
    entry = room.fed.audits.record(signed)
    assert entry.kind == "audited"
    assert room.reputation("ann") == before
    assert room.draws()["ann"].verdict == "audited"
    with pytest.raises(GymError) as caught:
        room.fed.audits.record(signed)
    assert caught.value.code is ErrorCode.REPLAYED
    room.fed.ledger.verify()


def test_a_failed_audit_lowers_the_reputation_and_the_ledger_agrees(room: Room) -> None:
    from gym_server.store.tables import reputations

    who = room.key("bob").contributor
    assert room.reputation("bob") > 0.0
    draw = room.draws()["bob"]
    signed = signed_verdict(
        draw, room.fed.server, room.key("eve"), room.fed.clock.now(), {draw.steps[0]: 0.5}, "step differs"
    )
    later = RewardsConfig(reputation=ReputationConfig(cheating=0.9))
    fed = room.fed
    audits = AuditVerdicts(
        fed.database, fed.ledger, fed.server, fed.config.rounds.audit, later, fed.clock.now
    )
    entry = audits.record(signed)  # by the terms of the audited round
    assert (entry.kind, entry.body["reputations"]) == ("audit-failed", {who: 0.0})
    assert room.draws()["bob"].verdict == "audit-failed"
    room.fed.ledger.verify()
    with room.fed.database.transaction() as tx:
        row = reputations.c.contributor == who
        tx.execute(reputations.update().where(row).values(value=0.5))
    try:
        with pytest.raises(GymError, match="reputations"):
            room.fed.ledger.verify()
    finally:
        with room.fed.database.transaction() as tx:
            tx.execute(reputations.update().where(row).values(value=0.0))


def test_verdicts_of_others_early_ones_and_ones_on_own_updates_are_refused(room: Room) -> None:
    draw, now = room.draws()["eve"], room.fed.clock.now()
    own = signed_verdict(draw, room.fed.server, room.key("eve"), now, dict.fromkeys(draw.steps, 0.0), "")
    other = signed_verdict(draw, room.fed.server, room.key("ann"), now, {}, "made up")
    stranger = SignedVerdict.of(own.verdict, SigningKey.generate())
    forged = own.model_copy(update={"signature": "00" * 64})
    early = unanswered(draw, room.fed.server, room.key("eve"), now + 2 * 3600)
    elsewhere = SignedVerdict.of(own.verdict.model_copy(update={"server": "s" + "1" * 16}), room.key("eve"))
    undrawn = SignedVerdict.of(own.verdict.model_copy(update={"update": "0" * 64}), room.key("eve"))
    for signed, code in (
        (own, ErrorCode.PERMISSION_DENIED),
        (other, ErrorCode.PERMISSION_DENIED),
        (stranger, ErrorCode.SIGNATURE_INVALID),
        (forged, ErrorCode.SIGNATURE_INVALID),
        (early, ErrorCode.AUDIT_INVALID),
        (elsewhere, ErrorCode.AUDIT_INVALID),
        (undrawn, ErrorCode.AUDIT_INVALID),
    ):
        with pytest.raises(GymError) as caught:
            room.fed.audits.record(signed)
        assert caught.value.code is code, signed.verdict
    with pytest.raises(GymError, match="more hours to answer"):
        unanswered(draw, room.fed.server, room.key("eve"), now)


def test_an_update_without_training_root_is_refused_and_not_drawn(room: Room) -> None:
    who = room.key("dan").contributor
    verdicts = [entry.body for entry in room.fed.ledger.about(who) if entry.kind == "verdict"]
    assert [body["verdict"] for body in verdicts] == ["refused"]
    assert "the manifest has no training_root" in verdicts[0]["reason"]
    assert "dan" not in room.draws()
