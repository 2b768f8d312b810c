"""Graders that read models and graders that teach them: reward models, evaluation, and reinforcement learning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.console import run_app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.evaluation import exact_match, grade, grade_answers
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.evaluation.graders.exact import Exact, ExactConfig
from gym_fed.evaluation.graders.length import Length, LengthConfig
from gym_fed.evaluation.graders.reward_model import RewardModelConfig, RewardModelGrader
from gym_fed.training.trainer import Trainer

SAMPLES = [
    Sample([{"role": "user", "content": "say ab"}], said)
    for said in ("AB", "a much longer answer than that", "")
]

CONFIG: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_length": 64,
    "device": "cpu",
    "num_threads": 1,
    "logging_steps": 1,
}


def conversation(word: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say {word}"}]


def pairs(count: int) -> list[dict[str, Any]]:
    """Pairs in which the answer in capitals is preferred."""
    words = [f"{chr(97 + n % 26)}{chr(97 + n * 7 % 26)}" for n in range(count)]
    return [
        {
            "prompt": conversation(word),
            "chosen": [{"role": "assistant", "content": word.upper()}],
            "rejected": [{"role": "assistant", "content": word}],
        }
        for word in words
    ]


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request: pytest.FixtureRequest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the reward model, and its model as it was in memory."""
    folder = tmp_path_factory.mktemp("rewards") / "run"
    settings = {
        "algorithm": "reward_model",
        "finetuning": request.param,
        "model": str(tiny_base),
        "output_dir": folder,
        "max_steps": 20,
        "learning_rate": 2e-2,
    }
    return Trainer(TrainingConfig(**{**CONFIG, **settings})).train(pairs(104))


def reward_model(folder: Path, **keys: Any) -> RewardModelGrader:
    return RewardModelGrader(
        RewardModelConfig(grader="reward_model", model=str(folder), device="cpu", **keys)
    )


def scores(grader: Grader, *samples: Sample) -> list[float]:
    grader.setup()
    try:
        return grader.grade(samples)
    finally:
        grader.teardown()


def test_a_finished_reward_model_prefers_what_it_learnt_to_prefer(trained: Any) -> None:
    samples = [
        Sample(conversation(word), said) for word in ("xq", "abc", "mn") for said in (word.upper(), word)
    ]
    found = scores(reward_model(trained.output_dir), *samples)
    assert all(good > bad for good, bad in zip(found[::2], found[1::2], strict=True))


def test_the_score_is_the_models_own_and_batches_change_nothing(trained: Any) -> None:
    samples = [Sample(conversation("ab"), said) for said in ("AB", "a much longer answer than that", "x", "")]
    found = scores(reward_model(trained.output_dir), *samples)
    alone = scores(reward_model(trained.output_dir, batch_size=1), *samples)
    assert found == pytest.approx(alone, abs=1e-5)
    for sample, score in zip(samples, found, strict=True):
        messages = [*conversation("ab"), {"role": "assistant", "content": sample.completion}]
        ids = trained.tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        with torch.inference_mode():
            assert score == pytest.approx(trained.model(input_ids=ids).logits.item(), abs=1e-4)


def test_a_conversation_longer_than_max_length_loses_its_beginning(trained: Any) -> None:
    long, short = (Sample(conversation("ab" * times), "an answer of some length") for times in (30, 20))
    keys = {"max_length": 16}
    assert scores(reward_model(trained.output_dir, **keys), long) == pytest.approx(
        scores(reward_model(trained.output_dir, **keys), short)
    )
    assert scores(reward_model(trained.output_dir), long) != scores(reward_model(trained.output_dir), short)


def test_the_type_of_the_weights_is_the_configs(trained: Any) -> None:
    coarse = reward_model(trained.output_dir, dtype="bfloat16")
    sample = Sample(conversation("ab"), "AB")
    assert scores(coarse, sample) != scores(reward_model(trained.output_dir), sample)
    assert scores(coarse, sample) == pytest.approx(
        scores(reward_model(trained.output_dir), sample), rel=0.1, abs=0.1
    )


