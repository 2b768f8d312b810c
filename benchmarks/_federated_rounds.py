"""Rounds of the network in one process: its trainer's steps, its codec with error feedback, its soup; and fp32 FedAvg.

``rounds_by_codec`` does what ``gym-server`` and its contributors do with the same settings, file for file, without
the network; ``rounds_in_fp32`` averages the same contributors' fp32 deltas. ``require_like_trainer`` checks that the
plain loop here ends with the very weights of the project's ``Trainer``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _stacked_llamas import IGNORED, Shape, train_stacked
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.utils.data import BatchSampler
from trl.trainer.utils import add_fused_lm_head

from gym_fed.base.models import load_model, model_name
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import load_rows
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation import heldout_loss
from gym_fed.soup.building import build_optimizer
from gym_fed.soup.merging import merge
from gym_fed.soup.optimizer import OptimizerState
from gym_fed.training.trainer import Trainer
from gym_fed.training.trl_glue import restore_after_run

STACKED_APART = 1e-3
"""How far the stacked loop may end from the trainer after a round, as a share (L2) of what the round changed. Where a
gradient is next to nothing, AdamW makes of float32's rounding a step that can be seen."""


@dataclass(frozen=True)
class Schedule:
    """How many rounds, and how the learning rate falls from one to the next."""

    rounds: int
    decay: float

    def recipe(self, recipe: TrainingRecipe, server_round: int) -> TrainingRecipe:
        """The hub's recipe of one round, when every round before it was committed."""
        rate = recipe.learning_rate * self.decay ** (server_round - 1)
        return recipe.model_copy(update={"learning_rate": rate})


@dataclass
class Contributors:
    """A model, what each contributor trains on, and the rows of others that measure the loss."""

    model: Any
    tokenizer: Any
    data: Sequence[list[dict[str, Any]]]
    heldout: list[dict[str, Any]]
    max_length: int
    name: str
    """What a manifest calls the model: part of an update's header, whose bytes count."""
    _first: dict[tuple[bool, str], list[dict[str, Tensor]]] = field(default_factory=dict)

    @classmethod
    def load(cls, model: Path, files: Sequence[Path], heldout: Path, max_length: int) -> Contributors:
        """From files, as a contributor and a hub read them."""
        loaded = load_model(str(model), dtype="float32", device="cpu")
        data = [load_rows(file) for file in files]
        return cls(
            loaded.model,
            loaded.tokenizer,
            data,
            load_rows(heldout, "text"),
            max_length,
            model_name(str(model)),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.model)

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def loss(self) -> float:
        """Held-out loss in nats per token."""
        return heldout_loss(self.model, self.tokenizer, self.heldout, max_length=self.max_length)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a version's tensors into the model."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def trained(self, recipe: TrainingRecipe, server_round: int, exact: bool) -> list[dict[str, Tensor]]:
        """What each contributor's model becomes in a round that starts from the model's tensors, which stay.

        First rounds start from the base whatever the codec, so they are trained once.
        """
        key = (exact, recipe.model_dump_json())
        if server_round == 1 and key in self._first:
            return self._first[key]
        start = {name: tensor.clone() for name, tensor in self.tensors.items()}
        if exact:
            after = []
            for rows in self.data:
                train(self.model, self.tokenizer, rows, recipe, server_round)
                after.append({name: tensor.clone() for name, tensor in self.tensors.items()})
                self.restore(start)
        else:
            after = self._stacked(start, recipe, server_round)
        if server_round == 1:
            self._first[key] = after
        return after

    def _stacked(
        self, start: Mapping[str, Tensor], recipe: TrainingRecipe, server_round: int
    ) -> list[dict[str, Tensor]]:
        config = round_training(recipe, server_round, Path("unused"), "cpu")
        return train_stacked(
            start,
            Shape.of(self.model.config),
            [_batches(config, self.tokenizer, rows) for rows in self.data],
            recipe.max_steps,
            config.learning_rate,
            (config.adam_beta1, config.adam_beta2),
            config.weight_decay,
            config.max_grad_norm,
        )


@dataclass(frozen=True)
class Course:
    """How a run went: held-out loss before the first round and after each, bytes up of every round's contributors."""

    losses: list[float]
    up_bytes: list[float]
    soups: list[str] = field(default_factory=list)

    def gain(self, at: int | None = None) -> float:
        """Fall of the loss until a round (the last by default)."""
        return self.losses[0] - self.losses[-1 if at is None else at]

    def best_gain(self) -> float:
        return self.losses[0] - min(self.losses)


