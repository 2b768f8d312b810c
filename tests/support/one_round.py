"""Options of `gym-server run` for one short round with one contributor."""

from __future__ import annotations

_SETTINGS = (
    "listen='127.0.0.1:0'",
    "rounds.num_rounds=1",
    "rounds.min_contributors=1",
    "soup.num_malicious_nodes=0",
    "recipe.max_steps=2",
    "limits.enrolment_work_bits=4",
)
ONE_ROUND = [word for setting in _SETTINGS for word in ("--set", setting)]
