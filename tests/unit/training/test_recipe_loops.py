"""Ready loops of recipes learn from threads with the algorithms of gym train, go on where they stopped, and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.evaluation.graders.length import Length, LengthConfig
from gym_fed.registry import ModelRegistry
from gym_fed.training.loops import DPO, GRPO, PPO, SFT, StringThread
from gym_fed.training.recipe import RecipeContext

SHORT = {"max_length": 32}


class Recording:
    """An experiment that remembers its figures."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    def log_config(self, config: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.figures.append(dict(metrics))

    def log_artifacts(self, paths: Any) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [figures[name] for figures in self.figures if name in figures]


@pytest.fixture
def recorded() -> Recording:
    return Recording()


@pytest.fixture
def context(tmp_path: Path, recorded: Recording) -> Any:
    torch.set_num_threads(1)
    with RecipeContext(tmp_path, devices="cpu", experiment=recorded) as context:
        yield context


def threads(number: int) -> list[StringThread]:
    """Questions of a task that gym-nano does not know, answered."""
    return [StringThread.of_row(row) for row in generate("twice", number, seed=1)]


def test_a_thread_grows_turn_by_turn_and_gives_what_templates_and_graders_read() -> None:
    asked = StringThread([("system", "Be brief")], {"answer": "4"}).user("2 + 2?")
    whole = asked.assistant("4")
    assert (asked.answered, whole.answered, whole.last_content()) == (False, True, "4")
    assert whole.prompt() == asked == asked.prompt()
    assert whole.metadata == {"answer": "4"}
    assert whole.messages()[-1] == {"role": "assistant", "content": "4"}
    assert StringThread.of_row({"prompt": "hi", "answer": "4"}) == StringThread(
        [("user", "hi")], {"answer": "4"}
    )
    assert StringThread().last_content() == ""
    for wrong in [("gpt", "hi")], [("user", None)], [("user",)]:
        with pytest.raises(GymError, match="turn 1 of a StringThread"):
            StringThread(wrong)  # type: ignore[arg-type]
    with pytest.raises(GymError, match="cannot create a thread from a row with text"):
        StringThread.of_row({"text": "words"})


def test_sft_learns_the_answers(context: RecipeContext, recorded: Recording) -> None:
    model = context.spawn_train("gym-nano")
    result = SFT(
        threads(32), model, lr=2e-3, samples_per_batch=16, max_steps=8, context=context, settings=SHORT
    ).run()
    losses = recorded.of("sft/loss")
    assert result.steps == len(losses) == 8
    assert mean(losses[-2:]) < 0.7 * mean(losses[:2])
    assert result.model is model.model


def test_dpo_makes_chosen_answers_likelier_than_rejected_ones(
    context: RecipeContext, recorded: Recording
) -> None:
    pairs = [(thread, thread.prompt().assistant("no")) for thread in threads(16)]
    DPO(
        pairs,
        context.spawn_train("gym-nano"),
        lr=5e-4,
        beta=0.1,
        samples_per_batch=8,
        max_steps=6,
        context=context,
        settings=SHORT,
    ).run()
    losses = recorded.of("dpo/loss")
    assert losses[0] == pytest.approx(0.6931, abs=0.01)  # ln 2: the policy is the reference
    assert losses[-1] < 0.3


def few_characters(thread: StringThread) -> float:
    """1 for at most two characters, less for more."""
    return max(0.0, 1.0 - max(0, len(thread.last_content()) - 2) / 6)


def test_grpo_raises_the_reward_of_a_function_of_threads(context: RecipeContext, recorded: Recording) -> None:
    GRPO(
        threads(32),
        context.spawn_train("gym-nano"),
        few_characters,
        lr=1e-3,
        samples_per_batch=8,
        samples_per_mini_batch=4,
        completions_per_sample=4,
        max_completion_length=12,
        max_steps=16,
        context=context,
        settings=SHORT,
    ).run()
    rewards = recorded.of("grpo/reward")
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.05


def test_ppo_raises_the_reward_and_trains_the_value_model(
    context: RecipeContext, recorded: Recording
) -> None:
    policy = context.spawn_train("gym-nano")
    value = context.spawn("value", model=policy)
    before = {name: weights.clone() for name, weights in value.model.state_dict().items()}
    grader = Length(LengthConfig(grader="length", unit="characters", max=2, soft=6))
    loop = PPO(
        threads(32),
        policy,
        value,
        grader,
        lr_policy=1e-3,
        lr_value=1e-3,
        kl_beta=0.0,
        samples_per_batch=32,
        samples_per_mini_batch=16,
        num_iterations=2,
        max_num_ppo_steps=6,
        max_completion_length=12,
        context=context,
        settings=SHORT,
    )
    assert loop.run().steps == 6 * 2 * 2
    rewards = recorded.of("ppo/reward")
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.05
    after = value.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("body"))
    assert after["head.weight"].abs().sum() > 0


def stop_after(steps: int) -> Callable[[], bool]:
    seen = 0

    def should_stop() -> bool:
        nonlocal seen
        seen += 1
        return seen >= steps

    return should_stop


