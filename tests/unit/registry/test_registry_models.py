"""The model registry: push and pull by version and tag; a delta's model is rebuilt and checked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.registry import ModelRegistry
from gym_fed.trust.identity.keys import SigningKey


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh store of each kind."""
    yield str(tmp_path / "store") if request.param == "folder" else "memory://models"
    memory = fsspec.filesystem("memory")
    if memory.exists("/models"):
        memory.rm("/models", recursive=True)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_pushed_model_is_pulled_with_card_and_licence_and_nothing_else(
    url: str, model: Path, tmp_path: Path
) -> None:
    (model / "optimizer.pt").write_bytes(b"a pickle")
    (model / "config.yaml").write_text("data: [{path: /srv/me/secret.jsonl}]")
    (model / "train.log").write_text("/srv/me")
    (model / "checkpoint-1").mkdir()
    (model / "checkpoint-1" / "model.safetensors").write_bytes(b"x")
    pushed = ModelRegistry(url).push("me/tiny", model, licence="apache-2.0", description="Bytes.")
    assert (pushed.version, pushed.manifest.kind, pushed.manifest.licence) == (1, "weights", "Apache-2.0")
    folder = ModelRegistry(url).pull("me/tiny", tmp_path / "here")
    found = files_of(folder)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert found.pop(name) == (model / name).read_bytes()
    assert "license: apache-2.0" in found["README.md"].decode()
    assert not found.keys() & {"optimizer.pt", "config.yaml", "train.log", "checkpoint-1"}
    assert ModelRegistry(url).pull("me/tiny", tmp_path / "here") == folder, "what is here is taken"


