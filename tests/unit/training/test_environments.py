"""Multi-turn environments by the protocol of verifiers reward GRPO, and only the model's own tokens are trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.environments import MAX_TURNS, STATE, Environment
from gym_fed.evaluation.graders.base import Sample
from gym_fed.training.algorithms.rewards._environments import EnvironmentRollouts

ROWS = [
    {"prompt": [{"role": "user", "content": f"copy: {word}"}], "answer": word}
    for word in ("ab", "cd", "ef", "gh")
]


class Guessing:
    """Asks again until an answer is right, at most three times; as an environment of verifiers is written."""

    max_turns = 3

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.rubric = SimpleNamespace(funcs=[self.is_right, self.shortness], weights=[1.0, 0.5])

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        state["asked"] = 0
        self.states.append(state)
        return state

    async def is_completed(self, messages: list[Any], state: dict[str, Any]) -> bool:
        return bool(messages[-1]["content"] == state["answer"])

    async def env_response(
        self, messages: list[Any], state: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        state["asked"] += 1
        return [{"role": "user", "content": "no"}], state

    async def is_right(self, completion: list[Any], answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    def shortness(self, state: dict[str, Any], **_: Any) -> float:
        return 1.0 / state["turn"] if state["turn"] else 0.0


class Scripted:
    """A trainer whose model answers what it is told; the tokenizer is real."""

    def __init__(self, answers: list[list[str]]) -> None:
        self.processing_class = load_tokenizer("gym-nano")
        self._answers = [list(turns) for turns in zip(*answers, strict=True)]

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        ids = self.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)
        return ids["input_ids"], None, {}

    def _generate_single_turn(self, contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        texts = self._answers.pop(0)[-len(contexts) :]
        tokenizer = self.processing_class
        return [
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts
        ], None


def rollouts(answers: list[list[str]], most: int = 100) -> tuple[dict[str, Any], Any]:
    trainer = Scripted(answers)
    run = EnvironmentRollouts(Environment(Guessing()), ROWS, most)
    run.places = list(range(len(answers)))
    return run([ROWS[place]["prompt"] for place in run.places], trainer), trainer.processing_class


def test_a_conversation_has_the_tokens_of_the_template_and_a_mask_of_the_model_s() -> None:
    found, tokenizer = rollouts([["ab", "-", "-"], ["x", "yy", "cd"]])
    first, second = found[STATE]
    assert [turn["content"] for turn in first["completion"]] == ["ab"]
    assert [turn["content"] for turn in second["completion"]] == ["x", "no", "yy", "no", "cd"]
    for place, state in enumerate(found[STATE]):
        turns = [*state["prompt"], *state["completion"]]
        whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        ids = [*found["prompt_ids"][place], *found["completion_ids"][place]]
        assert whole[: len(ids)] == ids
        own = [
            i
            for i, of_model in zip(found["completion_ids"][place], found["env_mask"][place], strict=True)
            if of_model
        ]
        answers = [turn["content"] for turn in state["completion"] if turn["role"] == "assistant"]
        ended = [
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in answers
        ]
        assert own == [token for ids in ended for token in ids]


def test_a_conversation_ends_when_its_tokens_are_used_up() -> None:
    found, _ = rollouts([["x", "y", "z"]], most=6)
    assert len(found["completion_ids"][0]) <= 6
    assert found["env_mask"][0][-1] == 1


def test_the_rubric_scores_the_conversation_with_its_weights() -> None:
    found, _ = rollouts([["ab", "-", "-"], ["x", "yy", "cd"]])
    samples = [Sample(ROWS[place]["prompt"], "", {STATE: state}) for place, state in enumerate(found[STATE])]
    assert Environment(Guessing()).grade(samples) == [1.5, pytest.approx(1 + 0.5 / 3)]
    alone = Sample(ROWS[0]["prompt"], "ab", {"answer": "ab"})
    assert Environment(Guessing()).grade([alone]) == [1.0]


def test_an_object_that_is_no_environment_is_refused_by_the_missing_attribute() -> None:
    for broken, missing in (
        (SimpleNamespace(rubric=SimpleNamespace(funcs=[len])), "env_response"),
        (SimpleNamespace(env_response=len), "rubric.funcs"),
    ):
        with pytest.raises(GymError, match=f"has no {missing}") as caught:
            Environment(broken)
        assert caught.value.code is ErrorCode.USAGE
    assert Environment(
        SimpleNamespace(env_response=len, rubric=SimpleNamespace(funcs=[len]), max_turns=-1)
    ).max_turns == (MAX_TURNS)


def config(folder: Path, algorithm: str) -> TrainingConfig:
    return TrainingConfig(
        model="gym-nano",
        algorithm=algorithm,
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        max_length=64,
        seed=1,
        save_strategy="no",
        save_final=False,
        **{algorithm: {"num_generations": 2, "max_completion_length": 24}},
    )


def test_grpo_trains_in_an_environment(tmp_path: Path) -> None:
    environment = Guessing()
    trainer = Trainer(config(tmp_path / "run", "grpo"), graders=[Environment(environment)])
    result = trainer.train(dataset=[{**row, "answer": "never written"} for row in ROWS])
    rewards = [
        entry["rewards/environment/mean"] for entry in result.history if "rewards/environment/mean" in entry
    ]
    assert len(rewards) == 2
    assert len(environment.states) == 8
    assert all(state["asked"] for state in environment.states)


def test_an_algorithm_without_environments_refuses_one(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path / "run", "rloo"), graders=[Environment(Guessing())])
    with pytest.raises(GymError, match="rloo has no environments"):
        trainer.train(dataset=[dict(row) for row in ROWS])
