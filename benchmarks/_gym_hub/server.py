"""The hub with a ServerApp that moves one payload and times the round, like the peer's, but over `HubGrid`.

python server.py HUB_FOLDER up|down PAYLOAD RESULT
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from gym_server.cli.run import run_hub
from gym_server.federation import Federation
from gym_server.rounds import replies

from gym_fed.trust.wire.records import reference


def main(folder: str, direction: str, payload: str, result: str) -> None:
    """Serve until the round is over; write seconds, sha256 and size to the file ``result``."""
    opened: list[Federation] = []

    def listening(federation: Federation, port: int) -> None:
        opened.append(federation)
        print(json.dumps({"port": port, "fingerprint": federation.fingerprint}), flush=True)

    def app(grid: Grid) -> None:
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.1)
        store = opened[0].store
        started = time.perf_counter()
        content = RecordDict({"task": ConfigRecord({"payload": payload, "up": direction == "up"})})
        if direction == "down":
            sha256 = store.put_file(Path(payload))
            content["payload"] = ArrayRecord({sha256: reference(sha256, Path(payload).stat().st_size)})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=nodes[0], message_type="train")])
        seconds = time.perf_counter() - started
        if reply.has_error():
            raise RuntimeError(f"the contributor failed: {reply.error}")
        received = reply.content.config_records["received"]
        digest, size = str(received["sha256"]), int(str(received["size"]))
        if direction == "up":
            stored = store.local_path(digest)
            digest, size = file_digest(stored), stored.stat().st_size
        draft = Path(f"{result}.draft")
        draft.write_text(json.dumps({"seconds": seconds, "sha256": digest, "size": size}))
        draft.rename(result)

    # Plain replies may not be much larger than their task, but this one contains the payload.
    replies.MAX_RECORDS_BYTES = 10**9
    run_hub(Path(folder), exit_when_done=True, on_listening=listening, server_app=app)


def file_digest(path: Path) -> str:
    """Return the hex sha256 of a file, without loading it into memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:5])
