"""Regression tests for fuzz findings: inputs that raised something other than ``GymError``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gym_server.backup.place import MAX_BYTES, Place
from gym_server.backup.restore import read_head

from gym_fed.base.models import load_tokenizer, resolve
from gym_fed.config.training_file import load_training_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.trust.identity.commitment import UploadCommitment
from tests.fuzz.targets import read_safetensors, tokenizer_seeds
from tests.unit.evaluation.test_graders_rules import reward

BRACKETS = "[" * 3000


def place_with(folder: Path, manifest: str) -> Place:
    snapshot = folder / "snapshots" / "one"
    snapshot.mkdir(parents=True)
    (snapshot / "manifest.json").write_text(manifest, encoding="utf-8")
    return Place(str(folder))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        # Python 3.13 reads to the end, where brackets are missing; earlier ones give up at the depth.
        (BRACKETS, "(nested too deeply|not JSON)"),
        (f"{'[' * 200}{']' * 200}", "nested too deeply"),
    ],
    ids=["unreadable", "readable"],
)
def test_a_backup_manifest_that_is_nested_deeply_is_refused_by_name(
    manifest: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match=rf"snapshots/one/manifest\.json is {problem}") as refused:
        place_with(tmp_path, manifest).manifests()
    assert refused.value.code is ErrorCode.STATE_CORRUPT


def test_a_backup_manifest_larger_than_any_json_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    place = place_with(tmp_path, "")
    with (tmp_path / "snapshots" / "one" / "manifest.json").open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(GymError, match="is larger than"):
        place.manifests()


def test_a_head_that_is_nested_deeply_is_refused_with_its_file(tmp_path: Path) -> None:
    head = tmp_path / "newest-head.json"
    head.write_text(BRACKETS, encoding="utf-8")
    with pytest.raises(GymError, match=r"newest-head\.json is not JSON") as refused:
        read_head(head)
    assert refused.value.code is ErrorCode.DATA_INVALID


def test_a_commitment_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(GymError, match="cannot be read") as refused:
        UploadCommitment.verified(BRACKETS, bytes(32))
    assert refused.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_json_schema_of_a_row_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(GymError, match="is not JSON") as refused:
        reward("{}", {"schema": BRACKETS}, grader="json_schema", column="schema")
    assert refused.value.code is ErrorCode.DATA_INVALID


def tokenizer_folder(folder: Path, content: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.mark.parametrize(
    "content",
    [tokenizer_seeds()[0][:-40], b"5", b'"a"', b"{}", b'{"added_tokens": null}', b'{"added_tokens": [5]}'],
)
def test_a_tokenizer_file_that_is_cut_or_of_other_types_is_a_broken_model(
    content: bytes, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match="cannot be read as a model") as refused:
        load_tokenizer(tokenizer_folder(tmp_path, content))
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_a_tokenizer_whose_unknown_token_is_not_in_its_vocabulary_is_a_broken_model(tmp_path: Path) -> None:
    content = tokenizer_seeds()[0].replace(b'"<unk>":0', b'"<unk?":0')
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, content))
    with (
        pytest.raises(GymError, match="its tokenizer failed on a text") as refused,
        tokenizer_errors(tokenizer),
    ):
        tokenizer("12")
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_an_empty_tensor_with_a_size_beyond_64_bits_is_a_broken_model() -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}).encode()
    header += b" " * (-len(header) % 8)
    with pytest.raises(GymError, match="cannot be read") as refused:
        read_safetensors(len(header).to_bytes(8, "little") + header)
    assert refused.value.code is ErrorCode.MODEL_INVALID
    assert "\n" not in refused.value.message


def test_a_data_set_whose_name_is_too_long_for_a_file_is_read_as_a_path(tmp_path: Path) -> None:
    name = "a" * 300
    (tmp_path / "run.yaml").write_text(f"model: gym-nano\ndata: {name}\n")
    config, _ = load_training_config(tmp_path / "run.yaml")
    assert [str(source.path) for source in config.data] == [name]


@pytest.mark.parametrize("name", ["a" * 300, "./" + "a" * 300, "a" * 300 + ":me", "x.gguf" * 100])
def test_a_model_whose_name_is_too_long_for_a_file_is_not_found(name: str) -> None:
    with pytest.raises(GymError) as refused:
        resolve(name)
    assert refused.value.code is ErrorCode.MODEL_NOT_FOUND
