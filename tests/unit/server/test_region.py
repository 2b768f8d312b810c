"""A region takes over versions of its root, and links both ledgers; without processes, models or rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.grid import Integers
from gym_server.rounds.region import NEW_ROOT, Region

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import GymError
from gym_fed.core.files import file_sha256
from gym_fed.delta.integer_sum import IntegerSum
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.regions.exchange import RegionExchange, RootVersion
from gym_fed.trust.regions.links import RegionLinks
from tests.support.loopback_hub import SPEC, LoopbackHub
from tests.support.loopback_mirror import add_version

UPDATE = "ef" * 32


@pytest.fixture
def root(tmp_path: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "root")
    yield hub
    hub.close()


@pytest.fixture
def region(tmp_path: Path, root: LoopbackHub) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "region", region={"root": root.fed.server})
    yield hub
    hub.close()


def side_of(hub: LoopbackHub) -> Region:
    side = Region.of(hub.fed.state, hub.fed.live_config, hub.fed.steering)
    assert side is not None
    return side


def give(hub: LoopbackHub, region: LoopbackHub, folder: Path, step: int, **changes: Any) -> RootVersion:
    """Leave a version of the root in the exchange, whose sum has ``step`` everywhere; 0 is the base."""
    path, integers = folder / f"{step}.gymdelta", None
    if step:
        total = IntegerSum()
        for name, shape in SPEC.shapes.items():
            total._sums[name] = Integers(torch.full(shape, step, dtype=torch.int8), -10)
        total.write(path, SPEC)
        integers = total.digest()
    said: dict[str, Any] = {
        "root": hub.fed.server,
        "root_key": hub.fed.key.public_key.hex(),
        "root_round": step + 1,
        "root_size": 0,
        "base_digest": SPEC.digest,
        "version_digest": f"sha256:{step:064x}" if step else SPEC.digest,
        "integers": integers,
        "sum_sha256": file_sha256(path) if step else None,
    }
    version = RootVersion(**{**said, **changes})
    RegionExchange(region.fed.folder).put_root_version(version, path if step else None)
    return version


def test_versions_of_the_root_are_taken_over_exactly_and_the_ledger_verifies(
    tmp_path: Path, root: LoopbackHub, region: LoopbackHub
) -> None:
    side, store = side_of(region), region.fed.round_store
    give(root, region, tmp_path, 0)
    assert side.may_begin(lambda: False)
    assert store.head().height == 0
    first = give(root, region, tmp_path, 1)
    assert side.may_begin(lambda: False)
    (soup,) = store.soups()
    assert (soup.integers, soup.sum_sha256) == (first.integers, first.sum_sha256)
    add_version(region, b"a round of the region")
    made = RegionExchange(region.fed.folder)
    second = give(root, region, tmp_path, 2)
    assert side.may_begin(lambda: False)
    (soup,) = store.soups()
    assert soup.integers == second.integers, "it follows from the base, not from the region's round"
    report = made.region_version()
    assert report is not None
    assert (report.root_version, report.num_rounds) == (second.version_digest, 0)
    assert region.fed.ledger.verify()["versions"] == 3


def test_a_running_round_ends_when_the_root_has_a_new_version(
    tmp_path: Path, root: LoopbackHub, region: LoopbackHub
) -> None:
    side, store = side_of(region), region.fed.round_store
    give(root, region, tmp_path, 1)
    assert side.may_begin(lambda: False)
    running = store.open_next()
    side.poll_root()
    assert store.require(running.server_round).state == "open", "nothing is new"
    give(root, region, tmp_path, 2)
    side.poll_root()
    ended = store.require(running.server_round)
    assert ended.state == "aborted"
    assert NEW_ROOT in ended.reason


def test_another_root_than_members_agreed_to_and_another_base_start_no_round(
    tmp_path: Path, root: LoopbackHub, region: LoopbackHub, caplog: pytest.LogCaptureFixture
) -> None:
    for changes in ({"root": "s" + "0" * 16}, {"base_digest": "sha256:" + "1" * 64}):
        give(root, region, tmp_path, 1, **changes)
        looks = iter([False, False, True])
        assert not side_of(region).may_begin(looks.__next__)
        assert region.fed.round_store.newest_height() == 0
    assert "members agreed to" in caplog.text
    assert "the same base_model" in caplog.text


def test_receipts_are_recorded_once_and_both_ledgers_are_compared(
    tmp_path: Path, root: LoopbackHub, region: LoopbackHub
) -> None:
    receipt = receipt_of(root)
    side, exchange = side_of(region), RegionExchange(region.fed.folder)
    give(root, region, tmp_path, 0)
    assert side.may_begin(lambda: False)
    for _ in range(2):
        exchange.put_receipt(receipt)
        side.poll_root()
    assert not exchange.receipts()
    entries = list(region.fed.ledger.entries())
    assert [entry.kind for entry in entries].count("root-update") == 1
    links = links_of(entries)
    found = links.compare(root.fed.server, root.fed.ledger.entries())
    assert (found.versions, found.updates, found.later) == (1, 1, 0)
    assert links.compare(root.fed.server, []).later == 1, (
        "an export that ends before the receipt proves nothing"
    )
    other = [replace(entry, hash="0" * 64) for entry in root.fed.ledger.entries()]
    with pytest.raises(GymError, match="a different entry"):
        links.compare(root.fed.server, other)


def test_a_receipt_that_the_root_did_not_sign_is_not_recorded(
    tmp_path: Path, root: LoopbackHub, region: LoopbackHub
) -> None:
    give(root, region, tmp_path, 0)
    receipt = receipt_of(root)
    receipt["proof"]["head"]["signature"] = "0" * 128
    RegionExchange(region.fed.folder).put_receipt(receipt)
    side_of(region).poll_root()
    assert "root-update" not in {entry.kind for entry in region.fed.ledger.entries()}


def test_receipts_that_are_not_the_root_s_are_set_aside_and_hold_up_nothing(
    tmp_path: Path, root: LoopbackHub, region: LoopbackHub, caplog: pytest.LogCaptureFixture
) -> None:
    give(root, region, tmp_path, 0)
    exchange, side = RegionExchange(region.fed.folder), side_of(region)
    good, forged = receipt_of(root), receipt_of(root)
    forged["proof"]["head"]["signature"] = "0" * 128
    exchange.put_receipt({**forged, "update": "0" * 64})  # the first in order
    (region.fed.folder / "region" / "receipts" / "1.json").write_text("{")
    exchange.put_receipt(good)
    side.poll_root()
    assert [entry.kind for entry in region.fed.ledger.entries()].count("root-update") == 1
    assert not exchange.receipts()
    assert len(list((region.fed.folder / "region" / "receipts").glob("*.refused"))) == 2
    assert caplog.text.count("a receipt was not recorded; it is kept as") == 2


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"recipe": {"finetuning": "lora"}}, "soup.codec"),
        ({"soup": {"server_optimizer": "nesterov"}}, "soup.server_optimizer"),
        ({"rounds": {"mode": "continuous", "merge_every": 3}}, "rounds.mode"),
    ],
)
def test_settings_that_cannot_take_over_a_version_are_refused_by_their_key(
    changes: dict[str, Any], key: str
) -> None:
    soup = {"aggregator": "mean", "num_malicious_nodes": 0, **changes.get("soup", {})}
    values = {"region": {"root": "s" + "0" * 16}, **changes, "soup": soup}
    with pytest.raises(ValueError, match=key):
        ServerConfig.model_validate(values)


def receipt_of(root: LoopbackHub) -> dict[str, Any]:
    """A receipt of an update, as the root signs it."""
    with root.fed.database.transaction() as tx:
        body = {"update": UPDATE, "verdict": "admitted", "contributor": "c" + "1" * 32, "server_round": 1}
        entry = root.fed.ledger.append(tx, "verdict", body)
        root.fed.ledger.sign_head(tx)
    proof = root.fed.ledger.proof(entry.sequence, 0)
    return {"update": UPDATE, "verdict": "admitted", "proof": json.loads(json.dumps(proof.to_dict()))}


def links_of(entries: list[Entry]) -> RegionLinks:
    links = RegionLinks()
    for entry in entries:
        links.add(entry, entry.body)
    return links
