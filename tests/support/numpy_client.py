"""A contributor that runs a plain numpy ClientApp: `python -m tests.support.numpy_client HOME ADDRESS FINGERPRINT`."""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gym_client.agent.agent import Agent
from gym_client.cli.join import enter
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add ``step`` to every array."""
    arrays = message.content["arrays"].to_numpy_ndarrays()
    step = message.content["config"]["step"]
    metrics = MetricRecord({"num-examples": 1, "round": float(message.content["config"]["server-round"])})
    content = RecordDict({"arrays": ArrayRecord([a + step for a in arrays]), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Sum of all arrays as the loss."""
    arrays = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"loss": float(sum(a.sum() for a in arrays)), "num-examples": 1})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def main(home_folder: str, address: str, fingerprint: str) -> None:
    """Join and work until the hub is finished."""
    home = Home.open(home_folder)
    where = Address.parse(address)
    with home.locked():
        pin = establish(home, where, fingerprint, lambda _: False)
        with HubClient(home, where, pin) as client:
            enter(client, Path(home_folder).name, "")
            Agent(app, home, client).run()


if __name__ == "__main__":
    main(*sys.argv[1:4])
