"""Calls to one hub: a TLS channel bound to the pinned key, a session, and conversion of errors."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from gym_client.hub.clock import Clocks, HubTime
from gym_client.hub.exchange import MirrorSource, ObjectExchange
from gym_client.hub.heads import Heads
from gym_client.hub.replies import read_proof
from gym_client.hub.traffic import Rates
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin, key_for, require_one_pin
from gym_client.identity.proxy import proxy_for
from gym_client.identity.trust import check_dates, check_fingerprint, fetch_certificate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.tracing import outgoing_metadata
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN, SigningKey, server_id
from gym_fed.trust.identity.login import do_work, enrolment_claim, login_claim
from gym_fed.trust.identity.tls import certificate_host, fingerprint
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.limits import CALL_SECONDS, CHANNEL_OPTIONS, PROTOCOL, SESSION_KEY
from gym_fed.trust.wire.protocol import require_hub
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_CONTRIBUTOR = re.compile(CONTRIBUTOR_PATTERN, re.ASCII)
_MIN_SECONDS_LEFT = 60
_SLOWEST_BYTES_PER_SECOND = 32 << 10
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Status codes of a call that failed because the hub died, rather than because it refused the call."""
_OPEN_CALLS = (
    "Status",
    "Base",
    "Enrol",
    "Authenticate",
    "LedgerHeads",
    "LedgerProof",
    "RotateKey",
    "RevokeKey",
)


