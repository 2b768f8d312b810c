"""Who made a version is named where they agreed to it, and harm gets nothing of what the version earns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from gym_server.cli.ledger import app as ledger_app
from gym_server.cli.main import app
from gym_server.ledger.columns import ColumnChecks
from gym_server.ledger.contributors import published_names
from gym_server.ledger.royalties import attribute_use
from gym_server.store.tables import accounts, updates
from typer.testing import CliRunner

from gym_fed.core.errors import GymError
from gym_fed.delta.base import model_tensors
from gym_fed.registry.card.facts import contributors_in
from gym_fed.registry.card.readme import card_of
from gym_fed.registry.manifest import ModelFile, ModelManifest
from gym_fed.trust.identity.keys import SigningKey
from tests.support.judged_rounds import DENSE, Judged


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    monkeypatch.setattr(ColumnChecks, "_updates", lambda self, tx, history: None)
    rows = [
        {"messages": [{"role": "user", "content": f"{n} {i}"}, {"role": "assistant", "content": n * 2}]}
        for n in ("ann", "bob")
        for i in range(8, 16)
    ]
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gate = {"heldout": str(heldout), "max_length": 64, "screen_updates": False}
    rewards = {"score": "estimate", "together_threshold": None}  # new contributors are paid at once
    here = Judged(tmp_path / "hub", tiny_base, gate=gate, rewards=rewards)
    return here


def test_a_version_names_who_agreed_and_gives_nothing_to_harm_or_to_what_was_rejected(
    hub: Judged, tmp_path: Path
) -> None:
    ids = {}
    with hub.fed.database.transaction() as tx:
        for name in ("ann", "bob", "harm", "zero"):
            key = SigningKey.generate()
            tx.execute(
                accounts.insert().values(
                    contributor=key.contributor,
                    name=f"{name} [example](http://x)",
                    public_key=key.public_key,
                    status="active",
                    enrolled_at=0.0,
                )
            )
            ids[name] = key.contributor
    work = {name: hub.trained(name, steps=12) for name in ("ann", "bob")}
    sent = {
        ids["ann"]: work["ann"],
        ids["bob"]: work["bob"],
        ids["harm"]: {name: -0.5 * tensor for name, tensor in work["bob"].items()},
        ids["zero"]: {name: 0.0 * tensor for name, tensor in work["bob"].items()},
    }
    found = hub.round(sent, named=[ids["ann"], ids["harm"]])
    assert found[ids["harm"]]["verdict"] == "merged"
    assert found[ids["harm"]]["credit"] > 0, "everybody who was merged gets a part of the round"
    assert found[ids["zero"]]["verdict"] == "rejected"

    shares = attribute_use(hub.fed.base, hub.fed.database, {"1": 1}, 1000, "improvement").shares
    assert set(shares) == {ids["ann"], ids["bob"]}
    with hub.fed.database.reading() as tx:
        assert published_names(tx, ids.values()) == {
            ids["ann"]: "ann [example](http://x)",
            ids["harm"]: "harm [example](http://x)",
        }
    folder = str(hub.fed.folder)
    hub.close()
    words = ["attribute", "--amount", "1000", "--version", "1", "--dir", folder]
    text = CliRunner().invoke(ledger_app, words).stdout
    assert f"{ids['ann']} (ann [example](http://x)) {shares[ids['ann']]}" in text
    assert f"{ids['bob']} {shares[ids['bob']]}" in text
    assert "harm" not in text
    printed = json.loads(CliRunner().invoke(ledger_app, [*words, "--json"]).stdout)
    assert (printed["shares"], printed["names"]) == (shares, {ids["ann"]: "ann [example](http://x)"})

    model = tmp_path / "model"
    assert CliRunner().invoke(app, ["model", str(model), "--dir", folder]).exit_code == 0
    listed = contributors_in(model)
    assert {(one.contributor, one.name) for one in listed} == {
        (ids["ann"], "ann [example](http://x)"),
        (ids["bob"], ""),
    }
    assert sum(one.share for one in listed) == pytest.approx(1.0)
    manifest = ModelManifest(
        name="m",
        version=1,
        kind="weights",
        licence="MIT",
        description="",
        files=[ModelFile(path="config.json", num_bytes=1, sha256="0" * 64)],
        created_at=0,
    )
    card = card_of(manifest, (), model)
    assert "## Contributors" in card
    assert "ann \\[example\\]" in card
    assert ids["bob"] in card
    assert ids["harm"] not in card
    assert yaml.safe_load(card.split("---")[1])["license"] == "mit"


def test_a_name_is_shown_while_the_newest_credited_update_agrees_to_it(hub: Judged, tmp_path: Path) -> None:
    path = hub.encode({name: 0.0 * tensor for name, tensor in model_tensors(hub.model.model).items()}, DENSE)
    row = {"contributor": "ann", "name": "Ann", "public_key": b"", "status": "active", "enrolled_at": 0.0}
    with hub.fed.database.transaction() as tx:
        tx.execute(accounts.insert().values(**row))

    def named_after(server_round: int, verdict: str, agrees: bool) -> dict[str, str]:
        copy = tmp_path / f"{server_round}.gymdelta"
        copy.write_bytes(path.read_bytes())
        update_id = hub.put(copy, "ann", server_round, 1.0, 1, agrees)
        with hub.fed.database.transaction() as tx:
            tx.execute(updates.update().where(updates.c.update_id == update_id).values(verdict=verdict))
            return published_names(tx, ["ann"])

    assert named_after(1, "rejected", agrees=True) == {}
    assert named_after(2, "duplicate", agrees=True) == {"ann": "Ann"}
    assert named_after(3, "rejected", agrees=False) == {"ann": "Ann"}
    assert named_after(4, "merged", agrees=False) == {}
    hub.close()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"contributors": 3}',
        '{"contributors": [{"contributor": "c", "share": true}]}',
        f'{{"contributors": [{{"contributor": "c", "share": {10**400}}}]}}',
    ],
    ids=["list", "empty", "number", "true", "large"],
)
def test_a_damaged_list_of_contributors_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "contributors.json").write_text(text)
    with pytest.raises(GymError, match=r"contributors\.json"):
        contributors_in(tmp_path)
    assert contributors_in(tmp_path / "elsewhere") == []
