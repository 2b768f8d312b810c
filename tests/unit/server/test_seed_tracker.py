"""The tracker of seeding: who is sent where, how long others wait, and what malicious contributors can delay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pytest
from gym_server.accounts.accounts import Session
from gym_server.seeding.tracker import LEASE_SECONDS, PublicObject, SeedTracker
from gym_server.traffic import HubTraffic

from gym_fed.config.hub.seeding import SeedingConfig
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import fingerprint
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.tls_files import seeder_certificate

OBJECT = "a" * 64
SIZE = 4 << 20
HOST = "192.0.2.1"


@dataclass
class Scene:
    """A tracker with a clock of its own; every seeder answers the probe unless its port is 1111."""

    tracker: SeedTracker
    key: SigningKey
    loop: asyncio.AbstractEventLoop
    seconds: float = 1000.0
    probes: int = 0

    def announce(
        self, number: int, objects: Collection[str] = (), host: str = "8.8.8.8", **fields: int
    ) -> str:
        request = pb.SeedRequest(
            **{"port": 9445, "slots": 1, **fields}, certificate_pem=seeder_certificate(number), sha256=objects
        )
        return str(self.loop.run_until_complete(self.tracker.announce(person(number), host, request)).why_not)

    def find(self, number: int, host: str = "8.8.4.4", **fields: list[str]) -> pb.FindSeederReply:
        request = pb.FindSeederRequest(sha256=OBJECT, **fields)
        return self.loop.run_until_complete(self.tracker.find(person(number), host, request))

    def where(self, number: int, **fields: list[str]) -> str:
        """Where the tracker sends a contributor."""
        reply = self.find(number, **fields)
        return "seeder" if reply.HasField("seeder") else "wait" if reply.wait_seconds else "hub"


def person(number: int) -> Session:
    return Session(f"c{number // 10}", number, b"", 0.0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    key = SigningKey.generate()
    scene: Scene

    async def probe(host: str, port: int, certificate_pem: str) -> bool:
        scene.probes += 1
        return port != 1111

    tracker = SeedTracker(
        SeedingConfig(min_bytes=1, hub_copies=2, max_wait_seconds=60),
        "s" + "1" * 16,
        key,
        lambda: 5000.0,
        False,
        lambda names: set(names) & {OBJECT},
        lambda name: PublicObject(SIZE, is_base=True) if name == OBJECT else None,
        1800.0,
        HubTraffic(),
        probe,
        lambda: scene.seconds,
    )
    scene = Scene(tracker, key, asyncio.new_event_loop())
    yield scene
    scene.loop.run_until_complete(scene.loop.shutdown_default_executor())
    scene.loop.close()


def test_two_copies_leave_the_hub_and_the_others_wait_for_a_seeder(scene: Scene) -> None:
    for number in (10, 20, 30):
        scene.announce(number)
    assert [scene.where(number) for number in (10, 20, 30, 40)] == ["hub", "hub", "wait", "wait"]
    scene.announce(10, [OBJECT])
    assert [scene.where(number) for number in (30, 40)] == ["seeder", "wait"]
    scene.announce(20, [OBJECT])
    assert scene.where(40) == "seeder"
    assert scene.probes == 3  # renewals are not probed


def test_contributors_who_will_not_seed_are_not_waited_for(scene: Scene) -> None:
    assert [scene.where(number) for number in range(10, 80, 10)] == ["hub"] * 7


def test_a_wait_ends_at_its_bound_though_nobody_seeds(scene: Scene) -> None:
    for number in (10, 20, 30):
        scene.announce(number)
        scene.where(number)
    assert scene.where(30) == "wait"
    scene.seconds += 25
    assert scene.where(30) == "wait"
    scene.seconds += 1
    assert scene.where(30) == "hub"


def test_a_wait_begins_again_when_the_object_reaches_another_contributor_and_ends_in_all(
    scene: Scene,
) -> None:
    scene.announce(10, [OBJECT])
    assert [scene.where(20), scene.where(30)] == ["seeder", "wait"]
    for number in (40, 60):
        scene.seconds += 25
        scene.announce(number, [OBJECT])
        assert [scene.where(number + 5), scene.where(30)] == ["seeder", "wait"]
    scene.seconds += 9
    assert scene.where(30) == "wait"
    scene.seconds += 1
    assert scene.where(30) == "hub"


def test_a_large_base_reaches_32_contributors_who_come_at_once_from_a_few_copies(scene: Scene) -> None:
    """500 MiB at the default rates: the hub takes 125 s for its copies, and a seeder 1,000 s for each of two."""
    scene.tracker._config = SeedingConfig()
    scene.tracker._describe = lambda name: PublicObject(500 << 20, is_base=True)
    everybody = range(0, 320, 10)
    ends: dict[int, float] = {}
    from_hub = 0
    for number in everybody:
        scene.announce(number, slots=2)
    while any(ends.get(number, 1e9) > scene.seconds for number in everybody):
        for number in everybody:
            scene.announce(number, [OBJECT] if ends.get(number, 1e9) <= scene.seconds else [], slots=2)
        for number in everybody:
            if number in ends or (where := scene.where(number)) == "wait":
                continue
            from_hub += where == "hub"
            ends[number] = scene.seconds + (125 if where == "hub" else 1000)
        scene.seconds += 50
        assert scene.seconds < 5000
    assert from_hub == 4


def test_contributors_who_announce_and_never_seed_delay_others_once(scene: Scene) -> None:
    for number in (10, 20):
        scene.announce(number)
        assert scene.where(number) == "hub"
    scene.seconds += 27
    for number in (10, 20, 30):
        scene.announce(number)
    assert [scene.where(number) for number in (10, 20)] == ["hub", "hub"]
    assert scene.where(30) == "hub"


def test_an_announcement_ends_with_its_lease_and_port_0_withdraws_it(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    assert scene.where(20) == "seeder"
    scene.seconds += LEASE_SECONDS
    assert scene.where(20) == "hub"
    scene.announce(10, [OBJECT])
    assert scene.where(20) == "seeder"
    scene.announce(10, port=0)
    assert scene.where(20) == "hub"


def test_a_ticket_is_signed_by_the_hub_for_that_seeder_and_names_no_account(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    found = scene.find(20).seeder
    name = fingerprint(found.certificate_pem.encode())
    ticket = SeedTicket.verified(found.ticket_json, scene.key.public_key, "s" + "1" * 16, name, 5000.0)
    assert (ticket.sha256, ticket.expires_at_seconds) == (OBJECT, 5060)
    fields = json.loads(found.ticket_json)["ticket"]
    assert fields.keys() == {"server", "seeder", "sha256", "nonce", "expires_at_seconds"}


def test_two_accounts_take_a_failing_seeder_off_the_list_and_one_account_does_not(scene: Scene) -> None:
    name = fingerprint(seeder_certificate(10).encode())
    scene.announce(10, [OBJECT], slots=9)
    for number in (20, 21):  # two machines of one account
        assert scene.where(number) == "seeder"
        assert scene.where(number, failed=[name]) == "hub"
    assert scene.where(40, failed=[name]) == "hub"  # who was not sent there cannot report it
    assert scene.where(30) == "seeder"
    assert scene.where(30, busy=[name]) == "hub"  # reached its limits
    assert scene.where(30) == "seeder"
    assert scene.where(30, failed=[name]) == "hub"
    assert scene.where(50) == "hub"
    assert "reported" in scene.announce(10, [OBJECT])
    scene.seconds += 3600
    assert not scene.announce(10, [OBJECT])
    assert scene.where(50) == "seeder"


def test_a_slot_is_taken_until_its_download_has_ended(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    assert [scene.where(20), scene.where(30)] == ["seeder", "wait"]
    scene.announce(20, [OBJECT])  # it has it, and serves it
    assert [scene.where(30), scene.where(40)] == ["seeder", "seeder"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "", "fe80::1"]
)
def test_addresses_that_others_cannot_connect_to_are_not_even_probed(scene: Scene, host: str) -> None:
    assert "cannot connect" in scene.announce(10, [OBJECT], host=host)
    assert scene.probes == 0
    assert scene.where(20) == "hub"


def test_a_seeder_in_a_private_network_is_named_only_to_others_with_private_addresses(scene: Scene) -> None:
    assert not scene.announce(10, [OBJECT], host="192.168.1.5", slots=9)
    assert not scene.find(20, host="8.8.8.8").HasField("seeder")
    assert scene.find(30, host="192.168.1.7").HasField("seeder")


def test_a_seeder_that_the_hub_does_not_reach_is_not_listed_and_a_new_place_is_probed(scene: Scene) -> None:
    assert "does not reach" in scene.announce(10, [OBJECT], port=1111)
    assert scene.where(20) == "hub"
    assert not scene.announce(10, [OBJECT])
    assert "does not reach" in scene.announce(10, [OBJECT], port=1111)
    assert scene.probes == 3
    assert scene.where(20) == "hub"


def test_small_and_private_objects_come_from_the_hub(scene: Scene) -> None:
    scene.announce(10, [OBJECT, "b" * 64])
    request = pb.FindSeederRequest(sha256="b" * 64)
    reply = scene.loop.run_until_complete(scene.tracker.find(person(20), HOST, request))
    assert reply == pb.FindSeederReply()
    scene.tracker._config = SeedingConfig(min_bytes=SIZE + 1)
    assert scene.where(20) == "hub"
