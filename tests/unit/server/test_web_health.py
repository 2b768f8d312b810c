"""Figures of the dashboard: of the hub's health and metrics, and how contributors are counted, ordered and cut."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_server.federation import Federation
from gym_server.observe.instruments import ROWS as INSTRUMENTS
from gym_server.observe.instruments import UPLOAD_BYTES
from gym_server.observe.metrics import ROWS
from gym_server.store.tables import credits, nodes
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import delete, insert, update

from gym_fed.core.metrics import MetricTable
from gym_fed.web.access import KEYS_NAME, WebKeys
from tests.support.hub_pages import TOKEN, HubPages
from tests.support.large_hub import fill
from tests.support.loopback_hub import LoopbackHub
from tests.support.private_hub import NAMES, PrivateRounds, private_hub

ROUNDS = 3
MANY, PEOPLE = 45, 6


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[PrivateRounds]:
    """Three rounds of three contributors at a hub without privacy."""
    folder = private_hub(tmp_path_factory.mktemp("pages") / "hub", tiny_base, privacy=None)
    with Federation.open(folder) as fed:
        found = PrivateRounds(fed)
        for _ in range(ROUNDS):
            found.run()
        yield found


@pytest.fixture(scope="module")
def pages(rounds: PrivateRounds) -> HubPages:
    return HubPages(rounds.fed)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubPages]:
    """A hub after more rounds than a strip has."""
    hub = LoopbackHub(tmp_path_factory.mktemp("large") / "hub")
    fill(hub.fed, MANY, PEOPLE)
    yield HubPages(hub.fed)
    hub.close()


def test_metrics_are_the_figures_of_health_and_need_no_session(rounds: PrivateRounds) -> None:
    pages = HubPages(rounds.fed)
    rounds.fed.traffic.called("Status")
    rounds.fed.traffic.refused("busy")
    rounds.fed.traffic.note_download(700)
    rounds.fed.traffic.note_ticket()
    rounds.fed.traffic.note_failed_seeder()
    response = pages.viewer.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    health = pages.get("health")
    assert found["gym_hub_round",] == health["server_round"] == ROUNDS
    assert found["gym_hub_ledger_entries",] == health["ledger_entries"]
    assert found["gym_hub_disk_free_bytes",] > 0
    assert found["gym_hub_refusals_total", "busy"] == health["traffic"]["refusals"]["busy"] == 1
    assert found["gym_hub_calls_total", "Status"] == 1
    assert found["gym_hub_download_bytes_total",] == health["traffic"]["download_bytes"] == 700
    assert health["traffic"]["seeding"] == {"seeders": 0, "tickets": 1, "failures": 1}
    assert found["gym_hub_seeders",] == 0
    assert found["gym_hub_seeding_tickets_total",] == found["gym_hub_seeding_failures_total",] == 1
    assert found["gym_hub_recent_updates", "", "merged"] == len(NAMES) * ROUNDS
    assert {"verdict": "merged", "code": "", "number": len(NAMES) * ROUNDS} in health["verdicts"]


def test_an_operators_metrics_have_every_family_that_this_hub_can_fill(rounds: PrivateRounds) -> None:
    fed = rounds.fed
    UPLOAD_BYTES.inc(5)
    fed.contributor_clocks.note("a", fed.clock.now() - 7, fed.clock.now())
    pages = HubPages(fed)
    text = pages.viewer.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    # This hub has no privacy, no held-out rows and no listener.
    not_here = {
        *("gym_hub_epsilon_spent", "gym_hub_epsilon_budget", "gym_hub_connections"),
        *("gym_hub_heldout_loss", "gym_hub_heldout_loss_before"),
    }
    assert {row.name for row in (*ROWS, *INSTRUMENTS)} - families.keys() == not_here
    value = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert value["gym_hub_rounds"] == value["gym_hub_recent_rounds"] == ROUNDS
    assert families["gym_hub_rounds"].samples[0].labels == {"state": "committed"}
    assert value["gym_hub_rounds_remaining"] == fed.config.rounds.num_rounds - ROUNDS
    assert value["gym_hub_disk_reserve_bytes"] == fed.config.storage.reserve_bytes
    assert value["gym_hub_ledger_signed_entries"] <= value["gym_hub_ledger_entries"]
    assert value["gym_hub_last_round_credits"] == value["gym_hub_reward_pool_credits"]
    assert abs(value["gym_hub_last_commit_timestamp_seconds"] - time.time()) < 600
    assert value["gym_hub_clock_skew_seconds"] == pytest.approx(7, abs=1)
    assert value["gym_hub_backup_timestamp_seconds"] == 0
    assert value["gym_hub_certificate_expiry_timestamp_seconds"] > time.time() + 10 * 365 * 86400
    assert value["gym_hub_upload_bytes"] >= 5
    assert value["gym_hub_database_wal_bytes"] < value["gym_hub_database_bytes"]
    transactions = families["gym_hub_database_seconds"].samples
    assert {sample.labels["kind"] for sample in transactions} == {"read", "write"}
    phases = {sample.labels["phase"] for sample in families["gym_hub_merge_phase_seconds"].samples}
    assert {"merging tensors", "scoring updates"} <= phases


def test_no_label_of_the_hubs_metrics_is_chosen_by_a_contributor() -> None:
    labels = {label for row in (*ROWS, *INSTRUMENTS) for label in row.labels}
    assert labels == {
        *("version", "status", "verdict", "code", "state", "method", "outcome", "kind", "phase"),
    }


def test_a_value_without_a_row_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="gym_other"):
        MetricTable(ROWS, {"gym_other": 1.0})


def test_soups_count_among_the_objects_of_the_store(pages: HubPages, rounds: PrivateRounds) -> None:
    """Contributors of this hub wrote theirs past its port, so that soups are all there are."""
    soups = {one["soup"] for one in pages.get("model")["versions"]}
    files = [path for path in (rounds.fed.folder / "objects").rglob("*") if path.name in soups]
    stored = pages.get("health")["stored"]
    assert (stored["objects"], stored["bytes"]) == (ROUNDS, sum(path.stat().st_size for path in files))


def test_metrics_show_a_viewer_no_more_than_the_page_does_and_a_wrong_key_nothing(pages: HubPages) -> None:
    seen = pages.viewer.get("/metrics").text
    assert "gym_hub_round" in seen
    for name in (
        "disk",
        "calls",
        "refusals",
        "messages",
        "connections",
        "seeders",
        "download_bytes",
        "upload_bytes",
    ):
        assert f"gym_hub_{name}" not in seen
    assert "_timestamp_seconds" not in seen
    wrong = pages.viewer.get("/metrics", headers={"Authorization": "Bearer gymweb-nobody"})
    assert wrong.status_code == 401


def test_a_key_of_role_metrics_reads_all_figures_and_opens_no_page(
    pages: HubPages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = WebKeys(tmp_path / KEYS_NAME)
    bearer = {"Authorization": f"Bearer {keys.add('prometheus', 'metrics')}"}
    monkeypatch.setattr(pages.viewer.app.state.access, "_keys", keys)
    assert "gym_hub_disk_free_bytes" in pages.viewer.get("/metrics", headers=bearer).text
    key = bearer["Authorization"].removeprefix("Bearer ")
    refused = pages.viewer.post("/api/v1/login", json={"key": key})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission-denied")
    assert "role viewer or operator" in refused.json()["error"]["hint"]


def test_updates_of_health_are_those_of_the_last_rounds(
    large: HubPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_server.web.health.RECENT_ROUNDS", 2)
    found = large.get("health")
    assert (found["recent_rounds"], sum(one["number"] for one in found["verdicts"])) == (2, 2 * PEOPLE)


# ---- contributors ----


def test_a_strip_has_the_last_rounds_and_no_other(large: HubPages) -> None:
    found = large.seen("contributors")
    assert (found["newest_round"], found["strip_rounds"]) == (MANY + 1, 40)
    for one in found["contributors"]:
        assert [line["server_round"] for line in one["strip"]] == list(range(MANY + 1 - 39, MANY + 1))


def test_contributors_are_ordered_by_credits_and_by_name(large: HubPages) -> None:
    last = large.seen("contributors")["contributors"][-1]["contributor"]
    fed = large.fed
    with fed.database.transaction() as tx:
        tx.execute(insert(credits).values(server_round=9999, contributor=last, amount=10**6))
    by_credits = large.seen("contributors", sort="credits")["contributors"]
    with fed.database.transaction() as tx:
        tx.execute(delete(credits).where(credits.c.server_round == 9999))
    assert by_credits[0]["contributor"] == last
    balances = [one["balance"] for one in by_credits]
    assert balances == sorted(balances, reverse=True)
    names = [one["name"] for one in large.seen("contributors", sort="name")["contributors"]]
    assert names == sorted(names)


def test_who_is_connected_is_who_was_heard_of_lately(large: HubPages) -> None:
    def connected() -> tuple[int, int]:
        listed = large.get("contributors")["contributors"]
        return large.get("health")["connected"], sum(one["connected"] for one in listed)

    with large.fed.database.transaction() as tx:
        tx.execute(update(nodes).values(connected_until=time.time() - 1))
        tx.execute(update(nodes).where(nodes.c.node_id == 1).values(connected_until=time.time() + 60))
    assert connected() == (1, 1)
