"""GRPO, GSPO, RLOO and PPO raise rewards, repeat and resume to the bit, and refuse what cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import generate
from gym_fed.evaluation.graders.base import CombinedGrader, Grader, Sample
from gym_fed.training.run.job import Job
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick
from tests.support.tiny_models import tiny_model

REWARDED = ("grpo", "gspo", "rloo", "ppo")
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcdefgh"
]


class Letters(Grader):
    """The share of the eight tokens of an answer that are letters: a fifth for a model that knows nothing."""

    name = "letters"

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.calls: list[str] = []

    def setup(self) -> None:
        self.calls.append("setup")

    def teardown(self) -> None:
        self.calls.append("teardown")

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        self.samples += samples
        return [sum(c.isascii() and c.isalpha() for c in s.completion) / 8 for s in samples]


def config(
    folder: Path, algorithm: str, section: dict[str, Any] | None = None, **changes: Any
) -> TrainingConfig:
    values = {
        "algorithm": algorithm,
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 16,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
        "logging_steps": 1,
        algorithm: {"max_completion_length": 4, **(section or {})},
    }
    return TrainingConfig(**{**values, **changes})


def train(tiny_base: Path, settings: TrainingConfig, rows: Any = ROWS * 2, **more: Any) -> Any:
    loaded = load_model(str(tiny_base))
    graders = more.pop("graders", [Letters()])
    held_out = more.pop("eval_dataset", None)
    trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, graders=graders, **more)
    return trainer.train(rows, held_out)


def logged(result: Any, key: str) -> list[float]:
    return [entry[key] for entry in result.history if key in entry]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 28), ("gspo", 28), ("rloo", 28), ("ppo", 56)])
def test_the_mean_reward_rises(tiny_base: Path, tmp_path: Path, algorithm: str, steps: int) -> None:
    grader = Letters()
    settings = config(
        tmp_path / "run",
        algorithm,
        {"max_completion_length": 8},
        max_steps=steps,
        per_device_train_batch_size=32,
    )
    result = train(tiny_base, settings, ROWS * 4, graders=[grader])
    rewards = logged(result, "reward")
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.7
    assert grader.calls == ["setup", "teardown"]
    assert {"reward_std", "rewards/letters/mean", "graders/letters", "completions/mean_length"} <= set(
        result.history[0]
    )
    if algorithm == "ppo":
        errors, explained = logged(result, "value_loss"), logged(result, "explained_variance")
        assert sum(errors[-4:]) < 0.5 * sum(errors[:4])
        assert max(explained[2:]) > max(0.05, explained[0])


@pytest.mark.parametrize(("algorithm", "steps"), quick([("grpo", 8), ("ppo", 16)], ("grpo", 8)))
def test_lora_learns_from_rewards_and_leaves_the_base_alone(
    tmp_path: Path, algorithm: str, steps: int
) -> None:
    loaded = load_model("gym-nano")
    before = weights(loaded.model)
    settings = config(
        tmp_path / "run",
        algorithm,
        {"max_completion_length": 8, "beta": 0.001, "num_iterations": steps // 8},
        max_steps=steps,
        learning_rate=0.01,
        per_device_train_batch_size=24,
        finetuning="lora",
    )
    trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, graders=[Letters()])
    result = trainer.train(generate("double", 60))
    rewards = logged(result, "reward")
    assert rewards[-1] > rewards[0] + 0.2
    assert logged(result, "kl")[-1] > logged(result, "kl")[0]
    assert set(result.model.peft_config) == {"default"}
    assert is_same(before, weights(result.model.unload()))


@pytest.mark.parametrize("start", ["default", "pissa"])
def test_the_reference_of_an_adapter_is_the_model_at_the_start(
    tiny_base: Path, tmp_path: Path, start: str
) -> None:
    """PiSSA takes its factors out of the base, so that switching the adapter off would be another model."""
    lora = {"init_lora_weights": start}
    settings = config(tmp_path / "run", "grpo", {"beta": 0.1}, finetuning="lora", lora=lora, max_steps=2)
    divergence = logged(train(tiny_base, settings), "kl")
    assert divergence[0] == pytest.approx(0, abs=1e-7)
    assert divergence[1] > 1e-6


@pytest.mark.parametrize(
    ("algorithm", "finetuning"),
    [
        ("grpo", "full"),
        pytest.param("gspo", "lora", marks=pytest.mark.slow),
        pytest.param("rloo", "full", marks=pytest.mark.slow),
        ("ppo", "lora"),
    ],
)
def test_a_run_resumes_to_the_bit_in_the_midst_of_a_generation_and_of_an_epoch(
    tiny_base: Path, tmp_path: Path, algorithm: str, finetuning: str
) -> None:
    """An epoch is 4 steps, and so is a generation: the run stops after the first step of the second."""
    section = {"steps_per_generation": 2, "num_iterations": 2, "num_generations": 4, "beta": 0.01}

    def settings(name: str) -> TrainingConfig:
        return config(tmp_path / name, algorithm, section, finetuning=finetuning, max_steps=6)

    whole = train(tiny_base, settings("whole"), ROWS)
    steps: list[int] = []
    with pytest.raises(GymError, match="stopped at step 5 of 6"):
        train(
            tiny_base,
            settings("part"),
            ROWS,
            on_step=lambda step, total, loss: steps.append(step),
            should_stop=lambda: len(steps) == 5,
        )
    resumed = train(tiny_base, settings("part"), ROWS)
    assert is_same(weights(whole.model), weights(resumed.model))
    assert resumed.losses == whole.losses
    assert resumed.num_tokens == whole.num_tokens
    assert logged(resumed, "reward") == logged(whole, "reward")


@pytest.mark.parametrize("algorithm", quick(REWARDED, "grpo", "ppo"))
def test_a_seed_gives_the_same_weights_again_and_another_others(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    first, again, other = (
        weights(train(tiny_base, config(tmp_path / str(i), algorithm, max_steps=2, seed=seed)).model)
        for i, seed in enumerate((0, 0, 1))
    )
    assert is_same(first, again)
    assert not is_same(first, other)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_beta_keeps_the_policy_near_the_model_at_the_start(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    """The divergence itself is measured, on one text."""
    start = load_model(str(tiny_base))
    ids = start.tokenizer("say a, and say it well", return_tensors="pt")["input_ids"]
    divergence = []
    for beta in (0.0, 5.0):
        section = {"beta": beta, "num_iterations": 2}
        result = train(tiny_base, config(tmp_path / str(beta), algorithm, section, max_steps=12))
        with torch.no_grad():
            new, old = (m(ids).logits.log_softmax(-1) for m in (result.model, start.model))
        divergence.append(float((new.exp() * (new - old)).sum(-1).mean()))
        assert ("kl" in result.history[0]) == (beta > 0)
    assert divergence[1] < 0.7 * divergence[0]


SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 5,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 20,
    "min_p": 0.9,
    "repetition_penalty": 3.0,
    "steps_per_generation": 2,
    "num_iterations": 3,
    "mask_truncated_completions": True,
    "epsilon": 0.1,
    "epsilon_high": 0.3,
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "dr_grpo", "scale_rewards": "batch", "entropy_coef": 0.1},
    "gspo": {"scale_rewards": "none", "entropy_coef": 0.1},
    "rloo": {"normalize_advantages": True, "reward_clip_range": (0.0, 0.1)},
    "ppo": {"entropy_coef": 0.1},
}


@pytest.mark.parametrize("algorithm", REWARDED)
def test_every_setting_reaches_trl(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    given = {**SETTINGS, **OWN_SETTINGS[algorithm]}
    trainer = built(tiny_base, config(tmp_path / "run", algorithm, {**given, "beta": 0.5}))
    assert {key: getattr(trainer.args, key) for key in given} == given
    assert (trainer.kl_weight if algorithm == "ppo" else trainer.beta) == 0.5
    assert trainer.ref_model is not None
    level = "sequence" if algorithm == "gspo" else "token"
    assert getattr(trainer.args, "importance_sampling_level", "token") == level
    plain = built(tiny_base, config(tmp_path / "plain", algorithm))
    assert all(getattr(plain.args, key) != value for key, value in given.items())
    assert plain.ref_model is None


def built(tiny_base: Path, settings: TrainingConfig) -> Any:
    loaded = load_model(str(tiny_base))
    algorithm = ALGORITHMS.new(settings.algorithm)
    job = Job(
        config=settings,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        encoded=algorithm.encode(settings, loaded.tokenizer, ROWS * 4),
        eval_encoded=None,
        checkpoints=settings.output_dir,
        callbacks=[],
        graders=[Letters()],
    )
    return algorithm.build(job)


def test_graders_are_given_text_prompt_and_the_row_and_their_weights_count(
    tiny_base: Path, tmp_path: Path
) -> None:
    plain, halved = Letters(), Letters()
    halved.name = "halved"
    rows = [{**row, "tests": None if i else ["x"], "n": i} for i, row in enumerate(ROWS)]
    result = train(
        tiny_base,
        config(tmp_path / "run", "grpo", max_steps=1),
        rows,
        graders=[plain, CombinedGrader([(halved, 0.5)], name="halved")],
        eval_dataset=rows[:2],
    )
    sample = plain.samples[0]
    assert sample.prompt == rows[sample.row["n"]]["prompt"]
    assert dict(sample.row) == {k: v for k, v in rows[sample.row["n"]].items() if k != "prompt"}
    assert not any("<|" in s.completion for s in plain.samples)
    first = result.history[0]
    assert first["graders/halved"] == pytest.approx(first["graders/letters"])
    assert first["rewards/halved/mean"] == pytest.approx(0.5 * first["graders/letters"])
    assert first["reward"] == pytest.approx(1.5 * first["graders/letters"])
    assert "eval_reward" in {key for entry in result.history for key in entry}
    assert len(plain.samples) == 16 + 2, "a held-out prompt is answered once"


@pytest.mark.shared
def test_a_model_without_chat_template_learns_from_texts(shared_folder: Path, tmp_path: Path) -> None:
    name = str(shared_folder / "models/stories260K")
    texts = [{"prompt": "Once upon a time"}, {"prompt": "The little cat"}]
    settings = config(tmp_path / "run", "grpo", model=name, max_steps=1, learning_rate=1e-3)
    grader = Letters()
    result = Trainer(settings, graders=[grader]).train(texts)
    assert result.steps == 1
    assert grader.samples[0].prompt in {row["prompt"] for row in texts}
    conversations = Trainer(config(tmp_path / "chat", "grpo", model=name), graders=[grader])
    with pytest.raises(GymError, match="no chat template"):
        conversations.train(ROWS)
    assert not (tmp_path / "chat").exists()


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "grpo",
        {"num_generations": 5},
        {},
        r"5 does not divide the 16 answers .* 16 x gradient_accumulation_steps 1",
    ),
    ("rloo", {"num_generations": 64, "steps_per_generation": 3}, {}, r"48 .* rloo.steps_per_generation 3"),
    ("ppo", {}, {"per_device_train_batch_size": 1}, "a generation has only one answer"),
    ("grpo", {}, {"group_by_length": True}, "group_by_length: not used by grpo"),
    ("gspo", {}, {"packing": True}, "packing: not used by gspo"),
    ("ppo", {}, {"assistant_only_loss": True}, "assistant_only_loss: not used by ppo"),
    ("ppo", {}, {"finetuning": "lora", "quantization": {}}, "ppo.critic: required"),
    ("ppo", {}, {"distributed": {"strategy": "fsdp2"}}, "fsdp2 can shard only one model"),
]


@pytest.mark.parametrize(("algorithm", "section", "changes", "problem"), REFUSED)
def test_what_cannot_work_is_refused_when_the_config_is_checked(
    tmp_path: Path, algorithm: str, section: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        ALGORITHMS.new(algorithm).check(config(tmp_path / "run", algorithm, section, **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("algorithm", REWARDED)
def test_a_run_without_graders_is_refused_before_a_model_is_loaded(tmp_path: Path, algorithm: str) -> None:
    with pytest.raises(GymError, match=f"graders: {algorithm} learns from rewards"):
        Trainer(config(tmp_path / "run", algorithm, model="absent"))
    with pytest.raises(GymError, match="two graders are called 'letters'"):
        Trainer(config(tmp_path / "run", algorithm, model="absent"), graders=[Letters(), Letters()])


def test_rows_that_cannot_work_are_refused_before_anything_is_written(
    tiny_base: Path, tmp_path: Path
) -> None:
    settings = config(tmp_path / "run", "grpo", max_length=32)
    long = {"prompt": [{"role": "user", "content": "x" * 40}]}
    for rows, problem in [
        (ROWS[:1], "1 prompt, but one generation needs 2"),
        (
            [*ROWS, {"prompt": "<|im_start|>user\nhi<|im_end|>\n"}],
            "row 9: plain strings and conversations are mixed",
        ),
        ([*ROWS, long], r"row 9: its prompt has \d+ tokens, but max_length is 32"),
        ([*ROWS, {**ROWS[0], "images": ["a.png"]}], "row 9 has images"),
        ([*ROWS, {**ROWS[0], "tools": [{"name": "f"}]}], "row 9: has tools"),
    ]:
        with pytest.raises(GymError, match=problem) as caught:
            train(tiny_base, settings, rows)
        assert caught.value.code is ErrorCode.DATA_INVALID
    assert not (tmp_path / "run").exists()


def test_a_grader_that_gives_no_finite_number_ends_the_run(tiny_base: Path, tmp_path: Path) -> None:
    class Broken(Letters):
        def grade(self, samples: Sequence[Sample]) -> list[float]:
            return [float("nan")] * len(samples)

    grader = Broken()
    with pytest.raises(GymError, match="the grader letters returned"):
        train(tiny_base, config(tmp_path / "run", "grpo"), graders=[grader])
    assert grader.calls == ["setup", "teardown"]


@pytest.mark.parametrize("algorithm", REWARDED)
@pytest.mark.parametrize("kind", quick(["mpt", "granitemoe"], "mpt"))
def test_architectures_without_a_fused_head_are_trained_with_a_reference(
    kind: str, algorithm: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer("gym-nano")
    model = tiny_model(kind, vocab_size=len(tokenizer))
    settings = config(tmp_path / "run", algorithm, {"beta": 0.1}, max_steps=1, learning_rate=1e-4)
    result = Trainer(settings, model=model, tokenizer=tokenizer, graders=[Letters()]).train(ROWS * 2)
    assert result.steps == 1
    kl = [entry["kl"] for entry in result.history if "kl" in entry]
    assert kl[0] == pytest.approx(0, abs=1e-4), "the reference is the policy, by the same head"
