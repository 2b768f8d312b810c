"""A contributor reaches every version over gRPC by few bytes: the newest soup, combined ones, or one sum of all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from gym_client.agent.global_model import GlobalModel
from gym_client.agent.hooks import Hooks
from gym_client.agent.policy import Policy
from gym_client.agent.task_objects import TaskObjects
from gym_client.agent.version_sum import VersionSum
from gym_client.audits.check import fetched_sum
from gym_client.cli.audit import fetch_version
from gym_client.display import Display
from gym_client.hub.traffic import Traffic
from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.seeding.policy import SeedingPolicy
from gym_client.seeding.seeding import Seeding
from gym_server.rounds.sums import CombinedSoups
from gym_server.strategy.tasks import new_task

from gym_fed.config.hub.seeding import SeedingConfig, SeedingTerms
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.trust.wire.records import reference, to_wire
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.unit.server.conftest import put_without_admission, updates_without_admission  # noqa: F401
from tests.unit.server.test_integer_versions import fresh, momentum_hub
from tests.unit.server.test_server_state import merge_next

pytestmark = pytest.mark.usefixtures("updates_without_admission")

Weights = dict[str, torch.Tensor]
Played = tuple[Path, dict[int, TaskSpec], dict[int, Weights]]
"""The folder of a hub with four versions, their tasks and their weights."""


@dataclass
class Scene:
    """A hub with four versions, their tasks and their weights."""

    loopback: LoopbackHub
    base: Path
    tasks: dict[int, TaskSpec]
    weights: dict[int, Weights]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Played:
    folder = tmp_path_factory.mktemp("played") / "hub"
    with pytest.MonkeyPatch.context() as patch, momentum_hub(folder, tiny_base) as hub:
        put_without_admission(patch)
        model = fresh(hub)
        tasks, weights = {}, {}
        for height in range(1, 5):
            merge_next(hub, model, 1e-2 if height < 4 else 1e-3)
            tasks[height] = new_task(hub.state, hub.config, hub.max_update_bytes, height + 1)
            model.follow(hub.round_store.soups())
            weights[height] = {name: tensor.clone() for name, tensor in model_tensors(model.model).items()}
    return folder, tasks, weights


@pytest.fixture
def scene(played: Played, tiny_base: Path, tmp_path: Path) -> Iterator[Scene]:
    folder, tasks, weights = played
    shutil.copytree(folder, tmp_path / "hub")
    loopback = LoopbackHub(tmp_path / "hub")
    yield Scene(loopback, tiny_base, tasks, weights)
    loopback.close()


class Member:
    """A contributor who trains in some rounds and is away in others."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self.home = scene, Home.open(folder)
        self.client: HubClient = scene.loopback.client(folder)
        self.model = GlobalModel(str(scene.base))
        self.traffic = Traffic(self.home, scene.tasks[1].server)
        self.times_busy = 0

    def fetch(self, height: int) -> int:
        """Fetch what a version needs; return its bytes."""
        spec = self.scene.tasks[height]
        soups = {soup.sha256: reference(soup.sha256, soup.size_bytes) for soup in spec.soups}
        content = to_wire(RecordDict({"soups": ArrayRecord(soups)}), lambda data: None)
        objects = TaskObjects(self.home, self.client, Policy(), self.traffic)
        self.traffic.begin()
        objects.fetch(pb.Task(content=content), spec, Hooks(), self._retry)
        return self.traffic.task.down

    def _retry(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except GymError as error:
            if error.code is not ErrorCode.BUSY:
                raise
            self.times_busy += 1
            time.sleep(0.1)
            return self._retry(action)

    def advance(self, height: int) -> Weights:
        spec = self.scene.tasks[height]
        sums = VersionSum(self.home.versions(spec.server))
        self.model.advance(spec, ObjectCache(self.home.objects).path, sums)
        return self.model.tensors

    def files(self) -> list[Path]:
        return [*self.home.objects.iterdir(), *self.home.versions(self.scene.tasks[1].server).iterdir()]


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_every_path_leads_to_the_same_weights_and_a_member_who_was_away_fetches_one_object(
    scene: Scene, tmp_path: Path
) -> None:
    soups = scene.tasks[4].soups
    sizes = [soup.size_bytes for soup in soups]
    steady, away, late = (Member(scene, tmp_path / name) for name in ("steady", "away", "late"))
    for height in range(1, 5):
        assert steady.fetch(height) == sizes[height - 1]
        assert steady.fetch(height) == 0
        assert same(steady.advance(height), scene.weights[height])
        assert len(steady.files()) == 1
    assert away.fetch(1) == sizes[0]
    assert same(away.advance(1), scene.weights[1])
    combined = away.fetch(4)
    assert 0 < combined < sum(sizes[1:])
    assert away.fetch(4) == 0
    assert same(away.advance(4), scene.weights[4])
    assert late.fetch(4) == soups[-1].sum_bytes
    assert same(late.advance(4), scene.weights[4])
    again = Member(scene, tmp_path / "late")  # another process
    assert again.fetch(4) == 0
    assert same(again.advance(4), scene.weights[4])


def test_a_member_who_was_away_for_longer_than_the_hub_combines_takes_the_whole_sum(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_server.rounds.sums._RECENT", 1)
    member = Member(scene, tmp_path / "member")
    member.fetch(1)
    member.advance(1)
    assert member.fetch(4) == scene.tasks[4].soups[-1].sum_bytes
    assert member.fetch(4) == 0
    assert same(member.advance(4), scene.weights[4])
    assert len(member.files()) == 1


def test_a_member_waits_without_a_thread_of_the_hub_while_its_soups_are_combined(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_server.rpc.hub._SOUP_SECONDS", 0.05)
    make = CombinedSoups._make

    def slowly(*args: Any) -> tuple[str, int]:
        time.sleep(1.0)
        return make(*args)

    monkeypatch.setattr(CombinedSoups, "_make", slowly)
    member = Member(scene, tmp_path / "member")
    member.fetch(1)
    member.advance(1)
    combined = member.fetch(4)
    assert member.times_busy >= 2
    assert 0 < combined < sum(soup.size_bytes for soup in scene.tasks[4].soups[1:])
    assert same(member.advance(4), scene.weights[4])


def test_a_member_whose_combined_soup_was_deleted_during_its_download_gets_another_one(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member(scene, tmp_path / "member")
    member.fetch(1)
    member.advance(1)
    names: list[str] = []

    def deleted_first(client: HubClient, cache: ObjectCache, sha256: str, *args: Any) -> Path:
        names.append(sha256)
        if len(names) == 1:
            scene.loopback.fed.store.delete(sha256)
        return download(client, cache, sha256, *args)

    monkeypatch.setattr("gym_client.agent.task_objects.download", deleted_first)
    member.fetch(4)
    assert len(names) == 2
    assert same(member.advance(4), scene.weights[4])


def test_a_hub_that_went_back_to_an_earlier_version_gives_its_sum(scene: Scene, tmp_path: Path) -> None:
    member = Member(scene, tmp_path / "member")
    member.fetch(4)
    member.advance(4)
    member.fetch(2)
    assert same(member.advance(2), scene.weights[2])


def test_combined_soups_that_lead_elsewhere_are_refused_and_fetched_again(
    scene: Scene, tmp_path: Path
) -> None:
    member = Member(scene, tmp_path / "member")
    member.fetch(1)
    member.advance(1)
    member.fetch(4)
    spec = scene.tasks[4]
    (piece,) = (path for path in member.files() if "-" in path.name)
    wrong = scene.loopback.fed.store.local_path(spec.soups[1].sha256)  # starts at the same version
    piece.write_bytes(wrong.read_bytes())
    with pytest.raises(GymError, match="the sum of the soups has digest") as caught:
        member.advance(4)
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    member.fetch(4)
    assert same(member.advance(4), scene.weights[4])


def test_an_auditor_fetches_one_sum_and_keeps_it(scene: Scene, tmp_path: Path) -> None:
    auditor, spec = Member(scene, tmp_path / "auditor"), scene.tasks[4]
    cache = ObjectCache(auditor.home.objects)
    fetch_version(auditor.client, cache, Policy(), spec)
    (path,) = auditor.home.objects.iterdir()
    assert path.stat().st_size == spec.soups[-1].sum_bytes
    auditor.model.advance(spec, cache.path, fetched_sum(spec, cache.path, tmp_path / "versions"))
    assert same(auditor.model.tensors, scene.weights[4])
    assert path.exists()


def test_a_missing_soup_leaves_the_sum_on_this_machine(scene: Scene, tmp_path: Path) -> None:
    member = Member(scene, tmp_path / "member")
    member.fetch(1)
    member.advance(1)
    before = member.files()
    with pytest.raises(GymError) as caught:
        member.advance(2)  # nothing was fetched
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    assert member.files() == before
    member.fetch(2)
    assert same(member.advance(2), scene.weights[2])


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:-9] + bytes(9), lambda data: b""]
)
def test_a_damaged_sum_on_this_machine_is_fetched_again(
    scene: Scene, tmp_path: Path, damage: Callable[[bytes], Any]
) -> None:
    member = Member(scene, tmp_path / "member")
    member.fetch(3)
    member.advance(3)
    (path,) = member.files()
    path.write_bytes(damage(path.read_bytes()))
    other = Member(scene, tmp_path / "member")
    with pytest.raises(GymError):
        other.advance(3)
    other.fetch(3)
    assert same(other.advance(3), scene.weights[3])


def test_a_soup_and_the_sum_of_all_come_from_members_who_fetched_them_before(
    scene: Scene, tmp_path: Path
) -> None:
    tracker = scene.loopback.service._seeds
    tracker._config = SeedingConfig(min_bytes=1)
    terms, policy = SeedingTerms(min_bytes=1), SeedingPolicy(listen="127.0.0.1:0")
    members = [Member(scene, tmp_path / name) for name in ("steady", "late", "later", "last")]
    for member in members:
        member.client.seeding = Seeding(member.client, policy, terms, Display())
        member.client.seeding.start()
    steady, late, later, last = members
    soups = scene.tasks[4].soups
    for height in range(1, 5):
        assert steady.fetch(height) == soups[height - 1].size_bytes
        steady.advance(height)
        assert len(steady.files()) == 1
    assert late.fetch(4) == soups[-1].sum_bytes
    late.client.seeding._announce()  # type: ignore[union-attr]
    assert later.fetch(4) == 0
    assert same(later.advance(4), scene.weights[4])
    assert last.fetch(1) == 0
    assert same(last.advance(1), scene.weights[1])
    assert late.client.seeding.totals.now.served == soups[-1].sum_bytes  # type: ignore[union-attr]
    for member in members:
        member.client.close()
