"""The hub's privacy budget: the cost of every round per contributor, the remaining budget, and the end of the run.

A round's cost is written in the transaction that ends it, whether the round is committed or rolled back, because the
noised soup was visible in either case. Costs are composed for the run and for each contributor; a round without an
update of a contributor costs that contributor nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from gym_fed.config.hub.privacy import PrivacyConfig, ReleasePrivacy
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.privacy.accountant import NoiseEvent, accountant_name, epsilon
from gym_fed.privacy.noise import MAX_STD
from gym_server.rounds.round_store import COLLECTING, MERGING, RoundStore
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.tables import accounts, ledger, privacy_spending, settings, updates, versions

ADJACENCY = "zero-out: one contributor's updates count as zero in every sum and count; their number is public"
SAMPLING = "none: every admitted update is in, and who takes part is public"
SPENT = "the privacy budget is spent"
_PROMISED = "privacy_promised"
"""Key of the setting that stores the last privacy guarantee given to contributors."""

_MAX_VARIANCE = int(MAX_STD) ** 2 >> 16


def spending(
    state: HubState, config: ServerConfig, server_round: int, contributors: Sequence[str]
) -> Callable[[Connection], None]:
    """Return a function that records a round's cost for the contributors of its updates.

    Returns:
        A function that writes the costs and a ledger entry of kind ``privacy`` in the transaction that ends the round;
        it does nothing if the hub promises no privacy.
    """
    privacy = config.privacy
    if privacy is None:
        return lambda _: None
    event, names, clip = _event(privacy), sorted(set(contributors)), clipping_norm(config, state.database)

    def write(tx: Connection) -> None:
        for contributor in names:
            tx.execute(
                privacy_spending.insert().values(
                    server_round=server_round,
                    contributor=contributor,
                    mechanism=event.mechanism,
                    noise_multiplier=event.noise_multiplier,
                )
            )
        state.ledger.append(
            tx,
            "privacy",
            {
                "server_round": server_round,
                "mechanism": event.mechanism,
                "noise_multiplier": event.noise_multiplier,
                "clipping_norm": clip,
                "clipping": privacy.clipping,
                "adjacency": ADJACENCY,
                "sampling": SAMPLING,
                "contributors": names,
                "target_delta": privacy.target_delta,
                "epsilon": epsilon(_events(tx), privacy.target_delta),
            },
        )

    return write


# ---- the budget ----


def is_spent(config: ServerConfig, database: Database) -> bool:
    """Return True if another round would exceed the run's budget."""
    privacy = config.privacy
    return privacy is not None and _after_next(database, privacy) > privacy.epsilon


def rounds_paid(config: ServerConfig, database: Database, wanted: int) -> int:
    """Return how many more rounds the budget allows, at most ``wanted``."""
    privacy = config.privacy
    if privacy is None:
        return wanted
    with database.reading() as tx:
        spent = _events(tx)
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        more = _event(privacy).model_copy(update={"count": middle})
        fits = epsilon([*spent, more], privacy.target_delta) <= privacy.epsilon
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def has_begun(database: Database) -> bool:
    """Return True if any of the budget is spent."""
    with database.reading() as tx:
        return bool(_events(tx))


def end_of_run(config: ServerConfig, database: Database, round_store: RoundStore) -> str:
    """Return the reason why no more rounds are opened, as text."""
    privacy = config.privacy
    if (
        privacy is None
        or round_store.num_committed() >= config.rounds.num_rounds
        or not is_spent(config, database)
    ):
        return "all rounds are done"
    return (
        f"{SPENT}: epsilon {_spent(database, privacy):.3g} of {privacy.epsilon:g}, and another round would make it "
        f"{_after_next(database, privacy):.3g}"
    )