def test_a_stopped_loop_goes_on_and_ends_with_the_weights_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def trained(folder: Path, should_stop: Callable[[], bool] | None = None) -> Any:
        with RecipeContext(folder, devices="cpu", experiment=Recording()) as context:
            model = context.spawn_train("gym-nano")
            options: dict[str, Any] = {"max_steps": 4, "context": context, "settings": SHORT}
            SFT(threads(8), model, lr=1e-3, samples_per_batch=4, should_stop=should_stop, **options).run()
        return model.model.state_dict()

    with pytest.raises(GymError) as caught:
        trained(tmp_path / "stopped", stop_after(2))
    assert caught.value.code is ErrorCode.INTERRUPTED
    whole, resumed = trained(tmp_path / "whole"), trained(tmp_path / "stopped")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_arguments_become_keys_of_gym_train(context: RecipeContext) -> None:
    model = context.spawn_train("gym-nano")
    sft = SFT(
        threads(2), model, lr=3e-4, samples_per_batch=8, samples_per_mini_batch=2, max_grad_norm=0.5
    ).config()
    assert (sft.learning_rate, sft.max_grad_norm, sft.algorithm) == (3e-4, 0.5, "sft")
    assert (sft.per_device_train_batch_size, sft.gradient_accumulation_steps) == (2, 4)
    grpo = GRPO(
        threads(2), model, few_characters, samples_per_batch=8, samples_per_mini_batch=2, kl_beta=0.2
    ).config()
    assert grpo.grpo is not None
    assert (grpo.per_device_train_batch_size, grpo.grpo.steps_per_generation, grpo.grpo.beta) == (16, 4, 0.2)
    ppo = PPO(threads(2), model, None, few_characters, lr_policy=1e-5, lr_value=1e-4, kl_beta=0.3).config()
    assert ppo.ppo is not None
    assert (ppo.learning_rate, ppo.ppo.critic_learning_rate, ppo.ppo.beta) == (1e-5, 1e-4, 0.3)
    dpo = DPO([], model, beta=0.7, context=context).config()
    assert dpo.dpo is not None
    assert (dpo.dpo.beta, dpo.output_dir, dpo.device) == (0.7, context.output_dir / "dpo", "cpu")


def test_what_a_loop_cannot_do_is_refused_before_it_begins(context: RecipeContext) -> None:
    model = context.spawn_train("gym-nano")
    asked = StringThread([("user", "hi")])
    with pytest.raises(GymError, match="samples_per_mini_batch: 3 does not divide samples_per_batch 8"):
        SFT([], model, samples_per_batch=8, samples_per_mini_batch=3)
    with pytest.raises(GymError, match="thread 1 does not end with an answer"):
        SFT([asked], model, context=context).rows()
    with pytest.raises(GymError, match="pair 1: the two threads have different prompts"):
        DPO([(asked.assistant("a"), asked.user("b").assistant("c"))], model, context=context).rows()
    with pytest.raises(GymError, match="value_model is not a critic"):
        PPO([asked], model, model, few_characters, context=context).run()
    with pytest.raises(GymError, match="max_steps") as caught:
        PPO([asked], model, None, few_characters, max_steps=3)
    assert caught.value.hint == "set max_num_ppo_steps"
    with pytest.raises(GymError, match="PPO: lr"):
        PPO([asked], model, None, few_characters, lr=1e-3)
    with pytest.raises(GymError, match="optimiser"):
        SFT([asked.assistant("a")], model, context=context, settings={"optimiser": "sgd"}).config()


def test_a_context_knows_its_processes_and_holds_whole_models(
    context: RecipeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert context.world_size == 1
    with pytest.raises(GymError, match="tp is 2, but a recipe does not shard models"):
        context.spawn_train("gym-nano", tp=2)
    model = context.spawn_train("gym-nano", tp=1)
    assert (context.save_model_safely("m", model) / "config.json").is_file()
    assert context.save_model_safely("m", model).name == "m-2"
    with pytest.raises(GymError, match="dict is not a model that spawn created"):
        context.save_model_safely("m", {})  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert context.world_size == 2


def test_a_grader_of_threads_is_set_up_once_and_torn_down(context: RecipeContext) -> None:
    calls: list[str] = []

    class Judge:
        def setup(self) -> None:
            calls.append("setup")

        def __call__(self, thread: StringThread) -> float:
            calls.append(f"{thread.metadata['answer']}")
            return float(len(thread.last_content()))

        def teardown(self) -> None:
            calls.append("teardown")

    asked = [StringThread([("user", f"double: {word}")], {"answer": word}) for word in ("ab", "cd")]
    GRPO(
        asked,
        context.spawn_train("gym-nano"),
        Judge(),
        samples_per_batch=2,
        completions_per_sample=2,
        max_completion_length=4,
        max_steps=1,
        context=context,
        settings=SHORT,
    ).run()
    assert (calls[0], calls[-1], sorted(calls[1:-1])) == ("setup", "teardown", ["ab", "ab", "cd", "cd"])


def test_a_pulled_model_is_trained_and_saved_and_its_folder_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    registry = ModelRegistry(tmp_path / "registry")
    registry.push("me/nano", load_model("gym-nano"), licence="mit")
    loop = GRPO(
        threads(2),
        model=registry.pull("me/nano", tmp_path / "pulled"),
        grader=lambda thread: float(len(thread.last_content())),
        lr=1e-4,
        samples_per_batch=2,
        completions_per_sample=2,
        max_completion_length=4,
        max_steps=1,
        output_dir=tmp_path / "run",
        settings={**SHORT, "device": "cpu"},
    )
    assert loop.run().steps == 1
    saved = load_model(str(loop.model.save(tmp_path / "saved")))
    for (name, ours), (_, theirs) in zip(
        loop.model.model.named_parameters(), saved.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs), name
    with pytest.raises(GymError) as refused:
        loop.model.save(tmp_path / "saved")
    assert refused.value.code is ErrorCode.FILE_EXISTS
