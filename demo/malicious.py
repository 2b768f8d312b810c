"""A contributor that lies: it trains honestly, then sends the signs flipped and inflated.

In odd rounds the lie is inflated by twenty, so its norm gives it away; in even rounds by three, which the
norms allow, and only the held-out set shows it. `python -m demo.malicious HOME ADDRESS FINGERPRINT DATA`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from gym_client.agent.agent import Agent
from gym_client.agent.tasks import TaskFolder
from gym_client.app import app as honest
from gym_client.cli.join import enter
from gym_client.hub.transfers import ObjectCache
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_source
from gym_fed.delta.file import DeltaFile
from gym_fed.trust.identity.manifest import UpdateManifest, new_nonce
from gym_fed.trust.wire.records import reference

INFLATION = (3.0, 20.0)
"""Factor on the honest size, in even and in odd rounds."""

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """The honest round, then its opposite, properly signed."""
    reply = honest(message, context)
    home = Home.open(str(context.node_config["home"]))
    manifest = UpdateManifest.parse(str(reply.content["update"]["manifest"]))
    truth = TaskFolder(home.task_folder(message.metadata.message_id)).delta_path
    lie = truth.with_name("lie.gymdelta")
    write_opposite(truth, lie, manifest.base_digest, INFLATION[manifest.server_round % 2])
    path = ObjectCache(home.objects).put(lie.read_bytes())
    size = path.stat().st_size
    signed = manifest.model_copy(
        update={"delta_sha256": path.name, "delta_bytes": size, "nonce": new_nonce()}
    )
    update: dict[str, ConfigRecordValues] = {
        "manifest": signed.model_dump_json(),
        "signature": signed.sign(home.key),
        "public_key": home.key.public_key,
    }
    content = RecordDict(
        {"update": ConfigRecord(update), "delta": ArrayRecord({path.name: reference(path.name, size)})}
    )
    return Message(content, reply_to=message)


def write_opposite(truth: Path, lie: Path, base_digest: str, factor: float) -> None:
    """Write ``-factor`` times a delta as sign bits."""
    with DeltaFile.open(truth) as delta:
        shapes = {name: tuple(delta.record(name).shape) for name in delta.names}
        spec = BaseSpec(delta.manifest.base_model, base_digest, shapes)
        policy = CodecPolicy(error_feedback=False)
        encode_source(lambda name: -factor * delta.decode(name), policy, lie, spec, None)


def main(home_folder: str, address: str, fingerprint: str, data: str) -> None:
    """Join and lie until the hub is finished."""
    home = Home.open(home_folder)
    where = Address.parse(address)
    with home.locked():
        pin = establish(home, where, fingerprint, lambda _: False)
        with HubClient(home, where, pin) as client:
            enter(client, "mallory", "")
            Agent(app, home, client, node_config={"data": data}).run()


if __name__ == "__main__":
    main(*sys.argv[1:5])
