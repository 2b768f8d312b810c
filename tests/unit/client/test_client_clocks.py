"""The hub's time on a contributor's machine, and the sentence that names the clock which is wrong."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from gym_client.hub.clock import Clocks, HubTime
from gym_client.identity import trust
from gym_client.identity.address import Address

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.statements import require_fresh
from gym_fed.trust.identity.tls import certificate_request, create_certificate, validity
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.authority import Authority

NOW = 1.8e9
HOUR = 3600.0
EARLIEST = NOW - 1000 * HOUR


@pytest.mark.parametrize(
    ("clocks", "said"),
    [
        (Clocks(0.0, NOW, NOW), ["behind", "set this machine's clock", "before this version"]),
        (Clocks(NOW, 0.0, 0.0), ["ahead of", "set the hub's clock", "before this version"]),
        (
            Clocks(NOW, NOW, NOW + 6 * HOUR),
            ["6 h 0 min behind", "set the hub's clock", "set while the hub ran"],
        ),
        (Clocks(NOW, NOW, NOW - 6 * HOUR), ["6 h 0 min ahead of", "set the hub's clock", "set while"]),
        (
            Clocks(NOW + 6 * HOUR, NOW, NOW, NOW + 1),
            ["6 h 0 min ahead of", "set this machine's clock", "others"],
        ),
        (Clocks(NOW - 6 * HOUR, NOW, NOW, NOW + 1), ["6 h 0 min behind", "set this machine's clock"]),
        (Clocks(NOW, NOW + 6 * HOUR, NOW + 6 * HOUR, NOW - 1), ["6 h 0 min behind", "set the hub's clock"]),
        (Clocks(NOW, NOW - 6 * HOUR, NOW - 6 * HOUR, NOW - 1), ["6 h 0 min ahead", "set the hub's clock"]),
        (Clocks(NOW, NOW + 6 * HOUR, NOW + 6 * HOUR), ["6 h 0 min behind", "one of the two clocks is wrong"]),
        (
            Clocks(NOW + 6 * HOUR, NOW, NOW, set_by=6 * HOUR),
            ["6 h 0 min ahead of", "set this machine's clock", "set while gym-client ran"],
        ),
        (
            Clocks(NOW + 3 * HOUR, NOW, NOW + 6 * HOUR, set_by=3 * HOUR),
            ["3 h 0 min behind", "one of the two clocks is wrong"],
        ),
    ],
)
def test_the_note_names_the_direction_and_the_side_that_is_wrong(clocks: Clocks, said: list[str]) -> None:
    note = clocks.note(EARLIEST).replace("other contributors", "others")
    assert all(words in note for words in said), note
    assert Clocks(clocks.hub_machine + 30, clocks.hub, clocks.hub_machine).note(EARLIEST) == ""


def test_the_hubs_time_is_that_of_the_middle_of_the_call_and_goes_on_when_this_clock_is_set() -> None:
    wall, steady = [NOW - 99 * HOUR], [10.0]
    found = HubTime(lambda: wall[0], lambda: steady[0])
    assert (found.is_known, found.now()) == (False, wall[0])

    def call() -> pb.StatusReply:
        steady[0] += 4
        return pb.StatusReply(hub_seconds=NOW, clock_seconds=NOW)

    found.measure(call)
    assert found.now() == pytest.approx(NOW + 2)
    wall[0] += 1e6
    steady[0] += 60
    assert found.now() == pytest.approx(NOW + 62)
    found.measure(lambda: pb.StatusReply())  # a hub that does not say leaves what is known
    assert found.now() == pytest.approx(NOW + 62)


def test_a_clock_that_was_set_is_compared_with_the_time_when_both_clocks_agreed() -> None:
    wall, steady, hub = [NOW], [10.0], [NOW]
    found = HubTime(lambda: wall[0], lambda: steady[0])

    def set_by(step: float, hubs: float = 0.0) -> float:
        for clock in (wall, steady, hub):
            clock[0] += 60
        wall[0] += step
        hub[0] += hubs
        found.measure(lambda: pb.StatusReply(hub_seconds=NOW, clock_seconds=hub[0]))
        assert found.clocks is not None
        return found.clocks.set_by

    assert set_by(0) == 0
    assert set_by(-6 * HOUR) == pytest.approx(-6 * HOUR)
    assert set_by(12 * HOUR) == pytest.approx(6 * HOUR)
    assert set_by(-6 * HOUR) == pytest.approx(0, abs=1e-3)
    assert set_by(0, hubs=6 * HOUR) == pytest.approx(0, abs=1e-3)
    wall[0], late = NOW - 99 * HOUR, HubTime(lambda: wall[0], lambda: steady[0])
    late.measure(lambda: pb.StatusReply(hub_seconds=NOW, clock_seconds=NOW))
    wall[0] += HOUR
    late.measure(lambda: pb.StatusReply(hub_seconds=NOW, clock_seconds=NOW))
    assert late.clocks is not None
    assert late.clocks.set_by == 0, "it may have been put right"


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300])
def test_a_time_that_no_clock_shows_is_refused(seconds: float) -> None:
    for key in ("hub_seconds", "clock_seconds"):
        with pytest.raises(GymError, match="sends an invalid time"):
            HubTime().measure(lambda key=key: pb.StatusReply(**{"hub_seconds": NOW, key: seconds}))  # type: ignore[misc]


@pytest.mark.parametrize(("issued_at", "side"), [(NOW + 6 * HOUR, "ahead of"), (NOW - 6 * HOUR, "behind")])
def test_a_request_signed_at_another_time_is_refused_with_the_right_sign(issued_at: float, side: str) -> None:
    with pytest.raises(GymError, match=f"6 h 0 min {side} the hub's") as caught:
        require_fresh("the request", issued_at, NOW)
    assert caught.value.code is ErrorCode.CLOCK_SKEWED
    require_fresh("the request", NOW + 299, NOW)


def test_a_hubs_own_certificate_is_valid_by_every_clock(tmp_path: Path) -> None:
    create_certificate(tmp_path / "tls.key", tmp_path / "tls.crt")
    begin, end = validity((tmp_path / "tls.crt").read_bytes())
    assert (begin.year, end.year) == (1970, 9999)
    trust.check_dates(Address("hub", 1), (tmp_path / "tls.crt").read_bytes())


@pytest.mark.parametrize(("days", "words"), [(-2, "is valid from"), (200, "expired on")])
def test_a_clock_outside_an_authoritys_certificate_is_a_matter_of_the_clock_and_worth_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, words: str
) -> None:
    from gym_client.hub.backoff import is_passing

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(time.time(), UTC) + timedelta(days=days)

    create_certificate(tmp_path / "tls.key", tmp_path / "tls.crt")
    request = certificate_request((tmp_path / "tls.key").read_bytes(), "hub.example.org")
    chain = Authority(tmp_path).sign(request)
    monkeypatch.setattr(trust, "datetime", Shifted)
    with pytest.raises(GymError, match=words) as caught:
        trust.check_dates(Address("hub.example.org", 9443), chain)
    assert caught.value.code is ErrorCode.CLOCK_SKEWED
    assert "hub.example.org:9443" in caught.value.message
    assert is_passing(caught.value)
