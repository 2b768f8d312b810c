"""FlowerTune's protocol, reduced for two CPU cores: data, clients, model, local training and scores of both sides."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _sequences import Sequences, encoded, speeches
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from gym_fed.base.models import load_model
from gym_fed.data.encoding import IGNORED

CLIENTS, FRACTION, MALICIOUS = 20, 0.1, 2
SAMPLED = int(CLIENTS * FRACTION)
STEPS = 10
TARGETS = ("q_proj", "v_proj")
"""The modules of a Llama that PEFT, and so FlowerTune, adapts by default."""
REVERSED = -8.0
"""Factor by which malicious clients multiply their honest update."""
FEWEST_LABELS = 8
SPEAKERS = 25


@dataclass(frozen=True)
class Setup:
    """A model and the training settings of its clients."""

    model: Path
    rank: int
    batch: int
    length: int
    rows: int
    """Rows per client."""
    heldout: int
    root: int
    """Number of clean rows on the hub."""

    @property
    def alpha(self) -> int:
        return 2 * self.rank


@dataclass(frozen=True)
class Plan:
    """The settings of one run: seed, number of rounds, and whether two clients are malicious."""

    seed: int
    rounds: int
    attacked: bool

    @property
    def sampled(self) -> list[list[int]]:
        """Return the clients of each round, numbered from 1, as Flower samples them after ``random.seed(seed)``."""
        draw = random.Random(self.seed)
        return [draw.sample(range(1, CLIENTS + 1), SAMPLED) for _ in range(self.rounds)]

    @property
    def malicious(self) -> set[int]:
        draw = random.Random(1000 + self.seed)
        return set(draw.sample(range(1, CLIENTS + 1), MALICIOUS)) if self.attacked else set()

    @property
    def attacks(self) -> int:
        """Return the number of malicious updates in the run."""
        return sum(client in self.malicious for sampled in self.sampled for client in sampled)


class Federation:
    """The model with its LoRA, and the randomly distributed rows of all clients."""

    def __init__(self, setup: Setup, plan: Plan, shared: Path) -> None:
        self.setup, self.plan = setup, plan
        self.tokenizer = load_model(str(setup.model)).tokenizer
        base = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32)
        lora = LoraConfig(
            r=setup.rank, lora_alpha=setup.alpha, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(base, lora)
        texts = [row for speaker in speeches(shared, SPEAKERS) for row in speaker]
        packed = encoded(self.tokenizer, texts, setup.length)
        rows = [row for row in packed if int((row[1] != IGNORED).sum()) >= FEWEST_LABELS]
        random.Random(plan.seed).shuffle(rows)
        self.heldout, rows = rows[: setup.heldout], rows[setup.heldout :]
        self.root, rows = rows[: setup.root], rows[setup.root :]
        assert len(rows) >= CLIENTS * setup.rows, f"there are {len(rows)} rows for the clients"
        each = setup.rows
        self.data = {client: rows[(client - 1) * each : client * each] for client in range(1, CLIENTS + 1)}
        self.trained_steps = 0

    def start_lora(self, seed: int) -> None:
        """Draw A, and set B to zero."""
        torch.manual_seed(seed)
        for layer in self.layers.values():
            layer.reset_lora_parameters("default", True)

    @property
    def layers(self) -> dict[str, LoraLayer]:
        named = self.model.get_base_model().named_modules()
        return {name: layer for name, layer in named if isinstance(layer, LoraLayer)}

    def train(self, rows: Sequences, rate: float, server_round: int, client: int) -> None:
        """Run a client's AdamW steps of a round, on batches that depend on seed, round and client."""
        generator = torch.Generator().manual_seed((self.plan.seed * 1000 + server_round) * 100 + client)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
        self.model.train()
        for _ in range(STEPS):
            chosen = torch.randint(len(rows), (self.setup.batch,), generator=generator).tolist()
            total, count = self.summed_loss([rows[at] for at in chosen])
            torch.autograd.backward(total / count)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.trained_steps += STEPS
        self.model.eval()

    def summed_loss(self, rows: Sequences) -> tuple[Tensor, int]:
        """Return the summed cross entropy of a right-padded batch, and the number of labels.

        The head is computed only at positions with a label, which saves a third of a step.
        """
        ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
        labels = pad_sequence([labels for _, labels in rows], batch_first=True, padding_value=IGNORED)[:, 1:]
        base = self.model.get_base_model()
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        counted = labels != IGNORED
        logits = base.lm_head(hidden[counted]).float()
        return torch.nn.functional.cross_entropy(logits, labels[counted], reduction="sum"), int(counted.sum())

    @torch.no_grad()
    def loss(self, rows: Sequences | None = None) -> float:
        """Return the mean loss per label, by default of the held-out rows."""
        rows = self.heldout if rows is None else rows
        parts = [self.summed_loss(rows[at : at + 8]) for at in range(0, len(rows), 8)]
        return sum(float(total) for total, _ in parts) / sum(count for _, count in parts)


def reversed_update(before: Tensor, after: Tensor) -> Tensor:
    """Return what a malicious client sends instead of ``after``."""
    return before + REVERSED * (after - before)
