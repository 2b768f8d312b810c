"""Floods: what twenty honest contributors notice while somebody else does what they like with the hub.

    python benchmarks/floods.py                              # this version
    python benchmarks/floods.py --before OTHER/.venv/bin/python   # compared with another checkout

A real hub (`gym-server run`, TLS) has twenty contributors with keys, clients and small real updates. A flood comes from
another address, out of a process of its own, while the twenty finish three rounds; a newcomer requests the hub's status
twice a second over a new connection each time. Reported of each flood: the rounds, the 99th percentile of the twenty's
calls and of the newcomer's, and how the hub's resident memory grew. The floods: 300 installations of one account that
take tasks and never answer, 1,000 work streams, 1,000 mute uploads, 1,100 mute TCP connections that come back when
they are closed, one account's calls and a stranger's enrolments and status calls, as fast as they go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from _flood_honest import GIVE_UP_SECONDS, Calls, Contributor, Newcomer
from _flood_hub import HubUnderTest, make_base
from _flood_kinds import FLOODS
from _report import Report, options

HONEST, ROUNDS = 20, 3
P99_SECONDS, GROWTH_MB = 2.0, 100.0


def measure(hub: HubUnderTest, base: Path, folder: Path, kind: str, rounds: int) -> dict[str, float]:
    """A fresh hub process, one round in peace, then the flood until the rounds are done."""
    hub.start()
    honest_calls, newcomers = Calls(), Calls()
    people = [Contributor(hub, folder / f"honest-{n}", base, honest_calls, n) for n in range(HONEST)]
    for person in people:
        person.start()
    try:
        goal = hub.committed() + 1
        wait_until(lambda: hub.committed() >= goal, GIVE_UP_SECONDS)
        before = hub.rss_mb
        honest_calls.seconds.clear()
        honest_calls.errors = 0
        pem = people[0].client.pin.certificate_pem
        script, home = Path(__file__).with_name("_flood_kinds.py"), tempfile.mkdtemp(dir=folder)
        command = [sys.executable, str(script), kind, str(hub.port), hub.fingerprint, home]
        flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        newcomer = Newcomer(hub, pem, newcomers)
        try:
            assert flood.stdout is not None
            ready = threading.Thread(target=flood.stdout.readline, daemon=True)
            ready.start()
            ready.join(60)
            newcomer.start()
            began, start, peak = time.monotonic(), hub.committed(), before
            while hub.committed() < start + rounds and time.monotonic() - began < GIVE_UP_SECONDS:
                time.sleep(0.25)
                peak = max(peak, hub.rss_mb)
            seconds = time.monotonic() - began
            done = min(rounds, hub.committed() - start)
        finally:
            flood.kill()
            flood.wait()
            newcomer.stopped.set()
        newcomer.join(35)
        time.sleep(1)
        return {
            "rounds": done,
            "seconds": seconds,
            "p99": honest_calls.p99,
            "errors": honest_calls.errors,
            "newcomer p99": newcomers.p99,
            "newcomer errors": newcomers.errors,
            "rss before": before,
            "rss peak": peak,
            "rss after": hub.rss_mb,
        }
    finally:
        for person in people:
            person.stopped.set()
        hub.stop()
        for person in people:
            person.stop()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"no round was committed in {seconds:.0f} s, without any flood")
        time.sleep(0.2)


def figures(kinds: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """What each flood came to."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_base(folder / "base")
        hub = HubUnderTest(folder / "hub", base, quorum=HONEST)
        enrol_all(hub, folder, base)
        for kind in kinds:
            found[kind] = measure(hub, base, folder, kind, rounds)
            print(
                kind,
                json.dumps({k: round(v, 3) for k, v in found[kind].items()}),
                file=sys.stderr,
                flush=True,
            )
    return found


def enrol_all(hub: HubUnderTest, folder: Path, base: Path) -> None:
    """The twenty enrol in peace; where there are limits, these are loose for the time being."""
    loose = "limits" in yaml.safe_load(hub.path.read_text()) or has_limits()
    if loose:
        hub.configure(limits={"enrolments_per_minute": 6000.0, "enrolment_work_bits": 0})
    hub.start()
    for number in range(HONEST):
        Contributor(hub, folder / f"honest-{number}", base, Calls(), number).connect().close()
    hub.stop()
    if loose:
        hub.configure(limits={"enrolments_per_minute": 6.0, "enrolment_work_bits": 8})


def has_limits() -> bool:
    from gym_fed.config.hub.server import ServerConfig

    return "limits" in ServerConfig.model_fields


def main() -> None:
    parser = options("what twenty contributors notice of floods")
    parser.add_argument("--before", metavar="PYTHON", help="a Python with another version, to compare with")
    parser.add_argument("--only", metavar="FLOODS", help="names of floods, with commas")
    parser.add_argument(
        "--raw", action="store_true", help="print what was measured as JSON, and nothing else"
    )
    given = parser.parse_args()
    kinds = given.only.split(",") if given.only else list(FLOODS[1:4] if given.quick else FLOODS)
    rounds = 1 if given.quick else ROUNDS
    ours = figures(kinds, rounds)
    if given.raw:
        print(json.dumps(ours))
        return
    theirs: dict[str, dict[str, float]] = {}
    if given.before:
        command = [given.before, __file__, "--raw", "--only", ",".join(kinds), *(["--quick"] * given.quick)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ})
        theirs = json.loads(done.stdout.splitlines()[-1])
    report = Report("floods", peer="before" if theirs else "")
    for kind in kinds:
        mine, other = ours[kind], theirs.get(kind, {})
        for key, unit in (("p99", "s"), ("newcomer p99", "s"), ("seconds", "s")):
            report.compare(f"{kind}: {key}", mine[key], other.get(key), unit=unit)
        growth = other.get("rss peak", 0) - other.get("rss before", 0) if other else None
        report.compare(f"{kind}: RSS growth", mine["rss peak"] - mine["rss before"], growth, unit="MB")
        report.compare(f"{kind}: rounds", mine["rounds"], other.get("rounds"), unit="", better="higher")
        report.aim(f"{kind}: rounds finished", figure=mine["rounds"], aim=rounds, better="higher")
        report.aim(f"{kind}: p99 of a call", figure=mine["p99"], aim=P99_SECONDS, better="lower")
        report.aim(f"{kind}: p99 of a newcomer", figure=mine["newcomer p99"], aim=P99_SECONDS, better="lower")
        report.aim(
            f"{kind}: RSS growth", figure=mine["rss peak"] - mine["rss before"], aim=GROWTH_MB, better="lower"
        )
    report.finish(given)


if __name__ == "__main__":
    main()
