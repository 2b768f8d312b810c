"""The screens of the round under way and of rounds: what they get, by pages, quickly, and who gets it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from gym_server.federation import Federation
from gym_server.rounds.queue import SET_ASIDE
from gym_server.store.tables import accounts, messages, nodes, rounds, updates
from gym_server.web.dashboard import SCREENS_FOLDER, Dashboard
from gym_server.web.home import MAX_TASKS, snapshot

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web.access import Access, Role, Visitor
from tests.support.large_hub import fill
from tests.support.loopback_hub import LoopbackHub
from tests.support.private_configs import NOTHING_COMPARED

NASTY = "<img src=x onerror=alert(1)>\x1b[2J"
ROUNDS, PEOPLE = 12, 210
PRIVATE = {
    "privacy": {"noise_multiplier": 1.0, "clipping_norm": 1.0, "epsilon": 50.0, "end_when_spent": True},
    "rounds": {"num_rounds": 1},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    **NOTHING_COMPARED,
}


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    hub = LoopbackHub(tmp_path_factory.mktemp("large") / "hub")
    fill(hub.fed, ROUNDS, PEOPLE)
    yield hub.fed
    hub.close()


def browser(fed: Federation, role: Role = Role.OPERATOR, is_running: bool = True) -> TestClient:
    """A page of somebody with this role."""
    with Dashboard(fed, "127.0.0.1:0", public=False, is_running=is_running) as pages:
        app: Any = pages.server._server.config.app._app  # behind the middleware of proxies
    access: Access = app.state.access
    access.visitor = lambda request: Visitor("somebody", role, "csrf", time.time() + 60)  # type: ignore[method-assign]
    return TestClient(app, "http://127.0.0.1:7000", follow_redirects=False)


def test_rounds_come_by_pages_newest_first(fed: Federation) -> None:
    page = browser(fed)
    first = page.get("/api/v1/rounds?limit=5").json()
    assert first["total"] == ROUNDS + 1
    assert [one["server_round"] for one in first["rounds"]] == [13, 12, 11, 10, 9]
    assert first["before"] == 9
    newest, one = first["rounds"][:2]
    assert (newest["state"], newest["version"], newest["verdicts"]) == ("collecting", None, {})
    assert one["verdicts"] == {"merged": 189, "rejected": 21}
    assert (one["version"], one["num_updates"]) == (12, 189)
    last = page.get("/api/v1/rounds?limit=5&before=4").json()
    assert [one["server_round"] for one in last["rounds"]] == [3, 2, 1]
    assert last["before"] is None


@pytest.mark.parametrize("asked", ["limit=0", "limit=201", "limit=x", "before=0", "before=99999999999"])
def test_a_page_of_rounds_is_bounded(asked: str, fed: Federation) -> None:
    answer = browser(fed).get(f"/api/v1/rounds?{asked}")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "usage"


def test_a_round_has_its_verdicts_its_recipe_and_the_command_that_replays_it(fed: Federation) -> None:
    page = browser(fed)
    found = page.get("/api/v1/rounds/7?limit=200").json()
    assert (found["total"], len(found["updates"])) == (PEOPLE, 200)
    rejected = next(one for one in found["updates"] if one["verdict"] == "rejected")
    assert (rejected["norm"], rejected["credit"]) == (49.72, 0)
    assert "times the median" in rejected["reason"]
    assert found["updates"][0]["score"] == 0.001
    assert found["updates"][0]["credit"] == 5
    assert found["recipe"]["max_steps"] == 25
    assert found["replay"] == "gym-server ledger replay 7 --dir HUB"
    assert (found["base_height"], found["latest"], found["codec"]) == (6, ROUNDS + 1, "bitdelta")
    rest = page.get("/api/v1/rounds/7?limit=200&offset=200").json()["updates"]
    ids = [one["update"] for one in [*found["updates"], *rest]]
    assert len(set(ids)) == PEOPLE
    assert page.get("/api/v1/rounds/13").json()["replay"] is None
    missing = page.get("/api/v1/rounds/14")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not-found")


def test_a_refused_update_stands_last_and_has_no_credits_of_its_contributor(fed: Federation) -> None:
    page = browser(fed)
    merged = next(one for one in page.get("/api/v1/rounds/11").json()["updates"] if one["credit"])
    with fed.database.transaction() as tx:
        row = dict(
            tx.execute(updates.select().where(updates.c.update_id == merged["update"])).mappings().one()
        )
        row |= {"update_id": "f" * 64, "nonce": "again", "verdict": "refused", "received_at": 0.0}
        tx.execute(updates.insert().values(**row))
    found = page.get("/api/v1/rounds/11?limit=500").json()["updates"]
    assert (found[-1]["update"], found[-1]["verdict"], found[-1]["credit"]) == ("f" * 64, "refused", 0)
    assert next(one for one in found if one["update"] == merged["update"])["credit"] == merged["credit"]
    assert page.get("/api/v1/rounds/11?offset=210").json()["updates"] == found[-1:]


def test_what_was_sent_in_for_a_version_is_what_was_merged(fed: Federation) -> None:
    page = browser(fed)
    sent = page.get("/api/v1/rounds/10?limit=500").json()["updates"]
    merged = sum(one["bytes"] for one in sent if one["verdict"] == "merged")
    (version,) = (one for one in page.get("/api/v1/model").json()["versions"] if one["server_round"] == 10)
    assert version["uploaded_bytes"] == merged < sum(one["bytes"] for one in sent)


def test_the_chart_has_every_version_until_there_are_too_many(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = browser(fed)
    found = page.get("/api/v1/rounds/losses").json()
    assert [point[0] for point in found["points"]] == list(range(13)), "version 0 is the base"
    assert found["points"][0][1:] == [None, found["points"][1][1]]
    assert found["points"][4][1] == found["points"][3][2]
    figures = page.get("/api/v1/model/figures").json()["heldout"]
    assert figures == [[height, after] for height, _, after in found["points"]]
    monkeypatch.setattr("gym_server.web.rounds.MAX_POINTS", 5)
    found = page.get("/api/v1/rounds/losses").json()
    assert (found["step"], [point[0] for point in found["points"]]) == (3, [0, 1, 4, 7, 10, 12])


def test_the_first_screen_has_the_round_who_works_on_it_and_the_last_verdicts(fed: Federation) -> None:
    page = browser(fed)
    with fed.database.transaction() as tx:
        tx.execute(accounts.update().where(accounts.c.name == "contributor 0").values(name=NASTY))
        message = {"message_id": "m0", "node_id": 1, "group_id": "13", "message_type": "train"}
        message |= {
            "created_at": 0.0,
            "ttl_seconds": 9.0,
            "fingerprint": "",
            "content": b"",
            "state": "leased",
        }
        tx.execute(messages.insert().values(**message, lease_until=0.0, progress="train 31/40"))
    found = page.get("/api/v1/overview").json()
    now = found["snapshot"]
    assert (now["server_round"], now["state"], now["num_tasks"]) == (13, "collecting", PEOPLE)
    assert (now["num_awaited"], now["version"], now["quorum"]) == (PEOPLE, 12, PEOPLE // 2 + 1)
    assert now["connected"] == PEOPLE
    task = next(one for one in now["tasks"] if one["name"] == NASTY)
    assert (task["phase"], task["done"], task["total"]) == ("train", 31, 40)
    assert len(found["verdicts"]) == 20
    assert found["verdicts"][0]["body"]["verdict"] == "merged"
    assert found["verdicts"][0]["name"] == "contributor 209"
    assert "key" not in found


def test_what_was_refused_at_admission_does_not_count_for_the_quorum(fed: Federation) -> None:
    before = snapshot(fed.state, fed.config, fed.lease_histories)["num_updates"]
    with fed.database.transaction() as tx:
        row = dict(tx.execute(updates.select().where(updates.c.server_round == 12)).mappings().first() or {})
        for verdict in ("admitted", "refused"):
            digest = hashlib.sha256(verdict.encode()).hexdigest()
            changed = {"update_id": digest, "nonce": verdict, "server_round": 13, "verdict": verdict}
            tx.execute(updates.insert().values(**{**row, **changed}))
    now = snapshot(fed.state, fed.config, fed.lease_histories)
    assert (before, now["num_updates"], now["verdicts"]["refused"]) == (0, 1, 1)


def test_a_round_names_the_replies_that_nobody_could_read(fed: Federation) -> None:
    with fed.database.transaction() as tx:
        message = {"message_id": "m1", "node_id": 2, "group_id": "7", "message_type": "train"}
        message |= {
            "created_at": 0.0,
            "ttl_seconds": 9.0,
            "fingerprint": "",
            "content": b"",
            "state": SET_ASIDE,
        }
        receipt = json.dumps({"verdict": SET_ASIDE, "reason": "no such record"})
        tx.execute(messages.insert().values(**message, lease_until=0.0, progress="", receipt=receipt))
    page = browser(fed)
    (found,) = page.get("/api/v1/rounds/7").json()["set_aside"]
    assert (found["verdict"], found["reason"]) == (SET_ASIDE, "no such record")
    assert found["name"].startswith("contributor ")
    assert page.get("/api/v1/rounds/8").json()["set_aside"] == []


def test_a_snapshot_lists_so_many_contributors_and_counts_the_others(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_TASKS >= 200
    monkeypatch.setattr("gym_server.web.home.MAX_TASKS", 7)
    now = snapshot(fed.state, fed.config, fed.lease_histories)
    assert (len(now["tasks"]), now["num_tasks"]) == (7, PEOPLE)


@pytest.mark.parametrize("path", ["overview", "rounds?limit=50", "rounds/losses", "rounds/12?limit=200"])
def test_a_screen_reads_no_more_than_it_shows(path: str, fed: Federation) -> None:
    """No statement goes through a table of updates, which has 200 rows a round, or of entries."""
    page, plans = browser(fed), []

    def explained(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            rows = connection.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.extend((row[3], statement) for row in rows)

    from sqlalchemy import event

    event.listen(fed.database.engine, "before_cursor_execute", explained)
    try:
        assert page.get(f"/api/v1/{path}").status_code == 200
    finally:
        event.remove(fed.database.engine, "before_cursor_execute", explained)
    assert plans
    for plan, statement in plans:
        assert not plan.startswith(("SCAN updates", "SCAN ledger", "SCAN contributions", "SCAN credits")), (
            statement
        )


def test_a_private_hub_shows_a_viewer_what_its_ledger_shows(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub", **PRIVATE)
    fed = hub.fed
    row = {"contributor": "c1", "server_round": 1, "message_id": "m", "manifest": "{}", "signature": b""}
    row |= {"delta_sha256": "", "delta_bytes": 9, "ledger_sequence": 1, "received_at": 5000.0}
    with fed.database.transaction() as tx:
        opened = {"server_round": 1, "state": "collecting", "base_height": 0, "opened_at": 7300.0}
        tx.execute(rounds.insert().values(**opened, deadline=9000.0))
        for number, verdict in enumerate(("merged", "refused", "rejected")):
            update = {"update_id": hashlib.sha256(verdict.encode()).hexdigest(), "nonce": str(number)}
            tx.execute(updates.insert().values(**row, **update, verdict=verdict, reason="secret", norm=2.0))
        tx.execute(nodes.insert().values(contributor="c1", instance="i", connected_until=time.time() + 60))
    assert snapshot(fed.state, fed.config, fed.lease_histories)["tasks"] == []
    assert snapshot(fed.state, fed.config, fed.lease_histories)["verdicts"] == {}
    viewer, operator = browser(fed, Role.VIEWER), browser(fed, Role.OPERATOR)
    seen = viewer.get("/api/v1/rounds/1").json()
    assert [set(one) for one in seen["updates"]] == [{"name", "credit", "update", "contributor", "verdict"}]
    assert (seen["is_sealed"], seen["total"], seen["verdicts"]) == (True, 1, {"merged": 1})
    assert seen["opened_at"] == 7200.0
    assert "secret" not in viewer.get("/api/v1/rounds/1").text
    assert viewer.get("/api/v1/rounds").json()["rounds"][0]["verdicts"] == {"merged": 1}
    whole = operator.get("/api/v1/rounds/1").json()
    assert (whole["total"], whole["is_sealed"], whole["opened_at"]) == (3, False, 7300.0)
    hub.close()


def test_a_hub_without_rounds_has_pages(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    page = browser(hub.fed)
    assert page.get("/api/v1/rounds").json() == {"total": 0, "rounds": [], "before": None}
    assert page.get("/api/v1/rounds/losses").json()["points"] == []
    places = ("overview", "members", "rounds/losses", "model/figures")
    assert not any(page.get(f"/api/v1/{place}").json()["is_measured"] for place in places)
    now = page.get("/api/v1/overview").json()["snapshot"]
    assert (now["server_round"], now["state"], now["version"], now["heldout"]) == (0, "", 0, None)
    hub.close()


def files_of(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_a_dashboard_alone_leaves_a_stopped_hubs_folder_as_it_is(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    fill(hub.fed, 2, 5)
    hub.close()
    (tmp_path / "hub" / "keys" / "session.key").unlink()
    before = files_of(tmp_path / "hub")
    with Federation.open(tmp_path / "hub", read_only=True) as fed:
        page = browser(fed, is_running=False)
        for path in ("overview", "rounds", "rounds/1", "rounds/losses"):
            assert page.get(f"/api/v1/{path}").status_code == 200
        assert page.get("/api/v1/overview").json()["is_running"] is False
        for change in (lambda: fed.database.set("a", "b"), fed.round_store.open_next):
            with pytest.raises(GymError) as refused:
                change()
            assert refused.value.code is ErrorCode.PERMISSION_DENIED
            assert "gym-server run --dashboard" in str(refused.value.hint)
        assert fed.database.setting("unknown", "its default") == "its default"
    assert files_of(tmp_path / "hub") == before


def test_a_database_of_another_version_or_none_is_refused_by_a_dashboard(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    with hub.fed.database.transaction() as tx:
        tx.exec_driver_sql("UPDATE settings SET value = '1' WHERE key = 'schema_version'")
    hub.close()
    with pytest.raises(GymError) as refused:
        Federation.open(tmp_path / "hub", read_only=True)
    assert refused.value.code is ErrorCode.STATE_CORRUPT
    (tmp_path / "hub" / "hub.db").unlink()
    with pytest.raises(GymError) as missing:
        Federation.open(tmp_path / "hub", read_only=True)
    assert missing.value.code is ErrorCode.FILE_NOT_FOUND
    assert not (tmp_path / "hub" / "hub.db").exists()


def test_every_screen_of_the_list_has_a_module() -> None:
    folder = SCREENS_FOLDER
    listed = (folder / "main.js").read_text()
    assert {"home", "rounds", "round"} <= {path.stem for path in folder.glob("*.js")}
    for name in ("home", "rounds", "round"):
        assert f'screen("{name}")' in listed
