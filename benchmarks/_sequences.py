"""Token sequences for training and measuring, a plain AdamW loop, and deltas as opened files."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.data import encode_rows
from gym_fed.data.encoding import IGNORED
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_source
from gym_fed.delta.file import DeltaFile

Delta = dict[str, Tensor]
Sequences = list[tuple[Tensor, Tensor]]
"""Pairs of token ids and labels, ``[t]`` each."""


def speeches(shared: Path, count: int | None = None) -> list[list[dict[str, Any]]]:
    """Return the rows of each Shakespeare speaker, most prolific first."""
    file = shared / "data" / "shakespeare_by_speaker" / "speakers.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [[{"text": speech} for speech in json.loads(line)["speeches"]] for line in lines]


def encoded(
    tokenizer: Any, rows: list[dict[str, Any]], length: int, packing: bool | None = None
) -> Sequences:
    """Tokenise rows; rows of ``text`` are packed unless ``packing`` is False."""
    packs = "text" in rows[0] if packing is None else packing
    found = encode_rows(tokenizer, rows, max_length=length, packing=packs)
    return [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in found]


@torch.inference_mode()
def loss_of(model: Any, sequences: Sequences) -> float:
    parts = [summed_loss(model, sequences[at : at + 32]) for at in range(0, len(sequences), 32)]
    return sum(float(total) for total, _ in parts) / sum(count for _, count in parts)


def summed_loss(model: Any, sequences: Sequences) -> tuple[Tensor, int]:
    """Return the summed cross entropy of a padded batch, and the number of labels."""
    losses, labels = row_losses(model, sequences)
    return losses.sum(), int((labels != IGNORED).sum())


def row_losses(model: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return the ``[n, t]`` cross entropy and labels of a right-padded batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([ids for ids, _ in sequences], batch_first=True)
    labels = pad([labels for _, labels in sequences], batch_first=True, padding_value=IGNORED)[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].transpose(1, 2).float()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none"), labels


def train(
    model: Any, rows: Sequences, steps: int, rate: float, batch: int, seed: int = 0, cycle: bool = False
) -> None:
    """Train all parameters that require gradients with AdamW, at a constant rate or in one cycle to zero."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1) if cycle else None
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(rows), (batch,), generator=generator).tolist()
        optimizer.zero_grad()
        total, count = summed_loss(model, [rows[i] for i in chosen])
        torch.autograd.backward(total / count)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    model.eval()


def trained(model: Any, rows: Sequences, steps: int, rate: float, batch: int, seed: int) -> Delta:
    """Return the delta that ``train`` adds to a copy of the model."""
    tuned = copy.deepcopy(model)
    train(tuned, rows, steps, rate, batch, seed)
    before = model_tensors(model)
    return {name: (tensor - before[name]).detach() for name, tensor in model_tensors(tuned).items()}


@contextmanager
def opened(deltas: Sequence[Delta], codec: CodecPolicy, spec: BaseSpec) -> Iterator[list[DeltaFile]]:
    with tempfile.TemporaryDirectory(prefix="gym-deltas-") as folder, ExitStack() as stack:
        files = []
        for number, delta in enumerate(deltas):
            path = Path(folder) / f"{number}.gymdelta"
            encode_source(delta.__getitem__, codec, path, spec)
            files.append(stack.enter_context(DeltaFile.open(path, spec)))
        yield files
