"""A grid whose contributors are folders of this process: the hub's rounds with real client code and no network."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from gym_client.agent.tasks import TaskFolder
from gym_client.app import app
from gym_client.identity.home import Home
from gym_server.federation import RUN_ID, Federation
from gym_server.store.tables import nodes
from gym_server.strategy.grid import LOST, HubGrid

from gym_fed.core.errors import GymError
from tests.support.enrolment import enrol


class Killed(BaseException):
    """What stands for SIGKILL: nothing after it happens, and nothing that handles failures sees it."""


class LocalGrid(Grid):
    """Messages wait until they are pulled; then the node's own app answers them.

    Args:
        folder: Gets a home for every contributor.
        base: The model's folder.
        names: Of the contributors; node 1 is the first.
    """

    def __init__(self, folder: Path, base: Path, names: list[str]) -> None:
        self.names = {number: name for number, name in enumerate(names, start=1)}
        self.homes = {name: Home.open(str(folder / name)) for name in names}
        self.base = base
        self.gone: set[str] = set()
        self.heard: list[tuple[str, str]] = []
        """Name and type of every message that reached a contributor."""
        self.before: Callable[[str, Message], None] = lambda name, message: None
        """Called with the receiver and a message before its app is."""
        self.after: Callable[[str, Message], None] = lambda name, reply: None
        """Called with the sender and its reply."""
        self._waiting: dict[str, Message] = {}
        self._fed: Federation | None = None
        for name in names:
            row = {
                "messages": [{"role": "user", "content": name}, {"role": "assistant", "content": name * 3}]
            }
            (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 6)

    def data(self, name: str) -> str:
        """The file that a contributor trains on."""
        return str(self.homes[name].folder.parent / f"{name}.jsonl")

    def serve(self, fed: Federation, newcomers: bool = True) -> LocalGrid:
        """Belong to a hub, whose folder may have been opened anew."""
        self._fed = fed
        HubGrid(
            fed.state, fed.live_config, fed.queue, fed.max_update_bytes
        )  # Flower stamps messages with the process's identity, which the hub's own grid sets
        for number, name in self.names.items() if newcomers else ():
            contributor = enrol(fed, self.homes[name].key, name)
            with fed.database.transaction() as tx:
                row = {"node_id": number, "contributor": contributor, "instance": name}
                tx.execute(nodes.insert().values(**row, connected_until=time.time() + 3600))
        return self

    # ---- Flower's contract ----

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, name in self.names.items() if name not in self.gone]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(secrets.token_hex(16))
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for message_id in message_ids for reply in self._answer(message_id)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError

    def _answer(self, message_id: str) -> list[Message]:
        asked = self._waiting[message_id]
        name = self.names[asked.metadata.dst_node_id]
        if name in self.gone:
            return [self._message(message_id, asked, error=Error(LOST, "the contributor disconnected"))]
        message = self._message(message_id, asked, content=asked.content)
        try:
            self.before(name, message)
            self.heard.append((name, message.metadata.message_type))
            reply = app(message, self._context(name, asked.metadata.dst_node_id))
            self._upload(name, message_id)
        except Killed:
            return []  # it starts again, finds its lease, and works on the message anew
        except GymError as error:
            return [self._message(message_id, asked, error=Error(error.exit_code, str(error)))]
        self.after(name, reply)
        return [reply]

    def _context(self, name: str, node: int) -> Context:
        config: dict[str, bool | float | int | str] = {
            "home": str(self.homes[name].folder),
            "data": self.data(name),
            "model": str(self.base),
            "by-reference": True,
        }
        return Context(run_id=RUN_ID, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def _upload(self, name: str, message_id: str) -> None:
        path = TaskFolder(self.homes[name].task_folder(message_id)).delta_path
        if path.exists():
            assert self._fed is not None
            self._fed.store.put_file(path)

    @staticmethod
    def _message(message_id: str, asked: Message, **what: Any) -> Message:
        metadata = Metadata(
            run_id=RUN_ID,
            message_id=message_id,
            src_node_id=asked.metadata.dst_node_id if "error" in what else 1,
            dst_node_id=asked.metadata.dst_node_id,
            reply_to_message_id=message_id if "error" in what else "",
            group_id=asked.metadata.group_id,
            created_at=time.time(),
            ttl=3600.0,
            message_type=asked.metadata.message_type,
        )
        return Message(metadata=metadata, **what)  # type: ignore[call-overload,no-any-return]
