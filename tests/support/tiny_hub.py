"""A hub of a hundred lines over real gRPC with TLS, whose misbehaviour a test can choose."""

from __future__ import annotations

import hashlib
import json
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, contributor_id, server_id, verify_signature
from gym_fed.trust.identity.login import enrolment_claim, login_claim, work_is_done
from gym_fed.trust.identity.tls import create_certificate
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.heads import EntryProof, Head, SignedHead
from gym_fed.trust.ledger.merkle import Tree
from gym_fed.trust.wire.errors import to_status
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS, CHUNK_BYTES, PROTOCOL, SESSION_KEY
from gym_fed.trust.wire.service import add_hub
from gym_fed.trust.wire.v1 import hub_pb2 as pb


class TinyHub:
    """Start it with ``start``; everything it saw is in its attributes."""

    def __init__(self, folder: Path, insecure: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.insecure = insecure
        self.key = SigningKey.generate()
        self.server = server_id(self.key.public_key)
        self.port = 0
        self.fingerprint = ""
        self.protocol, self.software_version, self.work_bits = PROTOCOL, "0.2.0", 4
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, bytes] = {}
        self.declared: dict[str, int] = {}
        self.begun: list[str] = []
        self.download_offsets: list[int] = []
        self.submitted: dict[str, pb.SubmitRequest] = {}
        self.events: queue.Queue[pb.WorkEvent | None] = queue.Queue()
        self.verdicts: list[dict[str, Any]] = []
        self.sessions: set[str] = set()
        self.left: set[str] = set()
        self.enrolled: dict[str, bytes] = {}
        self.heartbeats: list[str] = []
        self.hook: Callable[[str, Any], None] = lambda method, request: None
        """Called first in every call; may raise a ``GymError``."""
        self.receipt: dict[str, Any] = {"verdict": "received"}
        self.entries: list[Entry] = []
        self.heads: list[SignedHead] = []
        self.privacy_json = self.rewards_json = ""
        self.announces: dict[str, Any] = {}
        """Further fields of its status: base model, recipe, sizes."""
        self.break_upload_after: int | None = None
        self.break_download_after: int | None = None
        self.base: list[pb.BasePart] = []
        self.serve: Callable[[bytes], bytes] = lambda data: data
        self.announced_size: Callable[[int], int] = lambda size: size

    # ---- life ----

    def start(self) -> TinyHub:
        """Listen on the port of before, or on a free one."""
        self._grpc = grpc.server(ThreadPoolExecutor(8), options=CHANNEL_OPTIONS)
        add_hub(self, self._grpc)
        address = f"127.0.0.1:{self.port}"
        if self.insecure:
            self.port = self._grpc.add_insecure_port(address)
        else:
            key, certificate = self.folder / "tls.key", self.folder / "tls.crt"
            if not key.exists():
                self.fingerprint = create_certificate(key, certificate)
            pair = (key.read_bytes(), certificate.read_bytes())
            self.port = self._grpc.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        self._grpc.start()
        return self

    def stop(self) -> None:
        self._grpc.stop(None).wait()

    def change_key(self) -> None:
        """Take another TLS key at the next start."""
        (self.folder / "tls.key").unlink()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def give(self, task: pb.Task) -> None:
        self.events.put(pb.WorkEvent(task=task))

    def finish(self) -> None:
        self.events.put(pb.WorkEvent(finished=pb.Finished(message="done")))

    # ---- calls ----

    def _enter(self, method: str, request: Any, context: Any, is_open: bool = False) -> None:
        try:
            self.hook(method, request)
            token = dict(context.invocation_metadata()).get(SESSION_KEY)
            if not is_open and token not in self.sessions:
                raise GymError(ErrorCode.UNAUTHENTICATED, "no session", "authenticate")
        except GymError as error:
            self._refuse(context, error)

    def _refuse(self, context: Any, error: GymError) -> None:
        status, details, trailer = to_status(error)
        context.set_trailing_metadata(trailer)
        context.abort(status, details)

    def Status(self, request: Any, context: Any) -> pb.StatusReply:
        self._enter("Status", request, context, is_open=True)
        return pb.StatusReply(
            name="tiny",
            ledger_public_key=self.key.public_key,
            enrolment="open",
            privacy_json=self.privacy_json,
            ledger_head_json=self.heads[-1].to_json() if self.heads else "",
            protocol=self.protocol,
            software_version=self.software_version,
            enrolment_work_bits=self.work_bits,
            **self.announces,
        )

    def Base(self, request: Any, context: Any) -> Iterator[pb.BasePart]:
        self._enter("Base", request, context, is_open=True)
        yield from self.base

    def Enrol(self, request: Any, context: Any) -> pb.EnrolReply:
        self._enter("Enrol", request, context, is_open=True)
        signed = enrolment_claim(request.name, request.invite, self.server, self.fingerprint)
        verify_signature(request.public_key, signed, request.signature)
        assert work_is_done(self.server, request.public_key, request.work, self.work_bits)
        self.enrolled[contributor_id(request.public_key)] = request.public_key
        return pb.EnrolReply(contributor=contributor_id(request.public_key))

    def Authenticate(self, request: Any, context: Any) -> pb.AuthenticateReply:
        self._enter("Authenticate", request, context, is_open=True)
        if request.contributor not in self.enrolled:
            self._refuse(context, GymError(ErrorCode.UNAUTHENTICATED, "not enrolled"))
        signed = login_claim(
            request.contributor,
            request.instance,
            request.issued_at_seconds,
            request.nonce,
            self.server,
            self.fingerprint,
        )
        verify_signature(self.enrolled[request.contributor], signed, request.signature)
        self.sessions.add(request.nonce)
        if request.contributor in self.left and not request.left:
            self._refuse(context, GymError(ErrorCode.UNAUTHENTICATED, "has left"))
        return pb.AuthenticateReply(
            session=request.nonce, expires_at_seconds=int(time.time()) + 3600, node_id=7
        )

    def Work(self, request: Any, context: Any) -> Iterator[pb.WorkEvent]:
        self._enter("Work", request, context)
        while context.is_active():
            if self.left:
                self._refuse(context, GymError(ErrorCode.UNAUTHENTICATED, "has left", "enrol again"))
            try:
                event = self.events.get(timeout=0.05)
            except queue.Empty:
                continue
            if event is None:  # the stream breaks off
                return
            yield event

    def Heartbeat(self, request: Any, context: Any) -> pb.HeartbeatReply:
        self._enter("Heartbeat", request, context)
        self.heartbeats.append(request.message_id)
        return pb.HeartbeatReply(lease_seconds=30)

    def BeginUpload(self, request: Any, context: Any) -> pb.UploadState:
        self._enter("BeginUpload", request, context)
        self.begun.append(request.sha256)
        self.declared[request.sha256] = request.size_bytes
        held = len(self.parts.get(request.sha256, b""))
        complete = request.sha256 in self.objects
        return pb.UploadState(offset=request.size_bytes if complete else held, complete=complete)

    def Upload(self, chunks: Iterator[Any], context: Any) -> pb.UploadState:
        self._enter("Upload", None, context)
        name = ""
        for chunk in chunks:
            name = name or chunk.sha256
            part = self.parts.setdefault(name, b"")
            assert chunk.offset == len(part), f"chunk at {chunk.offset}, held {len(part)}"
            assert len(chunk.data) <= CHUNK_BYTES
            self.parts[name] = part + chunk.data
            if self.break_upload_after is not None and len(self.parts[name]) >= self.break_upload_after:
                self.break_upload_after = None
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
        data = self.parts[name]
        if len(data) < self.declared[name]:
            return pb.UploadState(offset=len(data), complete=False)
        assert hashlib.sha256(data).hexdigest() == name
        self.objects[name] = self.parts.pop(name)
        return pb.UploadState(offset=len(data), complete=True)

    def Download(self, request: Any, context: Any) -> Iterator[pb.DownloadChunk]:
        self._enter("Download", request, context)
        self.download_offsets.append(request.offset)
        if request.sha256 not in self.objects:
            self._refuse(context, GymError(ErrorCode.NOT_FOUND, "no such object"))
        data = self.serve(self.objects[request.sha256])
        yield pb.DownloadChunk(size_bytes=self.announced_size(len(data)))
        for start in range(request.offset, len(data), 1000):
            yield pb.DownloadChunk(data=data[start : start + 1000])
            if self.break_download_after is not None and start + 1000 >= self.break_download_after:
                self.break_download_after = None
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")

    def Submit(self, request: Any, context: Any) -> pb.SubmitReply:
        self._enter("Submit", request, context)
        self.submitted[request.message_id] = request
        if request.HasField("error"):
            return pb.SubmitReply(receipt_json=json.dumps({"verdict": "failed"}))
        return pb.SubmitReply(receipt_json=json.dumps(self.receipt))

    def Account(self, request: Any, context: Any) -> pb.AccountReply:
        self._enter("Account", request, context)
        return pb.AccountReply(
            balance=3,
            status="left" if self.left else "active",
            verdicts_json=[json.dumps(v) for v in self.verdicts],
            rewards_json=self.rewards_json,
        )

    def record(self, kind: str, body: dict[str, Any]) -> EntryProof:
        """Append to the ledger and sign the head."""
        last = (self.entries[-1].sequence, self.entries[-1].hash) if self.entries else None
        self.entries.append(Entry.following(last, kind, body))
        entry, tree = self.entries[-1], Tree(entry.hash for entry in self.entries)
        root = tree.root(tree.size)
        head = Head("gym-head-1", self.server, tree.size, entry.hash, root, 0, int(time.time()))
        self.heads.append(SignedHead.sign(self.key, head))
        return EntryProof(entry, self.heads[-1])

    def LedgerHeads(self, request: Any, context: Any) -> Iterator[pb.LedgerHead]:
        for head in self.heads[max(0, request.from_size - 1) :]:
            yield pb.LedgerHead(head_json=head.to_json())

    def LedgerProof(self, request: Any, context: Any) -> pb.LedgerProofReply:
        size = request.size or len(self.entries)
        if not 0 < request.sequence <= size <= len(self.entries):
            self._refuse(context, GymError(ErrorCode.NOT_FOUND, f"no entry {request.sequence}"))
        entry, tree = self.entries[request.sequence - 1], Tree(entry.hash for entry in self.entries)
        return pb.LedgerProofReply(
            entry=_message(entry),
            head_json=self.heads[size - 1].to_json(),
            path=tree.inclusion(request.sequence - 1, size) if request.sequence < size else [],
        )

    def Ledger(self, request: Any, context: Any) -> Iterator[pb.LedgerEntry]:
        self._enter("Ledger", request, context)
        yield from map(_message, self.entries[max(0, request.from_sequence - 1) :])

    def Leave(self, request: Any, context: Any) -> pb.LeaveReply:
        self._enter("Leave", request, context)
        self.left.update(self.enrolled)
        self.sessions.clear()
        return pb.LeaveReply()


def _message(entry: Entry) -> pb.LedgerEntry:
    return pb.LedgerEntry(
        sequence=entry.sequence,
        kind=entry.kind,
        body_json=entry.body_json,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )
