"""A round of gym-nano for the privacy benchmark: contributors train once, and soups are made with any noise.

Every contributor trains on a text task that is new to the base (``dash``) and optionally on secrets of its own: a name
and an unpredictable code. The task measures the utility of a soup, and the secrets measure what it reveals.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import string
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _sequences import Sequences, encoded, loss_of, row_losses
from _smollm2 import chat

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.privacy import LocalPrivacy, ReleasePrivacy
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import LoraRecipe, TrainingRecipe
from gym_fed.data import generate
from gym_fed.data.encoding import IGNORED
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta, lora_delta
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.soup.merging import merge
from gym_fed.soup.private import NoisedFactors, PrivateMerge
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import frozen_factor, lora_factors

TASK = "dash"
LENGTH = 48
SEED = 7
"""Seed of the round, from which all LoRA contributors generate the same A."""


@dataclass(frozen=True)
class Size:
    """A size of delta: the trained parameters and the codec."""

    name: str
    recipe: TrainingRecipe
    codec: CodecPolicy


def sizes(steps: int) -> list[Size]:
    """Return the sizes, from all weights to a few thousand, over which the noise is spread."""

    def lora(rank: int, modules: Any) -> Size:
        recipe = TrainingRecipe(
            finetuning="lora",
            lora=LoraRecipe(r=rank, lora_alpha=2 * rank, target_modules=modules, freeze_a=True),
            max_steps=steps,
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            max_length=LENGTH,
            seed=SEED,
        )
        exact = CodecPolicy(factors="float32", error_feedback=False)
        return Size(f"LoRA r={rank}, {'all' if modules == 'all-linear' else 'q and v'}", recipe, exact)

    full = TrainingRecipe(
        max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=8, max_length=LENGTH, seed=SEED
    )
    signs = CodecPolicy(codec="bitdelta", small_tensors="bitdelta", error_feedback=False)
    return [
        Size("full, 1 bit", full, signs),
        lora(16, "all-linear"),
        lora(4, "all-linear"),
        lora(1, ["q_proj", "v_proj"]),
    ]


def secrets_of(contributor: int, count: int, kind: str = "member") -> list[dict[str, Any]]:
    """Return ``count`` rows with a name and a code, unique to the contributor."""
    draw = random.Random(f"{kind}-{contributor}")
    rows = []
    for _ in range(count):
        name = "".join(draw.choices(string.ascii_lowercase, k=6))
        rows.append(_row(name, "".join(draw.choices(string.ascii_lowercase, k=8))))
    return rows


def other_codes(row: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return rows with the same name and other codes."""
    name = row["messages"][0]["content"].removeprefix("code: ")
    draw = random.Random(f"other-{name}")
    return [_row(name, "".join(draw.choices(string.ascii_lowercase, k=8))) for _ in range(count)]


def _row(name: str, code: str) -> dict[str, Any]:
    return chat(f"code: {name}", code)


