"""The contributor's limits: every refusal names the field, the value and the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gym_client.agent.policy import Policy
from gym_client.agent.work import parse_task

from gym_fed.config.hub.task import TaskSpec, next_digest
from gym_fed.core.errors import ErrorCode, GymError

BASE = "sha256:" + "a" * 64


def task(**changes: Any) -> dict[str, Any]:
    fields = {
        "server": "s" + "0" * 16,
        "server_round": 1,
        "base_model": "tiny",
        "base_digest": BASE,
        "version_digest": BASE,
        "max_update_bytes": 1 << 20,
        "deadline_seconds": 4e9,
    }
    return {**fields, **changes}


def refusal(text: str, policy: Policy | None = None) -> str:
    with pytest.raises(GymError) as caught:
        (policy or Policy()).check(parse_task(text))
    assert caught.value.code is ErrorCode.POLICY_REFUSED
    return caught.value.message


def test_an_ordinary_task_passes_the_default_policy() -> None:
    Policy().check(parse_task(json.dumps(task())))


@pytest.mark.parametrize(
    ("recipe", "field", "value", "limit"),
    [
        ({"max_steps": 5001}, "recipe.max_steps", "5001", "2000"),
        ({"max_length": 9000}, "recipe.max_length", "9000", "8192"),
        ({"per_device_train_batch_size": 4096, "max_length": 4096}, "tokens per step", "16777216", "1048576"),
        ({"finetuning": "lora", "lora": {"r": 512}}, "recipe.lora.r", "512", "256"),
    ],
)
def test_a_recipe_over_a_limit_is_refused_with_field_value_and_limit(
    recipe: dict[str, Any], field: str, value: str, limit: str
) -> None:
    message = refusal(json.dumps(task(recipe=recipe)))
    assert field in message
    assert value in message
    assert limit in message


def test_algorithms_and_bases_may_be_listed() -> None:
    text = json.dumps(task(recipe={"algorithm": "pretrain"}))
    assert "'pretrain'" in refusal(text, Policy(algorithms=["sft"]))
    assert BASE in refusal(json.dumps(task()), Policy(base_digests=["sha256:" + "b" * 64]))


def test_soups_count_as_downloads() -> None:
    version = next_digest(BASE, "d" * 64, 1)
    soup = {"sha256": "d" * 64, "size_bytes": 2000, "version_digest": version, "server_round": 1}
    text = json.dumps(task(soups=[soup], version_digest=version, server_round=2))
    assert "2000" in refusal(text, Policy(max_download_bytes=1999))
    Policy(max_download_bytes=2000).check(TaskSpec.model_validate_json(text))


@pytest.mark.parametrize("key", ["path", "command", "epsilon"])
def test_a_task_with_an_unknown_key_is_refused_by_name(key: str) -> None:
    assert f"{key}: unknown key" in refusal(json.dumps(task(**{key: "/etc/passwd"})))


def test_an_unknown_key_inside_the_recipe_is_refused_by_its_path() -> None:
    text = json.dumps(task(recipe={"trust_remote_code": True}))
    assert "recipe.trust_remote_code: unknown key" in refusal(text)


def test_a_policy_file_sets_limits_and_unknown_limits_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    assert Policy.load(path) == Policy()
    path.write_text("max_steps: 7\n")
    assert "over this machine's max_steps of 7" in refusal(json.dumps(task()), Policy.load(path))
    path.write_text("max_step: 7\n")
    with pytest.raises(GymError, match="max_steps") as caught:
        Policy.load(path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
