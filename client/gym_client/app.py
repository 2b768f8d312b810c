"""The contributor's Flower app: trains on a task and returns a signed delta, in the agent or in stock Flower.

Settings are read from the node's config, then from the run's: ``home``, ``data``, ``data-format``, ``columns``,
``model``, ``device``, ``region``, and ``by-reference``, which the agent sets to send the delta as an object.
``{partition}`` in ``home`` and ``data`` is replaced by Flower's ``partition-id``, so that each node of a simulation has
its own key and shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gym_client.agent.policy import Policy
from gym_client.agent.residuals import Residuals
from gym_client.agent.tasks import FinishedUpdate, TaskFolder
from gym_client.agent.work import Setup, parse_task, perform
from gym_client.audits.evidence import keep_evidence
from gym_client.hub.transfers import ObjectCache
from gym_client.identity.home import Home
from gym_client.identity.pins import key_at
from gym_client.privacy.secure_round import SecureRound
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.privacy.secure_aggregation.messages import ACTIONS, ADVERTISE, CONFIRM, RECORD, SHARE, UNMASK
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.records import reference

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Perform one round. ``message.content`` contains ``task`` (the spec as JSON) and ``soups``."""
    spec = parse_task(_spec_text(message.content))
    home = Home.open(_text(context, "home"))
    policy = Policy.load(home.policy_path)
    policy.check(spec)
    cache = ObjectCache(home.objects)
    _keep_soups(message.content, cache, policy)
    by_reference = bool(context.node_config.get("by-reference", False))
    if spec.secure_aggregation is not None:
        if not by_reference:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                "secure aggregation needs a gym-fed hub, which tracks the stages of a round; this is stock Flower",
                "run the federation with gym-server run, or without secure_aggregation",
            )
        SecureRound(home, spec, key_at(home, spec.server)).receive(secure_text(message.content))
    setup = Setup(
        data=_text(context, "data"),
        data_format=_text(context, "data-format") or "auto",
        columns=_text(context, "columns"),
        model=_text(context, "model"),
        device=_text(context, "device") or "auto",
        region=_text(context, "region"),
    )
    finished = perform(spec, message.metadata.message_id, home, policy, setup, cache.path)
    reply = Message(update_records(finished, by_reference), reply_to=message)
    if not by_reference:  # stock Flower has no verdicts, so every returned update is treated as accepted
        folder = TaskFolder(home.task_folder(message.metadata.message_id))
        residuals, update = Residuals(home, spec.server), finished.manifest.digest
        residuals.stage(folder.residual_path, update, folder.moments_path)
        residuals.accept(update)
        keep_evidence(home, folder, update)
        folder.drop()
    return reply


@app.query(ACTIONS[ADVERTISE])
def advertise_keys(message: Message, context: Context) -> Message:
    """Send signed public keys for the round, in the first stage of secure aggregation."""
    return _stage(message, context, lambda secure, text: secure.advertise())


@app.query(ACTIONS[SHARE])
def share_keys(message: Message, context: Context) -> Message:
    """Split the round's secrets among the participants, in the second stage."""
    return _stage(message, context, lambda secure, text: secure.share(text))


@app.query(ACTIONS[CONFIRM])
def confirm(message: Message, context: Context) -> Message:
    """Sign the list of contributors whose votes are in the sum, in the fourth stage."""
    return _stage(message, context, lambda secure, text: secure.confirm(text))


@app.query(ACTIONS[UNMASK])
def unmask(message: Message, context: Context) -> Message:
    """Reveal the shares that remove the masks from the sum, in the last stage."""
    return _stage(message, context, lambda secure, text: secure.unmask(text))


def _stage(message: Message, context: Context, act: Callable[[SecureRound, object], StrictModel]) -> Message:
    spec = parse_task(_spec_text(message.content))
    home = Home.open(_text(context, "home"))
    Policy.load(home.policy_path).check(spec)
    answer = act(SecureRound(home, spec, key_at(home, spec.server)), secure_text(message.content))
    content = RecordDict({RECORD: ConfigRecord({"json": answer.model_dump_json()})})
    return Message(content, reply_to=message)


def secure_text(content: RecordDict) -> object:
    """Return the hub's JSON message of a secure aggregation stage; None if there is none."""
    record = content.get(RECORD)
    return record.get("json") if isinstance(record, ConfigRecord) else None


def update_records(finished: FinishedUpdate, by_reference: bool) -> RecordDict:
    """Create the reply with the update: manifest, signature, delta and metrics."""
    manifest = finished.manifest
    if by_reference:
        delta = reference(manifest.delta_sha256, manifest.delta_bytes)
    else:
        data = finished.delta_path.read_bytes()
        delta = Array(dtype="uint8", shape=(len(data),), stype=DELTA_STYPE, data=data)
    settings: dict[str, Any] = {
        "manifest": manifest.model_dump_json(),
        "signature": finished.signature,
        "public_key": finished.public_key,
    }
    metrics: dict[str, Any] = {**finished.metrics, "num-examples": manifest.num_examples}
    return RecordDict(
        {
            "update": ConfigRecord(settings),
            "delta": ArrayRecord({manifest.delta_sha256: delta}),
            "metrics": MetricRecord(metrics),
        }
    )


def _spec_text(content: RecordDict) -> str:
    task = content.get("task")
    text = task.get("spec") if isinstance(task, ConfigRecord) else None
    if not isinstance(text, str):
        raise GymError(
            ErrorCode.POLICY_REFUSED, "the message carries no task (config record 'task', key 'spec')"
        )
    return text


def _keep_soups(content: RecordDict, cache: ObjectCache, policy: Policy) -> None:
    """Store the soups in the message, which only stock Flower sends, in the cache."""
    soups = content.get("soups")
    if not isinstance(soups, ArrayRecord):
        return
    policy.check_download(sum(len(array.data) for array in soups.values()))
    for sha256, array in soups.items():
        if not array.data:
            continue
        digest = hashlib.sha256(array.data).hexdigest()
        if digest != sha256:
            raise GymError(ErrorCode.HASH_MISMATCH, f"soup {sha256} has content with sha256 {digest}")
        cache.put(array.data)


def _text(context: Context, key: str) -> str | None:
    value = context.node_config.get(key, context.run_config.get(key))
    if value is None:
        return None
    text = str(value)
    if "{partition}" not in text:
        return text
    partition = context.node_config.get("partition-id")
    if partition is None:
        raise GymError(ErrorCode.USAGE, f"{key}: {text!r} needs a partition-id in the node's config")
    return str(Path(text.replace("{partition}", str(partition))))
