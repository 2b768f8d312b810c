"""One hub in memory, one contributor, one agent, and what it reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from gym_client.agent.agent import Agent
from gym_client.agent.policy import Policy
from gym_client.cli.join import enter
from gym_client.display import Display
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.privacy.terms import Promises

from gym_fed.trust.wire.records import to_wire
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.tiny_hub import TinyHub


class Recorder(Display):
    """Keeps the news."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def report(self, event: str, text: str, **fields: Any) -> None:
        self.events.append((event, text))

    def texts(self, event: str) -> list[str]:
        return [text for name, text in self.events if name == event]


class Scene:
    """One hub, one contributor, one agent."""

    def __init__(self, tmp_path: Path) -> None:
        self.hub = TinyHub(tmp_path / "hub").start()
        self.home, self.display = Home.open(tmp_path / "home"), Recorder()
        address = Address.parse(self.hub.address)
        self.client = HubClient(
            self.home, address, establish(self.home, address, self.hub.fingerprint, lambda _: False)
        )
        enter(self.client, "me", "")

    def agent(
        self,
        work: Callable[[Message, Context], RecordDict],
        policy: Policy | None = None,
        promises: Promises | None = None,
    ) -> Agent:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return Message(work(message, context), reply_to=message)

        return Agent(app, self.home, self.client, policy=policy, promises=promises, display=self.display)

    def task(self, message_id: str, content: RecordDict | None = None) -> pb.Task:
        def put(data: bytes) -> None:
            self.hub.objects[hashlib.sha256(data).hexdigest()] = data

        metadata = pb.MessageMetadata(
            run_id=1,
            src_node_id=1,
            dst_node_id=7,
            group_id="1",
            created_at_seconds=time.time(),
            ttl_seconds=3600,
            message_type="train",
        )
        return pb.Task(
            message_id=message_id,
            lease_seconds=30,
            metadata=metadata,
            content=to_wire(content or RecordDict(), put),
        )

    def error_of(self, message_id: str) -> pb.ReplyError:
        return self.hub.submitted[message_id].error

    def close(self) -> None:
        self.client.close()
        self.hub.stop()


def empty(message: Message, context: Context) -> RecordDict:
    return RecordDict()
