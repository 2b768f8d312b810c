"""What a client of a hub needs of the exchange of public objects with other contributors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gym_client.seeding.policy import Kind, SeedingPolicy
from gym_fed.base.files import BaseFile


class ObjectExchange(Protocol):
    """See ``gym_client.seeding.seeding.Seeding``, the only implementation."""

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
