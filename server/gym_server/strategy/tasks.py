"""The task of a round, with the version that contributors start from and the training recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from gym_fed.config.delta import codec_of
from gym_fed.config.hub.privacy import SecureTask
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from gym_fed.config.schema.plugins import PluginRecord, members_of, read_records, records
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import CODECS
from gym_fed.core.text import counted
from gym_server.evaluations.runner import announced_suites
from gym_server.ledger.chain import Ledger
from gym_server.rounds.payload import Payloads
from gym_server.rounds.round_store import Round
from gym_server.state import HubState


def new_task(state: HubState, config: ServerConfig, max_update_bytes: int, server_round: int) -> TaskSpec:
    """Return the task of a round that begins now, with the current version and recipe."""
    head, secure = state.round_store.head(), config.secure_aggregation
    soups = state.round_store.soups(head.height)
    recipe = config.recipe_at(len(soups))
    audit = config.rounds.audit
    return TaskSpec(
        server=state.server,
        server_round=server_round,
        base_model=config.public_base_name,
        base_digest=state.base.digest,
        version_digest=head.digest,
        soups=soups,
        recipe=recipe,
        codec=config.codec,
        pay=config.rewards.terms(),
        plugins=plugins_of_round(config, state.ledger, recipe),
        evaluated_on=announced_suites(config.gate, state.folder),
        max_update_bytes=max_update_bytes,
        deadline_seconds=state.clock.now() + config.rounds.deadline_seconds,
        secure_aggregation=SecureTask(threshold=secure.threshold) if secure else None,
        audit=None if audit is None else audit.terms(),
        region=config.region,
    )


def refuse_stock_flower(config: ServerConfig) -> None:
    """Refuse settings that only the hub's own grid supports.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if config.secure_aggregation is not None:
        what, remedy = "secure_aggregation needs the hub's own stages", "remove secure_aggregation"
    elif config.rounds.mode == "continuous":
        what, remedy = "rounds.mode: continuous needs the hub's own tasks", "set it to synchronous"
    else:
        return
    raise GymError(
        ErrorCode.CONFIG_INVALID,
        f"{what}; a stock Flower deployment does not have them",
        f"run the federation with gym-server run, or {remedy}",
    )


def task_of(current: Round) -> TaskSpec:
    """Return the task of a round.

    Raises:
        GymError: ``STATE_CORRUPT`` if it has none.
    """
    if current.spec is None:
        raise GymError(ErrorCode.STATE_CORRUPT, f"round {current.server_round} ({current.state}) has no task")
    return current.spec


def task_content(current: Round, payloads: Payloads) -> RecordDict:
    """Return the task as sent to contributors, with the soups of its version."""
    spec = task_of(current)
    soups = {soup.sha256: payloads.outgoing(soup.sha256, soup.size_bytes) for soup in spec.soups}
    return RecordDict(
        {
            "task": ConfigRecord({"spec": json.dumps(spec.model_dump(mode="json"))}),
            "soups": ArrayRecord(soups),
        }
    )


def update_in(content: RecordDict, payloads: Payloads) -> tuple[str, bytes, bytes]:
    """Read the manifest, its signature and the public key from a reply, and store its delta.

    Raises:
        GymError: ``UPDATE_REFUSED`` for a reply without an update.
    """
    try:
        update, deltas = content.config_records["update"], content.array_records["delta"]
        manifest, signature, key = update["manifest"], update["signature"], update["public_key"]
        if not (isinstance(manifest, str) and isinstance(signature, bytes) and isinstance(key, bytes)):
            raise TypeError("manifest, signature or public_key has the wrong type")
        if len(deltas) != 1:
            raise TypeError(f"{counted(len(deltas), 'delta')} instead of one")
        for sha256, array in deltas.items():
            payloads.incoming(sha256, array)
    except (KeyError, TypeError, AttributeError) as error:
        raise GymError(ErrorCode.UPDATE_REFUSED, f"the reply contains no valid update: {error}") from error
    return manifest, signature, key


def plugins_of_round(config: ServerConfig, ledger: Ledger, recipe: TrainingRecipe) -> list[PluginRecord]:
    """Return the records of the plug-ins that a round names; contributors import no others.

    Raises:
        GymError: See ``plugins_of``.
    """
    of_soups = ((CODECS, name) for name in _soup_codecs(ledger))
    return records([*members_of(recipe), *members_of(config.codec), *of_soups])


def _soup_codecs(ledger: Ledger) -> Iterator[str]:
    """Yield the plug-in codecs of committed soups; codecs of updates are not included."""
    if CODECS.names() == CODECS.own():
        return  # without plug-ins, the ledger need not be read
    for entry in ledger.entries():
        if entry.kind == "version" and "plugins" in entry.body:
            words = {
                codec_of(word) for word in entry.body["recipe"]["codec"].values() if isinstance(word, str)
            }
            for record in read_records(entry.body["plugins"], "the ledger"):
                if record.kind == CODECS.kind and record.name in words:
                    yield record.name
