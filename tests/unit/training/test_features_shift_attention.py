"""LongLoRA's shifted attention: equal to a straight one with a mask written out, causal, and for training only."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gym_fed.base.modeling.shift_attention import group_size, register_shift_attention, shifted_attention
from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.training.features.shift_attention import ShiftAttention
from gym_fed.training.trainer import Trainer


def straight(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, size: int
) -> torch.Tensor:
    """Every pair of tokens looked at; a head at a time, in float64."""
    batch, heads, length, width = query.shape
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            shift = 0 if h < heads // 2 else size // 2
            for i in range(length):
                seen = [
                    j
                    for j in range(i + 1)
                    if (j - shift) // size == (i - shift) // size
                    and (allowed is None or bool(allowed[b, 0, i, j]))
                ]
                if seen:
                    scores = query[b, h, i] @ key[b, h, seen].T / math.sqrt(width)
                    out[b, h, i] = torch.softmax(scores, -1) @ value[b, h, seen]
    return out


def states(length: int, heads: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, length, 6, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    ("length", "size", "heads"), [(16, 4, 4), (17, 4, 4), (13, 5, 2), (8, 8, 4), (9, 4, 1), (3, 2, 3)]
)
def test_it_equals_attention_with_the_groups_written_out(length: int, size: int, heads: int) -> None:
    query, key, value = states(length, heads)
    out = shifted_attention(query, key, value, None, size=size)
    torch.testing.assert_close(out, straight(query, key, value, None, size))


def test_it_equals_that_under_padding_and_packed_rows_too() -> None:
    query, key, value = states(14)
    position = torch.arange(14)
    row = torch.tensor([[0] * 6 + [1] * 8, [0] * 11 + [1] * 3])  # the second has three padded tokens
    allowed = (row[:, :, None] == row[:, None, :]) & (position[:, None] >= position)
    allowed[1, :, 11:] = False
    allowed = allowed.unsqueeze(1)
    out = shifted_attention(query, key, value, allowed, size=4)
    expected = straight(query, key, value, allowed, 4)
    torch.testing.assert_close(out[0], expected[0])
    torch.testing.assert_close(out[1, :, :11], expected[1, :, :11])
    assert torch.isfinite(out).all()


def test_no_token_sees_a_later_one_or_one_beyond_its_group() -> None:
    query, key, value = states(16)
    key, value = key.requires_grad_(), value.requires_grad_()
    out = shifted_attention(query, key, value, None, size=4)
    for half, shift in ((slice(0, 2), 0), (slice(2, 4), 2)):
        for i in range(16):
            (reached,) = torch.autograd.grad(out[:, half, i].sum(), value, retain_graph=True)
            seen = {j for j in range(16) if reached[:, half, j].abs().sum() > 0}
            assert seen == {j for j in range(i + 1) if (j - shift) // 4 == (i - shift) // 4}


def test_a_model_attends_in_groups_while_training_and_to_everything_afterwards() -> None:
    model = load_model("gym-nano").model
    ids = torch.randint(40, 90, (1, 32), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = 91
    full = model(ids).logits
    model.set_attn_implementation(register_shift_attention(0.25))
    torch.testing.assert_close(model(ids).logits, full)
    model.train()
    assert (model(ids).logits - full).abs().max() > 0.1
    # Four blocks, each of which carries a word at most half a group further in the shifted heads.
    grouped = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
    assert grouped[:8].max() > 0
    model.set_attn_implementation(register_shift_attention(0.0625))
    near = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
    assert near[1] > 0
    assert near[10:].max() == 0
    model.eval()
    assert (model(ids).logits - model(other).logits).abs().amax(-1)[0, 31] > 0


def test_training_with_it_learns_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    losses = {}
    shifted = {"shift_attention": {"group_size_ratio": 0.25}}
    for name, steps, extra in (("plain", 1, {}), ("shifted", 20, shifted)):
        loaded = load_model("gym-nano")
        settings = TrainingConfig(
            output_dir=tmp_path / name,
            max_steps=steps,
            per_device_train_batch_size=8,
            max_length=64,
            device="cpu",
            num_threads=1,
            save_final=False,
            learning_rate=2e-3,
            **extra,
        )
        trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer)
        losses[name] = trainer.train(generate("double", 160)).losses
        assert loaded.model.config._attn_implementation == "sdpa"
    assert losses["shifted"][0] != losses["plain"][0]
    assert sum(losses["shifted"][-5:]) / 5 < 0.7 * losses["shifted"][0]


def test_group_sizes_and_what_is_refused() -> None:
    assert [group_size(n, 0.25) for n in (1, 4, 100, 101)] == [2, 2, 25, 26]
    with pytest.raises(GymError, match="shift_attention: ppo generates"):
        ShiftAttention().check(TrainingConfig(algorithm="ppo", shift_attention={}))
