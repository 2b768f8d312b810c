"""The contributor: the real agent with a ClientApp that replies with a file (up) or a digest (down).

python client.py HOME ADDRESS FINGERPRINT
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from gym_client.agent.agent import Agent
from gym_client.cli.join import enter
from gym_client.hub.transfers import ObjectCache
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.trust.wire.records import reference

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Move the payload in the direction that the task names; it is hashed at the same points as the peer's."""
    task = message.content["task"]
    cache = ObjectCache(Home.open(str(context.node_config["home"])).objects)
    reply = RecordDict()
    if task["up"]:
        payload = Path(str(task["payload"]))
        with open(payload, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.link(payload, cache.path(sha256))
        reply["payload"] = ArrayRecord({sha256: reference(sha256, payload.stat().st_size)})
    else:
        (sha256,) = message.content["payload"]
        with open(cache.path(sha256), "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    reply["received"] = ConfigRecord({"size": cache.path(sha256).stat().st_size, "sha256": sha256})
    return Message(reply, reply_to=message)


def main(home_folder: str, address: str, fingerprint: str) -> None:
    """Join the hub and work until it has finished."""
    home, where = Home.open(home_folder), Address.parse(address)
    with home.locked():
        pin = establish(home, where, fingerprint, lambda _: False)
        with HubClient(home, where, pin) as client:
            enter(client, "benchmark", "")
            Agent(app, home, client).run()


if __name__ == "__main__":
    main(*sys.argv[1:4])
