"""What a contributor keeps of secure rounds: one round's secrets and words, and which rounds were begun.

A kill neither forks nor repeats what was sent. A contributor deletes its secrets when the hub reports the round
as over. If it began the same round again, it would mask the same votes with fresh secrets. Two sums with and without
one contributor reveal that contributor's votes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from gym_client.identity.home import Home
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.privacy.secure_aggregation.messages import Participants, SealedShares, SignedAdvert


def rounds_folder(home: Home) -> Path:
    """Where the secrets of secure rounds lie, a folder each; not among tasks, whose names the hub chooses."""
    return home.folder / "secure"


class Begun:
    """The last secure round of one hub that was begun on this machine; it outlives the round's secrets."""

    def __init__(self, home: Home, server: str) -> None:
        self._path, self._server = rounds_folder(home) / "begun.json", server

    @property
    def last(self) -> int:
        """0 before the first; ``STATE_CORRUPT`` for a file that cannot be read."""
        return self._read().get(self._server, 0)

    def note(self, server_round: int) -> None:
        """Remember a round, durably."""
        rounds = self._read()
        if rounds.get(self._server, 0) < server_round:
            rounds[self._server] = server_round
            make_folder(self._path.parent, 0o700)
            write_atomically(self._path, json.dumps(rounds, sort_keys=True).encode(), mode=0o600)

    def _read(self) -> dict[str, int]:
        try:
            return {str(server): int(last) for server, last in json.loads(self._path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self._path}: {error}",
                "delete it, and take part in no secure round that was begun before",
            ) from error


class SecureState(StrictModel):
    """``state.json`` of a round's folder, written before anything that follows from it is sent."""

    mask_private: str
    cipher_private: str
    seed: str
    advert: SignedAdvert
    participants: Participants | None = Field(default=None, alias="roster")
    """Who began, with their keys. The file keeps the key by which earlier versions wrote it."""
    shares: SealedShares | None = None
    """What was sealed for the others; sent again as it is."""
    own: tuple[str, str] | None = None
    """This contributor's own shares, of its seed and of its mask key."""
    received: dict[str, tuple[str, str]] | None = None
    """Shares of the others' seeds and mask keys; with it the list of who masks is fixed."""
    votes: str | None = None
    """sha256 of the one vector that was masked."""
    survivors: list[str] | None = None
