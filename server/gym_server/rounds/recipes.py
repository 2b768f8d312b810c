"""The recipe that holds: `gym-server.yaml`, and over it what the coordinator has set while rounds went on.

What is set is in the newest ledger entry of kind ``recipe-changed``, and nowhere else. It stands above the file and
above ``--set``, since contributors have agreed to it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.recipe_values import recipe_values
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.parsed import ParsedConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.canonical import canonical_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS
from gym_server.ledger.chain import Ledger
from gym_server.ledger.rows import newest_entry
from gym_server.rounds.steering import COORDINATOR, shown_words
from gym_server.store.database import Database, rerun

log = logging.getLogger("gym_server")

RECIPE_CHANGED = "recipe-changed"


@dataclass(frozen=True)
class ConfigText:
    """A hub's config file as it was read, and what the command line puts over it.

    Attributes:
        path: The file, for messages.
        text: Its text.
        overrides: ``a.b=value`` settings.
    """

    path: Path
    text: str
    overrides: tuple[str, ...] = ()

    def config(self, settings: Mapping[str, str] | None = None) -> ServerConfig:
        """The config under what the coordinator has set.

        Raises:
            GymError: ``CONFIG_INVALID``.
        """
        put = tuple(f"{key}={value}" for key, value in (settings or {}).items())
        try:
            return load_config(
                ParsedConfig.parse(self.path, self.text), ServerConfig, (*self.overrides, *put)
            )
        except GymError as error:
            if not put or error.code is not ErrorCode.CONFIG_INVALID:
                raise
            hint = f"with gym-server recipe set: {', '.join(put)}"
            raise GymError(
                error.code, error.message, f"{error.hint}; {hint}" if error.hint else hint
            ) from error


class LiveConfig:
    """The config that applies now. The coordinator may change its recipe between two rounds.

    Args:
        database: Has the ledger with the changes.
        source: The config file.
        settings: The changes that ``current`` was made with.
        current: The config.
    """

    def __init__(
        self, database: Database, source: ConfigText, settings: Mapping[str, str], current: ServerConfig
    ) -> None:
        self._database, self.source, self._settings = database, source, settings
        self.current = current

    def follow(self) -> None:
        """Apply what the coordinator has changed since; call it between two rounds."""
        settings = settings_in(self._database)
        if settings == self._settings:
            return
        self._settings = settings
        try:
            self.current = self.source.config(settings)
        except GymError:  # the command has checked it against a file that was changed since this hub began
            log.exception("the recipe that was set cannot be applied; rounds continue with the one before")
            return
        log.info("the coordinator has changed the recipe: %s", ", ".join(settings) or "as in gym-server.yaml")


class RecipeChanges:
    """What the coordinator has set of the recipe.

    Args:
        database: Has the ledger.
        ledger: Takes changes.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database, self._ledger = database, ledger

    def settings(self) -> dict[str, str]:
        """What is set now: YAML text by key."""
        return settings_in(self._database)

    @rerun
    def record(
        self,
        known: Mapping[str, str],
        settings: Mapping[str, str],
        before: ServerConfig,
        after: ServerConfig,
        why: str = "",
    ) -> dict[str, Any]:
        """Put settings in the place of those that held.

        Args:
            known: The settings that ``before`` was made with.
            settings: All that are to hold.
            before: The config until now.
            after: The config from now on.
            why: The coordinator's words.

        Returns:
            The entry: digests ``before`` and ``after``, and ``changes`` by key.

        Raises:
            GymError: ``USAGE`` where nothing changes; ``BUSY`` when another command came between.
        """
        changes = changes_between(before, after)
        if not changes:
            raise GymError(ErrorCode.USAGE, "that is the recipe already", "gym-server recipe show")
        body = {
            "by": COORDINATOR,
            "reason": shown_words(why),
            "before": recipe_digest(before),
            "after": recipe_digest(after),
            "changes": {key: {"before": was, "after": now} for key, (was, now) in changes.items()},
            "settings": dict(settings),
        }
        with self._database.transaction() as tx:
            if _settings_of(tx) != dict(known):
                raise GymError(
                    ErrorCode.BUSY, "the recipe was changed meanwhile", "look at gym-server recipe show"
                )
            return self._ledger.append(tx, RECIPE_CHANGED, body).body


def check_soup(config: ServerConfig) -> None:
    """Check that the smallest round that may be merged is enough for the rules.

    Raises:
        GymError: ``CONFIG_INVALID`` with the number that it needs.
    """
    import torch

    from gym_fed.soup.gram import Needs
    from gym_fed.soup.pipeline import Pipeline

    pipeline = Pipeline.of(config.soup)
    pipeline.check(torch.ones(config.rounds.min_contributors))
    if (pipeline.needs is Needs.ROOT) != (config.root is not None):
        judges = pipeline.needs is Needs.ROOT
        judging = (name for name in AGGREGATORS.own() if AGGREGATORS.type_of(name).needs_root())
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"soup.aggregator {config.soup.aggregator!r} "
            + ("needs root data of the coordinator" if judges else "does not look at the root data given"),
            "add root: {data: FILE}" if judges else f"remove root, or use aggregator: {' or '.join(judging)}",
        )


def settings_in(database: Database) -> dict[str, str]:
    """What is set of the recipe of a hub's database: YAML text by key."""
    with database.reading() as tx:
        return _settings_of(tx)


def with_settings(settings: Mapping[str, str], said: Mapping[str, str]) -> dict[str, str]:
    """Settings with others over them: a section that is set as a whole ends what was set inside it."""
    kept = {
        key: value
        for key, value in settings.items()
        if not any(key == new or key.startswith(f"{new}.") for new in said)
    }
    return dict(sorted({**kept, **said}.items()))  # as the ledger gives them back


def changes_between(before: ServerConfig, after: ServerConfig) -> dict[str, tuple[Any, Any]]:
    """Values that differ, by key; None stands for a key that is not there."""
    was, now = (recipe_values(config.recipe, config.codec) for config in (before, after))
    keys = sorted({*was, *now})
    return {key: (was.get(key), now.get(key)) for key in keys if was.get(key) != now.get(key)}


def recipe_digest(config: ServerConfig) -> str:
    """Names a recipe with its codec."""
    return f"sha256:{canonical_digest({'gym-recipe-1': recipe_values(config.recipe, config.codec)})}"


def _settings_of(tx: Connection) -> dict[str, str]:
    row = newest_entry(tx, RECIPE_CHANGED)
    return {} if row is None else dict(json.loads(row.body)["settings"])
