"""The stages of secure rounds, stored in the database so that a killed hub can resume a round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import ColumnElement, select, update

from gym_fed.config.schema.base import StrictModel
from gym_fed.delta.base import BaseSpec
from gym_fed.privacy.secure_aggregation.messages import (
    ADVERTISE,
    SHARE,
    STAGES,
    TRAIN,
    Participants,
    SignedAdvert,
    parse,
)
from gym_fed.privacy.secure_aggregation.votes import bits_for, check_masked
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.store.database import Database, insert_if_absent
from gym_server.store.tables import secure_messages, secure_stages

T = TypeVar("T", bound=StrictModel)


@dataclass(frozen=True)
class Stage:
    """A stage that has begun.

    Attributes:
        name: One of ``STAGES``.
        members: Nodes in the stage; None for all connected nodes.
        started_at: Start of the stage, Unix seconds.
    """

    name: str
    members: list[int] | None
    started_at: float


class Stages:
    """The stages of all rounds, in the tables ``secure_stages`` and ``secure_messages``."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def begin(self, server_round: int, name: str, members: Sequence[int] | None) -> None:
        """Begin a stage and fix its members; a stage that has begun is not changed."""
        chosen = None if members is None else json.dumps(sorted(members))
        row = {"server_round": server_round, "stage": name, "members": chosen, "started_at": self._clock()}
        with self._database.transaction() as tx:
            insert_if_absent(tx, secure_stages, **row)

    def get(self, server_round: int, name: str) -> Stage | None:
        """Return a stage, or None if it has not begun."""
        where = (secure_stages.c.server_round == server_round) & (secure_stages.c.stage == name)
        with self._database.reading() as tx:
            row = tx.execute(select(secure_stages).where(where)).first()
        if row is None:
            return None
        return Stage(row.stage, None if row.members is None else json.loads(row.members), row.started_at)

    def members(self, server_round: int, name: str) -> list[int]:
        """Return the nodes of a stage; empty before it has begun."""
        stage = self.get(server_round, name)
        return list(stage.members or []) if stage else []

    def current(self, server_round: int) -> Stage:
        """Return the latest stage; if there is none, begin the first one for all connected nodes."""
        self.begin(server_round, ADVERTISE, None)
        begun = [stage for name in STAGES if (stage := self.get(server_round, name)) is not None]
        return begun[-1]

    def tasks(self, server_round: int, name: str) -> dict[int, tuple[str, str]]:
        """Return (message id, outcome) of a stage's tasks by node id, in the order of replies."""
        said = select(secure_messages).where(_key(server_round, name)).order_by(secure_messages.c.replied_at)
        with self._database.reading() as tx:
            rows = tx.execute(said).all()
        return {int(row.node_id): (row.message_id, row.outcome) for row in rows}

    def record_task(self, server_round: int, name: str, node_id: int, message_id: str) -> None:
        """Record that the stage's task was sent to a node, possibly again after a lost lease."""
        key = _key(server_round, name, node_id)
        with self._database.transaction() as tx:
            tx.execute(secure_messages.delete().where(key))
            tx.execute(
                secure_messages.insert().values(
                    server_round=server_round, stage=name, node_id=node_id, message_id=message_id
                )
            )

    def record_outcome(
        self, server_round: int, name: str, node_id: int, outcome: str, reply: str | None = None
    ) -> None:
        """Record the outcome of a node's task: ``replied`` with the reply, ``failed`` or ``lost``."""
        with self._database.transaction() as tx:
            tx.execute(
                update(secure_messages)
                .where(_key(server_round, name, node_id))
                .values(outcome=outcome, reply=reply, replied_at=self._clock())
            )

    def replies(self, server_round: int, name: str, kind: type[T]) -> dict[int, T]:
        """Return every node's reply in a stage."""
        where = _key(server_round, name) & (secure_messages.c.outcome == "replied")
        with self._database.reading() as tx:
            rows = tx.execute(select(secure_messages).where(where)).all()
        return {int(row.node_id): parse(kind, row.reply) for row in rows}

    def adverts(self, server_round: int, name: str | None = None) -> dict[int, SignedAdvert]:
        """Return the signed keys by node, of all advertising nodes or of a stage's members."""
        found = self.replies(server_round, ADVERTISE, SignedAdvert)
        if name is None:
            return found
        return {node: found[node] for node in self.members(server_round, name)}

    def participants(self, server_round: int) -> Participants:
        """Return the round's participants, as sent to each of them."""
        adverts = self.adverts(server_round, SHARE).values()
        return Participants(adverts=sorted(adverts, key=lambda signed: signed.advert.contributor))


def check_upload(database: Database, manifest: UpdateManifest, path: Path, spec: BaseSpec) -> None:
    """Check that an uploaded object contains masked votes of its round; see ``check_masked``."""
    voters = len(Stages(database).members(manifest.server_round, TRAIN))
    check_masked(path, spec, bits_for(voters))


def _key(server_round: int, name: str, node_id: int | None = None) -> ColumnElement[bool]:
    """Select the rows of a stage, or of one node in it."""
    key = (secure_messages.c.server_round == server_round) & (secure_messages.c.stage == name)
    return key if node_id is None else key & (secure_messages.c.node_id == node_id)
