"""Credits of a committed round: a whole pool, split over the updates that were merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gym_fed.config.server import RewardsConfig
from gym_fed.soup.rewards import split_pool
from gym_server.rounds import Judgement


def reward(config: RewardsConfig, judgements: Sequence[Judgement]) -> list[Judgement]:
    """Give every merged update its share of ``config.pool``.

    With ``split: improvement`` the share is how much the update alone lowers the held-out loss; an update that does not
    lower it earns nothing, and if none does the pool is not paid out.
    """
    merged = [j for j in judgements if j.verdict == "merged"]
    if config.split == "equal":
        shares = {j.update_id: 1.0 for j in merged}
    else:
        shares = {j.update_id: max(0.0, -(j.heldout_change or 0.0)) for j in merged}
    amounts = split_pool(config.pool, shares)
    return [replace(j, credit=amounts.get(j.update_id, 0)) for j in judgements]
