"""The stored state of a hub, passed to functions that use most of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gym_fed.delta.base import BaseSpec
from gym_server.clock import HubClock
from gym_server.ledger.chain import Ledger
from gym_server.rounds.round_store import RoundStore
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore


@dataclass(frozen=True)
class HubState:
    """The stored state of one hub.

    Attributes:
        folder: The hub's folder.
        server: The hub's id, which depends on its key.
        base: Names, shapes and digest of the base model's tensors.
        database: Every table of the hub.
        ledger: The signed entries.
        store: Objects by sha256.
        round_store: Rounds and versions.
        clock: The hub's clock, which depends on the database.
    """

    folder: Path
    server: str
    base: BaseSpec
    database: Database
    ledger: Ledger
    store: ObjectStore
    round_store: RoundStore
    clock: HubClock
