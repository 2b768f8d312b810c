"""Rounds of gym-nano for the privacy benchmark: contributors who train once, and soups of their updates at any noise.

Every contributor learns a text task that the base has never seen (``dash``) and, where it is asked to, secrets of its
own: a name and a code that nothing predicts. The task shows what a soup is good for, the secrets what it gives away.
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
"""Seed of the round, so that LoRA contributors share A."""


@dataclass(frozen=True)
class Size:
    """A kind of delta: what is trained, and how it is written down."""

    name: str
    recipe: TrainingRecipe
    codec: CodecPolicy


def sizes(steps: int) -> list[Size]:
    """From every weight to a few thousand: what the noise is spread over."""

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
    """``count`` rows of a name and a code, drawn by nobody else."""
    draw = random.Random(f"{kind}-{contributor}")
    rows = []
    for _ in range(count):
        name = "".join(draw.choices(string.ascii_lowercase, k=6))
        rows.append(_row(name, "".join(draw.choices(string.ascii_lowercase, k=8))))
    return rows


def other_codes(row: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The same name with codes that it does not have."""
    name = row["messages"][0]["content"].removeprefix("code: ")
    draw = random.Random(f"other-{name}")
    return [_row(name, "".join(draw.choices(string.ascii_lowercase, k=8))) for _ in range(count)]


def _row(name: str, code: str) -> dict[str, Any]:
    return chat(f"code: {name}", code)


class Round:
    """One round: contributors' updates on disk, and soups of them."""

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
        if path.exists():  # a folder that was kept
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
        """The A that all contributors of the round share."""
        return frozen_factor(SEED + 1, name.removesuffix(".weight"), self.size.recipe.lora.r, columns)

    def median_norm(self) -> float:
        """The median of the norms that are clipped."""
        return statistics.median(self.norms())

    def longer_than(self, clip: float) -> float:
        """Share of the updates that a clip shortens."""
        return statistics.mean(norm > clip for norm in self.norms())

    def norms(self) -> list[float]:
        """Return the L2 norms of the updates; with LoRA, of their B."""
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
        """The base with the soup added: the plain mean or another rule, or a private one."""
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
        """Mean loss over the tokens of the answers."""
        return loss_of(model, self.encoded(rows))

    @torch.inference_mode()
    def losses(self, model: Any, rows: list[dict[str, Any]]) -> np.ndarray:
        """Mean loss of every row over the tokens of its answer, ``[n]``."""
        found, sequences = [], self.encoded(rows)
        for at in range(0, len(sequences), 64):
            losses, labels = row_losses(model, sequences[at : at + 64])
            found.append(losses.sum(1) / (labels != IGNORED).sum(1))
        return torch.cat(found).double().numpy()

    def tuned(self, index: int) -> Any:
        """The base with one contributor's update added: what a hub can look at."""
        model = load_model(self.start).model
        with DeltaFile.open(self.updates[index], self.spec) as delta:
            apply_delta(model, delta)
        return model

    def encoded(self, rows: list[dict[str, Any]]) -> Sequences:
        return encoded(self.base.tokenizer, rows, LENGTH)


def task_rows(contributor: int, count: int) -> list[dict[str, Any]]:
    """Rows of the task, others for every contributor; -1 is held out."""
    return generate(TASK, count, seed=1000 + contributor)
