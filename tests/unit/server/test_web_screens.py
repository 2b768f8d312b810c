"""The dashboard's screens of contributors, model, ledger and invites: what they say, and to whom."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import segno
from gym_server.accounts.invitations import invites_of, open_link
from gym_server.cli.accounts import accounts_of
from gym_server.cli.show import rewards_shown
from gym_server.federation import Federation
from gym_server.store.tables import contributions, royalties, transfers, updates, versions
from gym_server.web import ledger as ledger_screen
from gym_server.web.invites import qr_rows
from gym_server.web.members import leaving
from sqlalchemy import insert, select, update
from starlette.testclient import TestClient

from gym_fed.config.hub.privacy import LocalPrivacy
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.login import Invite, find_invite, parse_invite, token_hash
from gym_fed.trust.ledger.export import verify_file
from gym_fed.web.access import CSRF_HEADER
from tests.support.hub_pages import HubPages
from tests.support.private_hub import PrivateRounds, private_hub
from tests.support.wait import SECONDS

ROUNDS = 3


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[PrivateRounds]:
    """Three rounds of three contributors at a hub without privacy, and an update that was refused."""
    folder = private_hub(
        tmp_path_factory.mktemp("pages") / "hub", tiny_base, privacy=None, advertise="hub.example.org:9443"
    )
    with Federation.open(folder) as fed:
        found = PrivateRounds(fed)
        for _ in range(ROUNDS - 1):
            found.run()
        number = found.collect()
        found.send("ann", number, found.delta("ann", 77))
        found.finish(number)
        yield found


@pytest.fixture(scope="module")
def pages(rounds: PrivateRounds) -> HubPages:
    return HubPages(rounds.fed)


# ---- contributors ----


def test_contributors_have_the_credits_and_reputations_of_the_command_line(
    pages: HubPages, rounds: PrivateRounds
) -> None:
    shown = {one["contributor"]: one for one in pages.seen("contributors")["contributors"]}
    reported = {
        one["contributor"]: one
        for one in rewards_shown(rounds.fed.config, rounds.fed.database, rounds.fed.payouts)["contributors"]
    }
    assert shown.keys() == reported.keys()
    for who, one in shown.items():
        assert (one["balance"], one["reputation"]) == (reported[who]["balance"], reported[who]["reputation"])
    assert sum(one["balance"] for one in shown.values()) > 0


def test_the_strip_has_the_verdict_that_got_furthest_of_each_round(
    pages: HubPages, rounds: PrivateRounds
) -> None:
    ann = rounds.keys["ann"].contributor
    (one,) = [one for one in pages.seen("contributors")["contributors"] if one["contributor"] == ann]
    assert [mark["server_round"] for mark in one["strip"]] == [1, 2, 3]
    assert one["strip"][2]["verdict"] != "refused"
    long = pages.seen(f"contributors/{ann}")["strip"]
    assert long == one["strip"]


def test_contributors_are_found_by_name_and_beginning_of_id_and_nothing_is_a_pattern(
    pages: HubPages, rounds: PrivateRounds
) -> None:
    ann = rounds.keys["ann"].contributor
    assert pages.seen("contributors", find=ann[:8])["total"] == 1
    assert pages.seen("contributors", find="%")["total"] == 0
    assert pages.seen("contributors", find="_")["total"] == 0


def test_pages_of_contributors_join(pages: HubPages) -> None:
    everybody = pages.seen("contributors", sort="credits")["contributors"]
    parts = [
        pages.seen("contributors", sort="credits", offset=at, limit=1)["contributors"][0] for at in range(3)
    ]
    assert [one["contributor"] for one in parts] == [one["contributor"] for one in everybody]
    assert [one["balance"] for one in everybody] == sorted(
        (one["balance"] for one in everybody), reverse=True
    )
    assert pages.seen("contributors", limit=100_000)[0] == 400


def test_one_contributor_is_shown_over_rounds_as_the_rewards_were_written(
    pages: HubPages, rounds: PrivateRounds
) -> None:
    ann = rounds.keys["ann"].contributor
    found = pages.seen(f"contributors/{ann}")
    with rounds.fed.database.reading() as tx:
        mine = select(contributions.c.server_round, contributions.c.reputation)
        rows = tx.execute(
            mine.where(contributions.c.contributor == ann).order_by(contributions.c.server_round)
        )
        assert [
            (one["server_round"], one["reputation"]) for one in found["over_rounds"]
        ] == rows.tuples().all()
    (reported,) = [one for one in accounts_of(rounds.fed) if one["contributor"] == ann]
    for field in ("balance", "available", "held", "reserved"):
        assert found[field] == reported[field]
    assert pages.get(f"contributors/{ann}")["keys"] == reported["keys"]


def test_an_unknown_contributor_is_not_found_and_named_plainly(pages: HubPages) -> None:
    status, error = pages.seen("contributors/c%1b%5B31m")
    assert status == 404
    assert "\x1b" not in error["message"]


def test_balances_of_all_are_those_of_each_also_with_transfers_and_royalties(
    tmp_path: Path, tiny_base: Path
) -> None:
    with Federation.open(private_hub(tmp_path / "hub", tiny_base, privacy=None)) as fed:
        hub = PrivateRounds(fed)
        hub.run()
        ann, bob, cat = (key.contributor for key in hub.keys.values())
        with fed.database.transaction() as tx:
            for number, status in enumerate(("pending", "settled", "cancelled")):
                values = {"sender": ann, "recipient": bob, "amount": 5 + number, "status": status}
                rest = {"transfer": str(number), "nonce": str(number), "hold_seconds": 1.0, "asked_at": 1.0}
                tx.execute(insert(transfers).values(**values, **rest))
            tx.execute(insert(royalties).values(usage="u", contributor=cat, amount=7, recorded_at=1.0))
        with fed.database.reading() as tx:
            balances = fed.payouts.balances(tx)
            for who in (ann, bob, cat):
                assert balances.get(who, 0) == fed.payouts.balance_of(tx, who)["balance"]
        assert balances[ann] != balances[bob]


def test_an_operator_revokes_and_rebinds_with_the_entries_of_the_command_line(
    tmp_path: Path, tiny_base: Path
) -> None:
    with Federation.open(private_hub(tmp_path / "hub", tiny_base, privacy=None)) as fed:
        hub, pages = PrivateRounds(fed), HubPages(fed)
        hub.collect(send=False)
        who, key = hub.keys["ann"].contributor, SigningKey.generate().public_key.hex()
        assert pages.change(f"contributors/{who}/rebind", public_key=key)[0] == 400, "its key is good"
        assert pages.change(f"contributors/{who}/revoke", reason="")[0] == 400
        assert pages.change(f"contributors/{who}/revoke", reason="lost\nlaptop")["revoked"]
        (entry,) = hub.entries("revoked")
        assert (entry["contributor"], entry["by"]) == (who, "coordinator")
        assert "\n" not in entry["reason"]
        assert pages.seen(f"contributors/{who}")["status"] == "revoked"
        assert pages.change(f"contributors/{who}/rebind", public_key="zz")[0] == 400
        assert pages.change(f"contributors/{who}/rebind", public_key=key)["public_key"] == key
        assert hub.entries("rebound")[0]["by"] == "coordinator"
        assert [one["status"] for one in pages.get(f"contributors/{who}")["keys"]] == ["revoked", "active"]
        fed.ledger.verify()


# ---- who may ----

CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "contributors/c1/revoke", {"reason": "x"}),
    ("POST", "contributors/c1/rebind", {"public_key": "00" * 32}),
    ("POST", "invites", {}),
    ("DELETE", "invites/abc", {}),
    ("POST", "variants/remove", {"owner": "c1", "name": "mine", "reason": "x"}),
    ("POST", "variants/allow", {"owner": "c1", "name": "mine"}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_what_changes_the_hub_needs_an_operator_their_page_and_the_running_hub(
    pages: HubPages, rounds: PrivateRounds, method: str, path: str, body: dict[str, Any]
) -> None:
    url = f"/api/v1/{path}"
    assert pages.viewer.request(method, url, json=body).status_code == 403
    assert pages.operator.request(method, url, json=body).status_code == 403, "without the CSRF token"
    wrong = {CSRF_HEADER: "guess"}
    assert pages.operator.request(method, url, json=body, headers=wrong).status_code == 403
    status, error = HubPages(rounds.fed, is_running=False).change(path, method, **body)
    assert (status, error["message"]) == (403, "this dashboard only reads the hub's folder")


def test_what_is_the_operators_alone_is_not_shown_to_a_viewer(pages: HubPages, rounds: PrivateRounds) -> None:
    assert pages.seen("invites")[0] == 403
    assert pages.seen("variants/list")[0] == 403
    ann = pages.seen(f"contributors/{rounds.keys['ann'].contributor}")
    assert ann["keys"] is None
    assert not ann["may_change"]
    health = pages.seen("health")
    assert [name for name, value in health.items() if value is None] == [
        "paused",
        "disk",
        "stored",
        "queue",
        "traffic",
    ]


# ---- model ----


def test_versions_are_a_chain_whose_digests_follow(pages: HubPages, rounds: PrivateRounds) -> None:
    found = pages.seen("model")
    heights = [one["height"] for one in found["versions"]]
    assert heights == [3, 2, 1]
    assert found["chain_is_whole"]
    assert found["versions"][-1]["parent"] == rounds.fed.base.digest
    parts = [pages.seen("model", offset=at, limit=1) for at in range(3)]
    assert all(part["chain_is_whole"] for part in parts)
    assert [part["versions"][0] for part in parts] == found["versions"]
    with rounds.fed.database.reading() as tx:
        sent = tx.execute(select(updates).where(updates.c.verdict == "merged", updates.c.server_round == 1))
        assert found["versions"][-1]["uploaded_bytes"] == sum(row.delta_bytes for row in sent)


def test_a_version_that_does_not_follow_is_said(pages: HubPages, rounds: PrivateRounds) -> None:
    with rounds.fed.database.reading() as tx:
        soup = tx.scalar(select(versions.c.soup_sha256).where(versions.c.height == 2))
    second = update(versions).where(versions.c.height == 2)
    with rounds.fed.database.transaction() as tx:
        tx.execute(second.values(soup_sha256="0" * 64))
    try:
        assert not pages.seen("model")["chain_is_whole"]
    finally:
        with rounds.fed.database.transaction() as tx:
            tx.execute(second.values(soup_sha256=soup))


def test_evaluations_of_the_gate_are_curves_of_committed_versions_that_begin_with_version_0(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(parent: str, height: int | None, before: float, after: float) -> dict[str, Any]:
        task = {"metric": "acc", "before": before, "after": after, "after_stderr": 0.1}
        body = {"server_round": 1, "parent": parent, "suites": [{"suite": "tiny", "tasks": {"sums": task}}]}
        return body if height is None else {**body, "height": height}

    with Federation.open(private_hub(tmp_path / "hub", tiny_base, privacy=None)) as fed:
        base = fed.base.digest
        entries = [
            entry(base, None, 0.25, 0.1),  # rolled back
            entry(base, 1, 0.25, 0.5),
            entry("v1", None, 0.5, 0.1),
            entry("v1", 2, 0.5, 0.6),
            entry("v2", 3, 0.6, 0.7),
        ]
        with fed.database.transaction() as tx:
            for body in entries:
                fed.ledger.append(tx, "evaluated", body)
        (curve,) = HubPages(fed).seen("model/figures")["evaluations"]
        monkeypatch.setattr("gym_server.web.model.MAX_EVALUATIONS", 2)
        (newest,) = HubPages(fed).seen("model/figures")["evaluations"]
    assert (curve["suite"], curve["task"], curve["metric"]) == ("tiny", "sums", "acc")
    assert curve["points"] == [[0, 0.25, None], [1, 0.5, 0.1], [2, 0.6, 0.1], [3, 0.7, 0.1]]
    assert newest["points"] == [[0, 0.25, None], [2, 0.6, 0.1], [3, 0.7, 0.1]], "version 0 never leaves"


# ---- ledger ----


def test_pages_of_the_ledger_join_without_a_gap(pages: HubPages, rounds: PrivateRounds) -> None:
    entries, before = [], 0
    while True:
        found = pages.seen("ledger", before=before, limit=4)
        entries += [entry["sequence"] for entry in found["entries"]]
        before = found["next"]
        if before is None:
            break
    size = len(list(rounds.fed.ledger.entries()))
    assert entries == list(range(size, 0, -1))
    assert found["total"] == size
    head = rounds.fed.ledger.newest_head()
    assert head is not None
    assert found["head"] == head.to_dict()


def test_entries_are_found_by_kind_and_by_whom_they_name(pages: HubPages, rounds: PrivateRounds) -> None:
    ann = rounds.keys["ann"].contributor
    for kind in ("verdict", "credit"):
        wanted = [e.sequence for e in rounds.fed.ledger.about(ann) if e.kind == kind]
        found = pages.seen("ledger", kind=kind, contributor=ann, limit=200)["entries"]
        assert [entry["sequence"] for entry in found] == wanted[::-1]
        assert wanted
    assert pages.seen("ledger", kind="' OR 1=1")["entries"] == []


def test_a_large_entry_is_left_out_of_lists_and_read_by_itself(
    pages: HubPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_screen, "MAX_BODY_BYTES", 100)
    entry = pages.seen("ledger", kind="version")["entries"][0]
    assert entry["body"] is None
    assert entry["body_bytes"] > 100
    assert len(pages.seen(f"ledger/{entry['sequence']}")["body"]) == entry["body_bytes"]


def _sha256(*parts: str) -> str:
    return hashlib.sha256(bytes.fromhex("".join(parts))).hexdigest()


def test_a_reader_computes_the_root_again_from_what_the_proof_shows(
    pages: HubPages, rounds: PrivateRounds
) -> None:
    size = len(list(rounds.fed.ledger.entries()))
    for sequence in range(1, size + 1):
        found = pages.seen(f"ledger/{sequence}")
        check, entry = found["check"], found["proof"]["entry"]
        assert check["valid"], check
        if check["is_own_head"]:
            assert found["proof"]["head"]["head"]["hash"] == entry["hash"]
            continue
        node = _sha256("00", entry["hash"])
        assert node == check["leaf"]
        for step in check["steps"]:
            left_first = (step["sibling"], node) if step["side"] == "left" else (node, step["sibling"])
            node = _sha256("01", *left_first)
            assert node == step["node"]
        assert node == check["root"] == found["proof"]["head"]["head"]["root"]


def test_an_entry_that_was_altered_is_said_to_be_without_a_proof(tmp_path: Path, tiny_base: Path) -> None:
    from gym_server.store.tables import ledger

    with Federation.open(private_hub(tmp_path / "hub", tiny_base, privacy=None)) as fed:
        PrivateRounds(fed).collect(send=False)
        with fed.database.transaction() as tx:
            tx.execute(update(ledger).where(ledger.c.sequence == 1).values(body='{"at":1}'))
        check = HubPages(fed).seen("ledger/1")["check"]
    assert not check["valid"]
    assert "altered" in check["problem"]


def test_an_entry_that_is_not_there_is_not_found(pages: HubPages) -> None:
    for sequence in (0, -1, 10**6, 10**30):
        assert pages.seen(f"ledger/{sequence}")[0] in (400, 404)


def test_the_downloaded_ledger_verifies_without_the_hub(
    pages: HubPages, rounds: PrivateRounds, tmp_path: Path
) -> None:
    response = pages.viewer.get("/api/v1/ledger/export")
    assert response.headers["content-disposition"].startswith('attachment; filename="s')
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(response.content)
    key, checked = verify_file(file)
    assert key == rounds.fed.ledger.public_key
    assert checked.entries == len(list(rounds.fed.ledger.entries()))


def test_so_many_downloads_at_once_and_their_places_are_given_back(
    rounds: PrivateRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, begun, go_on = HubPages(rounds.fed), threading.Semaphore(0), threading.Event()

    def slow(*_: Any) -> Iterator[bytes]:
        begun.release()
        go_on.wait(SECONDS)
        yield b"{}\n"

    monkeypatch.setattr(ledger_screen, "_file", slow)
    url = "/api/v1/ledger/export"

    def at(number: int) -> TestClient:
        return TestClient(
            pages.viewer.app, base_url="http://127.0.0.1", client=(f"2001:db8:0:{number}::{number}", 1)
        )

    threads = [
        threading.Thread(target=at(number).get, args=(url,)) for number in range(ledger_screen.MAX_DOWNLOADS)
    ]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=SECONDS)
        if thread is threads[0]:  # an address, which is a network of IPv6, has one
            neighbour = TestClient(pages.viewer.app, base_url="http://127.0.0.1", client=("2001:db8::9", 1))
            assert neighbour.get(url).json()["error"]["code"] == "busy"
    assert pages.viewer.get(url).json()["error"]["code"] == "busy"
    go_on.set()
    for thread in threads:
        thread.join()
    assert pages.viewer.get(url).status_code == 200


# ---- members ----


def test_a_version_names_those_whose_updates_it_was_merged_from(pages: HubPages) -> None:
    for one in pages.seen("model")["versions"]:
        merged = [
            update["name"]
            for update in pages.seen(f"rounds/{one['server_round']}")["updates"]
            if update["verdict"] == "merged"
        ]
        assert sorted(helper["name"] for helper in one["merged_from"]) == sorted(merged)
        assert len(merged) == one["num_updates"]


def test_members_read_what_leaves_their_machine(pages: HubPages, rounds: PrivateRounds) -> None:
    found = pages.seen("members")
    assert found["stays"] == "your data and your private key"
    assert any("with loss" in line for line in found["leaves"])
    config = rounds.fed.config
    assert found["link"] == open_link(config, rounds.fed.folder, rounds.fed.fingerprint)
    local = LocalPrivacy(noise_multiplier=3.0)
    recipe = config.recipe.model_copy(update={"privacy": local})
    lines = leaving(config.model_copy(update={"recipe": recipe}), None)
    assert any("multiplier 3" in line for line in lines)
    assert any("without loss" in line for line in lines)
    assert not any("at most" in line for line in lines), "no size is known"


def test_the_link_of_an_open_hub_pins_its_key_and_admits_everybody(rounds: PrivateRounds) -> None:
    config = rounds.fed.config
    invited = config.model_copy(
        update={"enrolment": config.enrolment.model_copy(update={"policy": "invite"})}
    )
    assert open_link(invited, rounds.fed.folder, rounds.fed.fingerprint) is None
    link = open_link(config, rounds.fed.folder, rounds.fed.fingerprint)
    assert link is not None
    assert parse_invite(link) == Invite("hub.example.org", 9443, rounds.fed.fingerprint, "")
    assert find_invite(f"see {link}.") == link
    assert find_invite(f"{link}/abc") == f"{link}/abc", "part of an invite is not the link of an open hub"


# ---- invites ----


def test_an_invite_is_shown_once_and_admits_whom_it_is_given_to(
    pages: HubPages, rounds: PrivateRounds
) -> None:
    made = pages.change("invites", note="for <b>Ada</b>", valid_hours=24)
    token = parse_invite(made["invite"]).token
    assert made["id"] == token_hash(token)[:12]
    assert made["code"] == qr_rows(made["invite"])
    assert find_invite(made["message"]) == made["invite"]
    steps = [line.split(maxsplit=1) for line in made["message"].splitlines() if line.startswith("    ")]
    assert [what for what, _ in steps] == ["install", "join", "gym-client", "leave", "uninstall"]
    assert steps[0][1] == "pip install WHEEL (the file sent with this message)"
    listed = pages.operator.get("/api/v1/invites").text
    assert made["id"] in listed
    assert token not in listed
    (one,) = pages.get("invites", limit=1)["invites"]
    assert (one["note"], one["state"]) == ("for <b>Ada</b>", "open")
    assert one["expires_at"] - one["created_at"] == pytest.approx(24 * 3600)
    assert pages.change(f"invites/{made['id']}", "DELETE") == {"cancelled": [made["id"]]}
    assert invites_of(rounds.fed.database, rounds.fed.clock)[0]["state"] == "cancelled"
    assert pages.change(f"invites/{made['id']}", "DELETE")[0] == 404
    assert pages.change("invites/%25", "DELETE")[0] == 404, "nothing is a pattern"


def test_the_code_of_an_invite_is_the_qr_code_of_its_text() -> None:
    text = "gym://hub.example.org:9443/" + "ab" * 32 + "/" + "cd" * 16
    rows = qr_rows(text)
    assert len({len(row) for row in rows} | {len(rows)}) == 1, "a square"
    assert [[int(module) for module in row] for row in rows] == [
        [int(module) for module in row] for row in segno.make(text, micro=False).matrix
    ]


def test_invites_are_bounded(pages: HubPages) -> None:
    assert pages.change("invites", note="x" * 201)[0] == 400
    assert pages.change("invites", valid_hours=0)[0] == 400
    assert pages.change("invites", count=5)[0] == 400