def check_promise(config: ServerConfig, base: BaseSpec, database: Database, round_store: RoundStore) -> None:
    """Check before serving that the hub can keep its privacy promise.

    Raises:
        GymError: ``CONFIG_INVALID`` if the budget is too small for the first round, if the noise cannot be drawn, if
            the hub promised privacy and no longer does, or if it has merged without noise before;
            ``MISSING_DEPENDENCY`` if dp-accounting is not installed.
    """
    privacy = config.privacy
    with database.reading() as tx:
        began, without = bool(_events(tx)), _rounds_without_noise(tx)
        heard = any(tx.scalar(select(func.count()).select_from(table)) for table in (accounts, updates))
        promised = tx.scalar(select(settings.c.value).where(settings.c.key == _PROMISED))
    if privacy is None:
        if began or (promised and heard):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "this hub promised its contributors privacy, but its config no longer has a privacy section: soups "
                "without noise would reveal what it promised to hide",
                "restore the privacy section, or start another hub with other contributors",
            )
        return
    if without:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"privacy: this hub merged {counted(without, 'round')} without noise, so no epsilon would be valid for "
            "the contributors in them",
            "start another hub for private rounds, with this one's model as its base (gym-server model)",
        )
    first = _after_next(database, privacy)
    if not began and first > privacy.epsilon:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"privacy.epsilon {privacy.epsilon:g} is not enough for one round, which costs {first:.3g} at "
            f"noise_multiplier {privacy.noise_multiplier:g}",
            "raise privacy.noise_multiplier or privacy.epsilon",
        )
    if (
        privacy.mechanism == "discrete_gaussian"
        and privacy.noise_multiplier**2 * base.num_parameters > _MAX_VARIANCE
    ):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"privacy.noise_multiplier {privacy.noise_multiplier:g}: noise on votes of {base.num_parameters} "
            "weights is too large to be drawn exactly, and every merge would fail",
            "lower privacy.noise_multiplier",
        )
    _remember(database, round_store, privacy, promised)


def _remember(
    database: Database, round_store: RoundStore, privacy: PrivacyConfig, before: str | None
) -> None:
    """Store the promise, and abort a current round that began without a promise or under a stronger one."""
    now = {"epsilon": privacy.epsilon, "target_delta": privacy.target_delta}
    then = json.loads(before) if before else None
    current = round_store.current()
    if current is not None and current.state in (COLLECTING, MERGING):
        if then is None:
            round_store.abort(current.server_round, "it began before privacy was promised")
        elif any(now[key] > then[key] for key in now):
            round_store.abort(current.server_round, "it began under a stronger promise of privacy")
    database.set(_PROMISED, json.dumps(now))


# ---- reports ----


def clipping_norm(config: ServerConfig, database: Database) -> float:
    """Return the clipping norm of the next merge: the last version's with adaptive clipping, else the config's."""
    privacy = config.privacy
    assert privacy is not None
    if privacy.adaptive_clipping is None:
        return privacy.clipping_norm
    with database.reading() as tx:
        entries = select(ledger.c.body).where(ledger.c.kind == "version").order_by(ledger.c.sequence.desc())
        last = tx.scalar(entries.limit(1))
    recorded = json.loads(last).get("privacy") if last else None
    return float(recorded["next_clipping_norm"]) if recorded else privacy.clipping_norm


def promise(config: ServerConfig, database: Database) -> dict[str, Any]:
    """Return ``central`` of ``StatusReply.privacy_json``: the promise and the spent budget; empty without privacy."""
    privacy = config.privacy
    if privacy is None:
        return {}
    clip = clipping_norm(config, database)
    with database.reading() as tx:
        return _promise(tx, privacy, config.soup.aggregator, clip)


def _promise(tx: Connection, privacy: PrivacyConfig, aggregator: str, clip: float) -> dict[str, Any]:
    events = _events(tx)
    return {
        "aggregator": aggregator,
        "mechanism": privacy.mechanism,
        "noise_multiplier": privacy.noise_multiplier,
        "clipping_norm": clip,
        "clipping": privacy.clipping,
        "adaptive_clipping": privacy.adaptive_clipping is not None,
        "epsilon": privacy.epsilon,
        "target_delta": privacy.target_delta,
        "epsilon_spent": epsilon(events, privacy.target_delta),
        "epsilon_after_next_round": epsilon([*events, _event(privacy)], privacy.target_delta),
        "adjacency": ADJACENCY,
        "sampling": SAMPLING,
    }


def status_json(config: ServerConfig, database: Database) -> str:
    """Return ``StatusReply.privacy_json``; empty if no privacy is promised."""
    promised: dict[str, Any] = {"central": promise(config, database)} if config.privacy is not None else {}
    if config.secure_aggregation is not None:
        promised["secure_aggregation"] = {"threshold": config.secure_aggregation.threshold}
    return json.dumps(promised) if promised else ""


