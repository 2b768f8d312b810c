"""The network's rounds in one process, with its training steps, codec, error feedback and soup; and fp32 FedAvg.

``rounds_by_codec`` produces the same files as ``gym-server`` and its contributors with the same settings, without the
network. ``rounds_in_fp32`` averages the same contributors' fp32 deltas. ``require_like_trainer`` checks that this
module's training loop gives exactly the weights of the project's ``Trainer``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
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
from gym_fed.data.encoding import IGNORED
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.integer_sum import IntegerSum
from gym_fed.evaluation import heldout_loss
from gym_fed.soup.merging import merge
from gym_fed.training.trainer import Trainer
from gym_fed.training.trl_glue import restore_after_run


@dataclass(frozen=True)
class Schedule:
    """The number of rounds, and the decay of the learning rate between them."""

    rounds: int
    decay: float

    def recipe(self, recipe: TrainingRecipe, server_round: int) -> TrainingRecipe:
        """Return the hub's recipe for a round, assuming that all earlier rounds were committed."""
        rate = recipe.learning_rate * self.decay ** (server_round - 1)
        return recipe.model_copy(update={"learning_rate": rate})


@dataclass
class Contributors:
    """A model, the rows of each contributor, and the held-out rows."""

    model: Any
    tokenizer: Any
    data: Sequence[list[dict[str, Any]]]
    heldout: list[dict[str, Any]]
    max_length: int
    name: str
    """Name of the model in manifests, which is part of an update's header and so of its size."""
    _first: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)

    @classmethod
    def load(cls, model: Path, files: Sequence[Path], heldout: Path, max_length: int) -> Contributors:
        """Load the model and the rows from files, as a contributor and a hub do."""
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
        return heldout_loss(self.model, self.tokenizer, self.heldout, max_length=self.max_length)

    def copied(self) -> dict[str, Tensor]:
        """Return a copy of the model's current tensors."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a version's tensors into the model."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def trained(self, recipe: TrainingRecipe, server_round: int) -> list[dict[str, Tensor]]:
        """Return each contributor's tensors after a round from the model's current tensors, which are restored.

        First rounds start from the base with every codec, so they are trained only once.
        """
        key = recipe.model_dump_json()
        if server_round == 1 and key in self._first:
            return self._first[key]
        start, after = self.copied(), []
        for rows in self.data:
            train(self.model, self.tokenizer, rows, recipe, server_round)
            after.append(self.copied())
            self.restore(start)
        if server_round == 1:
            self._first[key] = after
        return after


@dataclass(frozen=True)
class Course:
    """The result of a run: held-out loss before the first round and after each, and bytes per contributor and round."""

    losses: list[float]
    up_bytes: list[float]
    down_bytes: list[float] = field(default_factory=list)
    sum_bytes: int | None = None
    """Size of all soups combined, in bytes, if they are additive."""

    def gain(self) -> float:
        return self.losses[0] - self.losses[-1]

    def best_gain(self) -> float:
        return self.losses[0] - min(self.losses)


def rounds_by_codec(
    group: Contributors,
    recipe: TrainingRecipe,
    schedule: Schedule,
    codec: CodecPolicy,
    soup: SoupRecipe,
) -> Course:
    """Run rounds with updates in the codec, merged as on a hub."""
    start, base = group.copied(), BaseSpec.of(group.model, group.name)
    losses, sent, received, total = [group.loss()], [], [], IntegerSum()
    with tempfile.TemporaryDirectory(prefix="gym-rounds-") as name:
        folder = Path(name)
        for server_round in range(1, schedule.rounds + 1):
            spec, version = BaseSpec.of(group.model, group.name), group.copied()
            files = []
            for index, tuned in enumerate(group.trained(schedule.recipe(recipe, server_round), server_round)):
                files.append(folder / f"{server_round}-{index}.gymdelta")
                residual = ErrorFeedback.load(folder / f"{index}.safetensors", base.digest)
                own = residual if codec.error_feedback else None
                encode_delta(tuned, version, codec, files[-1], spec, residual=own)
                residual.save()
            sent.append(sum(file.stat().st_size for file in files) / len(files))
            with ExitStack() as stack:
                updates = [stack.enter_context(DeltaFile.open(file, spec)) for file in files]
                path = folder / f"soup-{server_round}.gymdelta"
                lost = (
                    ErrorFeedback.load(folder / "soup.safetensors", base.digest)
                    if soup.codec.error_feedback
                    else None
                )
                merge(updates, [1.0] * len(updates), soup.for_round(server_round), path, spec, lost)
                if lost is not None:
                    lost.save()
            received.append(float(path.stat().st_size))
            with DeltaFile.open(path, spec) as merged:
                if soup.codec.adds_up:
                    total.add(merged)
                    group.restore(start)
                    total.apply(group.model)
                else:
                    apply_delta(group.model, merged)
            losses.append(group.loss())
        combined = total.write(folder / "sum", base).size_bytes if soup.codec.adds_up else None
    group.restore(start)
    return Course(losses, sent, received, combined)


def rounds_in_fp32(group: Contributors, recipe: TrainingRecipe, schedule: Schedule) -> Course:
    """Run FedAvg (McMahan et al. 2017) on the mean of the same contributors' fp32 deltas."""
    start, losses = group.copied(), [group.loss()]
    for server_round in range(1, schedule.rounds + 1):
        version = group.copied()
        every = group.trained(schedule.recipe(recipe, server_round), server_round)
        mean = {name: sum(tuned[name] - old for tuned in every) / len(every) for name, old in version.items()}
        group.restore({name: tensor + mean[name] for name, tensor in version.items()})
        losses.append(group.loss())
    group.restore(start)
    return Course(losses, [4.0 * group.num_weights] * schedule.rounds)


def train(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], recipe: TrainingRecipe, server_round: int
) -> None:
    """Run the steps of the project's ``Trainer`` with a round's recipe, without its folder, logs and checkpoints."""
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
    """Yield batches of token id rows endlessly, in the trainer's order, reshuffled every epoch."""
    encoded = ALGORITHMS.new(config.algorithm).encode(config, tokenizer, rows)
    sampler = SeedableRandomSampler(encoded, data_seed=config.seed)
    order = BatchSampler(sampler, config.per_device_train_batch_size, drop_last=False)
    while True:
        for indices in order:
            yield [encoded[index]["input_ids"] for index in indices]


def require_like_trainer(group: Contributors, recipe: TrainingRecipe) -> None:
    """Check that the loop in this module gives the same weights as the project's trainer, bit for bit."""
    start = group.copied()
    ours = replace(group, data=group.data[:1], _first={}).trained(recipe, 1)[0]
    with tempfile.TemporaryDirectory(prefix="gym-rounds-") as name:
        config = round_training(recipe, 1, Path(name) / "run", "cpu")
        Trainer(config, model=group.model, tokenizer=group.tokenizer).train(dataset=group.data[0])
    same = all(torch.equal(ours[name], tensor) for name, tensor in group.tensors.items())
    group.restore(start)
    assert same, "the loop is not the trainer's"


def _padded(rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Pad rows to the longest one, like the trainer's collator."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = labels[at, : len(row)] = torch.tensor(row)
        mask[at, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
