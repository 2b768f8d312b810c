"""`gym-server mirror` as a process: killed and started again, it resumes and serves a contributor."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gym_client.hub.transfers import ObjectCache, download
from gym_client.mirror.source import Mirrors

from gym_fed.config.hub.mirrors import MirrorConfig
from gym_fed.core.errors import ErrorCode
from gym_fed.trust.mirrors.folder import MirrorFolder
from tests.support.loopback_hub import LoopbackHub
from tests.support.loopback_mirror import add_version
from tests.support.wait import SECONDS, until
from tests.support.warm import WarmProcess, run

pytestmark = pytest.mark.slow  # a mirror of two processes, started twice

DATA = bytes(range(256)) * 4000


def start(folder: Path, hub: LoopbackHub, port: str, log: Any, *arguments: str) -> tuple[Any, MirrorConfig]:
    """Start a mirror, and wait until it listens."""
    command = ["gym-server", "mirror", hub.address, "--output", str(folder), "--port", port, "--json"]
    process = WarmProcess([*command, *arguments], stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    event = json.loads(process.stdout.readline())
    return process, MirrorConfig(address=f"127.0.0.1:{event['port']}", fingerprint=event["fingerprint"])


def test_a_killed_mirror_resumes_with_its_key_and_serves_what_came_meanwhile(tmp_path: Path) -> None:
    calls = Counter[str]()
    hub = LoopbackHub(tmp_path / "hub", on_call=lambda method: calls.update([method]))
    folder = MirrorFolder(tmp_path / "mirror")

    def has(sha256: str) -> bool:
        content = folder.content()
        return content is not None and sha256 in content.objects

    process = None
    try:
        first = add_version(hub, DATA)
        with (tmp_path / "mirror.log").open("ab") as log:
            pinned = ("--fingerprint", hub.fed.fingerprint)
            process, config = start(folder.path, hub, "0", log, *pinned)
            until(lambda: has(first), "the first version")
            process.kill()
            process.wait()
            second = add_version(hub, DATA[::-1])
            process, again = start(folder.path, hub, config.address.split(":")[1], log)
        assert again == config, "the same port and key: the hub's list stays true"
        until(lambda: has(second), "the second version")
        with hub.client(tmp_path / "ann") as ann:
            ann.status()
            cache = ObjectCache(ann.home.objects)

            def fetched() -> bool:
                """Fetch it again, and return True if the hub did not send it; the mirror learns of the account soon."""
                time.sleep(0.5)
                calls.clear()
                ann.mirrors = Mirrors(ann, [config])
                cache.path(second).unlink(missing_ok=True)
                download(ann, cache, second, len(DATA), kind="soups")
                return calls["Download"] == 0

            until(fetched, "a download without the hub")
        process.terminate()
        assert process.wait(timeout=SECONDS) == 0
    finally:
        if process is not None:
            process.kill()
            process.wait()
        hub.close()


def test_a_mirror_of_a_hub_whose_key_nobody_gave_ends_with_the_reason(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    try:
        done = run(["gym-server", "mirror", hub.address, "--output", tmp_path / "mirror", "--port", "0"])
        assert done.returncode == ErrorCode.UNAVAILABLE.exit_code
        assert "was not accepted" in done.stderr
    finally:
        hub.close()
