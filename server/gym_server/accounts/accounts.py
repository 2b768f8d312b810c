"""Contributor accounts: enrolment, invites, sessions and nodes.

A session token is ``contributor.node.expiry.hmac``. The HMAC key is on disk, so sessions survive restarts. The HMAC
covers the hub's id, its TLS key, the account's public key and its time of enrolment. A session is therefore valid only
on this hub. It ends when the key is replaced or revoked, or when the account leaves, even if the account returns later.
To end all sessions, delete `keys/session.key` and restart the hub.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update

from gym_fed.config.hub.sections import EnrolmentConfig, LimitsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json
from gym_fed.core.text import counted, is_name, plain, whole_number
from gym_fed.trust.identity.keys import contributor_id, verify_signature
from gym_fed.trust.identity.login import enrolment_claim, login_claim, new_token, token_hash, work_is_done
from gym_fed.trust.identity.statements import require_fresh
from gym_server.accounts.keys import Keys, RevokedKey, check_signer, key_row
from gym_server.ledger.chain import Ledger
from gym_server.rounds.queue import disconnect, node_of
from gym_server.store.database import Database, rerun
from gym_server.store.tables import accounts, invites, nodes

MAX_NAME = 80
"""Maximum length of a contributor's name, in characters."""

LEFT = "left"
"""Status of an account that has left."""

SESSION_SECONDS = 3600
_LONGEST_CALL_SECONDS = 3000
"""How long a call may continue after its session has expired, in seconds."""
_MAX_WORK_BYTES = 64


@dataclass(frozen=True)
class Session:
    """The authenticated caller of one call."""

    contributor: str
    node_id: int
    public_key: bytes
    expires: float
    """Expiry time, Unix seconds."""
    has_left: bool = False
    """True if the account has left. It may then only read its balance and ledger entries and transfer its credits."""


