"""Two honest clients walk towards one; the third lies differently in every round."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    sent = message.content["arrays"]
    server_round = message.content["config"]["server-round"]
    arrays = {key: array.numpy() + 0.5 * (1.0 - array.numpy()) for key, array in sent.items()}
    if context.node_config["partition-id"] == 2:
        lies = {1: np.float32(np.nan), 2: np.float32(-1e30), 3: np.float32(-0.4)}
        arrays = {key: np.full_like(array, lies[server_round]) for key, array in arrays.items()}
    content = RecordDict(
        {
            "arrays": ArrayRecord({key: Array(np.asarray(array)) for key, array in arrays.items()}),
            "metrics": MetricRecord({"num-examples": 10**9, "train-loss": 0.5}),
        }
    )
    return Message(content=content, reply_to=message)