def test_a_model_that_is_no_reward_model_is_refused_by_name(tiny_base: Path) -> None:
    with pytest.raises(GymError, match="is Qwen3ForCausalLM, not a reward model") as info:
        reward_model(tiny_base)
    assert info.value.code is ErrorCode.MODEL_INVALID
    with pytest.raises(GymError, match="no such folder"):
        reward_model(tiny_base / "absent")


def test_evaluation_by_the_exact_grader_is_exact_match() -> None:
    nano = load_model("gym-nano")
    rows = [*generate("upper", 12), *generate("count", 12)]
    found = grade(
        nano.model, nano.tokenizer, rows, [Exact(ExactConfig(grader="exact")), length(max=3, soft=4)]
    )
    assert found.means["exact"] == exact_match(nano.model, nano.tokenizer, rows)
    assert 0 < found.means["exact"] < 1
    assert found.means["reward"] == pytest.approx(found.means["exact"] + found.means["length"])
    assert [s.prompt for s in found.samples] == [row["messages"][:-1] for row in rows]


def length(**keys: Any) -> Length:
    return Length(LengthConfig(grader="length", unit="characters", **keys))


def test_answers_that_are_there_already_are_graded_without_a_model() -> None:
    rows = [{"prompt": "q", "completion": said, "answer": "a"} for said in ("a", "b")]
    found = grade_answers(rows, [Exact(ExactConfig(grader="exact"))])
    assert (found.values["exact"], found.means["exact"]) == ([1.0, 0.0], 0.5)
    talk = {"messages": [*conversation("a"), {"role": "assistant", "content": "a"}], "answer": "a"}
    assert grade_answers([talk], [Exact(ExactConfig(grader="exact"))]).means["exact"] == 1.0
    with pytest.raises(GymError, match="row 2 has no answer to grade"):
        grade_answers([rows[0], {"prompt": "q"}], [length(max=1)])
    with pytest.raises(GymError, match="no rows to grade"):
        grade_answers([], [length(max=1)])
    with pytest.raises(GymError, match="graders: none"):
        grade_answers(rows, [])


def test_the_command_grades_answers_in_a_file_and_a_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gym(*words: str) -> Any:
        monkeypatch.setattr("sys.argv", ["gym", *words])
        with pytest.raises(SystemExit) as left:
            run_app(app)
        assert left.value.code == 0
        return json.loads(capsys.readouterr().out)

    monkeypatch.chdir(tmp_path)
    said = [
        {"prompt": "q", "completion": "a", "answer": "a"},
        {"prompt": conversation("b"), "completion": [{"role": "assistant", "content": "b!"}], "answer": "b"},
    ]
    for name, rows in (("said.jsonl", said), ("asked.jsonl", generate("length", 8))):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("graders.yaml").write_text(
        "graders: [{grader: exact, weight: 2}, {grader: length, max: 0, soft: 2}]\n"
    )
    found = gym("grade", "said.jsonl", "--graders", "graders.yaml", "--json", "--output", "out.jsonl")
    assert found == {"num_rows": 2, "unfinished": 0, "means": {"exact": 1.0, "length": 0.5, "reward": 1.5}}
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["rewards"] for line in lines] == [
        {"exact": 2.0, "length": 0.5},
        {"exact": 0.0, "length": 0.5},
    ]
    answers = gym(
        "grade", "asked.jsonl", "--graders", "graders.yaml", "--json", "--model", "gym-nano", "--limit", "5"
    )
    assert answers["num_rows"] == 5
    assert answers["means"]["exact"] > 1.0  # gym-nano knows this task


class Watched(Grader):
    """Counts, and remembers being torn down."""

    name = "watched"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self) -> None:
        self.calls.append("setup")

    def grade(self, samples: Any) -> list[float]:
        assert all(sample.row["answer"] for sample in samples)
        return [0.0] * len(samples)

    def teardown(self) -> None:
        self.calls.append("teardown")


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo", "ppo"])
def test_graders_of_the_config_and_in_memory_reward_every_algorithm_that_generates(
    algorithm: str, tiny_base: Path, tmp_path: Path
) -> None:
    watched = Watched()
    settings = {
        "algorithm": algorithm,
        "model": str(tiny_base),
        "output_dir": tmp_path / "run",
        "max_steps": 2,
        "learning_rate": 1e-2,
        "graders": [
            {"grader": "length", "unit": "characters", "max": 0, "soft": 40, "weight": 0.5},
            {"grader": "exact", "name": "right"},
        ],
        algorithm: {"num_generations": 4, "max_completion_length": 8},
    }
    result = Trainer(TrainingConfig(**{**CONFIG, **settings}), graders=[watched]).train(generate("copy", 16))
    logged = {key for entry in result.history for key in entry}
    assert {"rewards/watched/mean", "rewards/length/mean", "rewards/right/mean", "graders/length"} <= logged
    first = result.history[0]
    assert first["rewards/length/mean"] == pytest.approx(0.5 * first["graders/length"])
    assert watched.calls == ["setup", "teardown"]


