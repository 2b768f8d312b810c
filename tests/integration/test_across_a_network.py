"""The commands of docs/hub-on-the-internet.md, between two network namespaces with delay and loss.

The hub knows itself as hub.example.org, a name that both ends have in their /etc/hosts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import BIN
from tests.support.network import Line, why_no_network
from tests.support.wait import SECONDS, until

pytestmark = [
    pytest.mark.slow,  # a hub and a contributor that start cold, and a round over a slow line
    pytest.mark.skipif(bool(why_no_network()), reason=why_no_network()),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hub-on-the-internet.md"
HUB, FRIEND = 0, 1
SHORT = (
    "--set rounds.num_rounds=1 --set rounds.min_contributors=1 --set soup.num_malicious_nodes=0 "
    "--set recipe.max_steps=5"
)


def shown(beginning: str) -> str:
    """The command of the page that begins so."""
    found = re.search(rf"^\$ ({beginning}.*)$", PAGE.read_text(), re.MULTILINE)
    assert found is not None, f"{PAGE} shows no {beginning}"
    return found[1]


@pytest.mark.parametrize("cut_seconds", [0.0, 8.0], ids=["whole", "cut for a while"])
def test_a_friend_joins_by_invite_over_a_slow_line_that_loses_packets(
    tmp_path: Path, cut_seconds: float
) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "GYM_HOME": str(tmp_path / "home")}
    settings: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    rows = [{"text": f"the friend's own row {number}"} for number in range(16)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Line(seconds=0.04, loss=0.02, names=("hub.example.org",)) as line:

        def at(end: int, command: str) -> str:
            done = subprocess.run(line.inside(end, command), **settings, capture_output=True, text=True)
            assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
            return done.stdout

        at(HUB, shown("gym-server init"))
        log, heard = tmp_path / "hub.log", tmp_path / "friend.log"
        with open(log, "wb") as file, open(heard, "wb") as friends:
            run = f"exec {shown('gym-server run')} --exit-when-done {SHORT}"
            hub = subprocess.Popen(line.inside(HUB, run), **settings, stdout=file, stderr=file)
            friend: subprocess.Popen[bytes] | None = None
            try:
                until(lambda: "listens on" in log.read_text() or hub.poll() is not None, "the hub's start")
                assert "a friend types" in log.read_text(), log.read_text()
                invite = at(HUB, shown("gym-server invites create")).split()[-1]
                assert invite.startswith("gym://hub.example.org:9443/")
                join = re.sub(r"gym://\S+", invite, shown("gym-client join"))
                begun = time.monotonic()
                friend = subprocess.Popen(
                    line.inside(FRIEND, f"exec {join} --name ada --yes"),
                    **settings,
                    stdout=friends,
                    stderr=friends,
                )
                if cut_seconds:
                    until(lambda: "ada joined" in log.read_text(), "the friend's joining", 2 * SECONDS)
                    line.is_cut = True
                    time.sleep(cut_seconds)
                    line.is_cut = False
                assert friend.wait(timeout=4 * SECONDS) == 0, heard.read_text() + log.read_text()
                seconds = time.monotonic() - begun
                assert hub.wait(timeout=SECONDS) == 0, log.read_text()
            finally:
                for process in (hub, friend):
                    if process is not None and process.poll() is None:
                        process.send_signal(signal.SIGKILL)
                        process.wait()
        print(f"{seconds:.1f} s from the invite to the verdict; {line.carried} packets, {line.dropped} lost")
        assert line.dropped > 0
        (only,) = json.loads(at(HUB, "gym-server rounds --dir hub --json"))
        assert only["state"] == "committed"
        assert [(update["name"], update["verdict"]) for update in only["updates"]] == [("ada", "merged")]
        assert json.loads(at(HUB, "gym-server ledger verify --dir hub --json"))["valid"]