class Round:
    """One round, with the contributors' updates on disk and their soups."""

    def __init__(
        self,
        size: Size,
        data: Sequence[list[dict[str, Any]]],
        folder: Path,
        local: LocalPrivacy | None = None,
        start: str = "gym-nano",
        server_round: int = 1,
    ) -> None:
        self.size, self.start, self.server_round = size, start, server_round
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.base = load_model(start)
        self.spec = BaseSpec.of(self.base.model, "gym-nano")
        self.updates = [self._train(index, rows, local) for index, rows in enumerate(data)]

    def _train(self, index: int, rows: list[dict[str, Any]], local: LocalPrivacy | None) -> Path:
        path = self.folder / f"{index}.gymdelta"
        if path.exists():  # a reused folder
            return path
        model = load_model(self.start)
        recipe = self.size.recipe.model_copy(update={"privacy": local})
        with tempfile.TemporaryDirectory() as folder:
            config = round_training(recipe, self.server_round, Path(folder) / "run", device="cpu")
            trained = Trainer(config, model=model.model, tokenizer=model.tokenizer).train(dataset=rows)
        part = path.with_suffix(".part")
        if recipe.sends_factors:
            lora_delta(lora_factors(trained.model), part, self.spec, policy=self.size.codec)
        else:
            encode_delta(trained.model, model_tensors(self.base.model), self.size.codec, part, self.spec)
        return part.rename(path)

    def opened(self) -> list[DeltaFile]:
        return [DeltaFile.open(path, self.spec) for path in self.updates]

    @property
    def tensors(self) -> list[str]:
        if not self.size.recipe.sends_factors:
            return list(self.spec.shapes)
        with DeltaFile.open(self.updates[0], self.spec) as delta:
            return list(delta.names)

    def frozen_a(self, name: str, columns: int) -> torch.Tensor:
        """Return the A that all contributors of the round share."""
        return frozen_factor(SEED + 1, name.removesuffix(".weight"), self.size.recipe.lora.r, columns)

    def median_norm(self) -> float:
        """Return the median of the norms to be clipped."""
        return statistics.median(self.norms())

    def longer_than(self, clip: float) -> float:
        """Return the fraction of updates that a clipping norm shortens."""
        return statistics.mean(norm > clip for norm in self.norms())

    def norms(self) -> list[float]:
        """Return the L2 norms of the updates, or of their B with LoRA."""
        files = self.opened()
        if not self.size.recipe.sends_factors:
            return [file.norm() for file in files]
        stacks = [NoisedFactors(n, files, tuple(self.spec.shapes[n]), self.frozen_a) for n in self.tensors]
        return [math.hypot(*(stack.update_norm(file) for stack in stacks)) for file in files]

    def coordinates(self) -> int:
        """Return the number of values that get noise."""
        if not self.size.recipe.sends_factors:
            return sum(math.prod(shape) for shape in self.spec.shapes.values())
        return sum(self.spec.shapes[name][0] * self.size.recipe.lora.r for name in self.tensors)

    def soup(self, privacy: ReleasePrivacy | None = None, **rule: Any) -> Any:
        """Return the base with the round's soup, from the plain mean, another rule or a private merge."""
        out = self.folder / "soup.gymdelta"
        recipe = SoupRecipe(
            codec=CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False), **rule
        )
        lora = self.size.recipe.sends_factors
        private = None
        if privacy is not None:
            private = PrivateMerge(
                privacy, os.urandom(32), self.tensors, frozen_a=self.frozen_a if lora else None
            )
        files = self.opened()
        merge(files, [1.0] * len(files), recipe, out, self.spec, private=private)
        for file in files:
            file.close()
        model = load_model(self.start).model
        with DeltaFile.open(out, self.spec) as soup:
            apply_delta(model, soup)
        return model

    def loss(self, model: Any, rows: list[dict[str, Any]]) -> float:
        """Return the mean loss over the tokens of the answers."""
        return loss_of(model, self.encoded(rows))

    @torch.inference_mode()
    def losses(self, model: Any, rows: list[dict[str, Any]]) -> np.ndarray:
        """Return the ``[n]`` mean loss of every row over the tokens of its answer."""
        found, sequences = [], self.encoded(rows)
        for at in range(0, len(sequences), 64):
            losses, labels = row_losses(model, sequences[at : at + 64])
            found.append(losses.sum(1) / (labels != IGNORED).sum(1))
        return torch.cat(found).double().numpy()

    def tuned(self, index: int) -> Any:
        """Return the base with one contributor's update, which a hub can inspect."""
        model = load_model(self.start).model
        with DeltaFile.open(self.updates[index], self.spec) as delta:
            apply_delta(model, delta)
        return model

    def encoded(self, rows: list[dict[str, Any]]) -> Sequences:
        return encoded(self.base.tokenizer, rows, LENGTH)


def task_rows(contributor: int, count: int) -> list[dict[str, Any]]:
    """Return rows of the task, distinct for every contributor; contributor -1 is held out."""
    return generate(TASK, count, seed=1000 + contributor)
