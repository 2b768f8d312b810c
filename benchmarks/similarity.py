"""Similarity of honest updates, and of one contributor's updates under two keys, to choose a threshold.

    python benchmarks/similarity.py [--quick] [--json]

Real training of small models: gym-nano on text tasks, stories260K on Shakespeare's speakers where the team's folder is
there. The cosine is that of ``gym_fed.soup.screening`` on dense updates and on the same written as signs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from _report import SHARED, Report, options
from _sequences import Delta, Sequences, encoded, opened, speeches, trained

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.data.generated import generate
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.soup.screening import Comparison, compare

CONTRIBUTORS = 4
THRESHOLD = 0.9
CODECS = {
    "dense": CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False),
    "signs": CodecPolicy(codec="bitdelta", error_feedback=False),
}
TASKS = ("copy", "double", "reverse", "upper", "vowels", "last")


def main() -> None:
    parser = options(__doc__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("similarity")
    most = 0.0
    for name, (model, like, unlike) in _scenes().items():
        for steps in (3,) if arguments.quick else (3, 20, 50):
            base = {n: t.detach().clone() for n, t in model_tensors(model).items()}
            honest = [trained(model, text, steps, 1e-3, 8, 0) for text in like]
            others = [trained(model, text, steps, 1e-3, 8, 0) for text in unlike]
            again = [trained(model, like[0], steps, 1e-3, 8, seed) for seed in range(CONTRIBUTORS)]
            for codec in CODECS:
                for what, deltas in (("like", honest), ("unlike", others), ("again", again)):
                    low, high = _range(base, deltas, codec)
                    key = f"{name}_{steps}_steps_{what}_data_{codec}"
                    report.figure(f"{key}_min", low)
                    report.figure(f"{key}_max", high)
                    print(f"{name}, {steps} steps, {what} data, {codec}: {low:.2f} to {high:.2f}", flush=True)
                    if what != "again":
                        most = max(most, high)
    report.aim("the most alike honest pair, below the threshold", most, THRESHOLD)
    report.finish(arguments)


def _scenes(count: int = CONTRIBUTORS) -> dict[str, tuple[Any, list[Sequences], list[Sequences]]]:
    """By name a model, ``count`` texts of one kind, and as many of different kinds."""
    nano = load_model("gym-nano")

    def task(name: str, seed: int) -> Sequences:
        return encoded(nano.tokenizer, generate(name, 64, seed=seed), 96)

    found = {
        "gym-nano": (
            nano.model,
            [task("copy", seed) for seed in range(count)],
            [task(name, 0) for name in TASKS[:count]],
        )
    }
    if SHARED.is_dir():
        stories = load_model(str(SHARED / "models" / "stories260K"))
        speakers = [encoded(stories.tokenizer, rows, 96) for rows in speeches(SHARED, count)]
        whole = [row for speaker in speakers for row in speaker]
        shards = [whole[i::count] for i in range(count)]
        found["stories260K"] = (stories.model, shards, speakers)
    return found


def _range(base: Delta, deltas: list[Delta], codec: str) -> tuple[float, float]:
    """The least and the largest similarity of a pair."""
    alike = _compared(base, deltas, codec).similarity
    pairs = [alike[i, j] for i, j in itertools.combinations(range(len(deltas)), 2)]
    return float(np.min(pairs)), float(np.max(pairs))


def _compared(base: Delta, deltas: list[Delta], codec: str) -> Comparison:
    spec = BaseSpec.of(base, "base")
    with opened(deltas, CODECS[codec], spec) as files:
        return compare(files, spec)


if __name__ == "__main__":
    main()
