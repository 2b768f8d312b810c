"""Terms that the contributor has accepted, stored in the home. Changed terms require new consent.

The hub sets the terms: recipe, codec, base, pay, audits and privacy promises. Schedules change the learning rate every
round. A lower rate, or a higher one below the next power of two, is therefore not a change of terms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gym_client.display import Display
from gym_client.identity.home import Home
from gym_client.privacy.terms import Promises
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.credits import PayTerms
from gym_fed.config.hub.region import RegionConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe, recipe_values
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.json_files import canonical_digest, read_object

_RATE = "recipe.learning_rate"
_MAX_TERMS = 20
_MAX_CHARS = 1 << 20
"""Maximum total characters of the terms stored for a hub; the newest terms are stored even if they are longer."""


@dataclass(frozen=True)
class Terms:
    """The terms of a hub's rounds.

    Attributes:
        server: Id of the hub.
        data: Digest of the contributor's data; different data requires new consent.
        asked: All values of the terms, by dotted key.
    """

    server: str
    data: str
    asked: dict[str, Any]

    @classmethod
    def of(
        cls,
        server: str,
        base_digest: str,
        recipe: TrainingRecipe,
        codec: CodecPolicy,
        privacy_json: str,
        data: str,
        pay: PayTerms | None = None,
        audit: AuditTerms | None = None,
        seeding: bool = False,
        region: RegionConfig | None = None,
        mirrors: Sequence[str] = (),
    ) -> Terms:
        """Create the terms from a hub's announcement.

        ``privacy_json`` has the format of ``StatusReply.privacy_json``. ``seeding`` is True if both the hub and the
        contributor's policy allow it; ``mirrors`` contains the addresses of the mirrors in use.
        """
        promises = Promises.parse(privacy_json)
        asked: dict[str, Any] = {
            "base": base_digest,
            "privacy.epsilon": None if promises.central is None else promises.hub_epsilon,
            "privacy.target_delta": None if promises.central is None else promises.hub_delta,
            "secure_aggregation.threshold": promises.threshold,
        }
        if seeding:
            asked["seeding"] = True
        if mirrors:
            asked["mirrors"] = list(mirrors)
        of_rounds = {**recipe_values(recipe, codec), **_values(pay), **_values(audit), **_values(region)}
        return cls(server, data, {**asked, **of_rounds})

    def with_task(self, spec: TaskSpec) -> Terms:
        """Return a copy of these terms with the values of a task. Privacy promises are checked separately."""
        of_task = ("recipe.", "codec.", "pay.", "audit.", "region.")
        hub_values = {key: value for key, value in self.asked.items() if not key.startswith(of_task)}
        parts = (spec.pay, spec.audit, spec.region)
        named = recipe_values(spec.recipe, spec.codec)
        for part in parts:
            named |= _values(part)
        return replace(self, asked={**hub_values, "base": spec.base_digest, **named})

    def changes(self, later: Terms) -> list[str]:
        """List the changes from these terms to later ones, one line each: ``key: before -> after``."""
        keys = sorted({*self.asked, *later.asked})
        pairs = [(key, self.asked.get(key), later.asked.get(key)) for key in keys]
        return [
            f"{key}: {_shown(was)} -> {_shown(now)}" for key, was, now in pairs if _is_news(key, was, now)
        ]

    @property
    def name(self) -> str:
        """The identifier of exactly these terms, as passed to ``--accept``."""
        return f"terms:{canonical_digest({'gym-terms-1': [self.server, self.asked]})[:32]}"


@dataclass(frozen=True)
class Renewal:
    """A change of terms while the contributor works for the hub.

    Attributes:
        name: Identifier of the new terms for ``--accept``.
        changes: Descriptions of the changes, one line each.
    """

    name: str
    changes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return {"accept": self.name, "changes": list(self.changes)}


class Agreement:
    """The accepted terms of one hub.

    Args:
        home: The home, which stores accepted terms.
        terms: The hub's current terms.
        agrees: Function that prompts for consent to changed terms.
        display: Displays changes of the terms.
        again: The command that resumes the work, without ``--accept``.
    """

    def __init__(
        self,
        home: Home,
        terms: Terms,
        agrees: Callable[[Renewal], bool],
        display: Display,
        again: str,
    ) -> None:
        self._home, self._terms = home, terms
        self._agrees, self._display, self._again = agrees, display, again

    @property
    def name(self) -> str:
        """The identifier of the terms."""
        return self._terms.name

    def is_known(self) -> bool:
        """Return True if these terms were accepted before, for the same data."""
        return any(
            known.data == self._terms.data and not known.changes(self._terms) for known in self._known()
        )

    def news(self) -> list[str]:
        """List the changes since the terms that were accepted last."""
        known = self._known()
        return known[-1].changes(self._terms) if known else []

    def keep(self) -> None:
        """Store the terms as accepted."""
        others = [known for known in self._known() if known != self._terms]
        accepted = [*others, self._terms][-_MAX_TERMS:]
        while len(accepted) > 1 and len(json.dumps([terms.asked for terms in accepted])) > _MAX_CHARS:
            accepted = accepted[1:]
        every = {
            **self._read(),
            self._terms.server: [{"data": terms.data, "asked": terms.asked} for terms in accepted],
        }
        write_atomically(self._home.consents_path, json.dumps(every, indent=1, sort_keys=True).encode())

    def require(self, spec: TaskSpec) -> None:
        """Require consent before processing a task with changed terms.

        Raises:
            GymError: ``TERMS_CHANGED``, with the command that accepts the terms.
        """
        later = self._terms.with_task(spec)
        changes = self._terms.changes(later)
        if not changes:
            return
        before, self._terms = self._terms, later
        if self.is_known():
            return
        self._display.busy("")
        if not self._agrees(Renewal(later.name, tuple(changes))):
            self._terms = before
            raise GymError(
                ErrorCode.TERMS_CHANGED,
                f"the hub has changed the terms of its rounds: {'; '.join(changes)}",
                f"to accept exactly these terms: {self._again} --accept {later.name}",
            )
        self.keep()
        self._display.report("terms", f"accepted: {'; '.join(changes)}")

    def _known(self) -> list[Terms]:
        """Read the terms accepted for this hub, oldest first."""
        entries = self._read().get(self._terms.server, [])
        return [Terms(self._terms.server, entry["data"], entry["asked"]) for entry in entries]

    def _read(self) -> dict[str, Any]:
        return _consents(self._home)


def has_agreed(home: Home, server: str) -> bool:
    """Return True if the contributor has accepted any terms of this hub."""
    return bool(_consents(home).get(server))


def _consents(home: Home) -> dict[str, Any]:
    path = home.consents_path
    if not path.exists():
        return {}
    consents: dict[str, Any] = read_object(
        path, ErrorCode.STATE_CORRUPT, "delete the file and accept the terms again"
    )
    for entries in consents.values():
        if not isinstance(entries, list) or not all(map(_is_kept, entries)):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path} does not contain accepted terms",
                "delete the file and accept the terms again",
            )
    return consents


def _is_kept(value: Any) -> bool:
    """Return True if the value has the format that ``Agreement.keep`` writes."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("data"), str)
        and isinstance(value.get("asked"), dict)
    )


def _values(terms: PayTerms | AuditTerms | RegionConfig | None) -> dict[str, Any]:
    return {} if terms is None else terms.values_by_key()


def _is_news(key: str, was: Any, now: Any) -> bool:
    if key == _RATE and isinstance(was, float) and isinstance(now, float):
        return now > was and math.frexp(now)[1] != math.frexp(was)[1]
    return bool(was != now)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
