"""Aliases for names used by other projects, looked up for names that the core does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gym_fed.core.aliases import MISSING, Place, Reading
from gym_fed.interop import exports, serving_keys, training_keys
from gym_fed.interop.commands import COMMANDS
from gym_fed.interop.draft import Alias, Draft, KeyAlias
from gym_fed.interop.names import ATTRIBUTES, NAMES

KEYS: dict[str, list[KeyAlias]] = {
    "TrainingConfig": training_keys.WORDS,
    "ServingConfig": serving_keys.WORDS,
    "BitDeltaConfig": training_keys.BITDELTA,
    "DeltaSoupConfig": training_keys.DELTA_SOUP,
}
"""Aliases of keys by schema, in the order in which they are translated."""

NEAR_MEMBERS = training_keys.NEAR_MEMBERS
NEAR: dict[str, Mapping[str, str]] = {
    "TrainingConfig": training_keys.NEAR,
    "SearchConfig": training_keys.NEAR,
    "ServingConfig": serving_keys.NEAR,
}


def rows() -> Iterator[Alias]:
    """Yield all rows of the alias table."""
    yield from NAMES
    yield from exports.ROWS
    yield from (word.row for words in KEYS.values() for word in words if word.where == "Python")
    yield from COMMANDS
    yield from (word.row for words in KEYS.values() for word in words if word.where == "YAML")


def read(schema: str, values: Mapping[str, Any], place: Callable[[Place], str] | None) -> Reading | None:
    """See ``gym_fed.core.aliases.read``."""
    draft = Draft(values, place)
    for word in KEYS.get(schema, ()):
        word.apply(draft)
    return draft.result if draft.changed else None


def nearest(schema: str, key: str, value: Any) -> str:
    """See ``gym_fed.core.aliases.nearest``."""
    for word in KEYS.get("TrainingConfig" if schema == "SearchConfig" else schema, ()):
        if word.theirs == key and word.near_only is not None:
            return word.near_only(value)
    near = NEAR.get(schema, {})
    return near.get(key, "")


def nearest_member(kind: str, name: str) -> str:
    """See ``gym_fed.core.aliases.nearest_member``."""
    return NEAR_MEMBERS.get(kind, {}).get(name.lower(), "")


def member(kind: str, name: str) -> str | None:
    """See ``gym_fed.core.aliases.member``."""
    return exports.member(kind, name)


def attribute(owner: str, name: str) -> Any:
    """See ``gym_fed.core.aliases.attribute``."""
    reference = ATTRIBUTES.get((owner, name))
    return MISSING if reference is None else reference()
