"""What the dashboard keeps from viewers: secrets of every hub, and in private rounds what the ledger seals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.accounts.invitations import make_invites
from gym_server.federation import Federation
from gym_server.privacy.budget import report
from gym_server.store.tables import evaluation_seeds, nodes, privacy_seeds, rounds, updates, versions
from sqlalchemy import insert, select, update

from gym_fed.trust.identity.login import parse_invite
from tests.support.hub_pages import HubPages
from tests.support.private_hub import NAMES, PrivateRounds, private_hub

LISTS = ("overview", "contributors", "model", "model/figures", "privacy", "variants", "health", "rounds")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[PrivateRounds]:
    folder = private_hub(tmp_path / "hub", tiny_base, advertise="hub.example.org:9443")
    with Federation.open(folder) as fed:
        yield PrivateRounds(fed)


def seen_of(hub: PrivateRounds, paths: tuple[str, ...] = LISTS) -> dict[str, Any]:
    """Every page that names contributors or counts updates, as everybody gets it; without what a clock changes."""
    pages = HubPages(hub.fed)
    people = [f"contributors/{key.contributor}" for key in hub.keys.values()]
    found = {path: pages.seen(path) for path in (*paths, *people)}
    found["overview"] = {
        key: value for key, value in found["overview"].items() if key not in ("now", "verdicts")
    }
    found["health"] = {
        key: value for key, value in found["health"].items() if key not in ("started_at", "ledger_entries")
    }
    return found


def test_whether_an_update_came_and_was_admitted_or_refused_changes_nothing_that_viewers_see(
    hub: PrivateRounds,
) -> None:
    hub.run()
    number = hub.collect(send=False)
    before = seen_of(hub)
    hub.send("ann", number, hub.delta("ann", number))
    assert seen_of(hub) == before, "admitted"
    assert hub.send("ann", number, hub.delta("ann", 77)).verdict == "refused"
    assert seen_of(hub) == before, "refused"
    with hub.fed.database.reading() as tx:
        verdicts = tx.scalars(select(updates.c.verdict).where(updates.c.server_round == number)).all()
    assert sorted(verdicts) == ["admitted", "refused"]


def test_an_operator_sees_what_is_sealed_from_viewers(hub: PrivateRounds) -> None:
    number = hub.collect(send=False)
    hub.send("ann", number, hub.delta("ann", number))
    ann = hub.keys["ann"].contributor
    pages = HubPages(hub.fed)
    assert pages.get(f"contributors/{ann}")["strip"][0]["verdict"] == "admitted"
    assert pages.seen(f"contributors/{ann}")["strip"] == []
    assert pages.get("health")["verdicts"] == [{"verdict": "admitted", "code": "", "number": 1}]
    assert pages.seen("health")["verdicts"] is None
    assert pages.get(f"contributors/{ann}")["connected"] is False
    assert pages.seen(f"contributors/{ann}")["connected"] is None


def test_who_is_connected_is_not_shown_to_viewers_of_private_rounds(hub: PrivateRounds) -> None:
    hub.collect(send=False)
    before = seen_of(hub, ("contributors", "overview", "health"))
    row = {"contributor": hub.keys["ann"].contributor, "instance": "one", "connected_until": 2.0**40}
    with hub.fed.database.transaction() as tx:
        tx.execute(insert(nodes).values(**row))
    after = seen_of(hub, ("contributors", "overview", "health"))
    # How many are connected is public (docs/privacy.md).
    assert after["overview"]["snapshot"].pop("connected") == 1
    assert before["overview"]["snapshot"].pop("connected") == 0
    assert after["health"].pop("connected") == 1
    assert before["health"].pop("connected") == 0
    assert after == before


def test_viewers_see_of_a_rejection_the_one_code_that_the_ledger_has(hub: PrivateRounds) -> None:
    hub.run()
    said = "tensor secret.weight is not one that the task trains"
    with hub.fed.database.transaction() as tx:
        mine = updates.c.contributor == hub.keys["ann"].contributor
        tx.execute(update(updates).where(mine).values(verdict="rejected", reason=said))
    pages, ann = HubPages(hub.fed), f"contributors/{hub.keys['ann'].contributor}"
    assert pages.seen(ann)["strip"] == [
        {"server_round": 1, "verdict": "rejected", "reason": "update-refused"}
    ]
    assert pages.get(ann)["strip"][0]["reason"] == said
    assert said not in json.dumps(seen_of(hub))


def test_viewers_see_the_hour_of_a_round_and_no_sizes(hub: PrivateRounds) -> None:
    hub.run()
    with hub.fed.database.transaction() as tx:
        tx.execute(update(versions).values(committed_at=1_800_001_234.5))
        tx.execute(update(rounds).values(closed_at=1_800_001_234.5))
    pages = HubPages(hub.fed)
    (shown,) = pages.seen("model")["versions"]
    assert shown["committed_at"] == 1_800_000_000
    assert shown["uploaded_bytes"] is None
    (reported,) = pages.get("model")["versions"]
    assert reported["committed_at"] == 1_800_001_234.5
    assert reported["uploaded_bytes"] > 0
    assert "1800001234" not in json.dumps(seen_of(hub))


def test_the_ledger_that_viewers_get_is_the_ledger(hub: PrivateRounds) -> None:
    hub.run()
    pages = HubPages(hub.fed)
    found = {entry["sequence"]: entry for entry in pages.seen("ledger", limit=200)["entries"]}
    kinds = set()
    for entry in hub.fed.ledger.entries():
        shown = found.pop(entry.sequence)
        kinds.add(entry.kind)
        assert (shown["kind"], shown["hash"]) == (entry.kind, entry.hash)
        assert shown["body"] == (entry.body if shown["body_bytes"] <= 2000 else None)
        assert pages.seen(f"ledger/{entry.sequence}")["proof"]["entry"] == entry.to_dict()
    assert not found
    assert {"sealed", "privacy", "version"} <= kinds


def test_no_secret_is_in_anything_that_viewers_see(hub: PrivateRounds) -> None:
    hub.run()
    fed, secrets = hub.fed, ["a note on the receiver", "10.11.12.13"]
    number = hub.collect()
    with fed.database.transaction() as tx:
        tx.execute(insert(evaluation_seeds).values(server_round=number, seed=b"s" * 32))
    (made,) = make_invites(
        fed.config, fed.folder, fed.accounts, fed.fingerprint, ["a note on the receiver"], 3600
    )
    secrets += [parse_invite(made["invite"]).token, made["id"]]
    with fed.database.reading() as tx:
        secrets += [seed.hex() for seed in tx.scalars(select(privacy_seeds.c.seed))]
        secrets += [seed.hex() for seed in tx.scalars(select(evaluation_seeds.c.seed))]
        secrets += [json.loads(text)["nonce"] for text in tx.scalars(select(updates.c.manifest))]
        secrets += list(tx.scalars(select(updates.c.delta_sha256)))
    for name in ("session.key", "ledger.pem", "tls.key"):
        secrets.append((fed.folder / "keys" / name).read_bytes()[-60:-30].decode("latin-1"))
    secrets.append(str(fed.folder))
    pages = HubPages(fed)
    seen = json.dumps([seen_of(hub), pages.seen("ledger", limit=200), pages.seen(f"rounds/{number}")])
    seen += pages.viewer.get("/metrics").text + pages.viewer.get("/api/v1/ledger/export").text
    for path in ("invites", "variants/list"):
        assert pages.seen(path)[0] == 403
    assert len(secrets) > 15
    for secret in secrets:
        assert secret not in seen, secret


def test_privacy_is_the_report_of_the_command_line_and_joins_by_pages(hub: PrivateRounds) -> None:
    hub.run()
    hub.run()
    pages, reported = HubPages(hub.fed), report(hub.fed.config, hub.fed.database)
    found = pages.seen("privacy")
    assert found["central"] == reported["central"]
    assert found["central"]["epsilon_spent"] > 0
    assert found["central"]["events"] == [{"mechanism": "gaussian", "noise_multiplier": 1.0, "count": 2}]
    assert found["total"] == len(NAMES)
    shown = [pages.seen("privacy", offset=at, limit=1)["contributors"][0] for at in range(len(NAMES))]
    assert [{k: v for k, v in one.items() if k != "name"} for one in shown] == reported["contributors"]
    ann = hub.keys["ann"].contributor
    assert pages.seen(f"contributors/{ann}")["privacy"]["epsilon"] == found["central"]["epsilon_spent"]
