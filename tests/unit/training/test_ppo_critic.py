"""The critic of PPO: what it sees, how it is trained beside the policy, and how it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import OPTIMIZERS
from gym_fed.training.model.critic import Critic, critic_like, load_critic
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer
from tests.unit.training.test_algorithms_rl import (
    ROWS,
    Letters,
    built,
    config,
    is_same,
    logged,
    train,
    weights,
)


def randomised(critic: Critic) -> Critic:
    torch.nn.init.normal_(critic.head.weight)
    return critic


def test_a_value_is_given_before_its_token_is_seen(tiny_base: Path) -> None:
    policy = load_model(str(tiny_base)).model
    critic = randomised(critic_like(policy, train_body=True))
    ids = torch.arange(10).unsqueeze(0) + 40
    changed = ids.clone()
    changed[0, 7] = 99
    with torch.no_grad():
        before, after = (critic(x, torch.ones_like(x), 4) for x in (ids, changed))
    same = torch.isclose(before, after)[0].tolist()
    assert before.shape == (1, 4)
    assert same == [True, True, False, False], "token 7 is the second of the answer's four"


def test_the_critic_learns_and_the_policys_own_body_does_not_by_it(tiny_base: Path, tmp_path: Path) -> None:
    trainer = built(tiny_base, config(tmp_path / "run", "ppo"))
    body = weights(trainer.critic.body)
    assert all(
        torch.equal(body[name], value) for name, value in trainer.model.base_model.state_dict().items()
    )
    trainer.train()
    assert not is_same(body, weights(trainer.critic.body))
    assert trainer.critic.head.weight.any()
    assert all(p.grad is None for p in trainer.critic.parameters())


def test_each_setting_of_the_critic_changes_what_is_learnt(tiny_base: Path, tmp_path: Path) -> None:
    def learnt(name: str, **section: Any) -> dict[str, torch.Tensor]:
        section = {"num_iterations": 2, "max_completion_length": 3, **section}
        settings = config(tmp_path / name, "ppo", section, max_steps=4, per_device_train_batch_size=8)
        return weights(train(tiny_base, settings).model)

    plain = learnt("plain")
    for number, change in enumerate(
        (
            {"gamma": 0.5},
            {"gae_lambda": 0.1},
            {"whiten_advantages": False},
            {"reward_clip_range": (0.0, 0.1)},
            {"cliprange_value": 1e-3},
            {"critic_learning_rate": 1e-4},
            {"train_critic_body": False},
        )
    ):
        assert not is_same(plain, learnt(str(number), **change)), change


def test_the_critic_is_saved_with_the_run_and_a_later_run_starts_from_it(
    tiny_base: Path, tmp_path: Path
) -> None:
    first = config(tmp_path / "first", "ppo", save_final=True)
    result = train(tiny_base, first)
    folder = tmp_path / "first/critic"
    assert (tmp_path / "first/model.safetensors").is_file()
    critic = load_critic(str(folder), result.model, dtype="float32", train_body=True)
    assert critic.head.weight.any()
    again = built(tiny_base, config(tmp_path / "again", "ppo", {"critic": str(folder)}))
    assert is_same(weights(critic), weights(again.critic))
    frozen = built(
        tiny_base, config(tmp_path / "frozen", "ppo", {"critic": str(tiny_base), "train_critic_body": False})
    )
    assert not frozen.critic.head.weight.any()
    assert not any(p.requires_grad for p in frozen.critic.body.parameters())


@pytest.mark.shared
def test_a_critic_of_another_vocabulary_is_refused(shared_folder: Path, tmp_path: Path) -> None:
    name = str(shared_folder / "models/stories260K")
    trainer = Trainer(
        config(tmp_path / "run", "ppo", {"critic": name}, model="gym-nano", max_steps=1), graders=[Letters()]
    )
    with pytest.raises(GymError, match=r"ppo.critic: .* 512 tokens, but the policy has 262") as caught:
        trainer.train(ROWS * 2)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_one_answer_a_prompt_is_enough(tiny_base: Path, tmp_path: Path) -> None:
    settings = config(
        tmp_path / "run", "ppo", {"num_generations": 1}, per_device_train_batch_size=3, max_steps=2
    )
    assert len(logged(train(tiny_base, settings), "value_loss")) == 2


@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_optimisers_with_groups_of_their_own_move_the_critic_too(
    tiny_base: Path, tmp_path: Path, optimizer: str
) -> None:
    pytest.importorskip("pytorch_optimizer")
    trainer = built(tiny_base, config(tmp_path / "run", "ppo", max_steps=2, optimizer=optimizer))
    trainer.make_optimizer = lambda model: OPTIMIZERS.new(optimizer).make(
        model, config(tmp_path / "run", "ppo", optimizer=optimizer)
    )
    before = weights(trainer.critic)
    trainer.train()
    assert not is_same(before, weights(trainer.critic))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adam_mini"}, "adam_mini groups the weights by the heads of one model"),
        ({"optimizer": "badam"}, "badam trains the layers of one model in turn"),
        ({"finetuning": "lora", "lora": {"lora_fa": True}}, "lora.lora_fa: its optimiser projects"),
    ],
)
def test_an_optimiser_that_has_no_place_for_a_critic_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(GymError, match=f"{words}.*ppo also trains a critic") as caught:
        check_config(config(tmp_path / "run", "ppo", **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("most", [1e-3, 0.0], ids=["clipped", "off"])
def test_the_critics_gradients_are_clipped_by_their_own_norm(
    tiny_base: Path, tmp_path: Path, most: float
) -> None:
    """Its loss is far larger than the policy's at the beginning; 0 means no clipping, as for the policy."""
    norms: list[float] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found = [p.grad.norm() for p in trainer.critic.parameters() if p.grad is not None]
            norms.append(float(torch.stack(found).norm()))

    trainer = built(tiny_base, config(tmp_path / "run", "ppo", max_grad_norm=most, max_steps=2))
    trainer.add_callback(Look())  # after the trainer's own
    trainer.train()
    assert len(norms) == 2
    if most:
        assert norms == pytest.approx([most] * 2, rel=1e-2)
    else:
        assert min(norms) > 1e-2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_critics_loss_is_a_mean_over_a_steps_tokens_however_many_batches_make_a_step(
    tiny_base: Path, tmp_path: Path, accumulation: int
) -> None:
    """The same generation of 4 batches, learnt from in 4, 2 or 1 steps by a critic that stands still."""

    def mean_gradient(name: str, accumulation: int) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        class Look(TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.append(trainer.critic.head.weight.grad.clone())

        still = {"learning_rate": 1e-20, "max_grad_norm": 0.0, "per_device_train_batch_size": 4}
        steps = {"max_steps": 4 // accumulation, "gradient_accumulation_steps": accumulation}
        section = {"steps_per_generation": 4, "critic_learning_rate": 1e-20, "num_generations": 2}
        trainer = built(tiny_base, config(tmp_path / name, "ppo", section, **still, **steps))
        trainer.add_callback(Look())
        trainer.train()
        assert len(seen) == 4 // accumulation
        return torch.stack(seen).mean(0)

    whole = mean_gradient("whole", 4)
    assert whole.norm() > 0
    torch.testing.assert_close(mean_gradient("parts", accumulation), whole, rtol=1e-3, atol=1e-7)
