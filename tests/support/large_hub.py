"""Fills a hub's database with rounds that never were, quickly: what a hub holds after many rounds of many contributors.

`python -m tests.support.large_hub FOLDER [ROUNDS]` makes a hub's folder to look at with `gym-server dashboard`. Its
ledger is not signed, so that nothing but looking works on it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_server.federation import Federation
from gym_server.store.tables import (
    account_keys,
    accounts,
    contributions,
    credits,
    ledger,
    ledger_subjects,
    nodes,
    reputations,
    round_tasks,
    rounds,
    updates,
    versions,
)
from sqlalchemy import Connection

CONTRIBUTORS = 200
START = 1_780_000_000.0
ROUND_SECONDS = 600.0
_REASON = "its norm 49.72 is 16.8 times the median 2.958, over 4 times"


def fill(fed: Federation, num_rounds: int, num_contributors: int = CONTRIBUTORS) -> None:
    """Write ``num_rounds`` committed rounds, and one that is collecting; every tenth update was rejected."""
    people = [f"c{_digest('account', number)[:32]}" for number in range(num_contributors)]
    sequence = 0
    with fed.database.transaction() as tx:
        _people(tx, people)
        for server_round in range(1, num_rounds + 1):
            sequence = _round(tx, server_round, people, sequence)
        opened = START + num_rounds * ROUND_SECONDS
        row = {"state": "collecting", "spec": _spec(num_rounds + 1), "base_height": num_rounds}
        row |= {"opened_at": opened, "deadline": time.time() + 900}
        tx.execute(rounds.insert().values(server_round=num_rounds + 1, **row))
        tasks = [
            {"server_round": num_rounds + 1, "node_id": 1 + at, "message_id": f"m{at}", "outcome": ""}
            for at in range(num_contributors)
        ]
        tx.execute(round_tasks.insert(), tasks)
        tx.execute(reputations.insert(), [{"contributor": who, "value": 0.5, "height": 1} for who in people])


def _people(tx: Connection, people: list[str]) -> None:
    tx.execute(
        accounts.insert(),
        [
            {
                "contributor": who,
                "name": f"contributor {number}",
                "public_key": bytes.fromhex(_digest("key", number)),
                "status": "active",
                "enrolled_at": START,
            }
            for number, who in enumerate(people)
        ],
    )
    keys = [
        {
            "public_key": bytes.fromhex(_digest("key", number)),
            "contributor": who,
            "status": "active",
            "valid_from": START,
        }
        for number, who in enumerate(people)
    ]
    tx.execute(account_keys.insert(), keys)
    made = [
        {"contributor": who, "instance": "i" * 8, "connected_until": time.time() + 3600} for who in people
    ]
    tx.execute(nodes.insert(), made)


def _round(tx: Connection, server_round: int, people: list[str], sequence: int) -> int:
    """One committed round; gives the last sequence of the ledger."""
    opened = START + (server_round - 1) * ROUND_SECONDS
    sent = [_update(server_round, number, who, opened) for number, who in enumerate(people)]
    merged = [row for row in sent if row["verdict"] == "merged"]
    before, after = _loss(server_round - 1), _loss(server_round)
    tx.execute(updates.insert(), sent)
    values = {"state": "committed", "spec": _spec(server_round), "base_height": server_round - 1}
    values |= {"merging": json.dumps([row["update_id"] for row in sent]), "reason": ""}
    values |= {"opened_at": opened, "deadline": opened + 900, "closed_at": opened + 590}
    tx.execute(rounds.insert().values(server_round=server_round, **values))
    version = {"height": server_round, "digest": f"sha256:{_digest('version', server_round)}"}
    version |= {"server_round": server_round, "heldout_before": before, "heldout_after": after}
    made = {"soup_sha256": _digest("soup", server_round), "soup_bytes": 2_168_096, "num_updates": len(merged)}
    tx.execute(versions.insert().values(**version, **made, committed_at=opened + 590))
    shared = {"server_round": server_round}
    tx.execute(
        credits.insert(), [{**shared, "contributor": row["contributor"], "amount": 5} for row in merged]
    )
    tx.execute(
        contributions.insert(),
        [
            {
                **shared,
                "update_id": row["update_id"],
                "contributor": row["contributor"],
                "method": "estimate",
                "score": 0.001,
                "similarity": 0.2,
                "reputation": 0.5,
            }
            for row in sent
        ],
    )
    entries = list(_entries(sent, version, sequence))
    tx.execute(ledger.insert(), entries)
    named = [
        {"sequence": entry["sequence"], "contributor": row["contributor"]}
        for entry, row in zip(entries, [*sent, *sent], strict=False)
    ]
    tx.execute(ledger_subjects.insert(), named)
    return sequence + len(entries)


def _update(server_round: int, number: int, who: str, opened: float) -> dict[str, Any]:
    update = _digest("update", server_round * 100_000 + number)
    is_merged = number % 10 != 3
    return {
        "update_id": update,
        "contributor": who,
        "server_round": server_round,
        "message_id": f"m{server_round}-{number}",
        "manifest": json.dumps({"metrics": {"train_loss": 0.5}, "nonce": update, "padding": "x" * 450}),
        "signature": b"s" * 64,
        "nonce": update[:32],
        "delta_sha256": _digest("delta", server_round * 100_000 + number),
        "delta_bytes": 153_164,
        "norm": 2.5 if is_merged else 49.72,
        "verdict": "merged" if is_merged else "rejected",
        "reason": "" if is_merged else _REASON,
        "heldout_change": -0.01 if is_merged else None,
        "ledger_sequence": 1,
        "received_at": opened + 60 + number,
    }


def _entries(sent: list[dict[str, Any]], version: dict[str, Any], sequence: int) -> Iterator[dict[str, Any]]:
    bodies: list[tuple[str, dict[str, Any]]] = []
    for verdicts in ([{"verdict": "admitted", "reason": ""}] * len(sent), sent):
        for row, said in zip(sent, verdicts, strict=True):
            body = {
                "update": row["update_id"],
                "server_round": row["server_round"],
                "at": int(row["received_at"]),
            }
            body |= {"contributor": row["contributor"], "verdict": said["verdict"], "reason": said["reason"]}
            bodies.append(("verdict", body))
    bodies.append(("version", {**version, "updates": [row["update_id"] for row in sent], "at": int(START)}))
    for kind, body in bodies:
        sequence += 1
        yield {
            "sequence": sequence,
            "kind": kind,
            "body": json.dumps(body, sort_keys=True, separators=(",", ":")),
            "previous_hash": _digest("entry", sequence - 1),
            "hash": _digest("entry", sequence),
        }


def _spec(server_round: int) -> str:
    recipe = {"algorithm": "sft", "finetuning": "full", "max_steps": 25, "learning_rate": 5e-4}
    return json.dumps({"server_round": server_round, "recipe": recipe, "codec": {"codec": "bitdelta"}})


def _loss(version: int) -> float:
    return 0.4 + 4.1 * math.exp(-version / 120)


def _digest(what: str, number: int) -> str:
    return hashlib.sha256(f"{what}-{number}".encode()).hexdigest()


if __name__ == "__main__":
    from tests.support.loopback_hub import LoopbackHub

    began = time.monotonic()
    hub = LoopbackHub(Path(sys.argv[1]))
    fill(hub.fed, int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
    hub.close()
    print(f"{time.monotonic() - began:.1f} s")
