"""Pre-training together: a small Llama from scratch by 8 workers, against data-parallel training and fp32 averaging.

    python benchmarks/pretraining.py [--seeds 1 2 3] [--quick] [--json] [--plot FILE] [--cells FILE]
        [--shared FOLDER] [--only learned|attacked]

The text is GSM8K's training set in tokens of stories260K, whose first 192 rows are held out. Every worker takes 2,000
inner steps. Learning rates, and the outer rate and momentum, are chosen per method on TinyStories with 400 steps; rates
are doubled or halved until the best one is neither the first nor the last.

The peers are data-parallel fp32, which sends a gradient every step, and the fp32 average of the weights every H steps.
Files of updates, error feedback, merges and the outer optimiser are the package's own. Two malicious workers are added,
20% of 10. They know the honest updates, and send the negated mean, or the mean shifted by one standard deviation
(ALIE); the decoded file has the median norm. The peer under attack is the plain mean; our rule is the hub's default
without clean rows. Soups are exact here; bytes are those of updates, including headers. ``--cells FILE`` stores
finished runs, which are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from _federated_learning import one_thread
from _report import Report, kept, options, show
from _stacked_llama import Shape, Workers, losses
from torch import Tensor

from gym_fed.base.models import load_tokenizer
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.soup.building import build_optimizer
from gym_fed.soup.merging import merge
from gym_fed.soup.optimizer import OptimizerState

SHAPE = Shape(hidden=32, mlp=96, layers=2, heads=2, kv_heads=2)
WORKERS, MALICIOUS, EVERY = 8, 2, 10
STEPS, CHOOSING_STEPS, WARMUP = 2000, 400, 40
ROWS, LENGTH, HELDOUT_ROWS = 2, 32, 192
CHOOSING_SEED = 900
RATES = (6e-3, 1.2e-2, 2.4e-2)
"""Initial grid of learning rates, extended while the best one is at an end."""

OUTER = ((0.7, 0.9), (1.0, 0.5), (0.5, 0.5))
"""Pairs of outer learning rate and momentum: DiLoCo's, and more conservative ones for few rounds."""

ATTACKS = ("sign flip", "ALIE")
RULE = "byzantine_evidence"
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
ONE_BIT = CodecPolicy(codec="bitdelta", small_tensors="bitdelta", scale_dtype="bfloat16")
SPARSE = CodecPolicy(codec="sparse_sign", small_tensors="sparse_sign")


@dataclass(frozen=True)
class Arm:
    """The settings of one method of joint training; ``codec`` is None for data-parallel training."""

    codec: str | None
    rate: float = 0.0
    outer: tuple[float, float] | None = None
    attack: str = ""
    rule: str = "mean"

    @property
    def policy(self) -> CodecPolicy:
        return {"fp32": EXACT, "one bit": ONE_BIT, "sparse": SPARSE}[str(self.codec)]

    @property
    def recipe(self) -> SoupRecipe:
        values: dict[str, Any] = {"codec": EXACT}
        if self.outer is not None:
            values["server_optimizer"] = "nesterov"
            values["server_learning_rate"] = self.outer[0]
            values["server_optimizer_options"] = {"momentum": self.outer[1]}
        if self.rule != "mean":
            values.update(aggregator=self.rule, num_malicious_nodes=MALICIOUS)
        return SoupRecipe(**values)


METHODS = {
    "data-parallel fp32": Arm(None),
    "fp32 averaging": Arm("fp32"),
    "DiLoCo": Arm("fp32", outer=OUTER[0]),
    "one bit": Arm("one bit"),
    "sparse_sign": Arm("sparse", outer=OUTER[0]),
}


