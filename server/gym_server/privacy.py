"""The hub's privacy budget: what every round cost whom, what is left, where the run stops, and what is said of it.

What a round costs is written in the transaction that ends it, whether it is committed or rolled back: who saw the
noised soup saw it. Costs add up, for the run and for each contributor: rounds without an update of theirs cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.config.privacy import PrivacyConfig, ReleasePrivacy
from gym_fed.errors import ErrorCode, GymError
from gym_fed.privacy.accountant import NoiseEvent, accountant_name, epsilon
from gym_server.federation import Federation
from gym_server.store.tables import ledger, privacy_spending, versions

ADJACENCY = "zero-out: all updates of one contributor replaced by nothing; the number of updates is public"
SAMPLING = "none: every admitted update is in, and who takes part is public"
SPENT = "the privacy budget is spent"


def spending(fed: Federation, server_round: int, contributors: Sequence[str]) -> Callable[[Connection], None]:
    """What a round costs those whose updates are in it, to be written in the transaction that ends it.

    Returns:
        Writes the costs and the ledger's entry of kind ``privacy``; nothing where the hub promises nothing.
    """
    privacy = fed.config.privacy
    if privacy is None:
        return lambda _: None
    event, names, clip = _event(privacy), sorted(set(contributors)), clipping_norm(fed)

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
        fed.ledger.append(
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


def is_spent(fed: Federation) -> bool:
    """Whether another round would take the run above its budget."""
    privacy = fed.config.privacy
    return privacy is not None and _after_next(fed, privacy) > privacy.epsilon


def end_of_run(fed: Federation) -> str:
    """Why no more rounds are opened, in words."""
    privacy = fed.config.privacy
    if privacy is None or fed.journal.num_committed() >= fed.config.rounds.num_rounds or not is_spent(fed):
        return "all rounds are done"
    return (
        f"{SPENT}: epsilon {_spent(fed, privacy):.3g} of {privacy.epsilon:g}, and another round would make it "
        f"{_after_next(fed, privacy):.3g}"
    )


def check_promise(fed: Federation) -> None:
    """Whether the hub can keep what it promises, asked before it serves.

    Raises:
        GymError: ``CONFIG_INVALID`` for a budget that is not enough for the first round, and for a hub that promised
            privacy and no longer does; ``DEPENDENCY_MISSING`` without dp-accounting.
    """
    privacy = fed.config.privacy
    with fed.database.reading() as tx:
        began = bool(_events(tx))
    if privacy is None:
        if began:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "rounds of this hub were noised, and the config has no privacy section any more: soups without noise "
                "would give away what was promised to stay hidden",
                "put the privacy section back, or start another hub with other contributors",
            )
        return
    first = _after_next(fed, privacy)
    if not began and first > privacy.epsilon:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"privacy.epsilon {privacy.epsilon:g} is not enough for one round, which costs {first:.3g} at "
            f"noise_multiplier {privacy.noise_multiplier:g}",
            "raise privacy.noise_multiplier or privacy.epsilon",
        )


# ---- what is said ----


def clipping_norm(fed: Federation) -> float:
    """The clip of the next merge: with adaptive clipping the one that the last version left, else the config's."""
    privacy = fed.config.privacy
    assert privacy is not None
    if privacy.adaptive_clipping is None:
        return privacy.clipping_norm
    with fed.database.reading() as tx:
        entries = select(ledger.c.body).where(ledger.c.kind == "version").order_by(ledger.c.sequence.desc())
        last = tx.scalar(entries.limit(1))
    told = json.loads(last).get("privacy") if last else None
    return float(told["next_clipping_norm"]) if told else privacy.clipping_norm


def promise(fed: Federation) -> dict[str, Any]:
    """``central`` of ``StatusReply.privacy_json``: what is promised and what is spent; empty without privacy."""
    privacy = fed.config.privacy
    if privacy is None:
        return {}
    return {
        "mechanism": privacy.mechanism,
        "noise_multiplier": privacy.noise_multiplier,
        "clipping_norm": clipping_norm(fed),
        "clipping": privacy.clipping,
        "adaptive_clipping": privacy.adaptive_clipping is not None,
        "epsilon": privacy.epsilon,
        "target_delta": privacy.target_delta,
        "epsilon_spent": _spent(fed, privacy),
        "epsilon_after_next_round": _after_next(fed, privacy),
        "adjacency": ADJACENCY,
        "sampling": SAMPLING,
    }


def status_json(fed: Federation) -> str:
    """``StatusReply.privacy_json``; empty where nothing is promised."""
    told: dict[str, Any] = {"central": promise(fed)} if fed.config.privacy is not None else {}
    if fed.config.secure_aggregation is not None:
        told["secure_aggregation"] = True
    return json.dumps(told) if told else ""


def account_of(fed: Federation, contributor: str) -> dict[str, Any]:
    """``privacy`` of ``AccountReply.rewards_json``: what was spent on the caller; empty without privacy."""
    privacy = fed.config.privacy
    if privacy is None:
        return {}
    with fed.database.reading() as tx:
        events = _events(tx, contributor)
    return {
        "epsilon": epsilon(events, privacy.target_delta),
        "target_delta": privacy.target_delta,
        "rounds": sum(event.count for event in events),
    }


def of_caller(fed: Federation, contributor: str) -> dict[str, Any]:
    """The key ``privacy`` of ``AccountReply.rewards_json``; none without privacy."""
    found = account_of(fed, contributor)
    return {"privacy": found} if found else {}


def report(fed: Federation) -> dict[str, Any]:
    """All of it, for `gym-server privacy`."""
    privacy = fed.config.privacy
    if privacy is None:
        return {"central": {}, "contributors": [], "rounds_without_noise": fed.journal.num_committed()}
    with fed.database.reading() as tx:
        names = sorted(set(tx.scalars(select(privacy_spending.c.contributor))))
        noised = set(tx.scalars(select(privacy_spending.c.server_round)))
        committed = set(tx.scalars(select(versions.c.server_round)))
        events = _events(tx)
    return {
        "central": {
            **promise(fed),
            "accountant": accountant_name([*events, _event(privacy)]),
            "rounds": sum(event.count for event in events),
        },
        "contributors": [{"contributor": name, **account_of(fed, name)} for name in names],
        "rounds_without_noise": len(committed - noised),
    }


# ---- helpers ----


def _event(privacy: ReleasePrivacy) -> NoiseEvent:
    return NoiseEvent(mechanism=privacy.mechanism, noise_multiplier=privacy.noise_multiplier)


def _events(tx: Connection, contributor: str | None = None) -> list[NoiseEvent]:
    """What was released of a contributor's updates; of those of whoever was in every round, without one."""
    columns = (
        privacy_spending.c.server_round,
        privacy_spending.c.mechanism,
        privacy_spending.c.noise_multiplier,
    )
    query = select(*columns).distinct().order_by(privacy_spending.c.server_round)
    if contributor is not None:
        query = query.where(privacy_spending.c.contributor == contributor)
    return [
        NoiseEvent(mechanism=row.mechanism, noise_multiplier=row.noise_multiplier)
        for row in tx.execute(query)
    ]


def _spent(fed: Federation, privacy: PrivacyConfig) -> float:
    with fed.database.reading() as tx:
        return epsilon(_events(tx), privacy.target_delta)


def _after_next(fed: Federation, privacy: PrivacyConfig) -> float:
    with fed.database.reading() as tx:
        return epsilon([*_events(tx), _event(privacy)], privacy.target_delta)
