"""A contributor made of bare gRPC calls: it can do everything right, and everything wrong."""

from __future__ import annotations

import hashlib
import json
import secrets
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TaskSpec
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.identity.login import do_work, enrolment_claim, login_claim
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.identity.tls import TLS_NAME, fingerprint
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS, DELTA_STYPE, PROTOCOL, SESSION_KEY
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.wait import SECONDS


class RawContributor:
    """Speaks `hub.proto` directly."""

    def __init__(self, address: str, name: str = "raw", key: SigningKey | None = None) -> None:
        host, _, port = address.rpartition(":")
        pem = ssl.get_server_certificate((host, int(port))).encode()
        self.tls = fingerprint(pem)
        self.channel = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(root_certificates=pem),
            options=[*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME)],
        )
        self.stub = HubStub(self.channel)
        self.key = key or SigningKey.generate()
        self.name = name
        self.status = self.stub.Status(pb.StatusRequest(), timeout=SECONDS)
        self.server = server_id(self.status.ledger_public_key)
        self.session = ""

    def enrol(self, invite: str = "", instance: str = "rawinstance") -> RawContributor:
        signed = enrolment_claim(self.name, invite, self.server, self.tls)
        request = pb.EnrolRequest(
            public_key=self.key.public_key,
            name=self.name,
            invite=invite,
            signature=self.key.sign(signed),
            protocol=PROTOCOL,
            work=do_work(self.server, self.key.public_key, self.status.enrolment_work_bits),
        )
        return self.log_in(self.call(self.stub.Enrol, request).contributor, instance)

    def log_in(self, account: str, instance: str = "rawinstance") -> RawContributor:
        """Begin a session of an account, with the key that it has now."""
        now, nonce = int(time.time()), secrets.token_hex(16)
        claim = login_claim(account, instance, now, nonce, self.server, self.tls)
        reply = self.call(
            self.stub.Authenticate,
            pb.AuthenticateRequest(
                contributor=account,
                instance=instance,
                issued_at_seconds=now,
                nonce=nonce,
                signature=self.key.sign(claim),
                protocol=PROTOCOL,
            ),
        )
        self.session = reply.session
        return self

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [(SESSION_KEY, self.session)] if self.session else []

    def call(self, method: Any, request: Any) -> Any:
        """A call; a refusal is raised as the ``GymError`` that it carries."""
        try:
            return method(request, timeout=SECONDS, metadata=self.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, "hub") from None

    def next_task(self, seconds: float = SECONDS) -> pb.Task:
        """The next task; the stream is closed again (the lease stays)."""
        stream = self.stub.Work(pb.WorkRequest(), timeout=seconds, metadata=self.metadata)
        try:
            for event in stream:
                if event.HasField("task"):
                    task: pb.Task = event.task
                    return task
        except grpc.RpcError as error:
            raise from_rpc_error(error, "hub") from None
        finally:
            stream.cancel()
        raise AssertionError("the stream ended without a task")

    def upload(self, data: bytes, declared: int | None = None, sha256: str | None = None) -> pb.UploadState:
        name = sha256 or hashlib.sha256(data).hexdigest()
        state = self.call(
            self.stub.BeginUpload,
            pb.BeginUploadRequest(sha256=name, size_bytes=len(data) if declared is None else declared),
        )
        if not state.complete:
            state = self.call(self.stub.Upload, chunks(name, data, state.offset))
        assert isinstance(state, pb.UploadState)
        return state

    def download(self, sha256: str) -> bytes:
        try:
            stream = self.stub.Download(
                pb.DownloadRequest(sha256=sha256), timeout=SECONDS, metadata=self.metadata
            )
            return b"".join(chunk.data for chunk in stream)
        except grpc.RpcError as error:
            raise from_rpc_error(error, "hub") from None

    def manifest(self, task: pb.Task, delta: bytes, **changes: Any) -> UpdateManifest:
        spec = spec_of(task)
        issued, expires = lifetime(time.time())
        fields: dict[str, Any] = {
            "contributor": self.key.contributor,
            "server": self.server,
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
        return UpdateManifest(**{**fields, **changes})

    def submit(
        self, task_id: str, manifest: UpdateManifest, signature: bytes | None = None
    ) -> dict[str, Any]:
        """Answer a task; returns the receipt."""
        content = update_records(manifest, signature or manifest.sign(self.key), self.key.public_key)
        request = pb.SubmitRequest(message_id=task_id, content=content)
        receipt: dict[str, Any] = json.loads(self.call(self.stub.Submit, request).receipt_json)
        return receipt

    def contribute(self, delta: bytes, task: pb.Task | None = None) -> dict[str, Any]:
        """Take a task, upload and answer it."""
        task = task or self.next_task()
        self.upload(delta)
        return self.submit(task.message_id, self.manifest(task, delta))

    def close(self) -> None:
        self.channel.close()


def spec_of(task: pb.Task) -> TaskSpec:
    entry = next(e for e in task.content.configs["task"].entries if e.key == "spec")
    return TaskSpec.model_validate_json(entry.value.text)


def update_records(manifest: UpdateManifest, signature: bytes, public_key: bytes) -> pb.Records:
    """The reply's records, as the client sends them."""
    records = pb.Records(order=["update", "delta"])
    for key, value in (
        ("manifest", pb.Value(text=manifest.model_dump_json())),
        ("signature", pb.Value(blob=signature)),
        ("public_key", pb.Value(blob=public_key)),
    ):
        records.configs["update"].entries.append(pb.Entry(key=key, value=value))
    records.arrays["delta"].arrays.append(
        pb.ArrayRef(
            name=manifest.delta_sha256,
            dtype="uint8",
            shape=[manifest.delta_bytes],
            stype=DELTA_STYPE,
            sha256=manifest.delta_sha256,
            size_bytes=manifest.delta_bytes,
        )
    )
    return records


def chunks(sha256: str, data: bytes, offset: int = 0, size: int = 1 << 20) -> Iterator[pb.UploadChunk]:
    """The rest of ``data`` in chunks; an empty rest is one empty chunk."""
    for start in range(offset, max(len(data), offset + 1), size):
        yield pb.UploadChunk(sha256=sha256, offset=start, data=data[start : start + size])


def random_delta(folder: Path, base_digest: str, seed: int, model: str, scale: float = 1e-3) -> bytes:
    """A valid .gymdelta of the base model with random signs."""
    from gym_fed.base.models import load_model

    base = model_tensors(load_model(model).model)
    generator = torch.Generator().manual_seed(seed)
    tuned = {k: v + scale * torch.randn(v.shape, generator=generator) for k, v in base.items()}
    spec = BaseSpec(model, base_digest, {k: tuple(v.shape) for k, v in base.items()})
    path = folder / f"random-{seed}.gymdelta"
    encode_delta(tuned, base, CodecPolicy(error_feedback=False), path, spec)
    return path.read_bytes()
