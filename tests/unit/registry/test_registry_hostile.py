"""Hostile stores: wrong sizes, names, digests and signatures are refused before anything is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json
from gym_fed.data.objects import Objects
from gym_fed.registry import ModelRegistry
from gym_fed.registry.manifest import DELTA_FILE, Signer
from gym_fed.registry.models import DamagedWarning
from gym_fed.registry.signers import own_key
from gym_fed.registry.versions import VersionStore
from gym_fed.trust.identity.keys import SigningKey

NAME = "me/tiny"


def signed(values: Any, key: SigningKey) -> bytes:
    """A manifest that a signer with bad intentions signs properly."""
    document = {"manifest": values, "public_key": key.public_key.hex(), "signature": key.sign(values).hex()}
    return canonical_json(document)


@pytest.fixture(scope="module")
def pushed(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a store that has version 1 and the home that signed it, and the version's manifest."""
    folder = tmp_path_factory.mktemp("pushed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYM_HOME", str(folder / "home"))
        version = ModelRegistry(folder / "store").push(NAME, tiny_base, licence="mit")
    return folder, version.manifest.model_dump(mode="json")


@pytest.fixture
def manifest(
    pushed: tuple[Path, dict[str, Any]], home: Path, store: Path, registry: ModelRegistry
) -> dict[str, Any]:
    """A manifest of version 2 like that of version 1, which is in the store; a test changes it."""
    folder, values = pushed
    shutil.copytree(folder / "home", home)
    shutil.copytree(folder / "store", store)
    registry._pins.add(NAME, Signer(own_key().public_key))
    return values | {"version": 2}


def put(store: Path, data: bytes) -> None:
    (store / f"models/{NAME}/000002.json").write_bytes(data)


def _file(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: values | {"files": [values["files"][0] | changed, *values["files"][1:]]}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_file(path="../config.json"), id="leads-out"),
        pytest.param(_file(path="/etc/config.json"), id="absolute"),
        pytest.param(_file(path="evals/../../config.json"), id="leads-out-of-evals"),
        pytest.param(_file(path="a\\config.json"), id="backslash"),
        pytest.param(_file(path="C:config.json"), id="drive"),
        pytest.param(_file(path="pytorch_model.bin"), id="pickle"),
        pytest.param(_file(path="modeling.py"), id="code"),
        pytest.param(_file(path=".gym-model.json"), id="hidden"),
        pytest.param(_file(path="con\u202efig.json"), id="turned"),
        pytest.param(_file(path="TOKENIZER.json"), id="twice-where-case-is-ignored"),
        pytest.param(_file(num_bytes=-1), id="negative-size"),
        pytest.param(_file(num_bytes=1 << 60), id="exabyte"),
        pytest.param(_file(sha256="../" + "0" * 61), id="digest-that-is-a-path"),
        pytest.param(lambda v: v | {"files": []}, id="no-files"),
        pytest.param(
            lambda v: v | {"files": [v["files"][0] | {"path": f"{i}.json"} for i in range(2001)]},
            id="many-files",
        ),
        pytest.param(lambda v: v | {"kind": "delta"}, id="delta-without-one"),
        pytest.param(
            lambda v: v | {"kind": "delta", "files": [v["files"][0] | {"path": DELTA_FILE}], "base": None},
            id="delta-without-a-base",
        ),
        pytest.param(lambda v: v | {"format": "gym-model-2"}, id="other-format"),
        pytest.param(lambda v: v | {"post_install": "rm -rf ~"}, id="unknown-key"),
        pytest.param(lambda v: v | {"name": "me/other"}, id="other-name"),
        pytest.param(lambda v: v | {"version": 1}, id="other-version"),
        pytest.param(lambda v: v | {"version": 1 << 70}, id="version-beyond-json"),
        pytest.param(lambda v: v | {"description": "x" * 5000}, id="long-text"),
    ],
)
def test_a_signed_manifest_that_lies_is_refused_and_nothing_is_written(
    registry: ModelRegistry, store: Path, tmp_path: Path, manifest: dict[str, Any], change: Any
) -> None:
    put(store, signed(change(manifest), own_key()))
    with pytest.raises(GymError) as caught:
        registry.pull(NAME, tmp_path / "out")
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert "000002.json" in caught.value.message
    assert not list(tmp_path.glob(".out*"))
    assert not (tmp_path / "out").exists()


def _forged(data: bytes) -> bytes:
    return data.replace(b'"licence":"MIT"', b'"licence":"ISC"')