def account_of(config: ServerConfig, database: Database, contributor: str) -> dict[str, Any]:
    """Return ``privacy`` of ``AccountReply.rewards_json``: the caller's spent budget; empty without privacy."""
    privacy = config.privacy
    if privacy is None:
        return {}
    with database.reading() as tx:
        return _account(tx, privacy, contributor)


def _account(tx: Connection, privacy: PrivacyConfig, contributor: str) -> dict[str, Any]:
    return _accounts(tx, privacy, [contributor])[contributor]


def _accounts(
    tx: Connection, privacy: PrivacyConfig, contributors: Sequence[str]
) -> dict[str, dict[str, Any]]:
    who = privacy_spending.c.contributor
    kind = (privacy_spending.c.mechanism, privacy_spending.c.noise_multiplier)
    query = select(who, *kind, func.count().label("count")).where(who.in_(contributors)).group_by(who, *kind)
    found: dict[str, list[NoiseEvent]] = {name: [] for name in contributors}
    for row in tx.execute(query):
        found[row.contributor].append(_counted(row))
    return {
        name: {
            "epsilon": epsilon(events, privacy.target_delta),
            "target_delta": privacy.target_delta,
            "rounds": sum(event.count for event in events),
        }
        for name, events in found.items()
    }


def spent_on(
    config: ServerConfig, database: Database, contributors: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the spent budget of each of these contributors; empty without privacy."""
    privacy = config.privacy
    if privacy is None:
        return {}
    with database.reading() as tx:
        return _accounts(tx, privacy, contributors)


def num_spent_on(database: Database) -> int:
    """Return the number of contributors who have spent some of the budget."""
    with database.reading() as tx:
        return int(tx.scalar(select(func.count(privacy_spending.c.contributor.distinct()))) or 0)


def report(
    config: ServerConfig, database: Database, offset: int = 0, most: int | None = None
) -> dict[str, Any]:
    """Return the full report as of one moment, for `gym-server privacy`.

    Args:
        config: The hub's config.
        database: The hub's database.
        offset: Number of contributors to skip, ordered by id.
        most: Maximum number of contributors to list; None lists all.
    """
    privacy = config.privacy
    if privacy is None:
        with database.reading() as tx:
            return {"central": {}, "contributors": [], "rounds_without_noise": _rounds_without_noise(tx)}
    clip = clipping_norm(config, database)
    with database.reading() as tx:
        who = select(privacy_spending.c.contributor).distinct().order_by(privacy_spending.c.contributor)
        names = tx.scalars(who.offset(offset).limit(most)).all()
        costs, events = _accounts(tx, privacy, names), _events(tx)
        return {
            "central": {
                **_promise(tx, privacy, config.soup.aggregator, clip),
                "accountant": accountant_name([*events, _event(privacy)], privacy.target_delta),
                "rounds": sum(event.count for event in events),
                "events": [event.model_dump(exclude={"sampling_probability"}) for event in events],
            },
            "contributors": [{"contributor": name, **costs[name]} for name in names],
            "rounds_without_noise": _rounds_without_noise(tx),
        }


# ---- helpers ----


def _rounds_without_noise(tx: Connection) -> int:
    noised = select(privacy_spending.c.server_round)
    without = select(func.count()).select_from(versions).where(versions.c.server_round.not_in(noised))
    return int(tx.scalar(without) or 0)


def _event(privacy: ReleasePrivacy) -> NoiseEvent:
    return NoiseEvent(mechanism=privacy.mechanism, noise_multiplier=privacy.noise_multiplier)


def _events(tx: Connection) -> list[NoiseEvent]:
    """Return the noise events of a contributor who took part in every round."""
    kind = (privacy_spending.c.mechanism, privacy_spending.c.noise_multiplier)
    query = select(*kind, func.count(privacy_spending.c.server_round.distinct()).label("count"))
    return [_counted(row) for row in tx.execute(query.group_by(*kind).order_by(*kind))]


def _counted(row: Any) -> NoiseEvent:
    return NoiseEvent(mechanism=row.mechanism, noise_multiplier=row.noise_multiplier, count=row.count)


def _spent(database: Database, privacy: PrivacyConfig) -> float:
    with database.reading() as tx:
        return epsilon(_events(tx), privacy.target_delta)


def _after_next(database: Database, privacy: PrivacyConfig) -> float:
    with database.reading() as tx:
        return epsilon([*_events(tx), _event(privacy)], privacy.target_delta)