class Accounts:
    """The hub's accounts."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        keys: Keys,
        policy: EnrolmentConfig,
        server: str,
        tls: str,
        session_key: bytes,
        work_bits: int = 0,
        nodes_per_account: int = LimitsConfig().nodes_per_account,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the accounts of an opened hub; called by ``Federation``.

        Args:
            database: The hub's database.
            ledger: Ledger that records enrolments and departures.
            keys: The key history of the accounts.
            policy: Enrolment policy.
            server: Id of the hub.
            tls: Fingerprint of the hub's TLS key, which every claim names; ``PLAIN_TEXT`` if it has none.
            session_key: The 32-byte HMAC key of session tokens.
            work_bits: Bits of proof of work for an enrolment under the policy ``open``.
            nodes_per_account: Maximum number of installations per account.
            clock: The hub's clock, Unix seconds.
        """
        self._database = database
        self._ledger = ledger
        self.keys = keys
        self._policy = policy
        self._server = server
        self._tls = tls
        self._session_key = session_key
        self._nodes_per_account = nodes_per_account
        self._clock = clock
        self.work_bits = work_bits if policy.policy == "open" else 0

    @rerun
    def invite(self, note: str, valid_seconds: float) -> str:
        """Create a one-time invite token; only its hash is stored."""
        token, now = new_token(), self._clock()
        with self._database.transaction() as tx:
            tx.execute(
                invites.insert().values(
                    token_hash=token_hash(token), note=note, created_at=now, expires_at=now + valid_seconds
                )
            )
        return token

    def enrol(
        self,
        public_key: bytes,
        name: str,
        invite: str,
        signature: bytes,
        work: bytes = b"",
        admit: Callable[[], None] = lambda: None,
    ) -> str:
        """Register a key and return the account's id; a registered key returns its existing id.

        ``admit`` is called after the name, signature and proof of work are verified; if it raises, the key is refused.
        Nothing is written if the key is refused.

        Raises:
            GymError: ``USAGE`` for an invalid name; ``SIGNATURE_INVALID``; ``INVITE_INVALID``; ``PERMISSION_DENIED`` if
                the policy refuses the key or the proof of work is missing.
        """
        name = name.strip()
        if not is_name(name, MAX_NAME):
            raise GymError(
                ErrorCode.USAGE,
                f"name {plain(name, 80)!r} is empty, has more than {MAX_NAME} characters, or invisible or stacked ones",
                "choose another with --name",
            )
        with self._signed_for_us():
            verify_signature(public_key, enrolment_claim(name, invite, self._server, self._tls), signature)
        if self.work_bits and self.is_new(public_key):
            self._check_work(public_key, work)
        admit()
        return self._register(public_key, name, invite)

    def is_new(self, public_key: bytes) -> bool:
        """Return True if no account has or had this key."""
        with self._database.reading() as tx:
            return key_row(tx, public_key) is None

    def get_or_create(self, public_key: bytes) -> str:
        """Register a key that signed a reply on a stock Flower grid, which has no enrolment and cannot carry invites.

        Raises:
            GymError: ``INVITE_INVALID`` or ``PERMISSION_DENIED`` if the policy refuses the key.
        """
        return self._register(public_key, contributor_id(public_key), "")

    @rerun
    def _register(self, public_key: bytes, name: str, invite: str) -> str:
        with self._database.transaction() as tx:
            key = key_row(tx, public_key)
            contributor = key.contributor if key is not None else contributor_id(public_key)
            account = accounts.c.contributor == contributor
            row = tx.execute(select(accounts).where(account)).first()
            status = None if row is None else row.status
            if key is None and row is not None:
                raise GymError(
                    ErrorCode.PERMISSION_DENIED,
                    f"a different key has the id {contributor} on this hub",
                    "create another key in a separate home",
                )
            if key is not None and key.status != "active":
                what = "revoked" if key.status == "revoked" else "replaced by another key"
                raise GymError(
                    ErrorCode.KEY_REVOKED,
                    f"this key of {contributor} was {what} on this hub",
                    "enrol with the account's current key, or with a new key as a new contributor",
                )
            if status == "left":
                self.keys.require_pace(tx, contributor)
                tx.execute(update(accounts).where(account).values(status="active", enrolled_at=self._clock()))
            if status is None:
                self._check_policy(tx, contributor, invite)
                tx.execute(
                    accounts.insert().values(
                        contributor=contributor,
                        name=name,
                        public_key=public_key,
                        status="active",
                        enrolled_at=self._clock(),
                    )
                )
                self.keys.first(tx, contributor, public_key)
            if status != "active":
                body = {"contributor": contributor, "name": name, "public_key": public_key.hex()}
                self._ledger.append(tx, "enrolled", body)
        return contributor

    def authenticate(
        self,
        contributor: str,
        instance: str,
        issued_at: int,
        nonce: str,
        signature: bytes,
        also_left: bool = False,
    ) -> tuple[str, float, int]:
        """Exchange a signature for a session: token, expiry (Unix seconds), node id.

        With ``also_left``, an account that has left gets a session without a node, for the ``LEFT_METHODS`` of the
        ``AuthInterceptor``.

        Raises:
            GymError: ``UNAUTHENTICATED`` for an unknown contributor; ``CLOCK_SKEWED``; ``SIGNATURE_INVALID``;
                ``KEY_REVOKED`` for a former key of the account.
        """
        now = self._clock()
        require_fresh("the request", issued_at, now)
        if not 8 <= len(instance) <= 64 or not instance.isalnum():
            raise GymError(ErrorCode.USAGE, f"instance {instance[:64]!r} is not 8 to 64 letters and digits")
        signed = login_claim(contributor, instance, issued_at, nonce, self._server, self._tls)
        with self._database.reading() as tx:
            row = tx.execute(select(accounts).where(accounts.c.contributor == contributor)).first()
            if row is not None:
                with self._signed_for_us():
                    check_signer(tx, row, signed, signature)
        _active(row, contributor, also_left)
        has_left = row is not None and row.status == LEFT
        node_id = 0 if has_left else self._node(contributor, instance)
        expires = int(now + SESSION_SECONDS)
        return self._token(row, node_id, expires), expires, node_id

    def note_revoked(self, contributor: str, method: str) -> None:
        """Record in the ledger that a revoked key was refused; see ``Keys.refused``."""
        self.keys.refused(contributor, method)

    def session(self, token: str) -> Session:
        """Return the session of a token.

        Raises:
            GymError: ``UNAUTHENTICATED`` if the token is from another hub or has expired, if its key was replaced, or
                if its account is not active; ``KEY_REVOKED``.
        """
        parts = token.split(".")
        row = self._row(parts[0])
        node_id, expires = map(whole_number, parts[1:3]) if len(parts) == 4 else (None, None)
        if row is not None and node_id is not None and expires is not None:
            known = self._token(row, node_id, expires)
            if hmac.compare_digest(token.encode(), known.encode()):
                self._check_age(expires)
                key = _active(row, row.contributor, also_left=True)
                return Session(row.contributor, node_id, key, expires, row.status == LEFT)
        raise GymError(ErrorCode.UNAUTHENTICATED, "this call needs a session", "enrol, then authenticate")

    def check(self, session: Session) -> None:
        """Check that a session is still valid; called during long calls.

        Raises:
            GymError: ``KEY_REVOKED``; ``UNAUTHENTICATED`` if the key was replaced, the account left, or the call has
                continued too long after the session's end.
        """
        self._check_age(session.expires + _LONGEST_CALL_SECONDS)
        row = self._row(session.contributor)
        if _active(row, session.contributor, session.has_left) != session.public_key:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"the key of {session.contributor} was replaced in the meantime",
                "authenticate with the new key",
            )

    def public_key(self, contributor: str) -> bytes:
        """Return the active key of a contributor.

        Raises:
            GymError: ``UNAUTHENTICATED`` if there is none, ``KEY_REVOKED``.
        """
        return _active(self._row(contributor), contributor)

    @rerun
    def leave(self, contributor: str) -> None:
        """Mark an account as left: its record is kept and its open tasks are marked as lost.

        Raises:
            GymError: ``KEY_REVOKED`` or ``UNAUTHENTICATED`` if the account is no longer active.
        """
        with self._database.transaction() as tx:
            account = accounts.c.contributor == contributor
            _active(tx.execute(select(accounts).where(account)).first(), contributor)
            tx.execute(update(accounts).where(account).values(status=LEFT))
            disconnect(tx, contributor)
            self._ledger.append(tx, "left", {"contributor": contributor})

    @rerun
    def connected(self, node_id: int, until: float) -> None:
        """Record the time until which a node counts as connected (Unix seconds; 0 disconnects it)."""
        with self._database.transaction() as tx:
            tx.execute(update(nodes).where(nodes.c.node_id == node_id).values(connected_until=until))

    def _check_policy(self, tx: Connection, contributor: str, invite: str) -> None:
        if self._policy.policy == "allow-list" and contributor not in self._policy.allow_list:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{contributor} is not on this hub's allow-list",
                "send this id to the coordinator",
            )
        if self._policy.policy != "invite":
            return
        if not invite:
            raise GymError(
                ErrorCode.INVITE_INVALID,
                "this hub needs an invite",
                "ask the coordinator to create one with gym-server invites create",
            )
        row = tx.execute(select(invites).where(invites.c.token_hash == token_hash(invite))).first()
        if row is None or row.used_by is not None or row.expires_at < self._clock():
            why = "is unknown" if row is None else "was used" if row.used_by else "has expired"
            raise GymError(ErrorCode.INVITE_INVALID, f"the invite {why}", "ask the coordinator for a new one")
        tx.execute(update(invites).where(invites.c.token_hash == row.token_hash).values(used_by=contributor))

    def _row(self, contributor: str) -> Any:
        with self._database.reading() as tx:
            return tx.execute(select(accounts).where(accounts.c.contributor == contributor)).first()

    @rerun
    def _node(self, contributor: str, instance: str) -> int:
        with self._database.transaction() as tx:
            return node_of(tx, contributor, instance, self._nodes_per_account, self._clock())

    def _token(self, row: Any, node_id: int, expires: int) -> str:
        claim = f"{row.contributor}.{node_id}.{expires}"
        bound = canonical_json(
            [
                claim,
                row.public_key.hex(),
                repr(float(row.enrolled_at)),
                row.status == LEFT,
                self._server,
                self._tls,
            ]
        )
        return f"{claim}.{hmac.digest(self._session_key, bound, 'sha256').hex()}"

    def _check_age(self, until: float) -> None:
        if until < self._clock():
            raise GymError(ErrorCode.UNAUTHENTICATED, "the session has expired", "authenticate again")

    def _check_work(self, public_key: bytes, work: bytes) -> None:
        if len(work) > _MAX_WORK_BYTES or not work_is_done(self._server, public_key, work, self.work_bits):
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"enrolment requires a proof of work of {counted(self.work_bits, 'bit')}, but no valid one was sent",
                "gym-client join computes it: about a second on one core at 20 bits",
            )

    @contextmanager
    def _signed_for_us(self) -> Iterator[None]:
        """Explain likely causes of an invalid signature in the error."""
        try:
            yield
        except GymError as error:
            if error.code is not ErrorCode.SIGNATURE_INVALID:
                raise
            raise GymError(
                error.code,
                f"{error.message}, or was made for a hub other than {self._server} with the TLS key "
                f"{self._tls or 'none (plain text)'}",
                "compare the fingerprint in servers/ with the coordinator's; another hub may have relayed this",
            ) from error


def _active(row: Any, contributor: str, also_left: bool = False) -> bytes:
    """Return the key of an account's row; raise if the account is not active."""
    if row is not None and row.status == "revoked":
        raise RevokedKey(contributor)
    if row is None or (row.status != "active" and not (also_left and row.status == LEFT)):
        what = "is not enrolled" if row is None else f"has {row.status}"
        raise GymError(ErrorCode.UNAUTHENTICATED, f"contributor {contributor!r} {what}", "enrol again")
    return bytes(row.public_key)
