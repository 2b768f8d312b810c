"""What a hub serves of its base: by licence, by the coordinator's word, only files of a base, only to accounts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from gym_server.base.served import ServedBase, record_tensors, tensor_digests
from gym_server.cli.checks_at_start import check_at_start
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation

from gym_fed.base.files import licence_of
from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import digests_by_tensor
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS

OPEN, CLOSED = "---\nlicense: Apache-2.0\n---\n", "---\nlicense: other\nlicense_name: our-own\n---\n"


@pytest.fixture
def base(tmp_path: Path, tiny_base: Path) -> Path:
    folder = tmp_path / "models" / "base"
    shutil.copytree(tiny_base, folder)
    (folder / "README.md").write_text(OPEN, encoding="utf-8")
    (folder / "notes.py").write_text("print()", encoding="utf-8")
    return folder


def open_hub(base: Path, **settings: object) -> Federation:
    folder = base.parent / "hub"
    if not folder.exists():
        init_hub(folder, HubChoices(str(base), "base", "open"))
    path = folder / "gym-server.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **settings}))
    return Federation.open(folder)


def served(base: Path, **settings: object) -> ServedBase:
    with open_hub(base, **settings) as fed:
        return ServedBase(fed.config, fed.base, fed.database)


def test_a_base_with_an_open_licence_is_served_without_being_asked_for(base: Path) -> None:
    found = served(base)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        f.name for f in found.files
    }
    assert "notes.py" not in {file.name for file in found.files}
    offer = json.loads(found.offer_json())
    assert offer["licence"] == "apache-2.0"
    assert offer["bytes"] == sum((base / file.name).stat().st_size for file in found.files)
    assert "offered it" in found.line()


@pytest.mark.parametrize(
    "card", [CLOSED, "", "# no front matter\n", "---\nlicense: [mit, x]\n---\n", "---\n: [\n---\n"]
)
def test_a_base_whose_licence_is_closed_or_unknown_is_served_only_on_the_coordinators_word(
    base: Path, card: str
) -> None:
    (base / "README.md").write_text(card, encoding="utf-8")
    refused = served(base)
    assert not refused.files
    assert not refused.offer_json()
    assert "serve_base: true" in refused.line()
    agreed = served(base, serve_base=True)
    assert agreed.files
    assert json.loads(agreed.offer_json())["licence"] == licence_of(base)


def test_a_coordinator_may_keep_an_open_base(base: Path) -> None:
    assert not served(base, serve_base=False).files


@pytest.mark.parametrize("flaw", ["adapter", "pickle", "code", "quantised", "shard"])
def test_a_base_that_cannot_travel_is_refused_at_the_start_where_it_was_promised(
    base: Path, flaw: str
) -> None:
    config = json.loads((base / "config.json").read_text())
    with open_hub(base):
        pass  # the federation began with a base that could travel
    if flaw == "adapter":
        (base / "adapter_config.json").write_text("{}")
    elif flaw == "pickle":
        (base / "model.safetensors").rename(base / "pytorch_model.bin")
    elif flaw == "shard":
        (base / "model.safetensors").rename(base.parent / "model.safetensors")
        index = {"weight_map": {"x": "../model.safetensors"}}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        extra = {"code": {"auto_map": {}}, "quantised": {"quantization_config": {}}}[flaw]
        (base / "config.json").write_text(json.dumps({**config, **extra}))
    assert not served(base).files
    with pytest.raises(GymError, match="serve_base") as caught:
        served(base, serve_base=True)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "tokenizer.json", "model.safetensors"])
def test_a_file_that_is_a_link_out_of_the_bases_folder_is_not_served(base: Path, name: str) -> None:
    with open_hub(base):
        pass
    elsewhere = base.parent / "private"
    (base / name).touch()
    (base / name).rename(elsewhere)
    elsewhere.write_bytes(elsewhere.read_bytes() or b"secret")
    (base / name).symlink_to(elsewhere)
    found = served(base)
    assert not found.files
    assert (name in found.why_not) is (
        name != "README.md"
    )  # of a card that is none of its own no licence is read
    with pytest.raises(GymError, match=rf"serve_base: .*has {name} as a link to") as caught:
        served(base, serve_base=True)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_changed_file_is_hashed_again_and_an_unchanged_one_is_not(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.sha256 for file in served(base).files}
    (base / "LICENSE").write_text("our terms", encoding="utf-8")
    hashed: list[str] = []

    def watched(path: Path) -> str:
        hashed.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr("gym_server.base.served.file_sha256", watched)
    after = {file.name: file.sha256 for file in served(base).files}
    assert hashed == ["LICENSE"]
    assert after == {**before, "LICENSE": hashlib.sha256(b"our terms").hexdigest()}


def test_the_digests_of_the_tensors_are_kept_by_the_checks_at_the_start(base: Path) -> None:
    with open_hub(base) as fed:
        assert not tensor_digests(fed.base, fed.database)
        check_at_start(fed.state, fed.config, fed.recipes)
        assert tensor_digests(fed.base, fed.database) == digests_by_tensor(load_model(str(base)).model)
        record_tensors(fed.base, fed.database, None)  # nothing is computed twice


@pytest.fixture
def hub(base: Path, tmp_path: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "loopback", base_model=str(base))
    yield hub
    hub.close()


def test_files_of_the_base_come_to_accounts_alone_and_no_other_file_does(
    hub: LoopbackHub, base: Path
) -> None:
    stranger = RawContributor(hub.address)
    parts = list(stranger.stub.Base(pb.BaseRequest(), timeout=SECONDS))
    names = {file.name: file.sha256 for part in parts for file in part.files}
    with pytest.raises(GymError) as caught:
        stranger.download(names["model.safetensors"])
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    account = stranger.enrol()
    for name, sha256 in names.items():
        assert account.download(sha256) == (base / name).read_bytes()
    with pytest.raises(GymError) as caught:
        account.download(hashlib.sha256((base / "notes.py").read_bytes()).hexdigest())
    assert caught.value.code is ErrorCode.NOT_FOUND
