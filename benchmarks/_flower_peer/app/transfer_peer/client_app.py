"""The ClientApp, which replies with the payload (up) or with the digest of the received payload (down)."""

import hashlib
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Move the payload in the direction that the task names."""
    task = message.content.config_records["task"]
    reply = RecordDict()
    if task["up"]:
        data = Path(str(task["payload"])).read_bytes()
        reply["payload"] = ArrayRecord({"delta": Array("uint8", (len(data),), "gym.delta.v1", data)})
        reply["received"] = ConfigRecord({"size": len(data)})
    else:
        data = message.content.array_records["payload"]["delta"].data
        reply["received"] = ConfigRecord({"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return Message(reply, reply_to=message)
