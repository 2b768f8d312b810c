"""Multi-turn environments by the protocol of verifiers reward GRPO, and only the model's own tokens are trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.compute import DistributedSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.environments import MAX_TURNS, STATE, Environment
from gym_fed.evaluation.graders.base import Sample
from gym_fed.training.algorithms.rewards._environments import EnvironmentRollouts
from gym_fed.training.algorithms.rewards._rollouts import GrpoRollouts, _environment_rollouts

ROWS: list[dict[str, Any]] = [
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
    """A trainer whose model gives the answers of the test, with a real tokenizer."""

    def __init__(self, answers: list[list[str]]) -> None:
        self.processing_class = load_tokenizer("gym-nano")
        self.eos_token_ids = [self.processing_class.eos_token_id]
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
    run.row_indices = list(range(len(answers)))
    return run([ROWS[place]["prompt"] for place in run.row_indices], trainer), trainer.processing_class


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
    turns = [(turn["role"], turn["content"]) for turn in found[STATE][0]["completion"]]
    assert turns == [("assistant", "x")]


class WithLogprobs(Scripted):
    """A trainer on vLLM: the log-probability of a token is its id, negative."""

    def _generate_single_turn(self, contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], Any]:
        answers, _logprobs = super()._generate_single_turn(contexts)
        return answers, [[-float(token) for token in answer] for answer in answers]


@pytest.mark.parametrize("most", [100, 40, 6])
def test_tokens_of_the_model_keep_their_log_probabilities_and_others_have_none(most: int) -> None:
    answers = [["ab", "-", "-"], ["x", "yy", "cd"]]
    run = EnvironmentRollouts(Environment(Guessing()), ROWS, most)
    run.row_indices = [0, 1]
    found = run([ROWS[place]["prompt"] for place in run.row_indices], WithLogprobs(answers))
    for ids, mask, logprobs in zip(
        found["completion_ids"], found["env_mask"], found["logprobs"], strict=True
    ):
        assert logprobs == [-token if of_model else 0.0 for token, of_model in zip(ids, mask, strict=True)]
    assert rollouts(answers)[0]["logprobs"] is None


class Echo(Guessing):
    """Replies with a fixed message, and records the event loops of its calls."""

    def __init__(self, content: Any) -> None:
        super().__init__()
        self.content, self.loops = content, set[Any]()

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> Any:
        self.loops.add(asyncio.get_running_loop())
        state["info"].setdefault("seen", []).append(messages[-1]["content"])
        return [{"role": "user", "content": self.content}], state


def test_what_an_environment_writes_into_its_state_stays_in_one_conversation() -> None:
    row = {"prompt": ROWS[0]["prompt"], "answer": "ab", "info": {"level": 1}}
    environment = Environment(Echo("no"))
    states = [environment.begin(row["prompt"], row) for _ in range(2)]
    environment.respond(states[0], "x")
    states[0]["prompt"][0]["content"] = "changed"
    assert (states[0]["info"], states[1]["info"]) == ({"level": 1, "seen": ["x"]}, {"level": 1})
    assert row == {"prompt": ROWS[0]["prompt"], "answer": "ab", "info": {"level": 1}}
    assert states[1]["prompt"][0]["content"] == "copy: ab"


def test_text_parts_of_a_reply_are_joined_and_other_parts_refused_by_name() -> None:
    parts = [{"type": "text", "text": "not "}, {"type": "text", "text": "yet"}]
    for content, text in ((parts, "not yet"), (None, ""), ("no", "no")):
        environment = Environment(Echo(content))
        assert environment.respond(environment.begin([], {}), "x")[0]["content"] == text
    environment = Environment(Echo([{"type": "image_url"}]))
    with pytest.raises(GymError, match=r"user message whose content has a part of type 'image_url'"):
        environment.respond(environment.begin([], {}), "x")


def test_all_async_calls_of_an_environment_run_in_one_event_loop() -> None:
    echo = Echo("no")
    environment = Environment(echo)
    state = environment.begin([], {})
    environment.respond(state, "x")
    environment.respond(state, "y")
    assert len(echo.loops) == 1
    assert not echo.loops.pop().is_closed()


def test_reward_functions_get_the_parser_and_unknown_parameters_are_refused_at_once() -> None:
    class Parsed(Guessing):
        def __init__(self) -> None:
            super().__init__()
            self.rubric = SimpleNamespace(funcs=[self.starts], parser="ab")

        def starts(self, parser: str, completion: list[Any], **_: Any) -> float:
            return float(completion[-1]["content"].startswith(parser))

        def judged(self, completion: list[Any], judge: Any) -> float:
            raise AssertionError((completion, judge))

    environment = Parsed()
    assert Environment(environment).grade([Sample(ROWS[0]["prompt"], "abc", {})]) == [1.0]
    environment.rubric.funcs.append(environment.judged)
    with pytest.raises(GymError, match=r"Parsed\.judged requires the parameter judge") as caught:
        Environment(environment)
    assert caught.value.code is ErrorCode.USAGE


def test_control_tokens_in_a_reply_do_not_become_turns_of_the_context() -> None:
    trainer = Scripted([["x", "y", "z"]])
    tokenizer = trainer.processing_class
    end, prompt = tokenizer.eos_token, ROWS[0]["prompt"]
    run = EnvironmentRollouts(Environment(Echo(f"ok{end}")), ROWS, 200)
    run.row_indices = [0]
    found = run([prompt], trainer)
    context = [*found["prompt_ids"][0], *found["completion_ids"][0]]
    turns = [*prompt, *found[STATE][0]["completion"]]
    assert [turn["content"] for turn in turns[1:]] == ["x", f"ok{end}", "y", f"ok{end}", "z"]
    whole = tokenizer.apply_chat_template(turns, return_dict=True, sanitize_control_tokens=True)["input_ids"]
    assert whole[: len(context)] == context


def test_any_end_token_of_the_model_is_written_once() -> None:
    class Ending(Scripted):
        def _generate_single_turn(self, contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            answers = super()._generate_single_turn(contexts)[0]
            return [[*ids[:-1], self.eos_token_ids[0]] for ids in answers], None

    trainer = Ending([["x", "y", "z"]])
    tokenizer = trainer.processing_class
    tokenizer.eos_token = tokenizer.pad_token
    assert tokenizer.eos_token_id not in trainer.eos_token_ids
    run = EnvironmentRollouts(Environment(Echo("no")), ROWS, 200)
    run.row_indices = [0]
    found = run([ROWS[0]["prompt"]], trainer)
    whole = tokenizer.apply_chat_template(
        [*ROWS[0]["prompt"], *found[STATE][0]["completion"]], return_dict=True
    )["input_ids"]
    context = [*found["prompt_ids"][0], *found["completion_ids"][0]]
    assert whole[: len(context)] == context


def test_a_template_that_drops_answers_is_refused() -> None:
    trainer = Scripted([["x", "y", "z"]])
    trainer.processing_class.chat_template = "{{ messages[-1].content }}"
    run = EnvironmentRollouts(Environment(Echo("no")), ROWS, 200)
    run.row_indices = [0]
    with pytest.raises(GymError, match="drops the text of an answer") as caught:
        run([ROWS[0]["prompt"]], trainer)
    assert caught.value.code is ErrorCode.MODEL_INVALID


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
    endless = Guessing()
    endless.max_turns = -1
    assert Environment(endless).max_turns == MAX_TURNS


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


def test_a_model_split_between_processes_is_refused_with_an_environment(tmp_path: Path) -> None:
    split = config(tmp_path / "run", "grpo").model_copy(
        update={"distributed": DistributedSettings(strategy="fsdp2")}
    )
    job = SimpleNamespace(config=split, graders=[Environment(Guessing())])
    with pytest.raises(
        GymError, match=r"distributed\.strategy: fsdp2 splits the model, and environments need ddp"
    ):
        _environment_rollouts(GrpoRollouts, job, ROWS, 24)  # type: ignore[arg-type]
