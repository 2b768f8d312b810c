"""Folders for the Hugging Face Hub: contents, what the Hub's own library reads, and their upload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, constants, metadata_load

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults, Figure, SampleResult, TaskResult
from gym_fed.registry import DataUsed, ModelRegistry
from gym_fed.registry.hub_folder import hub_folder_of_model, hub_folder_of_version, upload
from gym_fed.registry.preparing import StatedFacts
from tests.support.hub_uploads import UploadHub


def record(folder: Path, model: Path | str, digest: str, *, delta: str = "none", task: str = "gsm8k") -> Path:
    """A record of one task, as ``gym eval`` writes it."""
    sample = SampleResult(0, "0" * 64, "1+1", (), (), "2", (1,), "2", {"exact_match": 1.0})
    found = TaskResult(
        task, "3", 5, {"exact_match": Figure(0.25, 0.05, 1, True)}, (sample,), "sha256:" + "0" * 64
    )
    identity = {"model": digest, "delta": delta, "suite": task}
    return write_record(
        EvalResults(str(model), identity, {task: found}, 1.0, {"benchmarks": ["/srv/me/rows.yaml"]}), folder
    )


@pytest.fixture
def digest(model: Path) -> str:
    from gym_fed.base.models import load_model
    from gym_fed.delta.base import tensors_digest

    return tensors_digest(load_model(str(model)).model)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with UploadHub() as found:
        found.stand_in(monkeypatch)
        yield found


def test_a_folder_has_weights_card_records_and_results_as_the_hubs_library_reads_them(
    registry: ModelRegistry, model: Path, tmp_path: Path, digest: str
) -> None:
    (model / "LICENSE").write_text("Apache")
    kept = record(tmp_path / "evals", model, digest)
    data = [DataUsed(name="gsm8k", licence="MIT", hub="openai/gsm8k")]
    stated = StatedFacts("Apache-2.0", "Counts: 'yes'.", data=data, evaluations=[tmp_path / "evals"])
    made = hub_folder_of_model("me/tiny", model, tmp_path / "hf", stated)
    files = set(made.files)
    assert {"model.safetensors", "config.json", "tokenizer.json", "LICENSE", "README.md"} <= files
    assert {f"evals/{kept.name}", f".eval_results/{kept.stem}.yaml"} <= files
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    card = ModelCard.load(tmp_path / "hf/README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.datasets == ["openai/gsm8k"]
    assert [(one.dataset_name, one.metric_value) for one in card.data.eval_results] == [("gsm8k", 0.25)]
    assert metadata_load(tmp_path / "hf/README.md")["library_name"] == "transformers"
    (result,) = yaml.safe_load((tmp_path / f"hf/.eval_results/{kept.stem}.yaml").read_text())
    assert result["dataset"] == {"id": "openai/gsm8k", "task_id": "main"}
    assert result["value"] == 0.25
    assert result["notes"] == "exact_match, 5-shot, n=1, standard error 0.0500; gym-fed"
    published = (tmp_path / f"hf/evals/{kept.name}").read_text()
    assert str(tmp_path) not in published
    assert "/srv/me" not in published
    assert made.problems == []


def test_a_version_of_a_registry_becomes_the_same_folder_with_its_signature(
    registry: ModelRegistry, model: Path, tmp_path: Path, digest: str
) -> None:
    record(tmp_path / "evals", model, digest)
    pushed = registry.push("me/tiny", model, licence="mit", evaluations=[tmp_path / "evals"])
    made = hub_folder_of_version(registry, "me/tiny@1", tmp_path / "one")
    direct = hub_folder_of_model(
        "me/tiny", model, tmp_path / "two", StatedFacts("MIT", evaluations=[tmp_path / "evals"])
    )
    assert set(made.files) - set(direct.files) == {".gym-model.json"}
    for path in direct.files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
    signed = json.loads((tmp_path / "one/.gym-model.json").read_bytes())
    assert signed["manifest"]["digest"] == pushed.manifest.digest == digest


def test_a_delta_becomes_weights_unless_it_is_wanted_as_it_is(
    model: Path, delta: Path, tmp_path: Path
) -> None:
    from gym_fed.base.models import load_model
    from gym_fed.delta.base import tensors_digest

    stated = StatedFacts("MIT", base=str(model))
    made = hub_folder_of_model("me/tuned", delta, tmp_path / "hf", stated)
    assert tensors_digest(load_model(str(tmp_path / "hf")).model) == made.manifest.digest
    as_is = hub_folder_of_model("me/tuned", delta, tmp_path / "as-is", stated, as_is=True)
    assert as_is.files == ["README.md", "model.gymdelta"]
    assert any("base model: licence not stated" in problem for problem in as_is.problems)


def test_an_adapter_names_its_base_as_the_hub_does_or_says_that_peft_will_not_find_it(
    model: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    from gym_fed.base.models import load_model

    tuned = get_peft_model(load_model(str(model)).model, LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(model)}))
    made = hub_folder_of_model("me/a", tmp_path / "adapter", tmp_path / "one", StatedFacts("MIT"))
    assert any("--base OWNER/NAME" in problem for problem in made.problems)
    assert "base_model" not in metadata_load(tmp_path / "one/README.md")
    named = StatedFacts("MIT", base="acme/tiny")
    made = hub_folder_of_model("me/a", tmp_path / "adapter", tmp_path / "two", named)
    assert not any("--base OWNER/NAME" in problem for problem in made.problems)
    head = metadata_load(tmp_path / "two/README.md")
    assert (head["base_model"], head["base_model_relation"]) == ("acme/tiny", "adapter")
    values = json.loads((tmp_path / "two/adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "acme/tiny"


def test_a_record_of_another_model_is_refused_and_passed_over_in_a_folder(
    registry: ModelRegistry, model: Path, tmp_path: Path, digest: str
) -> None:
    own = record(tmp_path / "evals", model, digest)
    other = record(tmp_path / "evals", "other", "sha256:" + "1" * 64)
    with pytest.raises(GymError, match="has no record of this model") as caught:
        registry.push("me/tiny", model, licence="mit", evaluations=[other])
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert registry.names() == []
    pushed = registry.push("me/tiny", model, licence="mit", evaluations=[tmp_path / "evals"])
    assert [file.path for file in pushed.manifest.files if file.path.startswith("evals/")] == [
        f"evals/{own.name}"
    ]
    own.unlink()
    with pytest.raises(GymError, match="has no record of this model"):
        registry.push("me/tiny", model, licence="mit", evaluations=[tmp_path / "evals"])


def test_a_record_of_a_delta_counts_by_the_digests_of_base_and_delta(
    registry: ModelRegistry, model: Path, delta: Path, tmp_path: Path, digest: str
) -> None:
    from gym_fed.core.files import file_sha256

    good = record(tmp_path / "one", "x", digest, delta=file_sha256(delta))
    other = record(tmp_path / "two", "x", digest, delta="f" * 64)
    of_base = record(tmp_path / "three", "x", digest)
    pushed = registry.push("me/tuned", delta, licence="mit", base=str(model), evaluations=[good])
    assert f"evals/{good.name}" in [file.path for file in pushed.manifest.files]
    for wrong in (other, of_base):
        with pytest.raises(GymError, match="has no record of this model"):
            registry.push("me/tuned", delta, licence="mit", base=str(model), evaluations=[wrong])


def test_an_upload_makes_a_private_repository_with_the_folders_files(
    hub: UploadHub, model: Path, tmp_path: Path
) -> None:
    made = hub_folder_of_model("me/tiny", model, tmp_path / "hf", StatedFacts("MIT"))
    commit = upload(made.folder, "me/tiny")
    assert commit.startswith(f"{hub.url}/me/tiny/commit/")
    assert hub.private == {"me/tiny": True}
    wanted = {path: (made.folder / path).read_bytes() for path in made.files}
    assert hub.repos["me/tiny"] == wanted
    sent = [path for method, path in hub.requests if method == "PUT"]
    assert len(sent) == sum(len(data) >= 4096 for data in wanted.values()) > 0
    upload(made.folder, "me/tiny")
    assert [path for method, path in hub.requests if method == "PUT"] == sent, "sent twice"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/repos", 403, ErrorCode.PERMISSION_DENIED),
        ("/api/repos", 401, ErrorCode.UNAUTHENTICATED),
        ("/api/models", 500, ErrorCode.UNAVAILABLE),
        ("/api/validate-yaml", 400, ErrorCode.DATA_INVALID),
        ("/blobs", 403, ErrorCode.PERMISSION_DENIED),
        ("/blobs", 500, ErrorCode.UNAVAILABLE),
    ],
)
def test_an_upload_that_the_hub_refuses_leaves_the_folder_and_says_what_to_do(
    hub: UploadHub, model: Path, tmp_path: Path, path: str, status: int, code: ErrorCode, monkeypatch: Any
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    made = hub_folder_of_model("me/tiny", model, tmp_path / "hf", StatedFacts("MIT"))
    hub.refuse[path] = status
    with pytest.raises(GymError) as caught:
        upload(made.folder, "me/tiny")
    assert caught.value.code is code
    assert f"hf upload me/tiny {made.folder} ." in caught.value.hint
    assert hub.repos.get("me/tiny", {}) == {}
    assert (made.folder / "README.md").is_file()


def test_an_upload_that_cannot_be_is_refused_before_anything_is_sent(
    hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GymError, match="is not a valid repository name"):
        upload(tmp_path, "tiny")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(GymError, match="there is no token") as caught:
        upload(tmp_path, "me/tiny")
    assert "hf auth login" in caught.value.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GymError, match="HF_HUB_OFFLINE") as caught:
        upload(tmp_path, "me/tiny")
    assert "hf upload me/tiny" in caught.value.hint
    assert hub.requests == []


def test_a_folder_in_the_way_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/mine").write_text("mine")
    with pytest.raises(GymError) as caught:
        hub_folder_of_model("me/tiny", model, tmp_path / "hf", StatedFacts("MIT"))
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]
