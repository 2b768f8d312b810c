"""Minutes in which hub, PostgreSQL and the S3 store are killed at random, under a crowd; then a backup and a restore.

    npm install --prefix FOLDER s3rver@3.7.1
    python benchmarks/kills.py --s3rver FOLDER [--minutes M] [--members N] [--quick] [--json]

Each is killed with SIGKILL (PostgreSQL with SIGQUIT, which also skips writing) and restarted after up to three seconds.
Afterwards every receipt of a member must be in the database and in the ledger, the ledger must be valid, no round may
pay more than its pool, and recomputed soups must equal the committed ones byte for byte. The hub is then backed up to
the store and restored to an empty database, folder and prefix, where the same checks must pass.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _crowd.check import check_credits, committed_rounds, lost_receipts
from _crowd.hub import CrowdHub
from _crowd.member import Crowd
from _crowd.s3 import BUCKET, DiskS3
from _crowd.updates import Updates
from _report import Report, load, options
from crowd import POOL, config_for, crowd_members

from tests.support.postgres import PostgresServer, why_not

MINUTES, QUICK_MINUTES, MEMBERS = 10.0, 0.7, 24
_BETWEEN_SECONDS, _AWAY_SECONDS = 12.0, 3.0
_REPLAYED = 3


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, help=f"length of the run ({MINUTES:g})")
    parser.add_argument("--members", type=int, default=MEMBERS, help="contributors")
    parser.add_argument("--base", default="gym-nano", help="base model: a name or a folder")
    parser.add_argument("--s3rver", type=Path, required=True, metavar="FOLDER", help="where npm installed it")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    server = PostgresServer()
    try:
        with tempfile.TemporaryDirectory(prefix="gym-kills-") as folder:
            store = DiskS3(arguments.s3rver, Path(folder) / "s3")
            try:
                asyncio.run(measure(arguments, Path(folder), server, store, 60 * minutes))
            finally:
                store.kill()
    finally:
        server.close()


async def measure(
    arguments: argparse.Namespace, folder: Path, server: PostgresServer, store: DiskS3, seconds: float
) -> None:
    """Run the crowd while processes are killed, and check the result."""
    url = server.new_database()
    config = config_for(arguments.members, 1_000_000, url)
    config["storage"]["objects"] = f"s3://{BUCKET}/objects"
    config["rounds"] |= {"lease_seconds": 20, "deadline_seconds": 120, "grace_max_seconds": 20}
    updates = Updates(arguments.base, 8)
    with CrowdHub(folder / "hub", arguments.base, config, environment=store.environment) as hub:
        hub.start()
        crowd = Crowd(hub.address, hub.certificate, hub.tls, updates, 3.0, random.Random(1))
        members = [asyncio.create_task(one.run()) for one in crowd_members(crowd, arguments.members)]
        kills: Counter[str] = Counter()
        end = time.monotonic() + seconds
        killer = asyncio.create_task(
            kill_at_random(random.Random(arguments.seed), hub, server, store, kills, end)
        )
        ended, _ = await asyncio.wait([*members, killer], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        if killer not in ended:
            raise RuntimeError("a member left before the time was over")
        crowd.over.set()
        await asyncio.wait(members, timeout=120)
        hub.stop()
    report(arguments, folder, hub, url, server, crowd, kills, seconds)


async def kill_at_random(
    draw: random.Random,
    hub: CrowdHub,
    server: PostgresServer,
    store: DiskS3,
    kills: Counter[str],
    end: float,
) -> None:
    """Kill and restart one of the three at a time until ``end`` (monotonic seconds)."""
    while time.monotonic() < end:
        await asyncio.sleep(draw.uniform(0.2, 2) * _BETWEEN_SECONDS)
        victim = draw.choice(("hub", "database", "store"))
        kills[victim] += 1
        if victim == "hub":
            hub.kill()
        elif victim == "database":
            await asyncio.to_thread(server.stop, signal.SIGQUIT)
        else:
            store.kill()
        await asyncio.sleep(draw.uniform(0, _AWAY_SECONDS))
        await asyncio.to_thread(bring_back, hub, server, store)


def bring_back(hub: CrowdHub, server: PostgresServer, store: DiskS3) -> None:
    """Start the processes that are not running, the hub last."""
    if not server.is_running():
        server.start_again()
    if not store.is_running():
        store.start()
    if not hub.is_running():
        hub.start()


def report(
    arguments: argparse.Namespace,
    folder: Path,
    hub: CrowdHub,
    url: str,
    server: PostgresServer,
    crowd: Crowd,
    kills: Counter[str],
    seconds: float,
) -> None:
    """Check the hub, its backup and the restored hub, and print the results."""
    committed = committed_rounds(hub, url)
    lost = lost_receipts(hub, url, crowd.receipts)
    paid, at_most = check_credits(hub, url, POOL)
    hub.ask("ledger", "verify")
    replayed = committed[:: max(1, len(committed) // _REPLAYED)][:_REPLAYED]
    soups = [hub.ask("ledger", "replay", str(number)) for number in replayed]
    place = f"s3://{BUCKET}/backups"
    started = time.monotonic()
    hub.ask("backup", "--to", place, "--include-plain-keys")
    backup_seconds, started = time.monotonic() - started, time.monotonic()
    again = hub.restored(folder / "again", place, server.new_database(), f"s3://{BUCKET}/again")
    restore_seconds = time.monotonic() - started
    lost_again = lost_receipts(again, again.database, crowd.receipts)
    again.ask("check")
    same = [again.ask("ledger", "replay", str(number)) for number in replayed] == soups
    table = Report("kills")
    table.compare("minutes", seconds / 60, better="higher")
    for victim, number in sorted(kills.items()):
        table.compare(f"kills: {victim}", number)
    table.compare("rounds committed", len(committed), better="higher")
    table.compare("updates acknowledged", len(crowd.receipts), better="higher")
    table.compare("backup to S3", backup_seconds, unit="s")
    table.compare("restore", restore_seconds, unit="s")
    table.aim("rounds committed", len(committed), 1, better="higher")
    table.aim("acknowledged updates lost", len(lost), 0)
    table.aim("acknowledged updates lost by backup and restore", len(lost_again), 0)
    table.aim("credits paid beyond the pools", max(0, paid - at_most), 0)
    table.aim("soups made again that differ", 0 if same else 1, 0)
    table.finish(arguments)
    refused: list[Any] = sorted(crowd.calls.refused.items())
    print(
        f"honest members were refused: {refused}; too late: {dict(crowd.missed)}; {load()}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