class HubClient:
    """A client for one hub. Thread-safe."""

    def __init__(self, home: Home, address: Address, pin: ServerPin, key: SigningKey | None = None) -> None:
        """Create the client; nothing is sent before the first call.

        Args:
            home: The home with key, instance and pins.
            address: Address of the hub.
            pin: Result of ``establish``; if it has no fingerprint, the channel is plain text.
            key: Key that signs requests; None for the key that the hub knows for this home.
        """
        self.home = home
        self.address = address
        self.pin = pin
        self.node_id = 0
        self.rates = Rates()
        self.seeding: ObjectExchange | None = None
        """Fetches public objects from other contributors and serves them; None to use only the hub."""
        self.mirrors: MirrorSource | None = None
        """The mirrors that the hub names; None to use only the hub."""
        self._key, self._instance = key or key_for(home, pin), home.instance
        self._lock = threading.RLock()
        self._session, self._expires_at = "", 0
        self._time = HubTime()
        self._open_channel()

    def status(self) -> pb.StatusReply:
        """Request the hub's status. Its ledger key is compared with the pin, or pinned at first contact.

        Raises:
            GymError: ``PROTOCOL_MISMATCH``; ``SERVER_KEY_CHANGED`` if its ledger key differs from the pinned one, or if
                this home knows another hub with the same id and a different key.
        """
        try:
            reply = self._measure()
        except GymError:
            self._require_one_ledger("")  # an unreachable hub cannot explain a proof
            raise
        require_hub(reply.protocol, reply.software_version)
        self._check_ledger_key(reply.ledger_public_key)
        server = server_id(reply.ledger_public_key)
        require_one_pin(self.home, self.pin, server, reply.ledger_public_key.hex())
        self._repin(server=server, name=reply.name, ledger_key=reply.ledger_public_key.hex())
        self._see(reply)
        return reply

    def enrol(self, name: str, invite: str = "", should_stop: Callable[[], bool] = lambda: False) -> str:
        """Register this home's key and return the contributor's id.

        Args:
            name: Name shown to the coordinator and in the ledger.
            invite: Token of an invite; empty if there is none.
            should_stop: Checked during the proof of work.

        Raises:
            GymError: ``INVITE_INVALID`` or ``PERMISSION_DENIED``, by the hub's policy; ``BUSY`` while the hub accepts
                no further enrolments from this network; ``INTERRUPTED`` after ``should_stop``.
        """
        bits, server = self.status().enrolment_work_bits, self._server()
        request = pb.EnrolRequest(
            public_key=self._key.public_key,
            name=name,
            invite=invite,
            signature=self._key.sign(enrolment_claim(name, invite, server, self.pin.fingerprint)),
            protocol=PROTOCOL,
            work=do_work(server, self._key.public_key, bits, should_stop) if bits else b"",
        )
        contributor = self.call("Enrol", request).contributor
        if not _CONTRIBUTOR.fullmatch(
            contributor
        ):  # after a rotation, the id is derived from the account's first key
            raise GymError(
                ErrorCode.INTERNAL, f"{self.address} enrolled {contributor!r}, which is not an account id"
            )
        self._repin(contributor=contributor, left="", public_key=self._key.public_key.hex())
        return str(contributor)

    def forget_enrolment(self) -> None:
        """Delete the record of the enrolment after ``Leave``; the next join enrols the account's key again."""
        self._repin(contributor="", left=self.pin.contributor, public_key=self._key.public_key.hex())
        self.renew_session()

    def note_leaving(self) -> bool:
        """Ask the hub whether the account has left, which another process may have done. If so, delete the enrolment.

        Returns:
            True if the account has left; False if it is active, or if the hub does not know it.
        """
        with self._lock:
            try:
                self.authenticate(may_have_left=True)
                status = self.call("Account", pb.AccountRequest()).status
            except GymError as error:
                if error.code is not ErrorCode.UNAUTHENTICATED:
                    raise
                return False
            if status == "left" and self.pin.contributor:
                self.forget_enrolment()
            return bool(status == "left")

    def authenticate(self, may_have_left: bool = False) -> None:
        """Open a new session. An account that has left gets a session that only allows queries and transfers.

        Args:
            may_have_left: Accept such a limited session even if this home did not know that the account has left.
        """
        with self._lock:
            account = self.pin.account
            if not account:
                raise GymError(
                    ErrorCode.UNAUTHENTICATED,
                    f"this key is not enrolled at {self.address}",
                    f"gym-client join --server {self.address}",
                )
            try:
                reply = self.call("Authenticate", self._login(account, may_have_left))
            except GymError as error:
                if error.code is not ErrorCode.CLOCK_SKEWED:
                    raise
                self._measure()  # the hub was restarted with a different time
                reply = self.call("Authenticate", self._login(account, may_have_left))
            self._session, self._expires_at = reply.session, reply.expires_at_seconds
            self.node_id = reply.node_id

    def now(self, method: str = "Status") -> float:
        """Return the hub's time in Unix seconds, for use in signatures; measure it if necessary.

        Args:
            method: Name of the call that the signature is for.

        Raises:
            GymError: ``LEDGER_FORKED`` if the call would be refused, even if the hub is unreachable.
        """
        self._require_one_ledger(method)
        if not self._time.is_known:
            self._measure()
        return self._time.now()

    @property
    def clocks(self) -> Clocks | None:
        """The readings of the clocks at the last ``Status``."""
        return self._time.clocks

    def sign(self, value: object) -> bytes:
        """Sign with the key that this hub knows."""
        return self._key.sign(value)

    def call(self, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        """Make a call that returns a single reply.

        Args:
            method: Name of the method in ``hub.proto``.
            request: A message, or a function that returns an iterator of messages; a function, since a call may be
                repeated.
            seconds: Deadline in seconds.

        Raises:
            GymError: The error from the hub, or the transport's ``UNAVAILABLE`` or ``DEADLINE_EXCEEDED``.
        """
        self._require_one_ledger(method)
        for attempt in range(2):
            metadata, session = self._metadata(method)
            try:
                with self.errors():
                    message = request() if callable(request) else request
                    return getattr(self._stub, method)(message, timeout=seconds, metadata=metadata)
            except GymError as error:
                if not self._may_renew(method, error, attempt, session):
                    raise
        raise AssertionError("unreachable")

    def stream(self, method: str, request: Any, seconds: float | None) -> Any:
        """Start a call with streamed replies. The caller iterates inside ``errors()`` and then cancels the call."""
        self._require_one_ledger(method)
        metadata, _ = self._metadata(method)
        return getattr(self._stub, method)(request, timeout=seconds, metadata=metadata)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert a failed call in the block to a ``GymError``."""
        try:
            yield
        except grpc.RpcError as error:
            refusal = from_rpc_error(error, self._shown)
            if (
                refusal.code is ErrorCode.INTERNAL
                and error.code() in _BROKEN
                and not error.trailing_metadata()
            ):
                refusal = GymError(ErrorCode.UNAVAILABLE, f"the connection broke: {refusal.message}")
            raise refusal from error

    def prove(self, sequence: int, size: int = 0) -> EntryProof:
        """Request the proof of a ledger entry; see ``gym_client.hub.heads.Prove``."""
        return read_proof(self.call("LedgerProof", pb.LedgerProofRequest(sequence=sequence, size=size)))

    def statements(self) -> list[str]:
        """Request the hub's restore statements; see ``gym_client.hub.heads.Statements``."""
        return list(self.call("Status", pb.StatusRequest()).restored_json)

    def renew_session(self) -> None:
        """Discard the session; the next call opens a new one."""
        with self._lock:
            self._session, self._expires_at = "", 0

    def check_key(self) -> None:
        """Check, after a failed call, that the hub still has the pinned key, and store a renewed certificate.

        Raises:
            GymError: ``SERVER_KEY_CHANGED``. Nothing is raised if the hub is unreachable.
        """
        if not self.pin.fingerprint:
            return
        try:
            pem = fetch_certificate(self.address)
        except GymError:
            return  # still unreachable; the caller keeps waiting
        check_fingerprint(self.home, self.address, fingerprint(pem), self.pin.fingerprint)
        check_dates(self.address, pem)
        if pem.decode("ascii") != self.pin.certificate_pem:
            with self._lock:
                self._repin(certificate_pem=pem.decode("ascii"))
                self._channel.close()
                self._open_channel()

    def pause_seeding(self, reason: str, paused: bool) -> None:
        """Pause or resume serving other contributors; serving resumes when no reason to pause is left."""
        if self.seeding is not None:
            self.seeding.pause(reason, paused)

    def close(self) -> None:
        """Stop seeding, and close the channel, which cancels running calls."""
        if self.seeding is not None:
            self.seeding.close()
        self._channel.close()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_channel(self) -> None:
        options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 5_000)]
        # Use the proxy that was used to fetch the certificate, not gRPC's own interpretation of the environment.
        if (proxy := proxy_for(self.address)) is None:
            options.append(("grpc.enable_http_proxy", 0))
        else:
            options.append(("grpc.http_proxy", proxy.url))
        self._shown = str(self.address) if proxy is None else f"{self.address} through {proxy}"
        if self.pin.fingerprint:
            pem = self.pin.certificate_pem.encode()  # the only root, so that only the pinned key is trusted
            credentials = grpc.ssl_channel_credentials(root_certificates=pem)
            options.append(("grpc.ssl_target_name_override", certificate_host(pem)))
            self._channel = grpc.secure_channel(str(self.address), credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(str(self.address), options=options)
        self._stub: Any = HubStub(self._channel)

    def _metadata(self, method: str) -> tuple[tuple[tuple[str, str], ...], str]:
        if method in _OPEN_CALLS:  # with a session, they would count towards the account's limits
            return (((SESSION_KEY, self._session),) if self._session else ()), ""
        with self._lock:
            if not self._session or self._expires_at < self._time.now() + _MIN_SECONDS_LEFT:
                self.authenticate()
            return ((SESSION_KEY, self._session), *outgoing_metadata()), self._session

    def _measure(self) -> pb.StatusReply:
        """Request the status and measure the hub's time."""
        return self._time.measure(lambda: self.call("Status", pb.StatusRequest()))

    def _login(self, account: str, may_have_left: bool) -> pb.AuthenticateRequest:
        """Create a login that is signed with the hub's current time."""
        nonce, issued_at, server = secrets.token_hex(16), int(self.now()), self._server()
        claim = login_claim(account, self._instance, issued_at, nonce, server, self.pin.fingerprint)
        return pb.AuthenticateRequest(
            contributor=account,
            instance=self._instance,
            issued_at_seconds=issued_at,
            nonce=nonce,
            signature=self._key.sign(claim),
            protocol=PROTOCOL,
            left=may_have_left or not self.pin.contributor,
            clock_seconds=time.time(),
        )

    def _may_renew(self, method: str, error: GymError, attempt: int, session: str) -> bool:
        if error.code is not ErrorCode.UNAUTHENTICATED or method in _OPEN_CALLS or attempt:
            return False
        with self._lock:
            if self._session == session:
                self.renew_session()
        return True

    def _see(self, reply: pb.StatusReply) -> None:
        def statements() -> list[str]:
            return list(reply.restored_json)

        heads = Heads(self.home, reply.ledger_public_key)
        heads.require_one_ledger(self.prove, statements)
        if reply.ledger_head_json:
            head = SignedHead.from_json(reply.ledger_head_json)
            heads.see(head, self.prove, is_newest=True, statements=statements)
        else:
            heads.require_shown(self.prove, statements)

    def _require_one_ledger(self, method: str) -> None:
        """Refuse calls to a hub with two ledgers, except revocations of lost keys.

        ``Status`` is allowed, since it may report that the hub was restored; otherwise ``status`` refuses the hub.
        """
        if self.pin.ledger_key and method not in ("RevokeKey", "Status", "LedgerProof"):
            Heads(self.home, bytes.fromhex(self.pin.ledger_key)).require_one_ledger()

    def _check_ledger_key(self, key: bytes) -> None:
        """Compare the full key with the pin, since collisions of the shorter id are feasible."""
        server, pinned = server_id(key), self.pin
        if (pinned.server and server != pinned.server) or (
            pinned.ledger_key and key.hex() != pinned.ledger_key
        ):
            raise GymError(
                ErrorCode.SERVER_KEY_CHANGED,
                f"{self.address} signs its ledger as {server} (key {key.hex()}), "
                f"not as {pinned.server} (key {pinned.ledger_key})",
                "a different hub uses this address; ask its coordinator",
            )

    def _server(self) -> str:
        if not self.pin.server:
            self.status()
        return self.pin.server

    def _repin(self, **changes: str) -> None:
        with self._lock:
            pin = self.pin.but(**changes)
            if pin != self.pin:
                pin.save(self.home, self.address)
                self.pin = pin


def transfer_seconds(num_bytes: int) -> float:
    """Return the deadline in seconds of a call that transfers ``num_bytes``, long enough for slow connections."""
    return CALL_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND
