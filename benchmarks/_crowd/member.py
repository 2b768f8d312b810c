"""A contributor of the crowd, which sends everything that the agent sends but does not train."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc

from _crowd.calls import Calls
from _crowd.messages import chunks
from _crowd.updates import SPOILS, Updates
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.identity.login import do_work, enrolment_claim, login_claim
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.identity.tls import TLS_NAME
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.limits import CALL_SECONDS, CHANNEL_OPTIONS, PROTOCOL, SESSION_KEY
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import update_records

T = TypeVar("T")

MALICE = ("forged", "replayed", "wrong-base", "garbage", "copied", *SPOILS)
"""Kinds of malicious members. They send a zero signature, a replayed manifest, a wrong base, invalid bytes, another
member's file, or a file spoiled by one of ``SPOILS``.
"""
_PASSING = (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.BUSY, ErrorCode.INTERNAL)
_MISSED = (ErrorCode.STALE, ErrorCode.LEASE_LOST, ErrorCode.REPLAYED)
"""Refusals of a correct update that came too late."""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.5, 5.0
_LONGEST_THINK = 4.0
"""Maximum thinking time, as a multiple of the mean."""


@dataclass
class Crowd:
    """What all members share.

    Attributes:
        address: The hub's address as host:port.
        certificate: The hub's certificate, PEM.
        tls: Fingerprint of the hub's TLS key.
        updates: The pool of updates.
        think_seconds: Mean time from a task to its upload, exponentially distributed.
        receipts: Receipts of acknowledged updates, by digest of the manifest.
        missed: Number of correct updates that came too late, by code.
        outcomes: Number of verdicts by kind of member; "" for honest members.
        over: Set when members must end.
    """

    address: str
    certificate: bytes
    tls: str
    updates: Updates
    think_seconds: float
    draw: random.Random
    calls: Calls = field(default_factory=Calls)
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)
    missed: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_up: int = 0
    bytes_down: int = 0
    connected: int = 0
    newest_file: bytes = b""
    """The last honest update, which members of kind ``copied`` send."""
    _specs: dict[str, TaskSpec] = field(default_factory=dict)

    def spec_of(self, task: pb.Task) -> TaskSpec:
        """Parse a round's task once, since all members get the same text."""
        entries = task.content.configs["task"].entries
        text = next(entry.value.text for entry in entries if entry.key == "spec")
        if text not in self._specs:
            self._specs = {text: TaskSpec.model_validate_json(text)}
        return self._specs[text]


class Finished(Exception):
    """Raised if the hub has no more rounds."""


