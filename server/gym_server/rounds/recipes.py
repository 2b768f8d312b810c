"""The current recipe: `gym-server.yaml`, with the changes that the coordinator made between rounds.

The changes are in the newest ledger entry of kind ``recipe-changed``, and nowhere else. They override the file and
``--set``, since contributors have agreed to them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import recipe_values
from gym_fed.config.parsed import ParsedConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.registries import AGGREGATORS
from gym_server.ledger.chain import Ledger
from gym_server.ledger.rows import newest_entry
from gym_server.rounds.steering import COORDINATOR, shown_words
from gym_server.store.database import Database, rerun

log = logging.getLogger("gym_server")

RECIPE_CHANGED = "recipe-changed"
_PLENTY = 10_000
"""Number of updates so large that only rules that never work are refused."""


@dataclass(frozen=True)
class ConfigText:
    """The text of a hub's config file, with the command line's overrides.

    Attributes:
        path: Path of the file, for messages.
        text: Its text.
        overrides: ``a.b=value`` settings.
    """

    path: Path
    text: str
    overrides: tuple[str, ...] = ()

    def config(self, settings: Mapping[str, str] | None = None) -> ServerConfig:
        """Return the config with the coordinator's changes applied.

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
    """The current config, whose recipe the coordinator may change between two rounds.

    Args:
        database: Database with the ledger that records the changes.
        source: The config file.
        settings: The changes that ``current`` includes.
        current: The config.
    """

    def __init__(
        self, database: Database, source: ConfigText, settings: Mapping[str, str], current: ServerConfig
    ) -> None:
        self._database, self.source, self._settings = database, source, settings
        self.current = current

    def follow(self) -> None:
        """Apply the coordinator's changes since the last call; call it between two rounds."""
        settings = settings_in(self._database)
        if settings == self._settings:
            return
        self._settings = settings
        try:
            self.current = self.source.config(settings)
        except GymError:  # the command validated it against a config file that changed after this hub started
            log.exception("the recipe that was set cannot be applied; rounds continue with the previous one")
            return
        log.info("the coordinator has changed the recipe: %s", ", ".join(settings) or "as in gym-server.yaml")


class RecipeChanges:
    """The changes that the coordinator has made to the recipe.

    Args:
        database: Database with the ledger.
        ledger: Ledger that records the changes.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database, self._ledger = database, ledger

    def settings(self) -> dict[str, str]:
        """Return the current changes: YAML text by key."""
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
        """Replace the current changes.

        Args:
            known: The changes that ``before`` includes.
            settings: All changes that apply afterwards.
            before: The config before the change.
            after: The config after the change.
            why: The coordinator's reason; may be empty.

        Returns:
            The entry: digests ``before`` and ``after``, and ``changes`` by key.

        Raises:
            GymError: ``USAGE`` if nothing changes; ``BUSY`` if another command made changes in the meantime.
        """
        changes = changes_between(before, after)
        if not changes:
            raise GymError(
                ErrorCode.USAGE, "these settings do not change the recipe", "see gym-server recipe show"
            )
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
                    ErrorCode.BUSY, "the recipe was changed in the meantime", "see gym-server recipe show"
                )
            return self._ledger.append(tx, RECIPE_CHANGED, body).body


def check_soup(config: ServerConfig) -> None:
    """Check that the smallest round that may be merged has enough updates for the rules.

    Raises:
        GymError: ``CONFIG_INVALID`` with the required number.
    """
    import torch

    from gym_fed.soup.gram import Needs
    from gym_fed.soup.pipeline import Pipeline

    pipeline = Pipeline.of(config.soup)
    is_continuous = config.rounds.mode == "continuous"  # such a round waits for enough updates
    pipeline.check(torch.ones(_PLENTY if is_continuous else config.rounds.min_contributors))
    if config.root is not None and pipeline.needs is Needs.EVIDENCE:
        pipeline.check_evidence()
    elif (pipeline.needs is Needs.ROOT) != (config.root is not None):
        judges = pipeline.needs is Needs.ROOT
        judging = (name for name in AGGREGATORS.own() if AGGREGATORS.type_of(name).needs >= Needs.EVIDENCE)
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"soup.aggregator {config.soup.aggregator!r} "
            + ("needs the coordinator's root data" if judges else "does not use the given root data"),
            "add root: {data: FILE}" if judges else f"remove root, or use aggregator: {' or '.join(judging)}",
        )


def settings_in(database: Database) -> dict[str, str]:
    """Return the coordinator's changes in a hub's database: YAML text by key."""
    with database.reading() as tx:
        return _settings_of(tx)


def with_settings(settings: Mapping[str, str], said: Mapping[str, str]) -> dict[str, str]:
    """Merge new settings into others; setting an entire section removes the settings inside it."""
    kept = {
        key: value
        for key, value in settings.items()
        if not any(key == new or key.startswith(f"{new}.") for new in said)
    }
    return dict(sorted({**kept, **said}.items()))  # in the order in which the ledger returns them


def changes_between(before: ServerConfig, after: ServerConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, by key; None is a missing key."""
    was, now = (recipe_values(config.recipe, config.codec) for config in (before, after))
    keys = sorted({*was, *now})
    return {key: (was.get(key), now.get(key)) for key in keys if was.get(key) != now.get(key)}


def recipe_digest(config: ServerConfig) -> str:
    """Return the digest of a recipe and its codec."""
    return f"sha256:{canonical_digest({'gym-recipe-1': recipe_values(config.recipe, config.codec)})}"


def _settings_of(tx: Connection) -> dict[str, str]:
    row = newest_entry(tx, RECIPE_CHANGED)
    return {} if row is None else dict(json.loads(row.body)["settings"])
