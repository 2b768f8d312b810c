"""The stored state of secure rounds: the secrets of each round, and the last round that was begun with each hub.

Due to the stored state, a message that was sent before a crash is never repeated with different content. The secrets
are deleted when the hub reports the end of the round. If the round could then begin again, the same votes would be
masked with new secrets, and the difference of two sums could reveal the votes of one contributor.
"""

from __future__ import annotations

import json
from pathlib import Path

from gym_client.identity.home import Home
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.privacy.secure_aggregation.messages import Participants, SealedShares, SignedAdvert


def rounds_folder(home: Home) -> Path:
    """Return the folder for the secrets of secure rounds. It is not in task folders, whose names the hub chooses."""
    return home.folder / "secure"


class Begun:
    """The last secure round that was begun with a hub; kept after the round's secrets are deleted."""

    def __init__(self, home: Home, server: str) -> None:
        self._path, self._server = rounds_folder(home) / "begun.json", server

    @property
    def last(self) -> int:
        """The last round; 0 if there is none. Raises ``STATE_CORRUPT`` for an unreadable file."""
        return self._read().get(self._server, 0)

    def note(self, server_round: int) -> None:
        """Record a round durably."""
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
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self._path}: {error}",
                "delete the file, and do not continue secure rounds that have already begun",
            ) from error


class SecureState(StrictModel):
    """The content of a round's ``state.json``, written before anything derived from it is sent."""

    mask_private: str
    cipher_private: str
    seed: str
    advert: SignedAdvert
    participants: Participants | None = None
    """The participants and their keys."""
    shares: SealedShares | None = None
    """The sealed shares for the other participants; every call sends the same ones."""
    own: tuple[str, str] | None = None
    """This contributor's shares of its own seed and mask key."""
    received: dict[str, tuple[str, str]] | None = None
    """The shares of the others' seeds and mask keys, which determine the list of masking participants."""
    votes: str | None = None
    """The SHA-256 of the only vector that was masked."""
    survivors: list[str] | None = None
