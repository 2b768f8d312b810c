"""Which secure rounds were begun on this machine, remembered after their secrets are gone.

A contributor that is told that a round is over deletes its secrets; asked to begin the same round again it would mask
the same votes with fresh ones, and two sums with and without somebody give that one's votes away.
"""

from __future__ import annotations

import json
from pathlib import Path

from gym_client.home import Home
from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import make_folder, write_atomically


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