def rounds_by_codec(
    group: Contributors,
    recipe: TrainingRecipe,
    schedule: Schedule,
    codecs: Sequence[CodecPolicy],
    soup: SoupRecipe,
    exact: bool = False,
) -> Course:
    """Updates by the codec of their round (the last one holds on), merged as contributors and hub do it."""
    start = {name: tensor.clone() for name, tensor in group.tensors.items()}
    base = BaseSpec.of(group.model, group.name)
    losses, sent, digests = [group.loss()], [], []
    optimizer = build_optimizer(soup)
    state = None if optimizer is None else OptimizerState(rule=optimizer.rule)
    with tempfile.TemporaryDirectory(prefix="gym-rounds-") as name:
        folder = Path(name)
        hub = (
            ErrorFeedback.load(folder / "hub.safetensors", base.digest) if soup.codec.error_feedback else None
        )
        for server_round in range(1, schedule.rounds + 1):
            spec = BaseSpec.of(group.model, group.name)
            codec = codecs[min(server_round, len(codecs)) - 1]
            version = {name: tensor.clone() for name, tensor in group.tensors.items()}
            files = []
            every = group.trained(schedule.recipe(recipe, server_round), server_round, exact)
            for index, tuned in enumerate(every):
                files.append(folder / f"{server_round}-{index}.gymdelta")
                residual = (
                    ErrorFeedback.load(folder / f"{index}.safetensors", base.digest)
                    if codec.error_feedback
                    else None
                )
                encode_delta(tuned, version, codec, files[-1], spec, residual=residual)
                if residual is not None:
                    residual.save()
            sent.append(sum(file.stat().st_size for file in files) / len(files))
            with ExitStack() as stack:
                updates = [stack.enter_context(DeltaFile.open(file, spec)) for file in files]
                path = folder / f"soup-{server_round}.gymdelta"
                report = merge(
                    updates,
                    [1.0] * len(updates),
                    soup.for_round(server_round),
                    path,
                    spec,
                    residual=hub,
                    optimizer_state=state,
                )
            if hub is not None:
                hub.save()
            if state is not None:
                state.advance()
            with DeltaFile.open(path, spec) as merged:
                apply_delta(group.model, merged)
            losses.append(group.loss())
            digests.append(report.sha256)
    group.restore(start)
    return Course(losses, sent, digests)


def rounds_in_fp32(
    group: Contributors, recipe: TrainingRecipe, schedule: Schedule, exact: bool = False
) -> Course:
    """FedAvg (McMahan et al. 2017): the mean of the same contributors' fp32 deltas."""
    start = {name: tensor.clone() for name, tensor in group.tensors.items()}
    losses = [group.loss()]
    for server_round in range(1, schedule.rounds + 1):
        version = {name: tensor.clone() for name, tensor in group.tensors.items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in version.items()}
        for tuned in group.trained(schedule.recipe(recipe, server_round), server_round, exact):
            for name, tensor in tuned.items():
                total[name] += tensor - version[name]
        group.restore({name: tensor + total[name] / len(group.data) for name, tensor in version.items()})
        losses.append(group.loss())
    group.restore(start)
    return Course(losses, [4.0 * group.num_weights] * schedule.rounds)


def train(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], recipe: TrainingRecipe, server_round: int
) -> None:
    """The steps of the project's ``Trainer`` on a round's recipe, without its folder, logs and checkpoints."""
    config = round_training(recipe, server_round, Path("unused"), "cpu")
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas, weight_decay=config.weight_decay, fused=True
    )
    batches = _batches(config, tokenizer, rows)
    with restore_after_run(model):
        add_fused_lm_head(model)
        model.train()
        for _ in range(recipe.max_steps):
            batch = _padded(next(batches), tokenizer.pad_token_id or 0)
            counted = (batch["labels"][..., 1:] != IGNORED).sum()
            found = model(**batch, use_cache=False, fused_lm_head=True).log_probs
            torch.autograd.backward(-found.sum() / counted)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    model.eval()


def _batches(config: TrainingConfig, tokenizer: Any, rows: list[dict[str, Any]]) -> Iterator[list[list[int]]]:
    """Batches of rows of ids without end, in the trainer's order: reshuffled every epoch."""
    encoded = ALGORITHMS.new(config.algorithm).encode(config, tokenizer, rows)
    sampler = SeedableRandomSampler(encoded, data_seed=config.seed)
    order = BatchSampler(sampler, config.per_device_train_batch_size, drop_last=False)
    while True:
        for indices in order:
            yield [encoded[index]["input_ids"] for index in indices]


def require_like_trainer(group: Contributors, recipe: TrainingRecipe) -> float:
    """The plain loop ends with the weights of the project's trainer, bit for bit; the stacked one close to them."""
    alone = replace(group, data=group.data[:1], _first={})
    ours, stacked = (alone.trained(recipe, 1, exact)[0] for exact in (True, False))
    start = {name: tensor.clone() for name, tensor in group.tensors.items()}
    with tempfile.TemporaryDirectory(prefix="gym-rounds-") as name:
        config = round_training(recipe, 1, Path(name) / "run", "cpu")
        Trainer(config, model=group.model, tokenizer=group.tokenizer).train(dataset=group.data[0])
    theirs = {name: tensor.clone() for name, tensor in group.tensors.items()}
    group.restore(start)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the plain loop is not the trainer's"
    apart = _distance(stacked, theirs) / _distance(theirs, start)
    assert apart <= STACKED_APART, f"the stacked loop ends {apart:.2g} of a round from the project's trainer"
    return apart


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """L2 over all weights."""
    return math.sqrt(sum(float((first[name] - second[name]).double().square().sum()) for name in first))


def _padded(rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Rows padded to the longest, as the trainer's collator pads them."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = labels[at, : len(row)] = torch.tensor(row)
        mask[at, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