def test_versions_count_up_old_ones_stay_and_the_same_model_is_no_new_one(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    registry.push("me/tiny", model, licence="mit")
    assert registry.push("me/tiny", model, licence="mit").version == 1
    assert registry.push("me/tiny", model, licence="mit", description="Better said.").version == 2
    assert "Better said" not in (registry.pull("me/tiny@1", tmp_path / "one") / "README.md").read_text()
    assert "Better said" in (registry.pull("me/tiny", tmp_path / "two") / "README.md").read_text()
    assert registry.versions("me/tiny") == [1, 2]
    with pytest.raises(GymError, match="no model me/tiny@3") as caught:
        registry.show("me/tiny@3")
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_pushes_at_once_get_a_version_each(store: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers loads no two models at once in one process; what is tried here is the store
    monkeypatch.setattr("gym_fed.registry.contents._digest", lambda folder: "sha256:" + "0" * 64)
    versions, errors = [], []

    def push(number: int) -> None:
        try:
            pushed = ModelRegistry(store).push("me/tiny", model, licence="mit", description=f"of {number}")
            versions.append(pushed.version)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    ModelRegistry(store).push("me/tiny", model, licence="mit")
    threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(versions) == [2, 3, 4, 5]
    said = {ModelRegistry(store).show(f"me/tiny@{v}").manifest.description for v in versions}
    assert said == {f"of {number}" for number in range(4)}


def test_a_delta_is_rebuilt_on_its_base_from_the_same_registry(
    registry: ModelRegistry, model: Path, delta: Path, tmp_path: Path
) -> None:
    import torch

    from gym_fed.base.models import load_model
    from gym_fed.delta.base import tensors_digest
    from gym_fed.delta.file import DeltaFile, apply_delta

    base = registry.push("me/base", model, licence="mit")
    pushed = registry.push("me/tuned", delta, licence="mit", base=str(model))
    assert pushed.manifest.kind == "delta"
    assert pushed.manifest.base is not None
    assert (pushed.manifest.base.version, pushed.manifest.base.digest) == ("me/base@1", base.manifest.digest)
    assert pushed.manifest.num_bytes < base.manifest.num_bytes
    model.rename(tmp_path / "away")  # only the registry has it now
    rebuilt = load_model(str(registry.pull("me/tuned", tmp_path / "out"))).model
    wanted = load_model(str(tmp_path / "away")).model
    with DeltaFile.open(delta) as opened:
        apply_delta(wanted, opened)
    assert tensors_digest(rebuilt) == tensors_digest(wanted) == pushed.manifest.digest
    assert not torch.equal(rebuilt.lm_head.weight, load_model(str(tmp_path / "away")).model.lm_head.weight)
    as_is = registry.pull("me/tuned", tmp_path / "as-is", as_is=True)
    assert files_of(as_is).keys() == {"model.gymdelta", "README.md"}


def test_a_delta_without_its_base_names_base_digest_and_command(
    registry: ModelRegistry, model: Path, delta: Path, tmp_path: Path
) -> None:
    pushed = registry.push("me/tuned", delta, licence="mit", base=str(model))
    model.rename(tmp_path / "away")
    with pytest.raises(GymError) as caught:
        registry.pull("me/tuned", tmp_path / "out")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert pushed.manifest.base is not None
    assert str(pushed.manifest.base.digest) in caught.value.message
    assert "--base" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert (
        registry.pull("me/tuned", tmp_path / "out", base=str(tmp_path / "away")) / "config.json"
    ).is_file()
    with pytest.raises(GymError) as caught:
        registry.pull("me/tuned", tmp_path / "nano", base="gym-nano")
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert not (tmp_path / "nano").exists()


def test_rebuilt_weights_that_were_changed_are_found_at_the_next_pull(
    registry: ModelRegistry, model: Path, delta: Path, tmp_path: Path
) -> None:
    registry.push("me/tuned", delta, licence="mit", base=str(model))
    folder = registry.pull("me/tuned", tmp_path / "out", base=str(model))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(GymError, match=r"model\.safetensors: differs from me/tuned@1"):
        registry.pull("me/tuned", tmp_path / "out", base=str(model))


def test_a_delta_signed_for_another_sum_is_refused(
    registry: ModelRegistry, store: Path, model: Path, delta: Path, tmp_path: Path
) -> None:
    from gym_fed.registry.manifest import ModelManifest, sealed
    from gym_fed.registry.signers import own_key

    pushed = registry.push("me/tuned", delta, licence="mit", base=str(model))
    lie = pushed.manifest.model_copy(update={"version": 2, "digest": "sha256:" + "0" * 64})
    data = sealed(ModelManifest.model_validate(lie.model_dump()), own_key())
    (store / "models/me/tuned/000002.json").write_bytes(data)
    with pytest.raises(GymError, match="was signed") as caught:
        registry.pull("me/tuned@2", tmp_path / "out", base=str(model))
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "out").exists()


def test_an_adapter_keeps_its_base_by_name_and_digest_and_no_path_of_this_machine(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    from gym_fed.base.models import load_model

    tuned = get_peft_model(load_model(str(model)).model, LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    values = json.loads(config.read_text()) | {"base_model_name_or_path": str(model)}
    config.write_text(json.dumps(values))
    base = registry.push("me/base", model, licence="mit")
    pushed = registry.push("me/adapter", tmp_path / "adapter", licence="mit")
    assert pushed.manifest.base is not None
    assert (pushed.manifest.base.name, pushed.manifest.base.digest) == ("model", base.manifest.digest)
    folder = registry.pull("me/adapter", tmp_path / "out")
    assert str(tmp_path) not in "".join(p.read_text() for p in folder.glob("*.json"))
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "model"
    assert (folder / "adapter_model.safetensors").is_file()


def test_tags_move_are_pulled_by_and_keep_their_history(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    registry.push("me/tiny", model, licence="mit")
    registry.push("me/tiny", model, licence="mit", description="Two.")
    registry.tag("me/tiny@2", "stable")
    registry.tag("me/tiny@1", "stable")
    registry.tag("me/tiny@1", "stable")
    assert registry.tags("me/tiny") == {"latest": 2, "stable": 1}
    assert [move.version for move, _ in registry.history("me/tiny", "stable")] == [2, 1]
    assert "Two." not in (registry.pull("me/tiny:stable", tmp_path / "out") / "README.md").read_text()
    assert registry.show("me/tiny:latest").version == 2
    registry.untag("me/tiny", "stable")
    assert registry.tags("me/tiny") == {"latest": 2}
    assert [move.version for move, _ in registry.history("me/tiny", "stable")] == [2, 1, None]
    with pytest.raises(GymError, match="has no tag stable"):
        registry.show("me/tiny:stable")
    with pytest.raises(GymError, match="always refers to the newest"):
        registry.tag("me/tiny@1", "latest")


def test_an_unknown_signer_is_refused_shown_once_and_pinned(
    registry: ModelRegistry, store: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = registry.push("me/tiny", model, licence="mit").signer.fingerprint
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "other"))
    other = ModelRegistry(store)
    with pytest.raises(GymError) as caught:
        other.pull("me/tiny", tmp_path / "out")
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert fingerprint in caught.value.message
    with pytest.raises(GymError) as caught:
        other.pull("me/tiny", tmp_path / "out", confirm=lambda what, signer: False)
    assert caught.value.code is ErrorCode.PERMISSION_DENIED
    with pytest.raises(GymError) as caught:
        other.pull("me/tiny", tmp_path / "out", signer="sha256:" + "0" * 64)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    asked = []
    other.pull("me/tiny", tmp_path / "out", confirm=lambda what, signer: not asked.append(signer.fingerprint))
    other.pull("me/tiny", tmp_path / "again")
    assert asked == [fingerprint]


def test_another_signer_of_a_known_model_is_refused_until_it_is_named(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    from gym_fed.registry.manifest import sealed

    pushed = registry.push("me/tiny", model, licence="mit")
    stranger = SigningKey.generate()
    later = pushed.manifest.model_copy(update={"version": 2})
    file = tmp_path / "store/models/me/tiny/000002.json"
    file.write_bytes(sealed(later, stranger))
    with pytest.raises(GymError, match="signed by a different key") as caught:
        registry.pull("me/tiny", tmp_path / "out", confirm=lambda what, signer: True)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    named = registry.show("me/tiny@2").signer.fingerprint
    assert named in caught.value.hint
    registry.pull("me/tiny", tmp_path / "out", signer=named)
    registry.pull("me/tiny@1", tmp_path / "one")


def test_lineage_of_a_run_names_parents_data_licences_and_digests(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    parent = registry.push("me/base", model, licence="mit")
    (model / "run.json").write_text(json.dumps({"data_sha256": "a" * 64}))
    (model / "environment.json").write_text(
        json.dumps({"environment": {"config_sha256": "b" * 64, "seed": 7}})
    )
    (model / "config.yaml").write_text(
        "model: gym-nano\nmax_steps: 3\ndata: [{name: gsm8k}, {path: /srv/me/secret.jsonl}]\n"
    )
    pushed = registry.push("me/tuned", model, licence="mit", parents=["me/base@1"])
    lineage = pushed.manifest.lineage
    assert [(one.version, one.sha256) for one in lineage.parents] == [("me/base@1", parent.sha256)]
    assert (lineage.data_sha256, lineage.config_sha256) == ("a" * 64, "b" * 64)
    assert [(one.name, one.licence) for one in lineage.data] == [
        ("gsm8k", "MIT"),
        ("files of the trainer", None),
    ]
    card = (registry.pull("me/tuned", tmp_path / "out") / "README.md").read_text()
    assert "openai/gsm8k" in card
    assert "secret" not in card


def test_verify_names_damaged_and_missing_objects(registry: ModelRegistry, store: Path, model: Path) -> None:
    pushed = registry.push("me/tiny", model, licence="mit")
    assert registry.verify("me/tiny")[1] == []
    by_path = {file.path: store / "objects" / file.sha256[:2] / file.sha256 for file in pushed.manifest.files}
    by_path["tokenizer.json"].unlink()
    damaged = bytearray(by_path["model.safetensors"].read_bytes())
    damaged[-1] ^= 1
    by_path["model.safetensors"].write_bytes(damaged)
    problems = {one.path: one.problem for one in registry.verify("me/tiny")[1]}
    assert problems.keys() == {"tokenizer.json", "model.safetensors"}
    assert "missing" in problems["tokenizer.json"]
    assert "different bytes" in problems["model.safetensors"]


def test_an_object_that_was_damaged_is_not_pulled(
    registry: ModelRegistry, store: Path, model: Path, tmp_path: Path
) -> None:
    pushed = registry.push("me/tiny", model, licence="mit")
    digest = next(file.sha256 for file in pushed.manifest.files if file.path == "model.safetensors")
    path = store / "objects" / digest[:2] / digest
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(GymError) as caught:
        registry.pull("me/tiny", tmp_path / "out")
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "out").exists()


def test_a_folder_in_the_way_is_refused_before_anything_is_fetched(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    registry.push("me/tiny", model, licence="mit")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(GymError) as caught:
        registry.pull("me/tiny", tmp_path / "out")
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_delta_with_added_tokens_is_rebuilt_with_its_tokenizer(
    registry: ModelRegistry, model: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from gym_fed.base.models import load_model
    from gym_fed.cli.main import app
    from tests.support.added_tokens import save_with_tokens

    save_with_tokens(model, tmp_path / "tuned", ["<think>"])
    words = ["delta", "encode", str(model), str(tmp_path / "tuned"), "-o", str(tmp_path / "d.gymdelta")]
    assert CliRunner().invoke(app, words).exit_code == 0
    registry.push("me/base", model, licence="mit")
    registry.push("me/thinks", tmp_path / "d.gymdelta", licence="mit", base=str(model))
    rebuilt = load_model(str(registry.pull("me/thinks", tmp_path / "out")))
    number = rebuilt.tokenizer.convert_tokens_to_ids("<think>")
    assert rebuilt.tokenizer("<think>", add_special_tokens=False)["input_ids"] == [number]
    assert len(rebuilt.model.get_input_embeddings().weight) == number + 1
