"""Limits on bytes per second: a token bucket, and transfers that keep to it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from gym_client.hub.traffic import DownloadPace, TokenBucket
from gym_client.hub.transfers import ObjectCache, download, upload
from gym_client.identity.home import Home

from tests.support.agent_scene import Scene
from tests.unit.client.test_client_waiting import Clock


class Sleeper(Clock):
    """Time that passes by sleeping alone."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bucket_lets_a_second_through_at_once_and_then_its_rate() -> None:
    clock = Sleeper()
    bucket = TokenBucket(1000, clock, clock.sleep)
    bucket.take(1000)
    assert clock.now == 100.0
    for _ in range(10):
        bucket.take(500)
    assert clock.now == pytest.approx(105.0, abs=0.01)
    clock.now += 60  # what is saved up in a pause is a second's worth
    bucket.take(3000)
    assert clock.now == pytest.approx(167.0, abs=0.01)


def test_a_bucket_without_a_rate_never_waits_and_one_that_stops_does_not_either() -> None:
    clock = Sleeper()
    TokenBucket(None, clock, clock.sleep).take(1 << 40)
    TokenBucket(1, clock, clock.sleep).take(1 << 40, should_stop=lambda: True)
    assert clock.now == 100.0


def test_uploads_and_downloads_keep_to_their_rates(scene: Scene) -> None:
    clock = Sleeper()
    scene.client.rates.up = TokenBucket(10_000, clock, clock.sleep)
    scene.client.rates.down = TokenBucket(20_000, clock, clock.sleep)
    data = bytes(range(256)) * 900  # 230,400 bytes
    cache = ObjectCache(scene.home.objects)
    sha256 = hashlib.sha256(data).hexdigest()
    upload(scene.client, sha256, cache.put(data))
    assert clock.now == pytest.approx(100 + 220_400 / 10_000, abs=0.1)
    assert scene.hub.objects[sha256] == data
    before = clock.now
    cache.path(sha256).unlink()
    download(scene.client, cache, sha256, len(data))
    assert clock.now - before == pytest.approx(210_400 / 20_000, abs=0.1)


def test_bandwidth_is_measured_remembered_and_never_above_the_limit(tmp_path: Path) -> None:
    home, clock = Home.open(tmp_path / "home"), Clock()
    pace = DownloadPace(home, clock=clock)
    assert pace.bandwidth() is None
    assert "not known" in pace.duration(10**9)
    pace.note(0)
    clock.now += 2
    pace.note(4_000_000)
    pace.save()
    assert pace.duration(10**9) == "about 8 min at 2.0 MB/s, measured just now"
    again = DownloadPace(home)
    assert again.duration(60_000_000) == "about 30 s at 2.0 MB/s, measured at the last download"
    limited = DownloadPace(home, limit=1_000_000)
    assert limited.duration(60_000_000) == "about 60 s at 1.0 MB/s, the most that policy.yaml allows"
