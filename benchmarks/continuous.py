"""Continuous rounds against synchronous ones: loss over simulated time, and four fast malicious clients of twenty.

    python benchmarks/continuous.py [--seeds 101 102 103] [--quick] [--json] [--plot FILE] [--cells FILE]
        [--shared FOLDER] [--only learning|attacked]

Twenty contributors train stories260K on Shakespeare speakers. Their speeds differ by up to a factor of ten
(log-uniform), and time is simulated: the fastest takes about 1 unit per task. Training, one-bit files with error
feedback, the admitted weight, the window and the soup are the package's own. The held-out loss is measured on speakers
that nobody trains on.

The peer is rounds that wait for everybody. The four fastest clients are malicious. They know the latest honest updates,
and send the negated mean, or the mean shifted by one standard deviation (ALIE). "Without them" is the same run with the
other sixteen. ``--cells FILE`` stores finished runs, and a later call resumes from it.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from _federated_learning import one_thread, speaker_sets
from _report import Report, kept, options
from _sequences import Delta, Sequences, encoded, loss_of, trained
from torch import Tensor

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.merging import merge, window_plan
from gym_fed.soup.window import MOST_SHARES, RoundWindow, staleness_weight

SPEAKERS, MALICIOUS, MERGE_EVERY, MAX_STALENESS = 20, 4, 8, 20
LENGTH, BATCH, STEPS, RATE, HELDOUT_ROWS = 64, 4, 10, 2e-3, 96
SYNC_ROUNDS, ATTACK_TIME = 4, 10.0
SEEN_HONEST = 16
"""Number of latest honest updates known to malicious clients."""

CODEC = CodecPolicy(
    codec="bitdelta", group_size="auto", small_tensors="bitdelta", scale_dtype="bfloat16", scale_gain=1.33
)
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


@dataclass(frozen=True)
class Arm:
    """The settings of one run: ``merge_every`` None waits for everybody, ``window`` False uses only the round's
    updates.
    """

    merge_every: int | None = MERGE_EVERY
    attack: str = ""
    window: bool = True
    robust: bool = False
    without: int = 0
    """Number of fastest contributors that are left out."""


@dataclass
class Speaker:
    """A contributor: its rows, its mean time per task, and the version of its current task."""

    number: int
    rows: Sequences
    seconds: float
    malicious: bool = False
    tasks: int = 0
    version: int = 0
    start: Any = None


@dataclass
class Community:
    """The contributors, the global model and its versions, in one process."""

    seed: int
    arm: Arm
    folder: Path
    shared: Path
    heldout: Sequences = field(default_factory=list)
    speakers: list[Speaker] = field(default_factory=list)
    latest: dict[int, Path] = field(default_factory=dict)
    honest: list[Delta] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self.model = load_model(str(self.shared / "models" / "stories260K"), dtype="float32", device="cpu")
        sets = speaker_sets(self.shared / "data" / "shakespeare_by_speaker" / "speakers.jsonl")
        tokenizer = self.model.tokenizer

        def rows(texts: list[str]) -> Sequences:
            return encoded(tokenizer, [{"text": text} for text in texts], LENGTH)

        people = [
            texts for name in ("first", "second", "choice") for texts in sets[name].contributors.values()
        ]
        held = rows([text for texts in sets["first"].heldout.values() for text in texts])
        order = np.random.default_rng(7).permutation(len(held))[:HELDOUT_ROWS]
        self.heldout = [held[i] for i in order]
        self.clock = np.random.default_rng(self.seed)
        spread = np.linspace(0, 1, SPEAKERS)
        self.clock.shuffle(spread)
        fastest = set(np.argsort(spread)[:MALICIOUS].tolist())
        self.speakers = [
            Speaker(i, rows(people[i]), 10.0 ** spread[i], bool(self.arm.attack) and i in fastest)
            for i in range(SPEAKERS)
            if not (self.arm.without and i in fastest)
        ]
        self.tensors: dict[str, Tensor] = model_tensors(self.model.model)
        self.spec = BaseSpec.of(self.tensors, "stories260K")
        most = MALICIOUS if self.arm.window else MERGE_EVERY // 5  # the rule does not tolerate 4 of 8
        f = most if self.arm.robust else 0
        rule = "byzantine_robust" if self.arm.robust else "mean"
        self.recipe = SoupRecipe(aggregator=rule, num_malicious_nodes=f, codec=EXACT)

    def seconds(self, speaker: Speaker) -> float:
        return speaker.seconds * float(self.clock.uniform(0.9, 1.1))

    def give_task(self, speaker: Speaker) -> None:
        """Give the contributor a task with the current version."""
        speaker.version = self.version
        speaker.start = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def update(self, speaker: Speaker) -> Path:
        """Train from the version of the task, and write the update in the same way as a contributor."""
        speaker.tasks += 1
        path = self.folder / f"{speaker.number}-{speaker.tasks}.gymdelta"
        if speaker.malicious:
            encode_source(self._lie().__getitem__, _without_feedback(), path, self.spec)
            return path
        now = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._put(speaker.start)
        seed = 100_000 * self.seed + 1000 * speaker.number + speaker.tasks
        delta = trained(self.model.model, speaker.rows, STEPS, RATE, BATCH, seed)
        self._put(now)
        feedback = ErrorFeedback.load(self.folder / f"{speaker.number}.residual", "stories260K")
        encode_source(delta.__getitem__, CODEC, path, self.spec, feedback)
        feedback.save()
        with DeltaFile.open(path, self.spec) as file:
            self.honest = [*self.honest, {name: file.decode(name) for name in file.names}][-SEEN_HONEST:]
        return path

    def merge(self, sent: dict[int, tuple[Path, int]]) -> None:
        """Merge the updates (path and staleness by contributor) into the next version."""
        out = self.folder / "soup.gymdelta"
        with ExitStack() as stack:
            files, window = self._opened(stack, sent)
            used = None if self.arm.merge_every is None else window
            merge(files, [1.0] * len(files), self.recipe, out, self.spec, window=used)
            soup = stack.enter_context(DeltaFile.open(out, self.spec))
            for name in soup.names:
                self.tensors[name].add_(soup.decode(name))
        self.version += 1
        self.latest |= {number: path for number, (path, _) in sent.items()}

    def admitted_weight(self, sent: dict[int, tuple[Path, int]]) -> float:
        """Return the admitted weight as in ``ContinuousPace``; 0 while the window is too small for the rule."""
        by_age = sum(staleness_weight(age) for _, age in sent.values())
        if not self.arm.window or self.arm.merge_every is None:
            return by_age
        if MOST_SHARES * by_age < self.arm.merge_every:
            return 0.0
        if len({*sent, *self.latest}) < 2 * self.recipe.num_malicious_nodes + 1:
            return 0.0
        with ExitStack() as stack:
            files, window = self._opened(stack, sent)
            return sum(window_plan(files, [1.0] * len(files), self.recipe, self.spec, window)[1])

    def loss(self) -> float:
        return loss_of(self.model.model, self.heldout)

    def _opened(
        self, stack: ExitStack, sent: dict[int, tuple[Path, int]]
    ) -> tuple[list[DeltaFile], RoundWindow]:
        files = [stack.enter_context(DeltaFile.open(path, self.spec)) for path, _ in sent.values()]
        left = [path for number, path in self.latest.items() if number not in sent] if self.arm.window else []
        others = [stack.enter_context(DeltaFile.open(path, self.spec)) for path in left]
        every = self.arm.merge_every or len(files)
        return files, RoundWindow(every, [age for _, age in sent.values()], others, [1.0] * len(others))

    def _lie(self) -> Delta:
        if not self.honest:
            return {name: torch.randn_like(tensor) * 1e-4 for name, tensor in self.tensors.items()}
        stacked = {name: torch.stack([one[name] for one in self.honest]) for name in self.tensors}
        mean = {name: rows.mean(0) for name, rows in stacked.items()}
        if self.arm.attack == "flip":
            lie = {name: -tensor for name, tensor in mean.items()}
        else:
            lie = {name: mean[name] - rows.std(0, correction=0) for name, rows in stacked.items()}
        wanted = float(np.median([_norm(one) for one in self.honest]))
        factor = wanted / _norm(lie)
        return {name: tensor * factor for name, tensor in lie.items()}

    def _put(self, values: Delta) -> None:
        for name, tensor in values.items():
            self.tensors[name].copy_(tensor)


def _norm(delta: Delta) -> float:
    return float(sum(float(tensor.square().sum()) for tensor in delta.values()) ** 0.5)


def _without_feedback() -> CodecPolicy:
    return CODEC.model_copy(update={"error_feedback": False})


def course(shared: Path, seed: int, arm: Arm, until: float, steps: int) -> dict[str, Any]:
    """Run one arm: ``steps`` rounds, or a continuous run until the simulated time ``until``."""
    with tempfile.TemporaryDirectory(prefix="gym-continuous-") as folder:
        world = Community(seed, arm, Path(folder), shared)
        found = _synchronous(world, steps) if arm.merge_every is None else _continuous(world, until)
    print(f"seed {seed}, {arm}: {found['curve'][-1]}", file=sys.stderr, flush=True)
    return found


def _synchronous(world: Community, rounds: int) -> dict[str, Any]:
    now, curve = 0.0, [(0.0, world.loss())]
    for _ in range(rounds):
        now += max(world.seconds(speaker) for speaker in world.speakers)
        for speaker in world.speakers:
            world.give_task(speaker)
        world.merge({speaker.number: (world.update(speaker), 0) for speaker in world.speakers})
        curve.append((now, world.loss()))
    return {"curve": curve, "staleness": [0.0, 0.0]}


def _continuous(world: Community, until: float) -> dict[str, Any]:
    assert world.arm.merge_every is not None
    curve, ages, of = [(0.0, world.loss())], [], {speaker.number: speaker for speaker in world.speakers}
    for speaker in world.speakers:
        world.give_task(speaker)
    queue = [(world.seconds(speaker), speaker.number) for speaker in world.speakers]
    heapq.heapify(queue)
    sent: dict[int, tuple[Path, int]] = {}
    while queue:
        now, number = heapq.heappop(queue)
        if now > until:
            break
        age = world.version - of[number].version
        if age <= MAX_STALENESS:
            sent[number] = (world.update(of[number]), age)
        if queue and world.admitted_weight(sent) < world.arm.merge_every:
            continue
        world.merge(sent)
        ages += [age for _, age in sent.values()]
        curve.append((now, world.loss()))
        for one in [*sent, *({number} - sent.keys())]:
            world.give_task(of[one])
            heapq.heappush(queue, (now + world.seconds(of[one]), one))
        sent = {}
    return {"curve": curve, "staleness": [fmean(ages), float(max(ages))] if ages else [0.0, 0.0]}


@dataclass(frozen=True)
class Cells:
    """A cache of finished runs, which runs the missing ones."""

    file: Path | None
    shared: Path

    def course(self, seed: int, arm: Arm, until: float, rounds: int) -> Any:
        """Return a run from the file, or run it and add it to the file."""
        key = {"seed": seed, "arm": asdict(arm), "until": round(until, 6), "rounds": rounds}
        return kept(self.file, key, lambda: course(self.shared, seed, arm, until, rounds))


def reached(curve: list[list[float]], loss: float) -> float:
    """Return the time of the first version at or below a loss; infinite if there is none."""
    return next((at for at, value in curve if value <= loss), float("inf"))


def learning(report: Report, cells: Cells, seeds: list[int], quick: bool) -> None:
    """Report the time until the loss of the synchronous rounds is reached."""
    rounds = 1 if quick else SYNC_ROUNDS
    shares = []
    for seed in seeds:
        waits = cells.course(seed, Arm(merge_every=None), 0.0, rounds)["curve"]
        end = 0.45 * waits[-1][0]
        found = cells.course(seed, Arm(), end, 0)
        at = reached(found["curve"], waits[-1][1])
        shares.append(at / waits[-1][0])
        report.compare(f"seed {seed}: time to loss {waits[-1][1]:.3f}", at, waits[-1][0])
        report.figure(f"seed_{seed}_staleness_mean", found["staleness"][0])
        report.figure(f"seed_{seed}_last_loss_continuous", found["curve"][-1][1])
    report.aim("largest share of the synchronous time to the same loss", max(shares), 0.4)


def attacked(report: Report, cells: Cells, seeds: list[int], quick: bool) -> None:
    """Report the final loss under four fast malicious clients, with and without the window."""
    until, worst = (3.0 if quick else ATTACK_TIME), []
    for seed in seeds:
        clean = cells.course(seed, Arm(robust=True, without=MALICIOUS), until, 0)["curve"][-1][1]
        for attack in ("flip", "alie"):
            arm = Arm(robust=True, attack=attack)
            under = cells.course(seed, arm, until, 0)["curve"][-1][1]
            alone = cells.course(seed, Arm(robust=True, attack=attack, window=False), until, 0)["curve"][-1][
                1
            ]
            report.compare(
                f"seed {seed}, {attack}: last loss, window (ours) or not", under, alone, unit="nats"
            )
            worst.append(under / clean - 1.0)
        report.figure(f"seed_{seed}_loss_without_malicious", clean)
    report.aim("largest rise of the loss by four fast malicious clients", max(worst), 0.04)


def main() -> None:
    parser = options(__doc__, "cells", "shared", seeds=[101, 102, 103])
    parser.add_argument("--only", choices=["learning", "attacked"], help="one half of the runs")
    args: argparse.Namespace = parser.parse_args()
    one_thread()
    cells = Cells(args.cells, args.shared)
    seeds = args.seeds[:1] if args.quick else args.seeds
    report = Report("continuous", peer="synchronous, or the rule without a window")
    if args.only != "attacked":
        learning(report, cells, seeds, args.quick)
    if args.only != "learning":
        attacked(report, cells, seeds, args.quick)
    report.finish(args)


if __name__ == "__main__":
    main()
