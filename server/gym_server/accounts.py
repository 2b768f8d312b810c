"""Enrolment, invites, sessions and nodes: who may speak to the hub, and as whom.

A session token is ``contributor.node.expiry.hmac``; the key of the HMAC is on disk, so sessions outlive restarts. The
HMAC covers the account's public key too, so that a session ends when the key is replaced or revoked.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update

from gym_fed.config.server import EnrolmentConfig, LimitsConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.invite import new_token, token_hash
from gym_fed.identity.keys import contributor_id, verify_signature
from gym_fed.text import is_name, plain, whole_number
from gym_server.keys import Keys, RevokedKey, check_signer, key_row
from gym_server.ledger import Ledger
from gym_server.nodes import node_of
from gym_server.store.database import Database
from gym_server.store.tables import accounts, invites, nodes

MAX_NAME = 80
"""Characters of a contributor's name."""

SESSION_SECONDS = 3600
_CLOCK_SKEW_SECONDS = 300


@dataclass(frozen=True)
class Session:
    """The authenticated caller of one call."""

    contributor: str
    node_id: int
    public_key: bytes


class Accounts:
    """The hub's register of contributors."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        keys: Keys,
        policy: EnrolmentConfig,
        server: str,
        session_key: bytes,
        nodes_per_account: int = LimitsConfig().nodes_per_account,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self.keys = keys
        self._policy = policy
        self._server = server
        self._session_key = session_key
        self._nodes_per_account = nodes_per_account

    def invite(self, note: str, valid_seconds: float) -> str:
        """A new one-time token; only its hash is kept."""
        token, now = new_token(), time.time()
        with self._database.transaction() as tx:
            tx.execute(
                invites.insert().values(
                    token_hash=token_hash(token), note=note, created_at=now, expires_at=now + valid_seconds
                )
            )
        return token

    def enrol(self, public_key: bytes, name: str, invite: str, signature: bytes) -> str:
        """Register a key; the same key again is answered with the same id.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``INVITE_INVALID``, ``PERMISSION_DENIED`` by the policy.
        """
        name = name.strip()
        if not is_name(name, MAX_NAME):
            raise GymError(
                ErrorCode.USAGE,
                f"name {plain(name, 80)!r} is empty, has more than {MAX_NAME} characters, or some that nobody sees",
                "choose another with --name",
            )
        verify_signature(public_key, {"enrol": name, "invite": invite, "server": self._server}, signature)
        return self._register(public_key, name, invite)

    def meet(self, public_key: bytes) -> str:
        """Register a key that signed a reply on a stock Flower grid, where nobody enrols; invites cannot reach it.

        Raises:
            GymError: ``INVITE_INVALID`` or ``PERMISSION_DENIED`` by the policy.
        """
        return self._register(public_key, contributor_id(public_key), "")

    def _register(self, public_key: bytes, name: str, invite: str) -> str:
        with self._database.transaction() as tx:
            key = key_row(tx, public_key)
            contributor = key.contributor if key is not None else contributor_id(public_key)
            account = accounts.c.contributor == contributor
            status = tx.scalar(select(accounts.c.status).where(account))
            if key is not None and key.status != "active":
                what = "revoked" if key.status == "revoked" else "replaced by another one"
                raise GymError(
                    ErrorCode.KEY_REVOKED,
                    f"this key of {contributor} was {what} here",
                    "enrol with the account's current key, or with a new one as somebody new",
                )
            if status == "left":
                tx.execute(update(accounts).where(account).values(status="active"))
            if status is None:
                self._check_policy(tx, contributor, invite)
                tx.execute(
                    accounts.insert().values(
                        contributor=contributor,
                        name=name,
                        public_key=public_key,
                        status="active",
                        enrolled_at=time.time(),
                    )
                )
                self.keys.first(tx, contributor, public_key)
            if status != "active":
                body = {"contributor": contributor, "name": name, "public_key": public_key.hex()}
                self._ledger.append(tx, "enrolled", body)
        return contributor

    def authenticate(
        self, contributor: str, instance: str, issued_at: int, nonce: str, signature: bytes
    ) -> tuple[str, float, int]:
        """Exchange a signature for a session: token, expiry, node id.

        Raises:
            GymError: ``UNAUTHENTICATED`` for an unknown contributor or a clock that is off; ``SIGNATURE_INVALID``;
                ``KEY_REVOKED`` for a key that was the account's and is no longer.
        """
        now = time.time()
        if abs(now - issued_at) > _CLOCK_SKEW_SECONDS:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"the request was signed {now - issued_at:+.0f} s from the hub's clock",
                "set this machine's clock (`gym doctor` shows it)",
            )
        if not 8 <= len(instance) <= 64 or not instance.isalnum():
            raise GymError(ErrorCode.USAGE, f"instance {instance[:64]!r} is not 8 to 64 letters and digits")
        signed = {
            "authenticate": contributor,
            "instance": instance,
            "issued_at": issued_at,
            "nonce": nonce,
            "server": self._server,
        }
        with self._database.reading() as tx:
            row = tx.execute(select(accounts).where(accounts.c.contributor == contributor)).first()
            if row is not None:
                check_signer(tx, row, signed, signature)
        public_key = _active(row, contributor)
        node_id = self._node(contributor, instance)
        expires = int(now + SESSION_SECONDS)
        return self._token(contributor, node_id, expires, public_key), expires, node_id

    def session(self, token: str) -> Session:
        """Who a token speaks for.

        Raises:
            GymError: ``UNAUTHENTICATED`` when it is not ours, expired, of a key that was replaced since, or its account
                is no longer active; ``KEY_REVOKED``.
        """
        parts = token.split(".")
        row = self._row(parts[0])
        node_id, expires = map(whole_number, parts[1:3]) if len(parts) == 4 else (None, None)
        if row is not None and node_id is not None and expires is not None:
            contributor = parts[0]
            if hmac.compare_digest(token, self._token(contributor, node_id, expires, row.public_key)):
                if expires < time.time():
                    raise GymError(ErrorCode.UNAUTHENTICATED, "the session has expired", "authenticate again")
                return Session(contributor, node_id, _active(row, contributor))
        raise GymError(ErrorCode.UNAUTHENTICATED, "this call needs a session", "enrol, then authenticate")

    def check(self, session: Session) -> None:
        """Whether a session that was good still is; called while a call lasts.

        Raises:
            GymError: ``KEY_REVOKED``; ``UNAUTHENTICATED`` when the key was replaced, or the account left.
        """
        if _active(self._row(session.contributor), session.contributor) != session.public_key:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"the key of {session.contributor} was replaced meanwhile",
                "authenticate with the new one",
            )

    def public_key(self, contributor: str) -> bytes:
        """The active key of a contributor.

        Raises:
            GymError: ``UNAUTHENTICATED`` when there is none, ``KEY_REVOKED``.
        """
        return _active(self._row(contributor), contributor)

    def leave(self, contributor: str) -> None:
        """Withdraw an account; its record stays.

        Raises:
            GymError: ``KEY_REVOKED`` or ``UNAUTHENTICATED`` for an account that is not active any more.
        """
        with self._database.transaction() as tx:
            account = accounts.c.contributor == contributor
            _active(tx.execute(select(accounts).where(account)).first(), contributor)
            tx.execute(update(accounts).where(account).values(status="left"))
            tx.execute(update(nodes).where(nodes.c.contributor == contributor).values(connected_until=0.0))
            self._ledger.append(tx, "left", {"contributor": contributor})

    def connected(self, node_id: int, until: float) -> None:
        """Note until when a node counts as connected (0: it is gone)."""
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
                "ask the coordinator for `gym-server invite`",
            )
        row = tx.execute(select(invites).where(invites.c.token_hash == token_hash(invite))).first()
        if row is None or row.used_by is not None or row.expires_at < time.time():
            why = "is unknown" if row is None else "was used" if row.used_by else "has expired"
            raise GymError(ErrorCode.INVITE_INVALID, f"the invite {why}", "ask the coordinator for a new one")
        tx.execute(update(invites).where(invites.c.token_hash == row.token_hash).values(used_by=contributor))

    def _row(self, contributor: str) -> Any:
        with self._database.reading() as tx:
            return tx.execute(select(accounts).where(accounts.c.contributor == contributor)).first()

    def _node(self, contributor: str, instance: str) -> int:
        with self._database.transaction() as tx:
            return node_of(tx, contributor, instance, self._nodes_per_account)

    def _token(self, contributor: str, node_id: int, expires: int, public_key: bytes) -> str:
        claim = f"{contributor}.{node_id}.{expires}"
        bound = f"{claim}.{public_key.hex()}".encode()
        return f"{claim}.{hmac.digest(self._session_key, bound, 'sha256').hex()}"


def _active(row: Any, contributor: str) -> bytes:
    """The key of an account's row."""
    if row is not None and row.status == "revoked":
        raise RevokedKey(contributor)
    if row is None or row.status != "active":
        what = "is not enrolled" if row is None else f"has {row.status}"
        raise GymError(ErrorCode.UNAUTHENTICATED, f"contributor {contributor!r} {what}", "enrol again")
    return bytes(row.public_key)
