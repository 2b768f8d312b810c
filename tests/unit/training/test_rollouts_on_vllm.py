"""Answers from a vLLM: the weights of ``generate``, exact resume, a vLLM that is killed, and refusals by name."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from gym_fed.base.models import load_model
from gym_fed.config.algorithms.reinforcement import RolloutEngine
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.serving.vllm import process
from gym_fed.serving.vllm_plugin import uploads
from gym_fed.serving.vllm_plugin.uploads import CONFIG_KEY, PREFIX, AdapterUploads
from gym_fed.training.run.reproducibility import RunWarning
from gym_fed.training.trainer import Trainer
from tests.support.policy_server import PolicyServer
from tests.support.seeded_sampling import seed_generate
from tests.unit.training.test_algorithms_rl import ROWS, Letters, weights

STEPS = 2
TOLERANCE = 1e-4
LOWERED, CAP = 0.3, 2.0


@pytest.fixture(scope="module")
def started(tiny_base: Path) -> Iterator[PolicyServer]:
    server = PolicyServer(tiny_base)
    yield server
    server.stop()


@pytest.fixture
def server(started: PolicyServer, monkeypatch: pytest.MonkeyPatch) -> PolicyServer:
    monkeypatch.setattr(process, "_WATCH_SECONDS", 0.05)
    started.asked.clear()
    started.loads.clear()
    return started


def config(
    folder: Path, tiny_base: Path, algorithm: str = "grpo", rollouts: Any = None, **changes: Any
) -> TrainingConfig:
    section = {"max_completion_length": 4, **changes.pop("section", {})}
    if rollouts is not None:
        section["rollouts"] = rollouts
    section |= {"num_iterations": 1} if algorithm == "ppo" else {"num_generations": 4}
    values = {
        "model": str(tiny_base),
        "algorithm": algorithm,
        "finetuning": "lora",
        "lora": {"r": 4, "lora_alpha": 8},
        "output_dir": folder,
        "max_steps": STEPS,
        "max_length": 64,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "num_threads": 1,
        "dtype": "float32",
        "save_final": False,
        algorithm: section,
    }
    return TrainingConfig(**{**values, **changes})


def train(settings: TrainingConfig, **more: Any) -> Any:
    return Trainer(settings, graders=[Letters()], **more).train(ROWS)


def largest_difference(a: Any, b: Any) -> float:
    ours, theirs = weights(a.model), weights(b.model)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def rewards(result: Any) -> list[float]:
    return [entry["reward"] for entry in result.history if "reward" in entry]


@pytest.mark.parametrize(
    "algorithm", ["grpo", "rloo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gspo", "ppo"))]
)
def test_weights_are_those_of_generate(
    server: PolicyServer, tiny_base: Path, tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "vllm", tiny_base, algorithm, {"url": server.url})
    by_vllm = train(settings)
    assert len(server.asked) == 8 * STEPS + 1
    assert len({body["model"] for body in server.asked}) == STEPS  # a policy of its own for each step
    with monkeypatch.context() as patch:
        seed_generate(patch, settings.seed)
        here = train(config(tmp_path / "here", tiny_base, algorithm))
    assert largest_difference(by_vllm, here) < TOLERANCE
    assert any(value.any() for name, value in weights(here.model).items() if ".lora_B." in name)
    assert rewards(by_vllm) == pytest.approx(rewards(here))


@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [
        ("grpo", math.exp(LOWERED)),
        ("rloo", CAP),
        ("ppo", math.exp(LOWERED)),
        pytest.param("gspo", CAP, marks=pytest.mark.slow),
    ],
)
def test_loss_is_weighted_by_the_probability_here_over_that_in_vllm(
    server: PolicyServer,
    tiny_base: Path,
    tmp_path: Path,
    algorithm: str,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Per token, or per answer of four tokens up to the cap; PPO's critic has a norm of its own."""
    norms = []
    for name, lowered in (("plain", 0.0), ("lowered", LOWERED)):
        monkeypatch.setattr(server, "lowered", lowered)
        rollouts = {"url": server.url, "cap": CAP}
        result = train(config(tmp_path / name, tiny_base, algorithm, rollouts, max_steps=1))
        norms.append(result.history[0]["grad_norm"])
    assert norms[0] > 0
    assert norms[1] / norms[0] == pytest.approx(factor, rel=1e-3)


def test_stale_answers_are_of_earlier_policies_and_a_resumed_run_ends_equal(
    server: PolicyServer, tiny_base: Path, tmp_path: Path
) -> None:
    rollouts = {"url": server.url, "max_staleness": 1}
    steps: dict[str, Any] = {"max_steps": 4, "save_steps": 1}
    whole = train(config(tmp_path / "whole", tiny_base, rollouts=rollouts, **steps))
    ages = [entry["rollouts/staleness"] for entry in whole.history if "rollouts/staleness" in entry]
    assert ages == [0.0, 1.0, 1.0, 1.0]
    stopped = config(tmp_path / "resumed", tiny_base, rollouts=rollouts, **steps)
    seen: list[int] = []
    with pytest.raises(GymError) as error:
        train(stopped, on_step=lambda *_: seen.append(1), should_stop=lambda: len(seen) >= 2)
    assert error.value.code is ErrorCode.INTERRUPTED
    assert largest_difference(whole, train(stopped)) == 0.0


def test_killed_vllm_costs_no_answer(server: PolicyServer, tiny_base: Path, tmp_path: Path) -> None:
    plain = train(config(tmp_path / "plain", tiny_base, rollouts={"url": server.url}))
    server.asked.clear()
    server.kill_at = 14  # in the second step
    with pytest.warns(RunWarning, match=r"vLLM stopped; requested \d+ answers? again"):
        killed = train(config(tmp_path / "killed", tiny_base, rollouts={"url": server.url}))
    assert server.kill_at is None
    assert largest_difference(plain, killed) == 0.0


