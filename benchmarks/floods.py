"""Floods: what twenty honest contributors notice while somebody else does what they like with the hub.

    python benchmarks/floods.py                              # this version
    python benchmarks/floods.py --before OTHER/.venv/bin/python   # beside another checkout's

A real hub (`gym-server run`, TLS) has twenty contributors with keys, clients and small real updates. A flood comes from
another address, out of a process of its own, while the twenty finish three rounds; a newcomer asks for the hub's status
twice a second over a new connection each time. Reported of each flood: the rounds, the 99th percentile of the twenty's
calls and of the newcomer's, and how the hub's resident memory grew. The floods: 300 installations of one account that
take tasks and never answer, 1,000 work streams, 1,000 mute uploads, 1,100 mute TCP connections that come back when
they are closed, one account's calls and a stranger's enrolments and status calls, as fast as they go.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from _report import Report, options
from gym_client.address import Address
from gym_client.home import Home
from gym_client.join import enter
from gym_client.stream import WorkStream
from gym_client.transport import HubClient
from gym_client.trust import establish

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.task import TaskSpec
from gym_fed.delta import BaseSpec, encode_delta, model_tensors
from gym_fed.errors import GymError
from gym_fed.identity.keys import SigningKey
from gym_fed.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.identity.tls import TLS_NAME
from gym_fed.wire.limits import CHANNEL_OPTIONS, DELTA_STYPE, SESSION_KEY
from gym_fed.wire.v1 import hub_pb2 as pb
from gym_fed.wire.v1 import hub_pb2_grpc

HONEST, ROUNDS = 20, 3
FLOODS = ("instances", "work streams", "mute uploads", "mute TCP", "calls", "enrolments", "status")
HONEST_HOST, FLOOD_HOST = "127.0.0.1", "[::1]"
"""The hub listens on both, and sees each caller under the address that it called."""
P99_SECONDS, GROWTH_MB, GIVE_UP_SECONDS = 2.0, 100.0, 90.0
BIN = Path(sys.executable).parent


# ---- the hub ----


class HubUnderTest:
    """`gym-server run` on a folder of its own."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.process = folder, None
        run = [str(BIN / "gym-server"), "init", "--dir", str(folder), "--enrolment", "open"]
        subprocess.run([*run, "--base-model", str(base)], check=True, stdout=subprocess.DEVNULL)
        self.path = folder / "gym-server.yaml"
        self.configure(
            listen="0.0.0.0:0",
            rounds={
                "num_rounds": 1000,
                "min_contributors": HONEST,
                "deadline_seconds": 60,
                "lease_seconds": 5,
            },
            soup={"aggregator": "mean", "num_malicious_nodes": 0},
            admission={"norm_ratio": None},
        )

    def configure(self, **sections: Any) -> None:
        values = yaml.safe_load(self.path.read_text())
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        self.path.write_text(yaml.safe_dump(values))

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            command = [str(BIN / "gym-server"), "run", "--dir", str(self.folder), "--json"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit((self.folder / "log").read_text()[-3000:])
        event = json.loads(line)
        self.port, self.fingerprint = event["port"], event["fingerprint"]
        self.configure(listen=f"0.0.0.0:{self.port}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")

    def committed(self) -> int:
        with sqlite3.connect(f"file:{self.folder}/hub.db?mode=ro", uri=True, timeout=30) as database:
            row = database.execute("SELECT count(*) FROM rounds WHERE state = 'committed'").fetchone()
        return int(row[0])


def make_base(folder: Path) -> Path:
    """A model of a few thousand random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gym_fed.models import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- the honest ones ----


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
        self.client: HubClient | None = None

    def connect(self) -> HubClient:
        self.client = connected(self.hub.port, self.hub.fingerprint, self.home)
        enter(self.client, f"honest {self.number}", "")
        return self.client

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
        issued, expires = lifetime()
        key = self.home.key
        import hashlib

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
        if self.client is not None:
            self.client.close()


ENCODING = threading.Lock()
_base: dict[Path, Any] = {}


def base_tensors(base: Path) -> Any:
    with ENCODING:
        if base not in _base:
            from gym_fed.models import load_model

            _base[base] = model_tensors(load_model(str(base)).model)
    return _base[base]


def connected(port: int, fingerprint: str, home: Home, host: str = HONEST_HOST) -> HubClient:
    address = Address.parse(f"{host}:{port}")
    return HubClient(home, address, establish(home, address, fingerprint, lambda _: False))


class Newcomer(threading.Thread):
    """Asks for the hub's status over a new connection, again and again."""

    def __init__(self, hub: HubUnderTest, pem: str, calls: Calls) -> None:
        super().__init__(daemon=True)
        self.hub, self.pem, self.calls, self.stopped = hub, pem, calls, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.5):
            channel = new_channel(grpc, f"{HONEST_HOST}:{self.hub.port}", self.pem)
            with suppress(grpc.RpcError):
                stub = hub_pb2_grpc.HubStub(channel)
                self.calls.timed(lambda: stub.Status(pb.StatusRequest(), timeout=30, wait_for_ready=True))  # noqa: B023
            channel.close()


