"""Credits of a committed round: a whole pool, split in whole numbers, nothing lost and nothing made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gym_fed.config.server import RewardsConfig
from gym_server.rounds import Judgement


def split_pool(config: RewardsConfig, judgements: Sequence[Judgement]) -> list[Judgement]:
    """Give every merged update its share of ``config.pool`` (largest remainders; ties by update id).

    With ``split: improvement`` the share is how much the update alone lowers the held-out loss; an update that does not
    lower it earns nothing, and if none does the pool is not paid out.
    """
    merged = [j for j in judgements if j.verdict == "merged"]
    if config.split == "equal":
        shares = {j.update_id: 1.0 for j in merged}
    else:
        shares = {j.update_id: max(0.0, -(j.heldout_change or 0.0)) for j in merged}
    total = sum(shares.values())
    if total <= 0:
        return list(judgements)
    exact = {update_id: config.pool * share / total for update_id, share in shares.items()}
    amounts = {update_id: int(value) for update_id, value in exact.items()}
    by_remainder = sorted(exact, key=lambda u: (amounts[u] - exact[u], u))
    for update_id in by_remainder[: config.pool - sum(amounts.values())]:
        amounts[update_id] += 1
    return [replace(j, credit=amounts.get(j.update_id, 0)) for j in judgements]
