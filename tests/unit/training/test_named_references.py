"""Algorithms that start from one adapter and are compared with another: whose weights, and whose log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.training.model import reference
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer
from tests.support.adapters import run, settings, sibling
from tests.support.preferences import ROWS as PAIRS

PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS[:16]]
ROLLOUTS: dict[str, Any] = {
    "max_completion_length": 4,
    "num_generations": 4,
    "num_iterations": 1,
    "beta": 0.5,
}
SECTIONS: dict[str, dict[str, Any]] = {"grpo": ROLLOUTS, "rloo": ROLLOUTS, "ppo": ROLLOUTS, "kto": {}}
PLACES = ("rewards._rollouts", "preference._tokenised")


class Spaces(Grader):
    """The share of an answer that is no letter."""

    name = "spaces"

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [sum(not c.isalpha() for c in sample.completion) / 8 for sample in samples]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``policy`` and ``reference``: a Llama and two adapters of it; ``other``, another Llama."""
    folder = tmp_path_factory.mktemp("references")
    base = sibling("Llama", folder / "base")
    sibling("Llama", folder / "other", seed=5)
    for seed, name in enumerate(("policy", "reference")):
        run(folder / name, model=str(base), seed=seed, learning_rate=0.1)
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every reference was asked and said, with the policy's trained weights at that time in ``policy``."""
    found: list[dict[str, Any]] = []

    def watched(config: TrainingConfig, policy: Any) -> Any:
        model = named(config, policy)
        start = {name: value.detach().clone() for name, value in policy.named_parameters()}

        def note(_: Any, __: Any, given: dict[str, Any], output: Any) -> None:
            found.append({**given, "log_probs": output.log_probs.clone(), "policy": start})

        model.register_forward_hook(note, with_kwargs=True)
        return model

    named: Callable[..., Any] = reference.named_reference
    for place in PLACES:
        monkeypatch.setattr(f"gym_fed.training.algorithms.{place}.named_reference", watched)
    return found


def log_probs(model: Any, asked: dict[str, Any]) -> torch.Tensor:
    """Of the tokens that are asked for, ``[tokens]``, by a model of plain transformers and PEFT."""
    ids, labels = asked["input_ids"], asked["labels"][:, 1:]
    with torch.no_grad():
        found = model.eval()(input_ids=ids, attention_mask=asked["attention_mask"]).logits[:, :-1]
    chosen = found.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen[labels != -100]


def plain(base: Path, adapter: Path | None = None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return model if adapter is None else PeftModel.from_pretrained(model, str(adapter))


@pytest.mark.few(4, "one path for every algorithm")
@pytest.mark.parametrize("algorithm", SECTIONS)
@pytest.mark.parametrize("named", ["reference_adapter", "reference_model"])
def test_the_policy_starts_from_its_adapter_and_is_held_against_the_named_model(
    trained: Path, tmp_path: Path, asked: list[dict[str, Any]], algorithm: str, named: str
) -> None:
    who = trained / ("reference" if named == "reference_adapter" else "other")
    config = settings(
        tmp_path / "run",
        model=str(trained / "base"),
        adapter=str(trained / "policy"),
        algorithm=algorithm,
        per_device_train_batch_size=8,
        logging_steps=1,
        max_steps=2,
        **{named: str(who), algorithm: SECTIONS[algorithm]},
    )
    graders = [] if algorithm == "kto" else [Spaces()]
    result = Trainer(config, graders=graders).train(PAIRS[:16] if algorithm == "kto" else PROMPTS)
    assert result.steps == 2
    other = plain(who) if named == "reference_model" else plain(trained / "base", who)
    policy = plain(trained / "base", trained / "policy")
    assert len(asked) >= 2
    for one in asked:
        wanted = log_probs(other, one)
        said = one["log_probs"][one["labels"][:, 1:] != -100]
        torch.testing.assert_close(said, wanted, rtol=0, atol=1e-5)
        assert (wanted - log_probs(policy, one)).abs().max() > 1e-2
    saved = load_file(trained / "policy/adapter_model.safetensors")
    start = {name.replace(".default", ""): value for name, value in asked[0]["policy"].items()}
    assert saved.keys() <= start.keys()
    assert all(torch.equal(start[name], value) for name, value in saved.items())
    if algorithm in ("grpo", "ppo"):
        distance = log_probs(policy, asked[0]) - log_probs(other, asked[0])
        kl = distance if algorithm == "ppo" else torch.exp(-distance) + distance - 1
        assert result.history[0]["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)


@pytest.mark.parametrize("algorithm", ["reward_model", "orpo", "sft", "npo"])
def test_an_algorithm_that_compares_with_no_other_model_refuses_one_by_key(
    trained: Path, tmp_path: Path, algorithm: str
) -> None:
    for named in ("reference_model", "reference_adapter"):
        config = settings(
            tmp_path / "run",
            model=str(trained / "base"),
            algorithm=algorithm,
            **{named: str(trained / "policy")},
        )
        with pytest.raises(GymError, match=rf"{named}: {algorithm} does not use a reference model") as caught:
            check_config(config)
        assert caught.value.code is ErrorCode.CONFIG_INVALID
        assert "remove" in caught.value.hint


def test_a_reward_model_goes_on_from_its_own_adapter_and_head(trained: Path, tmp_path: Path) -> None:
    common = {"model": str(trained / "base"), "algorithm": "reward_model"}
    Trainer(settings(tmp_path / "first", **common)).train(PAIRS[:16])
    again = {"adapter": str(tmp_path / "first"), "learning_rate": 1e-12, "max_steps": 1}
    Trainer(settings(tmp_path / "second", **common, **again)).train(PAIRS[:16])
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert any("score" in name for name in first)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=1e-7)
    with pytest.raises(GymError, match="has task_type CAUSAL_LM"):
        run(tmp_path / "third", **common, adapter=str(trained / "policy"))
