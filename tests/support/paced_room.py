"""A hub's real rounds under a simulated clock: contributors take tasks, send heartbeats, and answer at their pace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.queue import QueuedMessage, node_of
from gym_server.rounds.round_store import Round
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.store.tables import updates
from gym_server.strategy.durable import DurableDeltaSoup
from gym_server.strategy.grid import HubGrid
from sqlalchemy import select

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import update_records

STEP_SECONDS = 20.0
STEPS = 30
"""Training steps that a heartbeat counts."""


@dataclass
class Member:
    """A contributor that needs ``seconds`` for a task; infinite: it sends heartbeats and nothing else."""

    name: str
    seconds: float
    reports_progress: bool = True
    direction: float | None = None
    """Share of one common direction in the updates; None: updates without a common part."""
    num_examples: int = 3
    seed: int | None = None
    """Seed of its updates, so that two members may do the same work; None: each its own."""
    error: str = ""
    """Error that it replies with instead of an update."""
    key: SigningKey = field(default_factory=SigningKey.generate)
    node: int = 0
    task: Any = None
    since: float = 0.0
    lost: int = 0


class PacedRoom:
    """Rounds of a hub in ``folder`` with members of known pace. Time passes in steps."""

    def __init__(self, folder: Path, base: Path, members: list[Member], **changes: Any) -> None:
        init_hub(folder, HubChoices(str(base), "paced", "open"))
        path = folder / "gym-server.yaml"
        values = yaml.safe_load(path.read_text())
        values["soup"] = {"aggregator": "mean", "num_malicious_nodes": 0}
        values["codec"] = {"codec": "bitdelta", "error_feedback": False}
        values["gate"] = {"screen_updates": False}
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value}
        path.write_text(yaml.safe_dump(values))
        self.seconds, self._start = 0.0, time.time()
        self._open(folder)
        self.members: dict[str, Member] = {}
        self.join(members)
        model = self.strategy._hub_model().model
        self._base = {name: tensor.clone() for name, tensor in model_tensors(model).items()}

    def _open(self, folder: Path) -> None:
        self.fed = Federation.open(folder)
        self.fed.clock.steady = self.fed.clock.awake = lambda: self.seconds
        self.fed.clock.wall = lambda: self._start + self.seconds
        self.fed.clock.start()
        self.strategy, self.grid = (
            DurableDeltaSoup(self.fed),
            HubGrid(self.fed.state, self.fed.live_config, self.fed.queue, self.fed.max_update_bytes),
        )
        self._hub = Hub(self.fed, Wakeups())

    def restart(self) -> None:
        """Close the hub and open it again, as after a crash; members keep their tasks."""
        folder = self.fed.folder
        for member in self.members.values():  # the hub's clock goes on from the last sign of life
            self.fed.accounts.connected(member.node, self.fed.clock.now())
        self.fed.close()
        self._open(folder)
        for member in self.members.values():
            self.fed.accounts.connected(member.node, self.fed.clock.now() + 1e6)

    def join(self, members: list[Member]) -> None:
        """Enrol members; they stay connected."""
        for member in members:
            self.members[member.name] = member
            self._enrol(member)

    def leave(self, names: Iterable[str]) -> None:
        """Disconnect members for good."""
        for name in names:
            self.fed.accounts.connected(self.members.pop(name).node, self.fed.clock.now() - 1)

    def run(self, num_rounds: int, most_seconds: float = 20_000) -> list[Round]:
        """Rounds until so many have ended."""
        ended: list[Round] = []
        end = self.seconds + most_seconds
        while len(ended) < num_rounds and self.seconds < end:
            found = self.step()
            if found is not None:
                ended.append(found)
        return ended

    def step(self) -> Round | None:
        """Let one step of time pass; the round that ended in it."""
        fed = self.fed
        current = fed.round_store.current()
        number = (current.server_round if current and not current.is_over else None) or (
            fed.round_store.open_next().server_round
        )
        self.strategy._collecting(number)
        self.strategy._push(number, self.grid)
        for member in self.members.values():
            self._works(member)
        self.strategy._pull(number, self.grid)
        ended = None
        if self.strategy._pace.is_complete(fed.round_store.require(number)):
            ended = self.strategy._finish(fed.round_store.require(number))
        self.seconds += STEP_SECONDS
        return ended

    def admitted(self) -> Counter[str]:
        """How many updates of each member were admitted, whatever became of them then."""
        names = {member.key.contributor: name for name, member in self.members.items()}
        with self.fed.database.reading() as tx:
            rows = tx.scalars(select(updates.c.contributor).where(updates.c.verdict != "refused")).all()
        return Counter(names[contributor] for contributor in rows)

    def close(self) -> None:
        self.fed.close()

    def _enrol(self, member: Member) -> None:
        fed = self.fed
        contributor = fed.accounts.get_or_create(member.key.public_key)
        with fed.database.transaction() as tx:
            member.node = node_of(tx, contributor, f"instance{len(member.name):08d}", 1, fed.clock.now())
        fed.accounts.connected(member.node, fed.clock.now() + 1e6)

    def _works(self, member: Member) -> None:
        fed = self.fed
        if member.task is None:
            member.task = fed.queue.lease(member.node)
            member.since = self.seconds
            return
        took = self.seconds - member.since
        done = int(STEPS * min(1.0, took / member.seconds)) if member.reports_progress else 0
        try:
            fed.queue.renew(member.task.message_id, member.node, f"train {done}/{STEPS}")
            if took >= member.seconds:
                self._answer(member)
                member.task = None
        except GymError as error:
            if error.code is not ErrorCode.LEASE_LOST:
                raise
            member.task, member.lost = None, member.lost + 1

    def _answer(self, member: Member) -> None:
        fed = self.fed
        if member.error:
            error = pb.ReplyError(code=5, reason=member.error)
            failed = pb.SubmitRequest(message_id=member.task.message_id, error=error)
            self._hub._submit(member.key.contributor, member.node, failed)
            return
        task = task_in(member.task)
        generator = torch.Generator().manual_seed(
            1000 * task.server_round + (member.node if member.seed is None else member.seed)
        )
        tuned = {
            name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self._base.items()
        }
        if member.direction is not None:
            common = torch.Generator().manual_seed(7)
            for tensor in tuned.values():
                tensor += member.direction * 1e-3 * torch.randn(tensor.shape, generator=common)
        spec = BaseSpec(
            fed.base.model_name,
            task.version_digest,
            {k: tuple(v.shape) for k, v in self._base.items()},
        )
        path = fed.folder / "staging" / f"update-{member.name}"
        encode_delta(tuned, self._base, CodecPolicy(error_feedback=False), path, spec)
        issued, expires = lifetime(fed.clock.now())
        manifest = UpdateManifest(
            contributor=member.key.contributor,
            server=fed.server,
            task=member.task.message_id,
            server_round=task.server_round,
            base_digest=task.version_digest,
            delta_sha256=fed.store.put_file(path),
            delta_bytes=path.stat().st_size,
            nonce=new_nonce(),
            issued_at_seconds=issued,
            expires_at_seconds=expires,
            num_examples=member.num_examples,
        )
        records = update_records(manifest, manifest.sign(member.key), member.key.public_key)
        request = pb.SubmitRequest(message_id=member.task.message_id, content=records)
        self._hub._submit(member.key.contributor, member.node, request)


def task_in(message: QueuedMessage) -> TaskSpec:
    """The task in a message of the queue."""
    entries = pb.Records.FromString(message.content).configs["task"].entries
    text = next(entry.value.text for entry in entries if entry.key == "spec")
    return TaskSpec.model_validate_json(text)
