"""The registry of models on a real S3 server: numbers that two pushes want, fetches that go on, uploads cut short."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.data.objects import Objects
from gym_fed.registry import ModelRegistry
from tests.support import s3

pytest.importorskip("obstore", reason="obstore is not installed (pip install 'gym-fed[s3]')")
pytestmark = pytest.mark.slow  # the S3 server is installed from PyPI the first time, which takes a minute

server = s3.server


@pytest.fixture
def url(server: s3.S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    s3.use(server.url, monkeypatch)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    return f"s3://hub/{tmp_path.name}/models"


def test_a_model_is_pushed_listed_tagged_verified_and_pulled(
    url: str, tiny_base: Path, tmp_path: Path
) -> None:
    registry = ModelRegistry(url)
    registry.push("me/tiny", tiny_base, licence="mit")
    pushed = registry.push("me/tiny", tiny_base, licence="mit", description="Two.")
    registry.tag("me/tiny@1", "stable")
    registry.tag("me/tiny@2", "stable")
    fresh = ModelRegistry(url)
    assert [(one.name, one.version) for one in fresh.list()] == [("me/tiny", 2)]
    assert fresh.tags("me/tiny") == {"latest": 2, "stable": 2}
    assert [move.version for move, _ in fresh.history("me/tiny", "stable")] == [1, 2]
    assert fresh.verify("me/tiny:stable") == (pushed, [])
    folder = fresh.pull("me/tiny:stable", tmp_path / "out")
    assert (folder / "model.safetensors").read_bytes() == (tiny_base / "model.safetensors").read_bytes()


def test_a_number_that_is_taken_is_not_written_again(url: str) -> None:
    objects = Objects(url)
    made: list[bytes] = []

    def create(data: bytes) -> None:
        if Objects(url).create("models/me/x/000001.json", data):
            made.append(data)

    threads = [threading.Thread(target=create, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert objects.read("models/me/x/000001.json") == made[0]


def test_a_fetch_goes_on_at_the_byte(url: str, tmp_path: Path) -> None:
    objects, file = Objects(url), tmp_path / "file"
    file.write_bytes(os.urandom(3 << 20))
    sha256 = file_sha256(file)
    objects.put(file, sha256)
    part = tmp_path / f".here.{sha256[:16]}.part"
    part.write_bytes(file.read_bytes()[: 2 << 20])
    number = part.stat().st_ino
    objects.fetch(sha256, 3 << 20, tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == file.read_bytes()
    assert (tmp_path / "here").stat().st_ino == number, "fetched from the beginning"


def test_an_upload_that_stops_leaves_no_object_and_is_made_good_by_the_next(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, file = Objects(url), tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    sha256 = file_sha256(file)

    def stopped(file: Path, out: object) -> str:
        out.write(file.read_bytes()[: 1 << 19])  # type: ignore[attr-defined]
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr("gym_fed.data.objects._copy", stopped)
        with pytest.raises(OSError, match="the disk is gone"):
            objects.put(file, sha256)
    assert not objects.has(sha256, 1 << 19), "half an object has its name"
    assert objects.tree("objects") == []
    objects.put(file, sha256)
    assert objects.digest(sha256, 1 << 20) == sha256


def test_an_object_that_was_cut_is_found_refused_and_sent_again(
    url: str, tiny_base: Path, tmp_path: Path
) -> None:
    registry, objects = ModelRegistry(url), Objects(url)
    pushed = registry.push("me/tiny", tiny_base, licence="mit")
    digest = next(file.sha256 for file in pushed.manifest.files if file.path == "model.safetensors")
    with objects._fs.open(f"{objects._root}/objects/{digest[:2]}/{digest}", "wb") as stream:
        stream.write((tiny_base / "model.safetensors").read_bytes()[:-100])
    assert [damage.path for damage in registry.verify("me/tiny")[1]] == ["model.safetensors"]
    with pytest.raises(GymError) as caught:
        registry.pull("me/tiny", tmp_path / "out")
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "out").exists()
    assert registry.push("me/tiny", tiny_base, licence="mit").version == 1
    assert registry.verify("me/tiny")[1] == []
