"""The ClientApp: waits as if it trained, and replies with random bytes."""

import os
import random
import time

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return an update of the size that the task names, after a time with the mean that it names."""
    task = message.content.metric_records["task"]
    size, mean = task["bytes"], task["think"]
    assert isinstance(size, int)
    assert isinstance(mean, float)
    time.sleep(min(random.expovariate(1.0), 4.0) * mean)
    update = Array("uint8", (size,), "gym.delta.v1", os.urandom(size))
    content = RecordDict(
        {"update": ArrayRecord({"delta": update}), "metrics": MetricRecord({"num-examples": 10})}
    )
    return Message(content, reply_to=message)
