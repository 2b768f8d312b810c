"""Mixture-of-Depths: few tokens are computed, the routers learn, the model saves and loads, and there is no cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gym_fed.base.modeling.mixture_of_depths import convert_to_mixture_of_depths
from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer


def converted(**changes: Any) -> Any:
    model = load_model("gym-nano").model
    settings = {"capacity": 0.25, "every": 2, "router_loss_weight": 0.01, **changes}
    convert_to_mixture_of_depths(model, **settings)
    return model


def ids(length: int = 20, batch: int = 2) -> torch.Tensor:
    return torch.randint(40, 90, (batch, length), generator=torch.Generator().manual_seed(0))


def test_a_routed_block_computes_its_share_of_the_tokens_and_the_others_pass_by() -> None:
    model = converted().train()
    seen: dict[int, Any] = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(
            lambda module, args, output, n=number: seen.update({n: output.shape[1]})
        )
        layer.register_forward_hook(
            lambda module, args, output, n=number: seen.update({f"{n}": (args[0], output)})
        )
    model(ids())
    assert {n: seen[n] for n in range(4)} == {0: 20, 1: 5, 2: 20, 3: 5}
    before, after = seen["1"]
    assert ((before != after).any(-1).sum(1) == 5).all()


def test_padding_takes_no_place_of_a_word() -> None:
    model = converted(every=1).train()
    mask = torch.cat([torch.ones(1, 8), torch.zeros(1, 12)], 1).long().expand(2, -1)
    sizes: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    model(ids(), attention_mask=mask)
    assert sizes == [2] * 4


def test_with_full_capacity_and_an_open_gate_nothing_changes() -> None:
    dense = load_model("gym-nano").model
    model = converted(capacity=1.0, every=1, router_loss_weight=0.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.router.weight.zero_()  # a gate of 2 * sigmoid(0) = 1
    torch.testing.assert_close(model.train()(ids()).logits, dense(ids()).logits)


def test_padding_does_not_reach_the_words_before_it() -> None:
    model = converted(every=1)
    row = ids(12, 1)
    padded = torch.cat([row, torch.full((1, 5), 3)], 1)
    mask = torch.cat([torch.ones(1, 12), torch.zeros(1, 5)], 1).long()
    alone = model(row).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, :12], alone)
    both = model(torch.cat([padded, ids(17, 1)]), attention_mask=torch.cat([mask, torch.ones(1, 17).long()]))
    torch.testing.assert_close(both.logits[:1, :12], alone)


def test_outside_of_training_no_word_depends_on_a_later_one() -> None:
    model = converted(every=1)
    row = ids(16, 1)
    other = row.clone()
    other[0, 10:] = 91
    torch.testing.assert_close(model(row).logits[:, :10], model(other).logits[:, :10])
    model.train()
    assert (model(row).logits[:, :10] - model(other).logits[:, :10]).abs().max() > 1e-3


def test_the_routers_own_loss_reaches_the_router_only_and_with_its_weight() -> None:
    gradients = {}
    for weight in (0.0, 0.1, 0.2):
        model = converted(router_loss_weight=weight, every=4).train()
        model(ids(), labels=ids()).loss.backward()
        layer = model.model.layers[3]
        gradients[weight] = layer.router.weight.grad.clone(), model.lm_head.weight.grad.clone()
    added = [gradients[w][0] - gradients[0.0][0] for w in (0.1, 0.2)]
    assert added[0].norm() > 0
    torch.testing.assert_close(added[1], 2 * added[0])
    for weight in (0.1, 0.2):  # nothing else hears of it
        torch.testing.assert_close(gradients[weight][1], gradients[0.0][1])


@pytest.mark.slow  # three runs
def test_it_learns_saves_loads_trains_on_and_generates(tmp_path: Path) -> None:
    settings = TrainingConfig(
        model="gym-nano",
        output_dir=tmp_path / "run",
        mixture_of_depths={"capacity": 0.25, "every": 2},
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        max_length=48,
        device="cpu",
        num_threads=1,
    )
    rows = generate("copy", 960)
    result = Trainer(settings).train(rows)
    assert sum(result.losses[-10:]) / 10 < 0.5 * result.losses[0]
    loaded = load_model(str(tmp_path / "run"))
    torch.testing.assert_close(loaded.model(ids()).logits, result.model(ids()).logits)
    assert loaded.model.model.layers[1].router.weight.abs().sum() > 0
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert (written["model_type"], written["base_model_type"]) == ("gym_mixture_of_depths", "qwen3")
    with pytest.raises(ValueError, match="gym_mixture_of_depths"):  # never taken for a dense model
        AutoModelForCausalLM.from_pretrained(tmp_path / "run")

    again = settings.model_copy(
        update={
            "model": str(tmp_path / "run"),
            "output_dir": tmp_path / "on",
            "mixture_of_depths": None,
            "max_steps": 2,
        }
    )
    trained_on = Trainer(again).train(rows)
    assert trained_on.losses[0] < result.losses[0]
    assert load_model(str(tmp_path / "on")).model.config.mixture_of_depths["every"] == 2
    with pytest.raises(GymError, match="already has routers"):
        Trainer(
            settings.model_copy(update={"model": str(tmp_path / "run"), "output_dir": tmp_path / "no"})
        ).train(rows)

    written_by_hand = loaded.model.generate(ids(6, 1), max_new_tokens=4, do_sample=False)
    assert written_by_hand.shape == (1, 10) or written_by_hand[0, -1] == loaded.tokenizer.eos_token_id
    with pytest.raises(GymError, match="no key-value cache"):
        loaded.model.generate(ids(6, 1), max_new_tokens=2, use_cache=True)
    with pytest.raises(GymError, match="no key-value cache"):
        loaded.model(ids(6, 1), use_cache=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetuning": "lora"}, "would not train the routers"),
        ({"algorithm": "reward_model"}, "reward_model needs a model"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "cannot compile"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(GymError, match=words) as caught:
        Trainer(TrainingConfig(model="gym-nano", mixture_of_depths={}, **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_model_with_too_few_blocks_is_refused() -> None:
    with pytest.raises(GymError, match="has 4 blocks, and every 5th"):
        converted(every=5)