def new_channel(kind: Any, address: str, pem: str) -> Any:
    """A channel with a connection of its own."""
    own = [
        *CHANNEL_OPTIONS,
        ("grpc.ssl_target_name_override", TLS_NAME),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(pem.encode()), options=own)


# ---- the floods ----


class Flood:
    """One flood, in a process of its own: prints ``ready``, then goes on until it is killed."""

    def __init__(self, port: int, fingerprint: str, folder: Path) -> None:
        self.address = f"{FLOOD_HOST}:{port}"
        self.home = Home.open(folder)
        self.client = connected(port, fingerprint, self.home, FLOOD_HOST)
        self.pem = self.client.pin.certificate_pem

    def run(self, kind: str) -> None:
        if kind not in ("mute TCP", "status", "enrolments"):
            enter(self.client, "flood", "")
        asyncio.run(getattr(self, kind.replace(" ", "_"))())

    def sessions(self, number: int) -> list[str]:
        """Sessions of as many installations."""
        found = []
        for index in range(number):
            self.client._instance = f"instance{index:08d}"
            self.client.renew_session()
            try:
                self.client.authenticate()
                found.append(self.client._session)
            except GymError:
                if not found:
                    raise
                time.sleep(0.01)
        return found

    async def instances(self) -> None:
        tokens = await asyncio.to_thread(self.sessions, 300)
        await self._streams((tokens * 300)[:300], 300)

    async def work_streams(self) -> None:
        await self._streams(self.sessions(1) * 1000, 1000)

    async def _streams(self, tokens: list[str], number: int) -> None:
        stubs = self._stubs(max(1, number // 25))

        async def listen(index: int) -> None:
            while True:
                with suppress(grpc.RpcError):
                    metadata = [(SESSION_KEY, tokens[index])]
                    async for _ in stubs[index % len(stubs)].Work(pb.WorkRequest(), metadata=metadata):
                        pass  # a task, which is never answered
                await asyncio.sleep(0.5)

        await self._together([listen(index) for index in range(number)])

    async def mute_uploads(self) -> None:
        token, stubs = self.sessions(1)[0], self._stubs(40)

        async def upload(index: int) -> None:
            while True:
                with suppress(grpc.RpcError):
                    call = stubs[index % len(stubs)].Upload(metadata=[(SESSION_KEY, token)])
                    await call.wait_for_connection()
                    await call  # nothing is sent
                await asyncio.sleep(0.5)

        await self._together([upload(index) for index in range(1000)])

    async def mute_TCP(self) -> None:
        host, _, port = self.address.rpartition(":")

        async def connect() -> None:
            while True:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                    await reader.read()
                    writer.close()
                await asyncio.sleep(0.2)

        await self._together([connect() for _ in range(1100)])

    async def calls(self) -> None:
        token = self.sessions(1)[0]
        await self._closed_loop(
            lambda stub: stub.Account(pb.AccountRequest(), metadata=[(SESSION_KEY, token)])
        )

    async def status(self) -> None:
        await self._closed_loop(lambda stub: stub.Status(pb.StatusRequest()))

    async def enrolments(self) -> None:
        server = self.client.status() and self.client.pin.server

        def enrol(stub: Any) -> Any:
            key, name = SigningKey.generate(), secrets.token_hex(8)
            claim: dict[str, object] = {"enrol": name, "invite": "", "server": server}
            with suppress(ImportError):
                from gym_fed.identity.login import enrolment_claim

                claim = enrolment_claim(name, "", server, self.client.pin.fingerprint)
            request = pb.EnrolRequest(public_key=key.public_key, name=name, signature=key.sign(claim))
            if hasattr(request, "protocol"):
                from gym_fed.wire.limits import PROTOCOL

                request.protocol = PROTOCOL
            return stub.Enrol(request)

        await self._closed_loop(enrol)

    async def _closed_loop(self, call: Callable[[Any], Any]) -> None:
        stubs = self._stubs(20)

        async def again(index: int) -> None:
            while True:
                with suppress(grpc.RpcError):
                    await call(stubs[index % len(stubs)])

        await self._together([again(index) for index in range(400)])

    def _stubs(self, number: int) -> list[Any]:
        return [hub_pb2_grpc.HubStub(new_channel(grpc.aio, self.address, self.pem)) for _ in range(number)]

    async def _together(self, work: list[Any]) -> None:
        tasks = [asyncio.ensure_future(one) for one in work]
        print("ready", flush=True)
        await asyncio.gather(*tasks)


# ---- one measurement ----


def measure(hub: HubUnderTest, base: Path, folder: Path, kind: str, rounds: int) -> dict[str, float]:
    """A fresh hub process, one round in peace, then the flood until the rounds are done."""
    hub.start()
    honest_calls, newcomers = Calls(), Calls()
    people = [Contributor(hub, folder / f"honest-{n}", base, honest_calls, n) for n in range(HONEST)]
    for person in people:
        person.start()
    try:
        goal = hub.committed() + 1
        wait_until(lambda: hub.committed() >= goal, GIVE_UP_SECONDS)
        before = hub.rss_mb
        honest_calls.seconds.clear()
        honest_calls.errors = 0
        pem = people[0].client.pin.certificate_pem
        command = [sys.executable, __file__, "--flood", kind, "--hub", f"{hub.port},{hub.fingerprint}"]
        home = tempfile.mkdtemp(dir=folder)
        flood = subprocess.Popen([*command, "--home", home], stdout=subprocess.PIPE, text=True)
        newcomer = Newcomer(hub, pem, newcomers)
        try:
            ready = threading.Thread(target=flood.stdout.readline, daemon=True)
            ready.start()
            ready.join(60)
            newcomer.start()
            began, start, peak = time.monotonic(), hub.committed(), before
            while hub.committed() < start + rounds and time.monotonic() - began < GIVE_UP_SECONDS:
                time.sleep(0.25)
                peak = max(peak, hub.rss_mb)
            seconds = time.monotonic() - began
            done = min(rounds, hub.committed() - start)
        finally:
            flood.kill()
            flood.wait()
            newcomer.stopped.set()
        newcomer.join(35)
        time.sleep(1)
        return {
            "rounds": done,
            "seconds": seconds,
            "p99": honest_calls.p99,
            "errors": honest_calls.errors,
            "newcomer p99": newcomers.p99,
            "newcomer errors": newcomers.errors,
            "rss before": before,
            "rss peak": peak,
            "rss after": hub.rss_mb,
        }
    finally:
        for person in people:
            person.stopped.set()
        hub.stop()
        for person in people:
            person.stop()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"no round was committed in {seconds:.0f} s, without any flood")
        time.sleep(0.2)


def figures(kinds: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """What each flood came to."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_base(folder / "base")
        hub = HubUnderTest(folder / "hub", base)
        enrol_all(hub, folder, base)
        for kind in kinds:
            found[kind] = measure(hub, base, folder, kind, rounds)
            print(
                kind,
                json.dumps({k: round(v, 3) for k, v in found[kind].items()}),
                file=sys.stderr,
                flush=True,
            )
    return found


def enrol_all(hub: HubUnderTest, folder: Path, base: Path) -> None:
    """The twenty enrol in peace; where there are limits, these are loose for the time being."""
    loose = "limits" in yaml.safe_load(hub.path.read_text()) or has_limits()
    if loose:
        hub.configure(limits={"enrolments_per_minute": 6000.0, "enrolment_work_bits": 0})
    hub.start()
    for number in range(HONEST):
        Contributor(hub, folder / f"honest-{number}", base, Calls(), number).connect().close()
    hub.stop()
    if loose:
        hub.configure(limits={"enrolments_per_minute": 6.0, "enrolment_work_bits": 8})


def has_limits() -> bool:
    from gym_fed.config.server import ServerConfig

    return "limits" in ServerConfig.model_fields


def main() -> None:
    parser = options("what twenty contributors notice of floods")
    parser.add_argument("--before", metavar="PYTHON", help="a Python with another version, to compare with")
    parser.add_argument("--only", metavar="FLOODS", help="names of floods, with commas")
    parser.add_argument(
        "--raw", action="store_true", help="print what was measured as JSON, and nothing else"
    )
    for hidden in ("--flood", "--hub", "--home"):
        parser.add_argument(hidden, help="used by the benchmark itself")
    given = parser.parse_args()
    if given.flood:
        port, _, fingerprint = given.hub.partition(",")
        Flood(int(port), fingerprint, Path(given.home)).run(given.flood)
        return
    kinds = given.only.split(",") if given.only else list(FLOODS[1:4] if given.quick else FLOODS)
    rounds = 1 if given.quick else ROUNDS
    ours = figures(kinds, rounds)
    if given.raw:
        print(json.dumps(ours))
        return
    theirs: dict[str, dict[str, float]] = {}
    if given.before:
        command = [given.before, __file__, "--raw", "--only", ",".join(kinds), *(["--quick"] * given.quick)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ})
        theirs = json.loads(done.stdout.splitlines()[-1])
    report = Report("floods", peer="before" if theirs else "")
    for kind in kinds:
        mine, other = ours[kind], theirs.get(kind, {})
        for key, unit in (("p99", "s"), ("newcomer p99", "s"), ("seconds", "s")):
            report.compare(f"{kind}: {key}", mine[key], other.get(key), unit=unit)
        growth = other.get("rss peak", 0) - other.get("rss before", 0) if other else None
        report.compare(f"{kind}: RSS growth", mine["rss peak"] - mine["rss before"], growth, unit="MB")
        report.compare(f"{kind}: rounds", mine["rounds"], other.get("rounds"), unit="", better="higher")
        report.aim(f"{kind}: rounds finished", figure=mine["rounds"], aim=rounds, better="higher")
        report.aim(f"{kind}: p99 of a call", figure=mine["p99"], aim=P99_SECONDS, better="lower")
        report.aim(f"{kind}: p99 of a newcomer", figure=mine["newcomer p99"], aim=P99_SECONDS, better="lower")
        report.aim(
            f"{kind}: RSS growth", figure=mine["rss peak"] - mine["rss before"], aim=GROWTH_MB, better="lower"
        )
    report.finish(given)


if __name__ == "__main__":
    main()
