"""A crowd of contributors against one hub on one core: p99 of calls, memory, CPU, and what must hold afterwards.

    python benchmarks/crowd.py [--members N] [--rounds N] [--database URL] [--supernodes N] [--quick] [--json]
        [--plot FILE]

Members arrive at random (a Poisson process), 10% lose their connection in half of their tasks, and 2% attack in eight
ways. Everything except the training is real: TLS connections, keys, leases, downloads, uploads of prepared one-bit
updates that are signed for each task, and a query of the account after each. The hub's config differs from that of
``gym-server init`` in the limits per address, since all members share one address.

With ``--supernodes``, a stock SuperLink is measured afterwards on the same core. Its SuperNodes send updates of the
same size, each in its own process, since Flower has no lighter client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _crowd.check import check_credits, committed_rounds, lost_receipts
from _crowd.hub import CrowdHub, Sample
from _crowd.member import MALICE, Crowd, Member
from _crowd.updates import Updates
from _flower_peer.crowd import SuperLinkCrowd, measure_superlink
from _report import Report, load, options, picture, show

MEMBERS, QUICK_MEMBERS, ROUNDS, QUICK_ROUNDS = 200, 16, 6, 2
FLAPPING, MALICIOUS = 0.1, 0.02
AIM_SECONDS, AIM_BYTES = 2.0, 1 << 30
POOL = 1000
_TEMPLATES = 16
_SAMPLE_SECONDS = 1.0
_PEER_ROUNDS = 3


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--members", type=int, help=f"contributors ({MEMBERS})")
    parser.add_argument("--rounds", type=int, help=f"rounds to commit ({ROUNDS})")
    parser.add_argument("--base", default="gym-nano", help="base model: a name or a folder")
    parser.add_argument("--database", default="sqlite:///hub.db", metavar="URL", help="as storage.database")
    parser.add_argument("--core", type=int, default=0, help="core of the hub; -1 for all")
    parser.add_argument("--think", type=float, default=5.0, metavar="SECONDS", help="mean time of a task")
    parser.add_argument("--arrival", type=float, default=20.0, metavar="PER_SECOND", help="rate of arrivals")
    parser.add_argument("--supernodes", type=int, default=0, help="nodes of a SuperLink to compare with")
    parser.add_argument("--seconds", type=float, default=3600.0, help="give up after this time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the hub's folder here")
    arguments = parser.parse_args()
    members = arguments.members or (QUICK_MEMBERS if arguments.quick else MEMBERS)
    num_rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with tempfile.TemporaryDirectory(prefix="gym-crowd-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(measure(arguments, folder, members, num_rounds))


def config_for(members: int, num_rounds: int, database: str = "sqlite:///hub.db") -> dict[str, Any]:
    """Return the sections of a hub's config for a crowd behind one address."""
    return {
        "storage": {"database": database},
        "check": False,
        "limits": {
            "connections_per_address": 2 * members + 64,
            "calls_per_address": 4 * members + 64,
            "calls_per_second": 10_000,
            "enrolments_per_minute": 100_000,
            "enrolment_work_bits": 4,
        },
        "rounds": {
            "num_rounds": num_rounds,
            "min_contributors": max(3, members // 2),
            "deadline_seconds": 900,
            "grace_min_seconds": 5,
        },
        "rewards": {"pool": POOL},
    }


def crowd_members(crowd: Crowd, number: int) -> list[Member]:
    """Return members, some of which flap and some of which attack in different ways."""
    bad = max(1, round(MALICIOUS * number))
    found = []
    for n in range(number):
        malice = MALICE[n % len(MALICE)] if n < bad else ""
        found.append(Member(crowd, n, malice, flaps=not malice and crowd.draw.random() < FLAPPING))
    crowd.draw.shuffle(found)
    return found


async def run_crowd(crowd: Crowd, members: list[Member], per_second: float) -> None:
    """Let members arrive at random, and wait until the hub has finished."""

    async def arrive(member: Member, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await member.run()

    at, tasks = 0.0, []
    for member in members:
        at += crowd.draw.expovariate(per_second)
        tasks.append(asyncio.create_task(arrive(member, at)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def measure(arguments: argparse.Namespace, folder: Path, members: int, num_rounds: int) -> None:
    """Run the crowd, check the hub's state, and report the results."""
    updates = Updates(arguments.base, _TEMPLATES)
    config = config_for(members, num_rounds, arguments.database)
    core = None if arguments.core < 0 else arguments.core
    with CrowdHub(folder / "hub", arguments.base, config, core) as hub:
        hub.start("--exit-when-done")
        crowd = Crowd(hub.address, hub.certificate, hub.tls, updates, arguments.think, random.Random(1))
        sampler = asyncio.create_task(hub.sample(_SAMPLE_SECONDS))
        started, cpu, first = time.monotonic(), time.process_time(), hub.now()
        running = asyncio.create_task(run_crowd(crowd, crowd_members(crowd, members), arguments.arrival))
        done, _ = await asyncio.wait({running}, timeout=arguments.seconds)
        seconds, own_cpu = time.monotonic() - started, time.process_time() - cpu
        crowd.over.set()
        if not done:
            print(f"not done after {arguments.seconds:.0f} s", file=sys.stderr)
            await asyncio.wait({running}, timeout=60)
        sampler.cancel()
        hub.stop()
        if done:
            running.result()
        hub_cpu = hub.samples[-1].cpu_seconds - first.cpu_seconds
    peer = None
    if arguments.supernodes:
        size, think = updates.size_bytes, arguments.think
        peer = measure_superlink(arguments.supernodes, _PEER_ROUNDS, size, think, core)
    report(arguments, hub, hub_cpu, crowd, members, seconds, own_cpu, num_rounds, peer)


def report(
    arguments: argparse.Namespace,
    hub: CrowdHub,
    hub_cpu: float,
    crowd: Crowd,
    members: int,
    seconds: float,
    own_cpu: float,
    num_rounds: int,
    peer: SuperLinkCrowd | None,
) -> None:
    """Print the figures of the calls and of the hub's process, and the aims."""
    committed = len(committed_rounds(hub, arguments.database))
    lost = lost_receipts(hub, arguments.database, crowd.receipts)
    paid, at_most = check_credits(hub, arguments.database, POOL)
    hub.ask("ledger", "verify")
    calls, last = crowd.calls, hub.samples[-1]
    show("Calls, in seconds", ("", "number", "median", "p99", "maximum"), calls.rows())
    outcomes = [(kind or "honest", what, str(n)) for (kind, what), n in sorted(crowd.outcomes.items())]
    show("Answers", ("member", "answer", "number"), outcomes, f"too late: {dict(crowd.missed)}")
    refused = [(method, code, str(n)) for (method, code), n in sorted(calls.refused.items())]
    show("Refusals of honest members", ("call", "code", "number"), refused, load())
    table = Report("crowd", peer="SuperLink" if peer else "")
    theirs = {} if peer is None else peer.figures()
    if peer is not None:
        show("SuperLink, in processes of Flower", ("", "value"), peer.rows())
    peak = max(sample.memory_bytes for sample in hub.samples)
    table.compare("members", members, theirs.get("members"), better="higher")
    table.compare("rounds committed", committed, better="higher")
    table.compare("whole run", seconds, unit="s")
    table.compare("calls", len(calls), better="higher")
    table.compare("worst p99 of a call", calls.worst(0.99), unit="s")
    table.compare("hub: CPU, without its start", hub_cpu, unit="s")
    table.compare("hub: use of a core", 100 * hub_cpu / seconds, unit="%")
    table.compare("hub: CPU per call", 1000 * hub_cpu / max(1, len(calls)), unit="ms")
    per_update = 1000 * hub_cpu / max(1, len(crowd.receipts))
    table.compare("hub: CPU per update", per_update, theirs.get("update"), unit="ms")
    table.compare("hub: peak memory", peak / 1e6, theirs.get("memory"), unit="MB")
    table.compare("hub: threads", max(sample.threads for sample in hub.samples))
    table.compare("hub: open files", max(sample.files for sample in hub.samples))
    table.compare("hub: database", last.database_bytes / 1e6, unit="MB")
    table.compare("generator: CPU", own_cpu, unit="s")
    table.compare("uploads", crowd.bytes_up / 1e6, unit="MB")
    table.compare("downloads", crowd.bytes_down / 1e6, unit="MB")
    table.compare("credits paid", paid, better="higher")
    table.compare("load of the machine", os.getloadavg()[0])
    table.aim("worst p99 of a call (s)", calls.worst(0.99), AIM_SECONDS)
    table.aim("hub's peak memory (bytes)", peak, AIM_BYTES)
    table.aim("rounds committed", committed, num_rounds, better="higher")
    table.aim("acknowledged updates lost", len(lost), 0)
    table.aim("credits paid beyond the pools", max(0, paid - at_most), 0)
    plot, arguments.plot = arguments.plot, None
    table.finish(arguments)
    if plot:
        draw(plot, hub.samples)


def draw(file: Path, samples: list[Sample]) -> None:
    """Draw the hub's memory, CPU, open files and threads over time."""
    minutes = [sample.at_seconds / 60 for sample in samples]
    lines = {
        "memory, MB": [sample.memory_bytes / 1e6 for sample in samples],
        "CPU, s": [sample.cpu_seconds for sample in samples],
        "open files": [float(sample.files) for sample in samples],
        "WAL, MB": [sample.wal_bytes / 1e6 for sample in samples],
    }
    with picture(file, 2, 2, (10, 6)) as panels:
        for panel, (label, values) in zip(panels.flat, lines.items(), strict=True):
            panel.plot(minutes, values)
            panel.set(xlabel="minutes", ylabel=label, ylim=(0, None))


if __name__ == "__main__":
    main()
