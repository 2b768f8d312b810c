"""Interfaces through which a hub's client uses other sources of public objects: seeding contributors and mirrors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gym_client.seeding.policy import Kind, SeedingPolicy
from gym_fed.base.files import BaseFile
from gym_fed.trust.ledger.entries import Entry


class ObjectExchange(Protocol):
    """An exchange of objects with contributors; implemented by ``gym_client.seeding.seeding.Seeding``."""

    def start(self) -> None: ...

    def fetch(
        self,
        part: Path,
        sha256: str,
        size_bytes: int,
        kind: Kind,
        report: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> bool: ...

    def add(self, path: Path, sha256: str, kind: Kind) -> None: ...

    def share_base(self, folder: Path, files: Sequence[BaseFile]) -> None: ...

    def follow(self, policy: SeedingPolicy | None) -> None: ...

    def pause(self, reason: str, paused: bool) -> None: ...

    def in_words(self) -> list[str]: ...

    def close(self) -> None: ...


class MirrorSource(Protocol):
    """A download source; implemented by ``gym_client.mirror.source.Mirrors``."""

    @property
    def addresses(self) -> list[str]: ...

    def fetch(
        self,
        part: Path,
        sha256: str,
        size_bytes: int,
        report: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> bool: ...

    def entries(self, first: int, last: int, last_hash: str) -> list[Entry] | None: ...