def test_grpo_learns_what_a_grader_of_its_config_rewards(tmp_path: Path) -> None:
    settings = {
        "algorithm": "grpo",
        "model": "gym-nano",
        "output_dir": tmp_path / "run",
        "max_steps": 10,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 32,
        "graders": [{"grader": "length", "unit": "characters", "max": 2, "soft": 12}],
        "grpo": {"num_generations": 8, "max_completion_length": 16, "temperature": 1.3},
        "save_final": False,
    }
    result = Trainer(TrainingConfig(**{**CONFIG, **settings})).train(generate("twice", 64))
    rewards = [entry["reward"] for entry in result.history if "reward" in entry]
    assert rewards[0] < 0.92
    assert sum(rewards[-3:]) / 3 > 0.97


def test_a_config_whose_grader_cannot_be_had_is_refused_before_anything_is_written(
    tiny_base: Path, tmp_path: Path
) -> None:
    settings = {
        "algorithm": "grpo",
        "model": str(tiny_base),
        "output_dir": tmp_path / "run",
        "max_steps": 1,
        "graders": [{"grader": "reward_model", "model": str(tiny_base)}],
    }
    with pytest.raises(GymError, match="not a reward model"):
        Trainer(TrainingConfig(**{**CONFIG, **settings}))
    assert not (tmp_path / "run").exists()


def head(folder: Path, width: int = 16, name: str = "v_head.summary") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(1, width, generator=generator), torch.randn(1, generator=generator)
    save_file({f"{name}.weight": weight, f"{name}.bias": bias}, folder / "value_head.safetensors")
    return weight, bias


@pytest.fixture(params=["full", "adapter"])
def folder(request: Any, tiny_base: Path, tmp_path: Path) -> Path:
    there = tmp_path / "reward"
    if request.param == "full":
        shutil.copytree(tiny_base, there)
        return there
    loaded = load_model(str(tiny_base))
    adapted = get_peft_model(
        loaded.model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(str(there))
    loaded.tokenizer.save_pretrained(str(there))
    return there


def grader(folder: Path, **keys: Any) -> RewardModelGrader:
    return RewardModelGrader(
        RewardModelConfig(grader="reward_model", model=str(folder), device="cpu", **keys)
    )


def test_the_score_is_the_heads_value_at_the_last_token_in_any_batch(folder: Path) -> None:
    weight, bias = head(folder)
    chosen = grader(folder)
    chosen.setup()
    found = chosen.grade(SAMPLES)
    model, tokenizer = load_model(str(folder)).model, load_tokenizer(str(folder))
    body = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    for sample, score in zip(SAMPLES, found, strict=True):
        assert isinstance(sample.prompt, list)
        messages = [*sample.prompt, {"role": "assistant", "content": sample.completion}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            last = body(input_ids=ids).last_hidden_state[0, -1]
        assert score == pytest.approx(float(weight[0] @ last + bias[0]), abs=1e-5)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"width": 8}, r"its shapes are \[1, 8\] and \[1\], not \[1, 16\]"),
        ({"name": "score"}, "v_head.summary.weight"),
    ],
)
def test_a_head_of_another_model_is_refused(
    tiny_base: Path, tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    shutil.copytree(tiny_base, tmp_path / "reward")
    head(tmp_path / "reward", **keys)
    with pytest.raises(GymError, match=problem) as caught:
        grader(tmp_path / "reward").setup()
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_a_pickled_head_is_never_read(tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "reward")
    (tmp_path / "reward/value_head.bin").write_bytes(b"anything")
    with pytest.raises(GymError, match="is a pickle, which is never loaded"):
        grader(tmp_path / "reward")