def _of_nobody(data: bytes) -> bytes:
    return canonical_json(json.loads(data) | {"public_key": SigningKey.generate().public_key.hex()})


def _unsigned(data: bytes) -> bytes:
    return canonical_json({"manifest": json.loads(data)["manifest"]})


@pytest.mark.parametrize("change", [_forged, _of_nobody, _unsigned])
def test_a_forged_or_missing_signature_is_refused(
    registry: ModelRegistry, store: Path, tmp_path: Path, manifest: dict[str, Any], change: Any
) -> None:
    good = signed(manifest, own_key())
    assert change(good) != good
    put(store, change(good))
    with pytest.raises(GymError) as caught:
        registry.pull(NAME, tmp_path / "out")
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no json",
        b"[" * 100_000,
        b"null",
        b'{"manifest": 1}',
        b'{"manifest": {}, "public_key": "00", "signature": "00"}',
    ],
)
def test_bytes_that_are_no_manifest_are_refused_by_name(
    registry: ModelRegistry, store: Path, manifest: dict[str, Any], data: bytes
) -> None:
    put(store, data)
    with pytest.raises(GymError, match=r"000002\.json") as caught:
        registry.show(NAME)
    assert caught.value.code in (ErrorCode.STATE_CORRUPT, ErrorCode.SIGNATURE_INVALID)
    assert registry.show(f"{NAME}@1").version == 1


def test_a_manifest_of_a_million_files_is_refused_before_it_is_read(
    registry: ModelRegistry, store: Path, manifest: dict[str, Any]
) -> None:
    with (store / f"models/{NAME}/000002.json").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(GymError) as caught:
        registry.show(NAME)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_damaged_newest_version_is_followed_by_a_good_push(
    registry: ModelRegistry, store: Path, model: Path, manifest: dict[str, Any]
) -> None:
    put(store, b"damaged")
    assert registry.push(NAME, model, licence="mit").version == 3
    assert registry.show(NAME).version == 3


def test_an_object_of_another_size_than_stated_is_refused(
    registry: ModelRegistry, store: Path, tmp_path: Path, manifest: dict[str, Any]
) -> None:
    put(store, signed(_file(num_bytes=3)(manifest), own_key()))
    with pytest.raises(GymError) as caught:
        registry.pull(NAME, tmp_path / "out")
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "out").exists()


