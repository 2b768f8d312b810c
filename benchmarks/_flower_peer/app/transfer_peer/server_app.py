"""The ServerApp, which runs one round with one node as fast as Flower's grid allows."""

import hashlib
import json
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for the node, move the payload, and write the measurement to the file ``result``."""
    config = context.run_config
    payload, upwards = Path(str(config["payload"])), config["direction"] == "up"
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    started = time.perf_counter()
    content = RecordDict({"task": ConfigRecord({"payload": str(payload), "up": upwards})})
    if not upwards:
        content["payload"] = ArrayRecord({"delta": as_array(payload.read_bytes())})
    # `send_and_receive` polls every three seconds, so its two public halves are called with a shorter interval.
    sent = set(grid.push_messages([Message(content, dst_node_id=nodes[0], message_type="train")]))
    while not (replies := list(grid.pull_messages(sent))):
        time.sleep(0.1)
    (reply,) = replies
    if reply.has_error():
        raise RuntimeError(f"the ClientApp failed: {reply.error}")
    received = reply.content.config_records["received"]
    if upwards:
        data = reply.content.array_records["payload"]["delta"].data
        seconds = time.perf_counter() - started
        digest, size = hashlib.sha256(data).hexdigest(), len(data)
    else:
        seconds = time.perf_counter() - started
        digest, size = str(received["sha256"]), int(str(received["size"]))
    result = Path(str(config["result"]))
    draft = result.with_suffix(".draft")
    draft.write_text(json.dumps({"seconds": seconds, "sha256": digest, "size": size}))
    draft.rename(result)  # atomic, so that readers see the complete result


def as_array(data: bytes) -> Array:
    """Convert raw bytes to an array in Flower's fastest form: in chunks and without numpy."""
    return Array(dtype="uint8", shape=(len(data),), stype="gym.delta.v1", data=data)
