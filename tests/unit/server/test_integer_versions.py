"""Versions of soups that add up: base plus an integer sum on every path, in the ledger, in replay and on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.downloads import Downloads
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.replay import replay
from gym_server.rounds.sums import CombinedSoups, sum_to
from gym_server.rounds.versions import VersionSums
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.tasks import new_task

from gym_fed.config.hub.task import bytes_to_join, check_lineage
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.integer_sum import IntegerSum
from gym_fed.trust.ledger.lineage import LineageCheck
from tests.support.hub import QUICK_ENROLMENT
from tests.unit.server.test_server_state import (
    merge_next,
    model,  # noqa: F401
    version_entries,
)

pytestmark = pytest.mark.usefixtures("updates_without_admission")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    with momentum_hub(tmp_path / "hub", tiny_base) as federation:
        yield federation


def momentum_hub(folder: Path, base: Path) -> Federation:
    """A hub with the soup codec of `gym-server init`, whose server steps with momentum."""
    init_hub(folder, HubChoices(str(base), "state", "open"))
    path = folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    values["soup"] = {"aggregator": "mean", "num_malicious_nodes": 0, "server_optimizer": "momentum"}
    values["gate"] = {"screen_updates": False}
    values["limits"] = QUICK_ENROLMENT
    path.write_text(yaml.safe_dump(values))
    return Federation.open(folder)


def fresh(hub: Federation) -> HubModel:
    return HubModel(hub.base, hub.config.base_model, hub.store, hub.config.gate, hub.folder)


def with_codec(hub: Federation, codec: str) -> None:
    """The coordinator changes how soups are written."""
    soup = hub.config.soup
    policy = type(soup.codec)(codec=codec, **({"error_feedback": False} if codec == "dense" else {}))
    object.__setattr__(hub.config, "soup", soup.model_copy(update={"codec": policy}))


def test_versions_are_the_base_plus_the_sum_of_the_codes_of_their_soups(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    base = {name: tensor.clone() for name, tensor in model_tensors(model.model).items()}
    for size in (1e-2, 1e-2, 1e-4):  # the last one on a finer grid
        merge_next(hub, model, size)
    soups = hub.round_store.soups()
    parents, total, exponents = [hub.base.digest, *(s.version_digest for s in soups)], IntegerSum(), []
    for soup, parent in zip(soups, parents, strict=False):
        spec = BaseSpec(hub.base.model_name, parent, hub.base.shapes)
        with DeltaFile.open(hub.store.local_path(soup.sha256), spec) as opened:
            total.add(opened)
            name = max(opened.names)
            found = opened.integers(name)
            assert found is not None
            exponents.append(found.exponent)
        assert total.digest() == soup.integers
    assert exponents[2] <= exponents[1] == exponents[0]
    total.apply(base)
    by_rounds, at_once = fresh(hub), fresh(hub)
    for height in range(1, 4):
        by_rounds.follow(hub.round_store.soups(height))
    at_once.follow(soups)
    assert tensors_digest(base) == tensors_digest(by_rounds.model) == tensors_digest(at_once.model)
    at_once.release()
    assert tensors_digest(at_once.model) == tensors_digest(base)
    check_lineage(new_task(hub.state, hub.config, hub.max_update_bytes, 9))


def test_a_round_whose_soup_adds_up_replays_to_the_ledger_s_soup_and_sum(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    for _ in range(3):
        merge_next(hub, model)
    for server_round in (1, 2, 3):
        found = replay(hub.state, server_round)
        assert found["replayed"] == found["soup"]
    for body in version_entries(hub):
        assert body["integers"]["digest"].startswith("sha256:")
        assert hub.store.has(body["integers"]["sum"])
    hub.ledger.verify()


def test_a_soup_of_the_same_codes_in_other_bytes_replays(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge_next(hub, model)
    monkeypatch.setattr("gym_quant.codecs.lattice._deflate", lambda data: data + b"longer than data")
    found = replay(hub.state, 1)
    assert found["replayed"] != found["soup"]
    assert found["same_integers"]


def changed_entry(hub: Federation, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Let replay read other fields in the ledger's version entries, as if the hub had signed them."""
    bodies = {body["server_round"]: {**body, **fields} for body in version_entries(hub)}
    monkeypatch.setattr("gym_server.rounds.replay._version_entry", lambda ledger, key, number: bodies[number])