def test_vllm_of_another_model_is_refused(server: PolicyServer, tiny_base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    loaded = load_model(str(tiny_base))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.mul_(40)
    loaded.model.save_pretrained(other)
    loaded.tokenizer.save_pretrained(other)
    with pytest.raises(GymError, match="differ from the trained model's by") as error:
        train(config(tmp_path / "run", other, rollouts={"url": server.url}))
    assert error.value.code is ErrorCode.MODEL_INVALID


def test_truncated_sampling_is_not_taken_for_another_model(
    server: PolicyServer, tiny_base: Path, tmp_path: Path
) -> None:
    """The likeliest tokens are a small part of this model's probability, and vLLM reports them as all of it."""
    rollouts = {"url": server.url}
    result = train(config(tmp_path / "run", tiny_base, rollouts=rollouts, section={"top_k": 2}, max_steps=1))
    assert result.history[0]["sampling/sampling_logp_difference/mean"] > 0.5
    assert result.history[0]["sampling/importance_sampling_ratio/max"] <= 1


def test_log_probabilities_from_before_the_sampling_are_refused(
    server: PolicyServer, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "processed", False)
    with pytest.raises(GymError, match="before the sampling") as error:
        train(config(tmp_path / "run", tiny_base, rollouts={"url": server.url}))
    assert "processed_logprobs" in error.value.hint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"finetuning": "full", "lora": None}, "finetuning: full"),
        ({"finetuning": "oft", "lora": None}, "finetuning: oft"),
        ({"lora": {"use_dora": True}}, "lora.use_dora"),
        ({"lora": {"bias": "all"}}, "lora.bias: all"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "lora.modules_to_save"),
        ({"lora": {"init_lora_weights": "pissa"}}, "lora.init_lora_weights"),
        ({"section": {"temperature": 3.0}}, "temperature 3"),
    ],
)
def test_policy_that_vllm_cannot_hold_is_refused_before_loading(
    tiny_base: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    settings = config(tmp_path / "run", Path("absent"), rollouts="vllm", **changes)
    with pytest.raises(GymError, match=named) as error:
        ALGORITHMS.new("grpo").check(settings)
    assert error.value.code is ErrorCode.CONFIG_INVALID
    assert "grpo." in error.value.message


@pytest.mark.parametrize(
    ("rollouts", "named"),
    [
        ({"url": "http://10.0.0.1:8000"}, "https and api_key_file"),
        ({"url": "https://vllm.example"}, "https and api_key_file"),
        ({"api_key_file": "key"}, "set url"),
        ({"url": "http://127.0.0.1:8000", "python": "python"}, "python applies only to"),
        ({"max_staleness": 1, "correction": "none"}, "needs correction"),
        ({"correction": "none", "cap": 3}, "cap: 3"),
        ({"engine": "own"}, "vllm"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(rollouts: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RolloutEngine(**rollouts)


def put(
    name: str, content: bytes, key: str = "", *, ends: bool = True, app: Any = None
) -> tuple[int, dict[str, str]]:
    """The status and body of an upload to vLLM's ``app``, given to the middleware in two parts."""
    sent: list[dict[str, Any]] = []
    parts = [
        {"type": "http.request", "body": content[:9], "more_body": True},
        {"type": "http.request", "body": content[9:]} if ends else {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "PUT", "path": PREFIX + name, "headers": headers, "app": app}
    asyncio.run(UPLOADS(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


async def _no_app(*_: Any) -> None:
    raise AssertionError("the request reached vLLM")


UPLOADS = AdapterUploads(_no_app)
TENSORS = {"a": torch.ones(2)}
GOOD = save(TENSORS, metadata={CONFIG_KEY: '{"r": 4}'})


def test_uploaded_adapter_is_stored_for_this_user_alone() -> None:
    status, body = put("policy-1", GOOD)
    folder = Path(body["path"])
    assert status == 200
    assert folder.stat().st_mode & 0o77 == folder.parent.stat().st_mode & 0o77 == 0
    assert load_file(folder / "adapter_model.safetensors")["a"].tolist() == [1.0, 1.0]
    assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 4}


@pytest.mark.parametrize(
    ("name", "content", "status"),
    [
        ("../policy", GOOD, 404),
        ("Policy", GOOD, 404),
        ("policy", b"", 400),
        ("policy", struct.pack("<Q", 2**60) + b"{}", 400),
        ("policy", save(TENSORS), 400),
        ("policy", save(TENSORS, metadata={CONFIG_KEY: "[]"}), 400),
        ("policy", save(TENSORS, metadata={CONFIG_KEY: "{"}), 400),
    ],
)
def test_upload_that_is_no_adapter_is_refused(name: str, content: bytes, status: int) -> None:
    assert put(name, content)[0] == status


def test_upload_without_the_key_or_over_a_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert put("policy", GOOD, ends=False)[0] == 400
    monkeypatch.setattr(uploads, "MAX_BYTES", len(GOOD) - 1)
    assert put("policy", GOOD)[0] == 400
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert put("policy", GOOD, "wrong")[0] == put("policy", GOOD)[0] == 401


def test_keys_of_vllm_s_command_line_are_needed_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--api-key`` takes several, and replaces the variable."""
    monkeypatch.setenv("VLLM_API_KEY", "variable")
    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=["first", "second"])))
    statuses = [put("policy", GOOD, key, app=app)[0] for key in ("first", "second", "variable", "")]
    assert statuses == [200, 200, 401, 401]