@dataclass
class Federation:
    """The workers and the global model, in one process."""

    arm: Arm
    seed: int
    steps: int
    pool: Tensor
    heldout: Tensor
    folder: Path
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = SHAPE.initial(self.seed)
        self.spec = BaseSpec.of(self.model, "scratch")
        self.workers = Workers(self.model, SHAPE, 1 if self.arm.codec is None else WORKERS)
        optimizer = build_optimizer(self.arm.recipe)
        self.state = None if optimizer is None else OptimizerState(rule=optimizer.rule)
        order = np.random.default_rng(self.seed).permutation(len(self.pool))
        self._order = np.resize(order, self.steps * ROWS * WORKERS)

    def run(self) -> dict[str, Any]:
        """Run the training; return the final held-out loss, and the bytes uploaded per worker."""
        for step in range(self.steps):
            rows = self.pool[self._order[step * ROWS * WORKERS :][: ROWS * WORKERS]]
            self.workers.step(rows.view(self.workers.number, -1, LENGTH + 1), self._rate(step))
            if self.arm.codec is None:
                self.sent.append(4 * self.spec.num_parameters)
            elif (step + 1) % EVERY == 0:
                self._merge()
        if self.arm.codec is None:
            self.model = {name: w[0].detach() for name, w in self.workers.weights.items()}
        with torch.no_grad():
            stacked = {name: w[None] for name, w in self.model.items()}
            loss = float(losses(stacked, SHAPE, self.heldout[None])[0])
        return {"loss": loss, "bytes": sum(self.sent)}

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a half cosine to a tenth."""
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps))
        return self.arm.rate * min(1.0, (step + 1) / WARMUP) * cosine

    def _merge(self) -> None:
        paths = []
        for number, delta in enumerate(self.workers.deltas(self.model)):
            paths.append(self.folder / f"{number}.gymdelta")
            residual = None
            if self.arm.policy.error_feedback:
                residual = ErrorFeedback.load(self.folder / f"{number}.residual", self.spec.digest)
            encode_source(delta.__getitem__, self.arm.policy, paths[-1], self.spec, residual)
            if residual is not None:
                residual.save()
        self.sent.append(paths[0].stat().st_size)
        with ExitStack() as stack:
            files = [stack.enter_context(DeltaFile.open(path, self.spec)) for path in paths]
            if self.arm.attack:
                lie = self._lie(files)
                files += [stack.enter_context(DeltaFile.open(lie, self.spec)) for _ in range(MALICIOUS)]
            soup, ones = self.folder / "soup.gymdelta", [1.0] * len(files)
            merge(files, ones, self.arm.recipe, soup, self.spec, optimizer_state=self.state)
        if self.state is not None:
            self.state.advance()
        with DeltaFile.open(soup, self.spec) as file:
            apply_delta(self.model, file)
        self.workers.load(self.model)

    def _lie(self, files: Sequence[DeltaFile]) -> Path:
        """Write the malicious update, computed from the decoded honest updates, with their median norm."""
        honest = {name: torch.stack([file.decode(name) for file in files]) for name in self.spec.shapes}
        if self.arm.attack == "sign flip":
            lie = {name: -updates.mean(0) for name, updates in honest.items()}
        else:
            lie = {name: updates.mean(0) - updates.std(0) for name, updates in honest.items()}
        path, policy = self.folder / "lie.gymdelta", without_feedback(self.arm.policy)
        encode_source(lie.__getitem__, policy, path, self.spec)
        with DeltaFile.open(path, self.spec) as file:  # the codec changes its norm
            factor = median(file.norm() for file in files) / file.norm()
        encode_source(lambda name: lie[name] * factor, policy, path, self.spec)
        return path


def without_feedback(policy: CodecPolicy) -> CodecPolicy:
    return policy.model_copy(update={"error_feedback": False, "feedback_decay": None})


def sample_digest(policy: CodecPolicy) -> str:
    """Return the digest of a fixed update's file, which identifies the codec's implementation."""
    delta = Shape(hidden=64, layers=1).initial(0)
    with tempfile.TemporaryDirectory(prefix="gym-pretraining-") as folder:
        path = Path(folder) / "sample.gymdelta"
        encode_source(delta.__getitem__, without_feedback(policy), path, BaseSpec.of(delta, "sample"))
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def corpus(shared: Path, name: str) -> Tensor:
    """Return ``[rows, LENGTH + 1]`` tokens of a text."""
    if name == "gsm8k":
        lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        texts = ["\n".join(json.loads(line)[key] for key in ("question", "answer")) for line in lines]
    else:
        text = (shared / "data" / "tinystories" / "tinystories.txt").read_text(encoding="utf-8")
        texts = text.split("\n\n")
    tokenizer = load_tokenizer(str(shared / "models" / "stories260K"))
    ids = [token for text in texts for token in [1, *tokenizer(text, add_special_tokens=False)["input_ids"]]]
    return torch.tensor(ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)]).view(-1, LENGTH + 1)


@dataclass(frozen=True)
class Bench:
    """The runs of one call of the script."""

    shared: Path
    cells: Path | None
    seeds: tuple[int, ...]
    steps: int
    choosing_steps: int
    rates: tuple[float, ...] = RATES

    def measured(self, arm: Arm, seed: int, text: str, steps: int) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            rows = corpora.setdefault(text, corpus(self.shared, text))
            with tempfile.TemporaryDirectory(prefix="gym-pretraining-") as folder:
                federation = Federation(
                    arm, seed, steps, rows[HELDOUT_ROWS:], rows[:HELDOUT_ROWS], Path(folder)
                )
                return federation.run()

        name = {**asdict(arm), "seed": seed, "text": text, "steps": steps}
        setting = {
            **asdict(SHAPE),
            "workers": WORKERS,
            "rows": ROWS,
            "length": LENGTH,
            "heldout": HELDOUT_ROWS,
        }
        setting["warmup"] = WARMUP
        if arm.codec is not None:
            policy = arm.policy
            setting |= {"every": EVERY, "policy": policy.model_dump(), "sample": sample_digest(policy)}
        if arm.attack or arm.rule != "mean":
            setting["malicious"] = MALICIOUS
        found: dict[str, Any] = kept(self.cells, {**name, "setting": setting}, make)
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        return found

    def chosen(self, method: str) -> Arm:
        """Return the method with the rates that give the lowest loss on TinyStories."""
        arm, rates = METHODS[method], sorted(self.rates)
        pairs = [None] if arm.outer is None else OUTER

        def loss(one: Arm) -> float:
            cell = self.measured(one, CHOOSING_SEED, "tinystories", self.choosing_steps)
            return float(cell["loss"]) if math.isfinite(cell["loss"]) else math.inf

        best = min((replace(arm, rate=r, outer=p) for r, p in itertools.product(rates, pairs)), key=loss)
        while len(rates) > 1 and best.rate in (rates[0], rates[-1]):
            rates = sorted([*rates, best.rate * (2 if best.rate == rates[-1] else 0.5)])
            best = min((replace(best, rate=rate) for rate in rates), key=loss)
        return best

    def of(self, arm: Arm) -> tuple[list[float], float]:
        """Return the loss on GSM8K for every seed, and the bytes uploaded per worker."""
        found = [self.measured(arm, seed, "gsm8k", self.steps) for seed in self.seeds]
        return [one["loss"] for one in found], fmean(one["bytes"] for one in found)


corpora: dict[str, Tensor] = {}


def learned(report: Report, bench: Bench) -> None:
    """Report every method without malicious workers."""
    arms = {method: bench.chosen(method) for method in METHODS}
    found = {method: bench.of(arm) for method, arm in arms.items()}
    (best, most), averaged = found["data-parallel fp32"], found["fp32 averaging"]
    rows = []
    for method, (seeds, sent) in found.items():
        rate, outer = arms[method].rate, arms[method].outer
        rows.append(
            (
                method,
                f"{rate:g}" + (f"; {outer[0]:g}, {outer[1]:g}" if outer else ""),
                ", ".join(f"{loss:.3f}" for loss in seeds),
                f"{100 * (fmean(seeds) / fmean(best) - 1):.1f}",
                f"{most / sent:.0f}",
            )
        )
        report.figure(f"loss of {method}", fmean(seeds))
        report.figure(f"bytes of {method}", sent)
    show(
        "held-out loss, and bytes up",
        (
            "method",
            "rate; outer rate, momentum",
            "loss per seed",
            "% above data-parallel",
            "times fewer bytes",
        ),
        rows,
    )
    for method in ("one bit", "sparse_sign"):
        seeds, sent = found[method]
        above = 100 * (fmean(seeds) / fmean(averaged[0]) - 1)
        report.aim(f"{method}: % above fp32 averaging", above, 2.0)
        report.aim(f"{method}: times fewer bytes than fp32 averaging", averaged[1] / sent, 30.0, "higher")
        report.aim(f"{method}: % above data-parallel", 100 * (fmean(seeds) / fmean(best) - 1), 10.0)
        report.aim(f"{method}: times fewer bytes than data-parallel", most / sent, 100.0, "higher")


def attacked(report: Report, bench: Bench) -> None:
    """Report the default rule with and without two malicious workers of ten, against the mean under the same attack."""
    mean = bench.chosen("one bit")
    rule = replace(mean, rule=RULE)
    without = fmean(bench.of(mean)[0])
    report.figure("one bit, mean, none malicious", without)
    for attack in ATTACKS:
        loss, under_mean = (fmean(bench.of(replace(arm, attack=attack))[0]) for arm in (rule, mean))
        report.compare(f"one bit, {attack}", loss, under_mean, unit="nats")
        report.aim(f"one bit, {attack}: % above none malicious", 100 * (loss / without - 1), 2.0)


def main() -> None:
    parser = options(__doc__, "cells", "shared", seeds=[1, 2, 3])
    parser.add_argument("--only", choices=["learned", "attacked"], help="one half of the runs")
    args: argparse.Namespace = parser.parse_args()
    one_thread()
    bench = Bench(args.shared, args.cells, tuple(args.seeds), STEPS, CHOOSING_STEPS)
    if args.quick:
        bench = Bench(args.shared, args.cells, tuple(args.seeds[:1]), 100, 20, RATES[:1])
    report = Report("pretraining", peer="mean")
    if args.only != "attacked":
        learned(report, bench)
    if args.only != "learned":
        attacked(report, bench)
    report.finish(args)


if __name__ == "__main__":
    main()