def test_a_replay_of_the_honest_soup_with_the_sum_of_another_one_is_refused(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge_next(hub, model)
    (body,) = version_entries(hub)
    other = {**body["integers"], "digest": f"sha256:{'0' * 64}"}
    changed_entry(hub, monkeypatch, integers=other)
    with pytest.raises(GymError, match="round 1: the ledger records the sum sha256:0000") as caught:
        replay(hub.state, 1)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_replay_of_the_honest_sum_with_another_soup_is_refused(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    merge_next(hub, model)
    spec = BaseSpec(hub.base.model_name, hub.base.digest, hub.base.shapes)
    poisoned = IntegerSum()
    with DeltaFile.open(hub.store.local_path(hub.round_store.soups()[0].sha256), spec) as opened:
        poisoned.add(opened)
        poisoned.add(opened)
    poisoned.write(tmp_path / "poisoned", spec)
    changed_entry(hub, monkeypatch, soup=hub.store.put_file(tmp_path / "poisoned"))
    with pytest.raises(GymError, match="round 1: the ledger records the sum"):
        replay(hub.state, 1)


def test_a_replay_that_gives_other_codes_is_refused(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge_next(hub, model)
    monkeypatch.setattr("gym_quant.codecs.lattice.STEP_IN_RMS", 0.1)
    with pytest.raises(GymError, match="round 1: the ledger records soup"):
        replay(hub.state, 1)


def made(combined: CombinedSoups, start: str, end: str) -> tuple[str, int]:
    return combined.request("ann", start, end).result()


def test_a_combined_soup_leads_from_any_recent_version_to_the_current_one(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    for _ in range(4):
        merge_next(hub, model)
    soups, combined = hub.round_store.soups(), CombinedSoups(hub.state, hub.config)
    digests = [hub.base.digest, *(soup.version_digest for soup in soups)]
    for start in range(4):
        sha256, size = made(combined, digests[start], digests[4])
        assert made(combined, digests[start], digests[4]) == (sha256, size)
        total = IntegerSum() if start == 0 else sum_to(hub.state, hub.round_store.soups(start))
        with DeltaFile.open(hub.store.local_path(sha256)) as opened:
            assert opened.size_bytes == size
            assert opened.manifest.base_digest == digests[start]
            total.add(opened)
        assert total.digest() == soups[-1].integers
    assert made(combined, digests[1], digests[3]) != made(combined, digests[1], digests[4])  # a round is open
    for pair in ((digests[2], digests[1]), (digests[4], digests[4]), ("sha256:no", digests[4])):
        with pytest.raises(GymError) as caught:
            made(combined, *pair)
        assert caught.value.code is ErrorCode.NOT_FOUND


def test_no_more_combined_soups_are_kept_than_versions_they_may_start_from(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gym_server.rounds.sums._RECENT", 2)
    monkeypatch.setattr("gym_server.rounds.sums._KEPT_SECONDS", 0.0)
    combined, names = CombinedSoups(hub.state, hub.config), list[str]()
    for _ in range(4):
        merge_next(hub, model)
        *earlier, end = [hub.base.digest, *(soup.version_digest for soup in hub.round_store.soups())]
        names += [made(combined, start, end)[0] for start in earlier[-2:]]
        if len(earlier) > 2:
            with pytest.raises(GymError, match="no combined soup leads"):
                made(combined, earlier[-3], end)
    with hub.database.reading() as tx:
        of_versions = {held["sum"] for held in VersionSums().read(tx).values()}
    of_versions |= {soup.sha256 for soup in hub.round_store.soups()}
    kept = [sha256 for sha256 in dict.fromkeys(names) if hub.store.has(sha256)]
    assert set(kept) == {*names[-2:], *(of_versions & set(names))}
    assert len(set(names)) > len(kept)


def test_combined_soups_are_refused_where_they_would_cost_too_much(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(code: ErrorCode, contributor: str, start: int, end: int) -> None:
        with pytest.raises(GymError) as caught:
            combined.request(contributor, digests[start], digests[end])
        assert caught.value.code is code

    for _ in range(3):
        merge_next(hub, model)
    digests = [hub.base.digest, *(soup.version_digest for soup in hub.round_store.soups())]
    combined, free = CombinedSoups(hub.state, hub.config), Event()
    combined._worker.submit(free.wait)
    first = combined.request("ann", digests[0], digests[3])
    assert combined.request("bob", digests[0], digests[3]) is first
    refused(ErrorCode.BUSY, "ann", 1, 3)  # it has a request
    combined.request("bob", digests[1], digests[3])
    monkeypatch.setattr("gym_server.rounds.sums._MOST_WAITING", 2)
    refused(ErrorCode.NOT_FOUND, "cat", 0, 2)
    free.set()
    sha256, _ = first.result()
    made(combined, digests[1], digests[3])
    monkeypatch.setattr(
        "gym_server.rounds.sums.shortage", lambda state, config: GymError(ErrorCode.DISK_FULL, "")
    )
    refused(ErrorCode.NOT_FOUND, "cat", 0, 2)
    monkeypatch.undo()
    monkeypatch.setattr("gym_server.rounds.sums._RECENT", 2)
    refused(ErrorCode.NOT_FOUND, "cat", 2, 3)  # somebody may still download those made in the last hour
    assert hub.store.has(sha256)
    monkeypatch.undo()
    free.clear()
    combined._worker.submit(free.wait)
    waiting = combined.request("ann", digests[1], digests[2])
    combined.close()
    assert waiting.cancelled()
    free.set()


def test_six_rounds_combined_are_at_most_twice_one_soup(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    object.__setattr__(hub.config, "soup", hub.config.soup.model_copy(update={"server_optimizer": "none"}))
    for _ in range(6):
        merge_next(hub, model)
    soups = hub.round_store.soups()
    assert bytes_to_join(soups) <= 2 * soups[-1].size_bytes
    assert bytes_to_join(soups) < sum(soup.size_bytes for soup in soups) / 2


def test_the_hub_announces_one_sum_to_join_and_the_newest_soup_for_a_round(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    downloads = Downloads(hub.live_config, hub.base, hub.round_store)
    to_join, most = downloads.announced(0, 8)
    assert to_join == 0
    merge_next(hub, model)
    merge_next(hub, model)
    soups = hub.round_store.soups()
    assert downloads.announced(2, 8) == (soups[-1].sum_bytes, soups[-1].size_bytes)
    assert soups[0].size_bytes <= most
    assert "codec lattice: about " in downloads.line()


def test_a_round_whose_sum_has_more_than_31_bits_is_aborted_before_it_is_scored(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    merge_next(hub, model, 1e-8)
    number = merge_next(hub, model, 1e2)
    aborted = hub.round_store.require(number)
    assert "has a sum of more than 31 bits" in aborted.reason
    assert len(hub.round_store.soups()) == 1
    merge_next(hub, model, 1e-2)
    assert len(hub.round_store.soups()) == 2


def test_soups_of_another_codec_between_end_the_sum_and_the_next_one_begins_a_new_one(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    for _ in range(3):
        merge_next(hub, model)
    with_codec(hub, "dense")
    merge_next(hub, model)
    dense = hub.round_store.soups()
    assert dense[-1].integers is None
    at_once, late = fresh(hub), fresh(hub)
    at_once.follow(dense)
    late.follow(hub.round_store.soups(1))
    late.follow(dense)
    model.follow(dense)
    assert tensors_digest(at_once.model) == tensors_digest(model.model) == tensors_digest(late.model)
    with_codec(hub, "lattice")
    merge_next(hub, model)
    soups = hub.round_store.soups()
    with DeltaFile.open(hub.store.local_path(str(soups[-1].sum_sha256))) as opened:
        assert opened.manifest.base_digest == soups[3].version_digest
    combined = CombinedSoups(hub.state, hub.config)
    made(combined, soups[3].version_digest, soups[4].version_digest)
    with pytest.raises(GymError, match="no combined soup leads"):
        made(combined, soups[2].version_digest, soups[4].version_digest)
    at_once = fresh(hub)
    at_once.follow(soups)
    model.follow(soups)
    assert tensors_digest(at_once.model) == tensors_digest(model.model)
    for server_round in (1, 4, 5):
        assert replay(hub.state, server_round)["version"] == server_round


def test_a_model_that_could_not_follow_stays_at_its_version(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(store: Any, sha256: str) -> Path:
        raise StoreUnavailable(GymError(ErrorCode.UNAVAILABLE, "the store does not answer"))

    for _ in range(2):
        merge_next(hub, model)
    follower, second, third = fresh(hub), hub.round_store.soups(1), hub.round_store.soups(2)
    follower.follow(second)
    expected, digest = tensors_digest(follower.model), follower.digest
    follower.release()
    with monkeypatch.context() as patch:
        patch.setattr(type(hub.store), "local_path", away)
        with pytest.raises(StoreUnavailable):
            follower.follow(third)
    follower.follow(second)
    assert (tensors_digest(follower.model), follower.digest) == (expected, digest)


def test_a_sum_that_is_not_the_ledger_s_is_refused(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    merge_next(hub, model)
    merge_next(hub, model)
    first, second = hub.round_store.soups(1), hub.round_store.soups(2)
    wrong = second[-1].model_copy(update={"sum_sha256": first[-1].sum_sha256})
    with pytest.raises(GymError, match="the sum of the soups has digest"):
        fresh(hub).follow([first[0].model_copy(update={"sum_sha256": None, "sum_bytes": None}), wrong])


def test_a_version_s_digest_covers_its_sum_in_tasks_and_in_the_ledger(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    merge_next(hub, model)
    other = f"sha256:{'0' * 64}"
    task = new_task(hub.state, hub.config, hub.max_update_bytes, 9)
    check_lineage(task)
    wrong = task.model_copy(update={"soups": [task.soups[0].model_copy(update={"integers": other})]})
    with pytest.raises(GymError, match="does not follow from the one before it"):
        check_lineage(wrong)
    (entry,) = (entry for entry in hub.ledger.entries() if entry.kind == "version")
    LineageCheck().add(entry, entry.body)
    body = {**entry.body, "integers": {**entry.body["integers"], "digest": other}}
    with pytest.raises(GymError, match="is not the result of its parent and its soup"):
        LineageCheck().add(entry, body)


def test_the_ledger_s_sums_are_parsed_once(
    hub: Federation,
    model: HubModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(text: str) -> Any:
        raise AssertionError("an entry was parsed again")

    merge_next(hub, model)
    first = hub.round_store.soups(1)
    merge_next(hub, model)
    second = hub.round_store.soups(2)
    assert second[0].integers == first[0].integers != second[1].integers
    with monkeypatch.context() as patch:
        patch.setattr("gym_server.rounds.versions.json.loads", never)
        assert hub.round_store.soups(2) == second


def test_the_sum_of_every_version_is_kept_and_read_by_everyone(
    hub: Federation,
    model: HubModel,  # noqa: F811
) -> None:
    from gym_server.store.rights import may_read
    from gym_server.store.usage import needed

    merge_next(hub, model)
    with hub.database.reading() as tx:
        (held,) = VersionSums().read(tx).values()
        assert held["sum"] in needed(tx, 0.0)
        assert may_read(tx, "anyone", held["sum"])
