"""Ten rounds in which hub and contributors are killed at random, or reach each other over a line that fails."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.support.faulty_line import KINDS, FaultyLine
from tests.support.federation import Federation, assert_every_contributor_counts_once_a_round

pytestmark = pytest.mark.slow  # ten rounds of three processes, each started several times

NAMES = ("ann", "bob")
ROUNDS = {"min_contributors": 2, "deadline_seconds": 600, "lease_seconds": 6}
SEED = int(os.environ.get("GYM_KILLS_SEED", "1"))


def test_random_kills_of_hub_and_contributors_lose_no_round_and_pay_nothing_twice(
    federation: Federation,
) -> None:
    draw = random.Random(SEED)
    hub = federation.hub
    hub.configure({"rounds": {"num_rounds": 10, **ROUNDS}})
    hub.start("--exit-when-done")
    for name in NAMES:
        federation.join(name)
    kills = {"hub": 0, **dict.fromkeys(NAMES, 0)}
    while sum(kills.values()) < 15:
        time.sleep(draw.uniform(0.5, 6))
        assert hub.process is not None
        if hub.process.poll() is not None:
            break
        victim = draw.choice(list(kills))
        kills[victim] += 1
        if victim == "hub":
            hub.kill()
            hub.start("--exit-when-done")
        else:
            federation.clients[victim].kill()
            federation.clients[victim].wait()
            federation.join(victim)
    federation.finish()
    assert all(kills.values()), kills
    assert_every_contributor_counts_once_a_round(hub, set(NAMES), 10)


def test_connections_that_fail_at_any_byte_lose_no_round_and_pay_nothing_twice(
    federation: Federation,
) -> None:
    federation.hub.configure({"rounds": {"num_rounds": 4, **ROUNDS}})
    federation.hub.start("--exit-when-done")
    with FaultyLine(federation.hub.port, faults=24, seed=SEED) as line:
        federation.entrance = line.address
        for name in NAMES:
            federation.join(name)
        federation.finish()
        assert set(line.failed) == set(KINDS), line.failed
    assert_every_contributor_counts_once_a_round(federation.hub, set(NAMES), 4)
