"""The dashboard's screen of variants: counts for everybody, the rest and taking down for the operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.variants import push_variant, sign_variant
from gym_server.cli.accounts import variants_of

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.hub_pages import HubPages
from tests.support.loopback_hub import LoopbackHub, manifest_of, some_delta


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    found = LoopbackHub(tmp_path_factory.mktemp("variants") / "hub")
    yield found
    found.close()


def test_a_variant_is_counted_for_all_and_taken_down_by_the_operator_until_it_is_allowed(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    pages, delta = HubPages(hub.fed), some_delta(tmp_path, seed=7)
    assert pages.seen("variants")["number"] == 0
    with hub.client(tmp_path / "ann") as ann:
        push_variant(ann, delta, sign_variant(ann, manifest_of(delta)), ["*"])
        (reported,) = variants_of(hub.fed)
        counted = pages.seen("variants")
        assert (counted["number"], counted["owners"], counted["bytes"]) == (1, 1, delta.stat().st_size)
        assert reported["variant"] not in json.dumps([counted, pages.seen("health")])
        (one,) = pages.get("variants/list")["variants"]
        assert (one["owner"], one["name"]) == (reported["owner"], reported["variant"])
        assert (one["readers"], one["bytes"]) == ("everyone", reported["size_bytes"])

        named = {"owner": one["owner"], "name": one["name"]}
        assert pages.change("variants/remove", **named)[0] == 400, "without a reason"
        assert pages.change("variants/remove", **named, reason="not\nours")["held"] is False
        (entry,) = [e.body for e in hub.fed.ledger.entries() if e.kind == "variant-removed"]
        assert entry["by"] == "coordinator"
        assert "\n" not in entry["reason"]
        listed = pages.get("variants/list")
        assert listed["variants"] == []
        assert [(down["name"], down["reason"]) for down in listed["taken_down"]] == [
            (one["name"], entry["reason"])
        ]
        again = sign_variant(ann, manifest_of(delta, revision=2))
        with pytest.raises(GymError) as refused:
            push_variant(ann, delta, again, ["*"])
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
        assert pages.change("variants/allow", **named)["allowed"]
        push_variant(ann, delta, again, ["*"])
    assert pages.seen("variants")["taken_down"] == 0
    assert pages.change("variants/allow", **named)[0] == 404
    assert pages.seen("variants")["number"] == 1
