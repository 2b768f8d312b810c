"""Shares of accounts and addresses: buckets that refill, slots that are given back, memory that is bounded."""

from __future__ import annotations

import re

import pytest
import yaml
from gym_server.cli.template import TEMPLATE
from gym_server.rpc.limits import CallSlots, TokenBuckets, address_of

from gym_fed.config.hub.sections import LimitsConfig, RoundsConfig, StorageConfig


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_then_its_rate_and_returns_how_long_to_wait() -> None:
    clock = Clock()
    buckets = TokenBuckets(rate=2.0, burst=3, clock=clock)
    assert [buckets.take("a") for _ in range(3)] == [0.0, 0.0, 0.0]
    assert buckets.take("a") == pytest.approx(0.5)
    clock.now += 0.5
    assert buckets.take("a") == 0.0
    assert buckets.take("a") > 0


def test_one_key_that_is_used_up_takes_nothing_from_another() -> None:
    buckets = TokenBuckets(rate=1.0, burst=1, clock=Clock())
    assert buckets.take("a") == 0.0
    assert buckets.take("a") > 0
    assert buckets.take("b") == 0.0


def test_a_refused_call_costs_nothing_so_that_waiting_helps() -> None:
    clock = Clock()
    buckets = TokenBuckets(rate=1.0, burst=1, clock=clock)
    buckets.take("a")
    for _ in range(100):
        assert buckets.take("a") > 0
    clock.now += 1.0
    assert buckets.take("a") == 0.0


def test_a_million_keys_are_remembered_by_no_more_than_the_cap() -> None:
    buckets = TokenBuckets(rate=1.0, burst=1, max_keys=50, clock=Clock())
    for number in range(1_000):
        buckets.take(str(number))
    assert len(buckets) == 50
    assert buckets.take("999") > 0  # the youngest are the ones that are remembered


def test_slots_are_counted_by_key_and_given_back_whatever_happens() -> None:
    slots = CallSlots(2)
    with slots.taken("a") as first, slots.taken("a") as second, slots.taken("a") as third:
        assert (first, second, third) == (True, True, False)
        with slots.taken("b") as other:
            assert other
    with pytest.raises(RuntimeError), slots.taken("a"):
        raise RuntimeError
    assert len(slots) == 0
    with slots.taken("a") as again:
        assert again


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:5555", "10.1.2.3"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5555", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:5555", "10.1.2.3"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", "fe80::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("ipv4:nonsense:1", "ipv4:nonsense:1"),
    ],
)
def test_an_address_is_counted_as_one_however_its_ports_and_notation_change(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_the_config_that_init_writes_names_every_limit_with_its_default() -> None:
    commented = TEMPLATE[TEMPLATE.index("# limits:") : TEMPLATE.index("\nstorage:")]
    assert yaml.safe_load(re.sub(r"^# ?", "", commented, flags=re.M)) == {
        "limits": LimitsConfig().model_dump()
    }


@pytest.mark.parametrize("section", [RoundsConfig, StorageConfig])
def test_the_config_that_init_writes_names_every_key_of_rounds_and_storage(section: type) -> None:
    named = set(re.findall(r"^ +(?:# )?(\w+):", TEMPLATE, flags=re.M))
    assert set(section.model_fields) <= named  # type: ignore[attr-defined]
