"""A real vLLM generates for GRPO, on a CPU: the weights of ``generate`` through a kill -9, and an equal resume."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.serving.vllm.process import VllmProcess
from gym_fed.training.rollouts.client import RolloutClient, SampledAnswer
from gym_fed.training.run.reproducibility import RunWarning
from gym_fed.training.trainer import Trainer
from tests.support.seeded_sampling import seed_generate

PYTHON = Path(os.environ.get("GYM_VLLM_PYTHON", Path(sys.prefix).parent / ".vllm" / "bin" / "python"))
"""The interpreter of vLLM's environment."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no vLLM at {PYTHON}: make vllm"),
]

STEPS, ANSWERS, TEMPERATURE = 4, 8, 1.5
VLLM: dict[str, Any] = {"python": PYTHON, "args": ["--use-fp64-gumbel"]}
ROWS = [{"prompt": [{"role": "user", "content": f"{word} tell me"}]} for word in ("ab", "cd", "ef", "gh")]


class Characters(Grader):
    """A reward that differs from answer to answer."""

    name = "characters"

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [sum(map(ord, s.completion)) % 17 / 17 + len(s.completion) / 8 for s in samples]


def config(folder: Path, rollouts: dict[str, Any] | None, **changes: Any) -> TrainingConfig:
    section = {"max_completion_length": 8, "num_generations": 4, "temperature": TEMPERATURE}
    return TrainingConfig(
        model="gym-nano",
        algorithm="grpo",
        finetuning="lora",
        output_dir=folder,
        max_steps=STEPS,
        max_length=64,
        per_device_train_batch_size=ANSWERS,
        lr_scheduler_type="constant",
        dtype="float32",
        num_threads=1,
        save_final=False,
        grpo={**section, "rollouts": rollouts},
        **changes,
    )


def train(settings: TrainingConfig, **more: Any) -> Any:
    return Trainer(settings, graders=[Characters()], **more).train(ROWS)


def largest_difference(a: Any, b: Any) -> float:
    ours, theirs = a.model.state_dict(), b.model.state_dict()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_weights_are_those_of_generate_even_if_vllm_is_killed_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = 0
    original = RolloutClient._one

    async def killing(self: RolloutClient, *arguments: Any) -> SampledAnswer:
        nonlocal requests
        requests += 1
        if requests == 1 + ANSWERS + ANSWERS // 2:  # in the second step, with half of it requested
            assert isinstance(self._server, VllmProcess)
            assert self._server.pid is not None
            os.kill(self._server.pid, signal.SIGKILL)
        return await original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutClient, "_one", killing)
        with pytest.warns(RunWarning, match=r"requested \d+ answers? again"):
            by_vllm = train(config(tmp_path / "vllm", VLLM))
    with monkeypatch.context() as patch:
        seed_generate(patch, config(tmp_path, None).seed, TEMPERATURE)
        here = train(config(tmp_path / "here", None))
    difference = largest_difference(by_vllm, here)
    print(f"largest difference of weights: {difference:.2g}")
    assert difference < 1e-4
    assert any(value.any() for name, value in here.model.state_dict().items() if ".lora_B." in name)


def test_resumed_run_with_stale_answers_ends_equal(tmp_path: Path) -> None:
    rollouts = {**VLLM, "max_staleness": 1}
    whole = train(config(tmp_path / "whole", rollouts, save_steps=1))
    stopped = config(tmp_path / "resumed", rollouts, save_steps=1)
    seen: list[int] = []
    with pytest.raises(GymError) as error:
        train(stopped, on_step=lambda *_: seen.append(1), should_stop=lambda: len(seen) >= 2)
    assert error.value.code is ErrorCode.INTERRUPTED
    difference = largest_difference(whole, train(stopped))
    print(f"largest difference of weights: {difference:.2g}")
    assert difference < 1e-6
