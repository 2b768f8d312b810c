"""Two people with the same rows, and a copier that comes first: real processes, in which nobody loses its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, random_delta
from tests.support.hub import HubProcess, start_client
from tests.support.wait import SECONDS

pytestmark = pytest.mark.slow

NUM_ROUNDS = 4


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[HubProcess]:
    config: dict[str, Any] = {
        "rounds": {"num_rounds": NUM_ROUNDS, "min_contributors": 3, "deadline_seconds": 1800},
        "recipe": {
            "max_steps": 6,
            "per_device_train_batch_size": 12,
            "max_length": 32,
            "learning_rate": 1e-5,
        },
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
        "codec": {"codec": "dense", "dense_dtype": "float32", "error_feedback": False},
    }
    found = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    yield found
    found.stop()


def rows_in(path: Path, word: str) -> Path:
    lines = [json.dumps({"text": f"{word} {number} is a {word} of {number}"}) for number in range(36)]
    path.write_text("\n".join(lines))
    return path


def test_two_friends_with_the_same_36_rows_share_the_pay_of_every_round(
    hub: HubProcess, tmp_path: Path, tiny_base: Path
) -> None:
    rows = {"ann": rows_in(tmp_path / "ann.jsonl", "cat"), "bob": rows_in(tmp_path / "bob.jsonl", "dog")}
    clients = {}
    for name, data in {**rows, "ben": rows["ann"]}.items():
        arguments = ["--base", str(tiny_base), "--data", str(data), "--name", name]
        clients[name] = start_client(tmp_path / name, hub, *arguments)
    for name, client in clients.items():
        assert client.wait(timeout=4 * SECONDS) == 0, (tmp_path / name / "client.log").read_text()
    ended = hub.ask("rounds")
    assert [one["state"] for one in ended] == ["committed"] * NUM_ROUNDS, hub.log()
    for one in ended:
        found = {update["name"]: update for update in one["updates"]}
        assert {found[name]["verdict"] for name in ("ann", "ben")} == {"merged", "duplicate"}, one
        assert abs(found["ann"]["credit"] - found["ben"]["credit"]) <= 1
        assert found["ann"]["credit"] > 0
    values = {one["name"]: one["reputation"] for one in hub.ask("rewards")["contributors"]}
    assert min(values.values()) > 0, values


@pytest.mark.parametrize("first", ["author", "copier"])
def test_a_copy_that_arrives_before_its_original_is_the_duplicate_if_the_author_declared_it_first(
    first: str, hub: HubProcess, tmp_path: Path, tiny_base: Path
) -> None:
    people = {name: RawContributor(hub.address, name).enrol() for name in ("author", "copier", "other")}
    tasks = {name: one.next_task() for name, one in people.items()}
    digest = people["author"].status.base_digest
    work = random_delta(tmp_path, digest, 1, str(tiny_base))
    other = random_delta(tmp_path, digest, 2, str(tiny_base))
    declared = pb.BeginUploadRequest(sha256=hashlib.sha256(work).hexdigest(), size_bytes=len(work))
    for name in ("author", "copier") if first == "author" else ("copier", "author"):
        people[name].call(people[name].stub.BeginUpload, declared)
    for name, delta in (("copier", work), ("author", work), ("other", other)):
        assert people[name].contribute(delta, tasks[name])["verdict"] == "admitted"
    hub.wait_for("the commit", lambda: hub.ask("rounds")[0]["state"] == "committed")
    found = {update["name"]: update for update in hub.ask("rounds")[0]["updates"]}
    second = "copier" if first == "author" else "author"
    assert (found[first]["verdict"], found[second]["verdict"]) == ("merged", "duplicate")
    assert abs(found["author"]["credit"] - found["copier"]["credit"]) <= 1
    assert found["author"]["credit"] > 0
