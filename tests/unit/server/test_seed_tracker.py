"""The tracker of seeding: who is sent where, how long others wait, and what malicious contributors can delay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from gym_server.accounts.accounts import Session
from gym_server.seeding.seeders import SeederReports
from gym_server.seeding.tracker import LEASE_SECONDS, PublicObject, SeedTracker
from gym_server.traffic import HubTraffic

from gym_fed.config.hub.seeding import SeedingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import fingerprint
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.tls_files import seeder_certificate

OBJECT = "a" * 64
OTHER, SOUP = "c" * 64, "d" * 64
SIZE = 4 << 20
OBJECTS = {
    OBJECT: PublicObject(SIZE, is_base=True),
    OTHER: PublicObject(SIZE, is_base=True),
    SOUP: PublicObject(SIZE, is_base=False),
}
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

    def find(self, number: int, host: str = "8.8.4.4", **fields: Any) -> pb.FindSeederReply:
        request = pb.FindSeederRequest(**{"sha256": OBJECT, **fields})
        return self.loop.run_until_complete(self.tracker.find(person(number), host, request))

    def where(self, number: int, host: str = "8.8.4.4", **fields: Any) -> str:
        """Where the tracker sends a contributor."""
        reply = self.find(number, host, **fields)
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
        lambda names: set(names) & OBJECTS.keys(),
        OBJECTS.get,
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


def test_a_seeder_that_does_not_serve_this_object_is_not_waited_for(scene: Scene) -> None:
    for number in (10, 20, 30):
        scene.announce(number)
    assert [scene.where(number, will_not_serve=True) for number in (10, 20)] == ["hub", "hub"]
    assert scene.where(30) == "hub"
    scene.seconds += 3600
    assert not scene.tracker._copies.slow.has("c1", scene.seconds)


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


def test_a_search_for_another_object_does_not_clear_a_copy_that_others_wait_for(scene: Scene) -> None:
    for number in (10, 20):
        scene.announce(number)
        assert scene.where(number) == "hub"
    for _ in range(26):  # neither of these moves the deadline
        scene.seconds += 1
        for number in (10, 20):
            scene.announce(number)
            scene.where(number, sha256=OTHER)
            scene.where(number)
    scene.announce(30)
    assert scene.where(30) == "hub"
    assert all(scene.tracker._copies.slow.has(account, scene.seconds) for account in ("c1", "c2"))


def test_a_copy_counts_once_for_an_account_and_its_other_machines_wait_for_it(scene: Scene) -> None:
    for number in (10, 11, 20, 30):
        scene.announce(number)
    assert [scene.where(number) for number in (10, 11, 20, 30)] == ["hub", "wait", "hub", "wait"]
    assert scene.where(10) == "hub"  # it has lost the connection
    scene.announce(10, [OBJECT])
    assert scene.where(11) == "seeder"


def test_an_account_that_announces_again_and_again_does_not_extend_a_wait(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    assert [scene.where(20), scene.where(30)] == ["seeder", "wait"]
    for _ in range(25):
        scene.seconds += 1
        scene.announce(40, [OBJECT])
        scene.where(45)  # takes its only slot
        assert scene.where(30) == "wait"
        scene.announce(40, port=0)
    scene.seconds += 2
    assert scene.where(30) == "hub"


def test_the_wait_for_a_soup_is_a_part_of_the_rounds_deadline(scene: Scene) -> None:
    scene.tracker._round_seconds = 40.0
    for number in (10, 20, 30):
        scene.announce(number)
        scene.where(number, sha256=SOUP)
    assert scene.where(30, sha256=SOUP) == "wait"
    scene.seconds += 10
    assert scene.where(30, sha256=SOUP) == "hub"


def test_the_waits_for_all_files_of_the_base_are_bounded_together(scene: Scene) -> None:
    waited = 0
    for sha256 in (OBJECT, OTHER, OBJECT, OTHER):
        for number in (10, 20, 30):
            scene.announce(number)
        scene.tracker._copies.slow._until.clear()
        for number in (10, 20):
            assert scene.where(number, sha256=sha256) == "hub"
        while scene.where(30, sha256=sha256) == "wait":
            scene.seconds += 2
            waited += 2
        scene.seconds += 100
    assert 60 <= waited <= 64


def test_a_download_does_not_count_as_waiting_for_the_base(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    assert [scene.where(20), scene.where(30)] == ["seeder", "wait"]
    scene.find(20, sha256="")
    assert scene.where(30) == "seeder"
    scene.seconds += 65  # the announcement has expired, and the same search goes on with a wait
    for number in (40, 50):
        scene.announce(number)
        assert scene.where(number) == "hub"
    scene.where(30)
    assert scene.tracker._base_waits.seconds(30) == 0


def test_nobody_waits_for_a_seeder_whose_own_account_takes_its_slots(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    assert [scene.where(11), scene.where(20)] == ["seeder", "hub"]
    assert scene.where(12) == "wait"  # another machine of the account
    scene.find(11, sha256="")
    assert [scene.where(30), scene.where(40)] == ["seeder", "wait"]


def test_the_slot_of_a_killed_client_is_free_after_half_an_hour_whatever_the_size(scene: Scene) -> None:
    scene.tracker._describe = lambda name: PublicObject(5 << 30, is_base=True)
    scene.announce(10, [OBJECT])
    assert scene.where(20) == "seeder"
    scene.seconds += 1799
    scene.announce(10, [OBJECT])
    assert scene.where(30) == "wait"
    scene.seconds += 2
    assert scene.where(30) == "seeder"


def test_two_accounts_that_report_with_enough_tickets_remove_three_seeders_in_an_hour() -> None:
    reports, seeders = SeederReports(), [f"s{number}" for number in range(9)]
    for accuser in ("c5", "c6"):
        for seeder in seeders:
            reports.note_ticket(accuser)
            reports.note_ticket(accuser)
            reports.add(accuser, seeder, 0.0)
    assert [seeder for seeder in seeders if reports.banned.has(seeder, 1.0)] == seeders[:3]
    for accuser in ("c5", "c6"):
        for _ in range(9):
            reports.note_ticket(accuser)
        reports.add(accuser, "s8", 3601.0)
    assert reports.banned.has("s8", 3602.0)


def test_an_ended_search_frees_its_slot(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    assert [scene.where(20), scene.where(30)] == ["seeder", "wait"]
    assert scene.find(20, sha256="") == pb.FindSeederReply()
    assert scene.where(30) == "seeder"


def test_the_last_failure_is_reported_at_the_end_of_a_search(scene: Scene) -> None:
    name = fingerprint(seeder_certificate(10).encode())
    scene.announce(10, [OBJECT], slots=9)
    for number in (20, 30):
        assert scene.where(number) == "seeder"
        scene.find(number, sha256="", failed=[name])
    assert "reported" in scene.announce(10, [OBJECT])


def test_reports_lapse_and_outlive_a_withdrawn_announcement(scene: Scene) -> None:
    name = fingerprint(seeder_certificate(10).encode())

    def reported_by(number: int) -> None:
        assert scene.where(number) == "seeder"
        scene.where(number, failed=[name])

    scene.announce(10, [OBJECT], slots=9)
    reported_by(20)
    scene.seconds += 3601
    scene.announce(10, [OBJECT], slots=9)
    reported_by(30)
    scene.announce(10, port=0)
    assert not scene.announce(10, [OBJECT], slots=9)
    reported_by(40)
    assert "reported" in scene.announce(10, [OBJECT])


def test_a_seeder_that_has_withdrawn_is_not_reported(scene: Scene) -> None:
    name = fingerprint(seeder_certificate(10).encode())
    scene.announce(10, [OBJECT], slots=9)
    assert [scene.where(20), scene.where(30)] == ["seeder", "seeder"]
    scene.announce(10, port=0)
    for number in (20, 30):
        assert scene.where(number, failed=[name]) == "hub"
    assert not scene.announce(10, [OBJECT])


def test_who_reports_most_of_its_seeders_is_ignored(scene: Scene) -> None:
    for number in (10, 20, 30, 40):
        scene.announce(number, [OBJECT])
    for accuser in (50, 60):
        failed: list[str] = []
        while (reply := scene.find(accuser, failed=failed)).HasField("seeder"):
            failed.append(fingerprint(reply.seeder.certificate_pem.encode()))
    refused = [number for number in (10, 20, 30, 40) if scene.announce(number, [OBJECT])]
    assert len(refused) <= 2  # not all four


def test_a_contributor_is_sent_only_to_seeders_of_its_address_family(scene: Scene) -> None:
    scene.announce(10, [OBJECT], host="2606:4700::1111")
    assert scene.where(20) == "hub"
    assert scene.where(30, host="2001:4860:4860::8888") == "seeder"


def test_more_claimed_slots_attract_no_more_downloads(scene: Scene) -> None:
    for number, slots in ((10, 64), (20, 6)):
        scene.announce(number, [OBJECT], slots=slots)
    for number in range(100, 220, 10):
        assert scene.where(number) == "seeder"
    assert set(scene.tracker._searches.downloads.values()) == {6}


def test_an_account_gets_a_limited_number_of_tickets(scene: Scene) -> None:
    scene.announce(10, [OBJECT])
    given = 0
    while scene.where(20, sha256=OBJECT) == "seeder":
        given += 1
        assert given <= 200
    assert given == 200
    assert scene.where(30) == "seeder"
    scene.seconds += 1
    scene.find(30, sha256="")
    assert scene.where(20) == "seeder"


def test_one_certificate_is_listed_once_and_one_account_is_probed_once_at_a_time(scene: Scene) -> None:
    tracker, may_answer = scene.tracker, asyncio.Event()

    async def probe(host: str, port: int, certificate_pem: str) -> bool:
        await may_answer.wait()
        return True

    async def announce(number: int) -> str:
        request = pb.SeedRequest(port=9445, slots=1, certificate_pem=seeder_certificate(1))
        try:
            return str((await tracker.announce(person(number), "8.8.8.8", request)).why_not)
        except GymError as error:
            return error.code.value

    async def all_at_once() -> list[str]:
        tasks = [asyncio.create_task(announce(number)) for number in (10, 20, 11)]
        await asyncio.sleep(0)
        may_answer.set()
        return list(await asyncio.gather(*tasks))

    tracker._probe = probe
    first, second, same_account = scene.loop.run_until_complete(all_at_once())
    assert first == ""
    assert "another contributor" in second
    assert same_account == "busy"
    assert len(tracker._seeders) == 1


def test_one_network_cannot_take_all_probes(scene: Scene) -> None:
    may_answer = asyncio.Event()

    async def probe(host: str, port: int, certificate_pem: str) -> bool:
        if host == "8.8.8.8":
            await may_answer.wait()
        return True

    async def announce(number: int, host: str) -> bool:
        request = pb.SeedRequest(port=9445, slots=1, certificate_pem=seeder_certificate(number))
        try:
            return not (await scene.tracker.announce(person(number), host, request)).why_not
        except GymError as error:
            return error.code is not ErrorCode.BUSY

    async def many() -> tuple[bool, list[bool]]:
        tasks = [asyncio.create_task(announce(number, "8.8.8.8")) for number in range(10, 210, 10)]
        await asyncio.sleep(0)
        other = await announce(300, "8.8.4.4")
        may_answer.set()
        return other, list(await asyncio.gather(*tasks))

    scene.tracker._probe = probe
    other, listed = scene.loop.run_until_complete(many())
    assert other
    assert sum(listed) == 8


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
    assert "cannot reach" in scene.announce(10, [OBJECT], port=1111)
    assert scene.where(20) == "hub"
    assert not scene.announce(10, [OBJECT])
    assert "cannot reach" in scene.announce(10, [OBJECT], port=1111)
    assert scene.probes == 3
    assert scene.where(20) == "hub"


def test_small_and_private_objects_come_from_the_hub(scene: Scene) -> None:
    scene.announce(10, [OBJECT, "b" * 64])
    request = pb.FindSeederRequest(sha256="b" * 64)
    reply = scene.loop.run_until_complete(scene.tracker.find(person(20), HOST, request))
    assert reply == pb.FindSeederReply()
    scene.tracker._config = SeedingConfig(min_bytes=SIZE + 1)
    assert scene.where(20) == "hub"