class Member:
    """A contributor with its own key and connection.

    Args:
        crowd: The state that all members share.
        number: Number of the member, used in its name and seed.
        malice: Malicious behaviour, one of ``MALICE``; empty for an honest member.
        flaps: True if half of its tasks are interrupted by a lost connection.
    """

    def __init__(self, crowd: Crowd, number: int, malice: str = "", flaps: bool = False) -> None:
        self.crowd, self.name, self.malice, self.flaps = crowd, f"member {number}", malice, flaps
        self.draw = random.Random(f"{crowd.draw.random()} {number}")
        self.key = SigningKey.generate()
        self.is_enrolled = False
        self._instance = secrets.token_hex(8)
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._soups: set[str] = set()
        self._sent: pb.SubmitRequest | None = None
        self._stub: Any = None
        self._status = pb.StatusReply()

    async def run(self) -> None:
        """Contribute until the crowd or the hub has finished, reconnecting after failures."""
        pause = _FIRST_PAUSE_SECONDS
        while not self.crowd.over.is_set():
            try:
                async with self._connected():
                    pause = _FIRST_PAUSE_SECONDS
                    await self._listen()
            except Finished:
                return
            except GymError as error:
                if error.code is ErrorCode.UNAUTHENTICATED:
                    self._metadata = ()
                elif error.code not in _PASSING:
                    raise
                await self._sleep(pause * self.draw.uniform(0.5, 1.5))
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    async def leave(self) -> None:
        """Withdraw the account, as ``gym-client leave`` does."""
        with suppress(GymError):
            async with self._connected():
                await self._call("Leave", pb.LeaveRequest())

    # ---- connection ----

    def _connected(self) -> _Connection:
        return _Connection(self)

    async def open(self) -> None:
        """Connect, and enrol and log in if needed."""
        self._status = await self._call("Status", pb.StatusRequest())
        if not self.is_enrolled:
            await self._enrol()
        if not self._metadata:
            await self._log_in()

    def use(self, channel: Any) -> None:
        """Use a channel for further calls."""
        self._stub = HubStub(channel)

    async def _enrol(self) -> None:
        status, key = self._status, self.key
        server = server_id(status.ledger_public_key)
        signed = enrolment_claim(self.name, "", server, self.crowd.tls)
        request = pb.EnrolRequest(
            public_key=key.public_key,
            name=self.name,
            signature=key.sign(signed),
            protocol=PROTOCOL,
            work=do_work(server, key.public_key, status.enrolment_work_bits),
        )
        await self._call("Enrol", request)
        self.is_enrolled = True

    async def _log_in(self) -> None:
        account, now, nonce = self.key.contributor, int(time.time()), secrets.token_hex(16)
        server = server_id(self._status.ledger_public_key)
        claim = login_claim(account, self._instance, now, nonce, server, self.crowd.tls)
        request = pb.AuthenticateRequest(
            contributor=account,
            instance=self._instance,
            issued_at_seconds=now,
            nonce=nonce,
            signature=self.key.sign(claim),
            protocol=PROTOCOL,
        )
        reply = await self._call("Authenticate", request)
        self._metadata = ((SESSION_KEY, reply.session),)

    # ---- tasks ----

    async def _listen(self) -> None:
        stream = self._stub.Work(pb.WorkRequest(), metadata=self._metadata)
        try:
            async for event in stream:
                kind = event.WhichOneof("event")
                if kind == "finished":
                    raise Finished
                if kind == "task" and not await self._answer(event.task):
                    return
                if self.crowd.over.is_set():
                    return
        except grpc.RpcError as error:
            raise self._refusal("Work", from_rpc_error(error, "hub")) from None
        finally:
            stream.cancel()

    async def _answer(self, task: pb.Task) -> bool:
        """Answer a task; return False if a flapping member lost its connection instead."""
        spec = self.crowd.spec_of(task)
        seconds = min(self.draw.expovariate(1.0), _LONGEST_THINK) * self.crowd.think_seconds
        try:
            async with self._heartbeats(task):
                for references in task.content.arrays["soups"].arrays:
                    if references.sha256 not in self._soups:
                        await self._download(references.sha256)
                if self.flaps and self.draw.random() < 0.5:
                    await self._sleep(seconds * self.draw.random())
                    return False
                await self._sleep(seconds)
                await self._beat(task)
                if self.malice:
                    await self._attack(task, spec)
                else:
                    delta = self.crowd.updates.make(spec.version_digest, self.draw)
                    await self._contribute(task, spec, delta)
                    self.crowd.newest_file = delta
            await self._call("Account", pb.AccountRequest())
        except GymError as error:
            if error.code in _MISSED:
                self.crowd.missed[error.code.value] += 1
            elif not self.malice or error.code in (*_PASSING, ErrorCode.UNAUTHENTICATED):
                raise
            else:
                self.crowd.outcomes[self.malice, error.code.value] += 1
        return True

    @asynccontextmanager
    async def _heartbeats(self, task: pb.Task) -> AsyncIterator[None]:
        """Send three heartbeats per lease inside the context, as a contributor does from the task to its answer."""

        async def beat() -> None:
            while not self.crowd.over.is_set():
                await self._sleep(task.lease_seconds / 3)
                with suppress(GymError):  # a lost lease is reported by the answer
                    await self._beat(task)

        beats = asyncio.create_task(beat())
        try:
            yield
        finally:
            beats.cancel()

    async def _beat(self, task: pb.Task) -> None:
        beating = pb.HeartbeatRequest(message_id=task.message_id, phase="train", done=50, total=100)
        await self._again(partial(self._call, "Heartbeat", beating))

    async def _contribute(self, task: pb.Task, spec: TaskSpec, delta: bytes, **changes: Any) -> None:
        manifest = self._manifest(task, spec, delta, **changes)
        await self._upload(delta)
        await self._submit(task, manifest, manifest.sign(self.key))

    async def _attack(self, task: pb.Task, spec: TaskSpec) -> None:
        delta = self.crowd.updates.make(
            spec.version_digest, self.draw, self.malice if self.malice in SPOILS else ""
        )
        if self.malice == "garbage":
            delta = secrets.token_bytes(len(delta))
        elif self.malice == "copied":
            delta = self.crowd.newest_file or delta
        elif self.malice == "replayed" and self._sent is not None:
            again = pb.SubmitRequest(message_id=task.message_id, content=self._sent.content)
            await self._call("Submit", again)
            return
        if self.malice == "forged":
            await self._upload(delta)
            await self._submit(task, self._manifest(task, spec, delta), bytes(64))
        elif self.malice == "wrong-base":
            await self._contribute(task, spec, delta, base_digest=f"sha256:{secrets.token_hex(32)}")
        else:
            await self._contribute(task, spec, delta)

    def _manifest(self, task: pb.Task, spec: TaskSpec, delta: bytes, **changes: Any) -> UpdateManifest:
        issued, expires = lifetime(time.time())
        values: dict[str, Any] = {
            "contributor": self.key.contributor,
            "server": server_id(self._status.ledger_public_key),
            "task": task.message_id,
            "server_round": spec.server_round,
            "base_digest": spec.version_digest,
            "delta_sha256": hashlib.sha256(delta).hexdigest(),
            "delta_bytes": len(delta),
            "nonce": new_nonce(),
            "issued_at_seconds": issued,
            "expires_at_seconds": expires,
            "num_examples": 10,
        }
        return UpdateManifest(**{**values, **changes})

    async def _submit(self, task: pb.Task, manifest: UpdateManifest, signature: bytes) -> None:
        """Send the same answer until it is acknowledged, and record the receipt."""
        records = update_records(manifest, signature, self.key.public_key)
        self._sent = pb.SubmitRequest(message_id=task.message_id, content=records)
        request = self._sent
        reply = await self._again(lambda: self._call("Submit", request))
        receipt = json.loads(reply.receipt_json)
        self.crowd.receipts[manifest.digest] = receipt
        self.crowd.outcomes[self.malice, receipt.get("code") or receipt["verdict"]] += 1

    # ---- calls ----

    async def _upload(self, delta: bytes) -> None:
        sha256 = hashlib.sha256(delta).hexdigest()

        async def upload() -> None:
            state = await self._call(
                "BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=len(delta))
            )
            if not state.complete:
                state = await self._call("Upload", chunks(sha256, delta, state.offset))
            if not state.complete:
                raise GymError(ErrorCode.UNAVAILABLE, "the upload ended early")

        await self._again(upload)
        self.crowd.bytes_up += len(delta)

    async def _download(self, sha256: str) -> None:
        async def download() -> None:
            started, hashed = time.perf_counter(), hashlib.sha256()
            try:
                request = pb.DownloadRequest(sha256=sha256)
                async for chunk in self._stub.Download(
                    request, metadata=self._metadata, timeout=10 * CALL_SECONDS
                ):
                    hashed.update(chunk.data)
                    self.crowd.bytes_down += len(chunk.data)
            except grpc.RpcError as error:
                raise self._refusal("Download", from_rpc_error(error, "hub")) from None
            self.crowd.calls.seconds["Download"].append(time.perf_counter() - started)
            if hashed.hexdigest() != sha256:
                raise RuntimeError(f"soup {sha256} arrived with other bytes")

        await self._again(download)
        self._soups.add(sha256)

    async def _call(self, method: str, request: Any) -> Any:
        started = time.perf_counter()
        try:
            reply = await getattr(self._stub, method)(request, timeout=CALL_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._refusal(method, from_rpc_error(error, "hub")) from None
        self.crowd.calls.seconds[method].append(time.perf_counter() - started)
        return reply

    def _refusal(self, method: str, error: GymError) -> GymError:
        calls = self.crowd.calls
        (calls.refused_malicious if self.malice else calls.refused)[method, error.code.value] += 1
        return error

    async def _again(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the hub is unreachable; gRPC reconnects by itself."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await work()
            except GymError as error:
                if error.code not in _PASSING or self.crowd.over.is_set():
                    raise
            await self._sleep(pause * self.draw.uniform(0.5, 1.5))
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.crowd.over.wait(), seconds)


class _Connection:
    """A context manager for a member's TLS channel, which has its own subchannel."""

    def __init__(self, member: Member) -> None:
        self._member, self._crowd = member, member.crowd

    async def __aenter__(self) -> None:
        options = [
            *CHANNEL_OPTIONS,
            ("grpc.ssl_target_name_override", TLS_NAME),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", int(1000 * _LAST_PAUSE_SECONDS)),
        ]
        credentials = grpc.ssl_channel_credentials(self._crowd.certificate)
        self._channel = grpc.aio.secure_channel(self._crowd.address, credentials, options=options)
        self._crowd.connected += 1
        try:
            self._member.use(self._channel)
            await self._member.open()
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._crowd.connected -= 1
        await self._channel.close(None)
