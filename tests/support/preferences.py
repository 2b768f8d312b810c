"""Pairs that prefer capitals, and how strongly a model does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.rows.answers import encode_answers
from gym_fed.training.trainer import Trainer


def capitals(count: int, seed: int, *, chat: bool = True) -> list[dict[str, Any]]:
    """Pairs of a word in capitals (chosen) and in small letters, as messages or plain text."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=4)) for _ in range(count)]
    if not chat:
        return [{"prompt": f"say {word}: ", "chosen": word.upper(), "rejected": word} for word in words]
    return [
        {
            "prompt": [{"role": "user", "content": f"say {word}"}],
            "chosen": [{"role": "assistant", "content": word.upper()}],
            "rejected": [{"role": "assistant", "content": word}],
        }
        for word in words
    ]


ROWS = capitals(48, 0)
HELD_OUT = capitals(16, 1)
UNEVEN = [{**row, "rejected": [{"role": "assistant", "content": "no no no"}]} for row in capitals(8, 0)]


def config(folder: Path, algorithm: str, **changes: Any) -> TrainingConfig:
    values = {
        "algorithm": algorithm,
        "output_dir": folder,
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def train(base: Path, settings: TrainingConfig, rows: Any = ROWS, held_out: Any = None, **hooks: Any) -> Any:
    loaded = load_model(str(base))
    return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(rows, held_out)


def margins(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Mean log-probability of each chosen answer less that of the rejected one, ``[n]``, in nats per token."""
    values = []
    for row in encode_answers(tokenizer, rows, ("chosen", "rejected")):
        scores = []
        for key in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[key]])
            with torch.no_grad():
                log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
            token = log_probs.gather(-1, ids[:, 1:, None])[0, len(row["prompt_ids"]) - 1 :, 0]
            scores.append(token.mean())
        values.append(scores[0] - scores[1])
    return torch.stack(values)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