def test_a_link_that_leads_out_of_the_folder_is_not_pushed(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("{}")
    (model / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(GymError, match=r"vocab\.json as a link"):
        registry.push(NAME, model, licence="mit")


def test_a_link_in_a_pull_that_was_stopped_is_not_followed(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    found = registry.push(NAME, model, licence="mit")
    part = tmp_path / f".out.{found.sha256[:16]}.pull"
    part.mkdir()
    (tmp_path / "mine").write_text("mine")
    (part / "config.json").symlink_to(tmp_path / "mine")
    folder = registry.pull(NAME, tmp_path / "out")
    assert not (folder / "config.json").is_symlink()
    assert (folder / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_tag_on_a_version_that_was_replaced_is_refused(
    registry: ModelRegistry, store: Path, tmp_path: Path, manifest: dict[str, Any]
) -> None:
    registry.tag(f"{NAME}@1", "stable")
    other = signed(manifest | {"version": 1, "description": "another"}, own_key())
    (store / f"models/{NAME}/000001.json").write_bytes(other)
    with pytest.raises(GymError, match="the tag refers to a different me/tiny@1") as caught:
        registry.pull(f"{NAME}:stable", tmp_path / "out")
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_move_that_was_copied_to_another_tag_is_refused(
    registry: ModelRegistry, store: Path, manifest: dict[str, Any]
) -> None:
    registry.tag(f"{NAME}@1", "tested", key=own_key())
    folder = store / f"tags/{NAME}/stable"
    folder.mkdir(parents=True)
    (folder / "000001.json").write_bytes((store / f"tags/{NAME}/tested/000001.json").read_bytes())
    with pytest.raises(GymError, match=f"is move 1 of {NAME}:tested") as caught:
        registry.show(f"{NAME}:stable")
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_tag_that_a_stranger_moved_is_refused(
    registry: ModelRegistry, store: Path, tmp_path: Path, manifest: dict[str, Any]
) -> None:
    registry.tag(f"{NAME}@1", "stable", key=own_key())
    folder = store / f"tags/{NAME}/stable"
    move = json.loads((folder / "000001.json").read_bytes())["manifest"] | {"number": 2}
    (folder / "000002.json").write_bytes(signed(move, SigningKey.generate()))
    with pytest.raises(GymError, match="signed by a different key"):
        registry.pull(f"{NAME}:stable", tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["../tiny", "Me/tiny", "me/tiny/x", "me/../x", "", "me/a.json", "me/" + "x" * 80, "me tiny", "me/ti\nny"],
)
def test_a_name_that_could_be_a_path_is_refused(registry: ModelRegistry, model: Path, name: str) -> None:
    with pytest.raises(GymError) as caught:
        registry.push(name, model, licence="mit")
    assert caught.value.code is ErrorCode.USAGE
    assert not (Path(registry.url) / "objects").exists()


@pytest.mark.parametrize(
    "reference", ["me/tiny@0", "me/tiny@x", "me/tiny@1/../2", "me/tiny:3", "me/tiny:../x"]
)
def test_a_reference_that_is_none_is_refused(registry: ModelRegistry, reference: str) -> None:
    with pytest.raises(GymError) as caught:
        registry.show(reference)
    assert caught.value.code is ErrorCode.USAGE


def test_a_store_whose_last_number_is_taken_is_refused_instead_of_tried_for_ever(
    registry: ModelRegistry, store: Path, model: Path
) -> None:
    registry.push(NAME, model, licence="mit")
    (store / f"models/{NAME}/999999.json").write_bytes(b"{}")
    with pytest.raises(GymError, match=f"{NAME} has the number 999999") as caught:
        registry.push(NAME, model, licence="mit", description="again")
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    (store / f"tags/{NAME}/stable").mkdir(parents=True)
    (store / f"tags/{NAME}/stable/999999.json").write_bytes(b"{}")
    with pytest.raises(GymError, match=f"{NAME}:stable has the number 999999"):
        VersionStore(Objects(store)).move(NAME, "stable", lambda number: b"{}")


def test_a_hint_to_a_version_that_is_damaged_is_no_hint(
    registry: ModelRegistry, store: Path, manifest: dict[str, Any]
) -> None:
    versions = VersionStore(Objects(store))
    found = versions.with_digest(manifest["digest"])
    assert found is not None
    assert found.version == 1
    (store / f"models/{NAME}/000001.json").write_bytes(b"{}")
    assert versions.with_digest(manifest["digest"]) is None


@pytest.mark.parametrize("what", ["pipe", "folder"])
@pytest.mark.parametrize("command", ["verify", "pull"])
def test_an_object_that_is_no_regular_file_is_refused_and_not_waited_for(
    registry: ModelRegistry, store: Path, model: Path, tmp_path: Path, what: str, command: str
) -> None:
    pushed = registry.push(NAME, model, licence="mit")
    sha256 = pushed.manifest.files[0].sha256
    place = store / "objects" / sha256[:2] / sha256
    place.unlink()
    _put_in_place(place, what)
    with pytest.raises(GymError, match="is not a regular file") as caught:
        registry.verify(NAME) if command == "verify" else registry.pull(NAME, tmp_path / "here")
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_manifest_that_is_a_pipe_is_refused_and_not_waited_for(
    registry: ModelRegistry, store: Path, model: Path
) -> None:
    registry.push(NAME, model, licence="mit")
    os.mkfifo(store / f"models/{NAME}/000002.json")
    with pytest.raises(GymError, match=r"000002\.json is not a regular file") as caught:
        registry.show(NAME)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def _put_in_place(place: Path, what: str) -> None:
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()


def test_a_damaged_version_of_one_model_hides_no_other_from_the_list(
    registry: ModelRegistry, store: Path, model: Path
) -> None:
    registry.push(NAME, model, licence="mit")
    place = store / "models/another/one/000001.json"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"{}")
    with pytest.warns(DamagedWarning, match=r"skipped: .*another/one/000001\.json"):
        assert [one.reference for one in registry.list()] == [f"{NAME}@1"]


def test_a_hint_that_names_other_tensors_is_no_hint(
    registry: ModelRegistry, model: Path, store: Path
) -> None:
    pushed = registry.push(NAME, model, licence="mit")
    versions = VersionStore(Objects(str(store)))
    assert pushed.manifest.digest is not None
    right = versions.with_digest(pushed.manifest.digest)
    assert right is not None
    assert right.manifest == pushed.manifest
    name = pushed.manifest.digest.removeprefix("sha256:")
    hint = (store / f"digests/{name}.json").read_bytes()
    (store / f"digests/{'0' * 64}.json").write_bytes(hint)
    assert versions.with_digest(f"sha256:{'0' * 64}") is None
