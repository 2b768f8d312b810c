"""The honest callers of the floods: contributors that answer every task, and a newcomer; their calls are timed."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from _flood_hub import HONEST_HOST, HubUnderTest, connected, new_channel
from gym_client.cli.join import enter
from gym_client.hub.stream import WorkStream
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb

GIVE_UP_SECONDS = 90.0


@dataclass
class Calls:
    """How long calls took, in seconds, and how many failed."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0

    def timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return call()
        except (GymError, grpc.RpcError):
            self.errors += 1
            raise
        finally:
            self.seconds.append(time.perf_counter() - began)

    @property
    def p99(self) -> float:
        found = sorted(self.seconds)
        return found[min(len(found) - 1, int(0.99 * len(found)))] if found else GIVE_UP_SECONDS


class Contributor(threading.Thread):
    """A client with a key that answers every task with a small update of its own."""

    def __init__(self, hub: HubUnderTest, home: Path, base: Path, calls: Calls, number: int) -> None:
        super().__init__(daemon=True)
        self.hub, self.home, self.base, self.calls, self.number = hub, Home.open(home), base, calls, number
        self.stopped = threading.Event()
        self._client: HubClient | None = None

    @property
    def client(self) -> HubClient:
        assert self._client is not None, "connect first"
        return self._client

    def connect(self) -> HubClient:
        self._client = connected(self.hub.port, self.hub.fingerprint, self.home)
        enter(self._client, f"honest {self.number}", "")
        return self._client

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self.connect()
                break
            except GymError:  # a client of ours would try again too
                self.calls.errors += 1
                self.stopped.wait(0.5)
        with suppress(ValueError), WorkStream(self.client) as stream:  # the channel may be closed at the end
            while not self.stopped.is_set():
                event = stream.next(0.2)
                if isinstance(event, pb.WorkEvent) and event.HasField("task"):
                    with suppress(GymError):
                        self.work(event.task)

    def work(self, task: pb.Task) -> None:
        for entry in task.content.configs["task"].entries:
            if entry.key == "spec":
                spec = TaskSpec.model_validate_json(entry.value.text)
        self.call("Status", pb.StatusRequest())
        self.call(
            "Heartbeat", pb.HeartbeatRequest(message_id=task.message_id, phase="train", done=1, total=2)
        )
        data = self.update(spec)
        issued, expires = lifetime(time.time())
        key = self.home.key
        sha256 = hashlib.sha256(data).hexdigest()
        manifest = UpdateManifest(
            contributor=self.client.pin.contributor,
            server=self.client.pin.server,
            task=task.message_id,
            server_round=spec.server_round,
            base_digest=spec.version_digest,
            delta_sha256=sha256,
            delta_bytes=len(data),
            nonce=new_nonce(),
            issued_at_seconds=issued,
            expires_at_seconds=expires,
            num_examples=10,
        )
        self.call("BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=len(data)))
        self.call("Upload", lambda: iter([pb.UploadChunk(sha256=sha256, offset=0, data=data)]))
        records = pb.Records(order=["update", "delta"])
        for name, value in (
            ("manifest", pb.Value(text=manifest.model_dump_json())),
            ("signature", pb.Value(blob=manifest.sign(key))),
            ("public_key", pb.Value(blob=key.public_key)),
        ):
            records.configs["update"].entries.append(pb.Entry(key=name, value=value))
        records.arrays["delta"].arrays.append(
            pb.ArrayRef(
                name=sha256,
                dtype="uint8",
                shape=[len(data)],
                stype=DELTA_STYPE,
                sha256=sha256,
                size_bytes=len(data),
            )
        )
        self.call("Submit", pb.SubmitRequest(message_id=task.message_id, content=records))

    def call(self, method: str, request: Any) -> Any:
        return self.calls.timed(lambda: self.client.call(method, request, 30))

    def update(self, spec: TaskSpec) -> bytes:
        import torch

        base = base_tensors(self.base)
        generator = torch.Generator().manual_seed(1000 * spec.server_round + self.number)
        tuned = {k: v + 1e-3 * torch.randn(v.shape, generator=generator) for k, v in base.items()}
        of = BaseSpec(str(self.base), spec.version_digest, {k: tuple(v.shape) for k, v in base.items()})
        path = self.home.folder / "update.gymdelta"
        with ENCODING:
            encode_delta(tuned, base, CodecPolicy(error_feedback=False), path, of)
        return path.read_bytes()

    def stop(self) -> None:
        self.stopped.set()
        self.join(20)
        if self._client is not None:
            self._client.close()


ENCODING = threading.Lock()
_base: dict[Path, Any] = {}


def base_tensors(base: Path) -> Any:
    with ENCODING:
        if base not in _base:
            from gym_fed.base.models import load_model

            _base[base] = model_tensors(load_model(str(base)).model)
    return _base[base]


class Newcomer(threading.Thread):
    """Requests the hub's status over a new connection, again and again."""

    def __init__(self, hub: HubUnderTest, pem: str, calls: Calls) -> None:
        super().__init__(daemon=True)
        self.hub, self.pem, self.calls, self.stopped = hub, pem, calls, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.5):
            channel = new_channel(grpc, f"{HONEST_HOST}:{self.hub.port}", self.pem)
            with suppress(grpc.RpcError):
                stub = HubStub(channel)
                self.calls.timed(lambda: stub.Status(pb.StatusRequest(), timeout=30, wait_for_ready=True))  # noqa: B023
            channel.close()
