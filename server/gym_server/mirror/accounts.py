"""Logins at a mirror, where accounts prove possession of keys in the hub's verified ledger."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import verify_signature
from gym_fed.trust.identity.login import login_claim
from gym_fed.trust.identity.statements import require_fresh
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.accounts.accounts import SESSION_SECONDS, Session

_MAX_SESSIONS = 10_000
_SESSIONS_PER_ACCOUNT = 16
"""Maximum number of sessions per account, so that its logins cannot end others' sessions; the oldest ends first."""
_ACTIVE, _LEFT = "active", "left"
_STATUS = {"enrolled": _ACTIVE, "rebound": _ACTIVE, "left": _LEFT, "revoked": "revoked"}


class MirrorAccounts:
    """The hub's accounts, as recorded in its ledger.

    Args:
        tls: Fingerprint of the mirror's TLS key. Logins name it, so they cannot be relayed to the hub.
        clock: Monotonic clock, in seconds.
        now: Returns the Unix time, with which the age of a login is measured.
    """

    def __init__(
        self, tls: str, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._tls, self._clock, self._now = tls, clock, now
        self._server = ""
        self._history = History()
        self._status: dict[str, str] = {}
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def begin(self, server: str) -> None:
        """Forget all accounts, before reading a hub's ledger from its first entry."""
        self._server, self._history, self._status = server, History(server), {}
        self._sessions.clear()

    def add(self, entry: Entry) -> None:
        """Process the next entry."""
        self._history.add(entry.kind, entry.body)
        if entry.kind in _STATUS:
            self._status[entry.body["contributor"]] = _STATUS[entry.kind]

    def authenticate(self, request: pb.AuthenticateRequest) -> tuple[str, float]:
        """Exchange a signature for a session: token, and seconds for which it is valid.

        Raises:
            GymError: ``CLOCK_SKEWED`` for an old login; ``UNAUTHENTICATED`` for an account that is not in the ledger or
                not active; ``SIGNATURE_INVALID``.
        """
        who = request.contributor
        require_fresh("the request", request.issued_at_seconds, self._now())
        key = self._history.current(who)
        if key is None or self._status.get(who) not in (_ACTIVE, _LEFT):
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"the hub's ledger has no active account {who[:64]!r} yet",
                "use the hub; a mirror knows a new account within seconds",
            )
        claim = login_claim(
            who, request.instance, request.issued_at_seconds, request.nonce, self._server, self._tls
        )
        verify_signature(key, claim, request.signature)
        token = secrets.token_hex(32)
        has_left = self._status[who] == _LEFT
        own = [other for other, session in self._sessions.items() if session.contributor == who]
        for old in own[: len(own) + 1 - _SESSIONS_PER_ACCOUNT]:
            del self._sessions[old]
        self._sessions[token] = Session(who, 0, key, self._clock() + SESSION_SECONDS, has_left)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return token, SESSION_SECONDS

    def session(self, token: str) -> Session:
        """Return the session of a token.

        Raises:
            GymError: ``UNAUTHENTICATED`` if it has expired, or the account or its key has changed.
        """
        found = self._sessions.get(token)
        if found is not None and found.expires > self._clock():
            who = found.contributor
            status = _LEFT if found.has_left else _ACTIVE
            if self._status.get(who) == status and self._history.current(who) == found.public_key:
                return found
        self._sessions.pop(token, None)
        raise GymError(ErrorCode.UNAUTHENTICATED, "this session has ended", "log in again")

    def note_revoked(self, contributor: str, method: str) -> None:
        """Do nothing: a mirror has already ended sessions of revoked keys, and only the hub writes the ledger."""
