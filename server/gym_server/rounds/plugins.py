"""The plug-ins that contributors of a round need to train, to encode, and to read earlier soups."""

from __future__ import annotations

from collections.abc import Iterator

from gym_fed.config.delta import codec_of
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.schema.plugins import PluginRecord, members_of, read_records, records
from gym_fed.core.registries import CODECS
from gym_server.ledger.chain import Ledger


def plugins_of_round(config: ServerConfig, ledger: Ledger, recipe: TrainingRecipe) -> list[PluginRecord]:
    """As this machine has them; a contributor uses no other that the hub names.

    Raises:
        GymError: As ``plugins_of``.
    """
    of_soups = ((CODECS, name) for name in _soup_codecs(ledger))
    return records([*members_of(recipe), *members_of(config.codec), *of_soups])


def _soup_codecs(ledger: Ledger) -> Iterator[str]:
    """Codecs of other packages that committed soups are written in; those of updates are not among them."""
    if CODECS.names() == CODECS.own():
        return  # the ledger need not be read
    for entry in ledger.entries():
        if entry.kind == "version" and "plugins" in entry.body:
            words = {
                codec_of(word) for word in entry.body["recipe"]["codec"].values() if isinstance(word, str)
            }
            for record in read_records(entry.body["plugins"], "the ledger"):
                if record.kind == CODECS.kind and record.name in words:
                    yield record.name
