"""Similarity of honest updates, and of one contributor's updates under two keys, to choose a threshold.

    python benchmarks/similarity.py [--kinds] [--quick] [--json]

Real training of small models: gym-nano on text tasks, stories260K on Shakespeare's speakers where the team's folder is
there. The cosine is that of ``gym_fed.soup.screening`` on dense updates and on the same written as signs.

``--kinds`` measures whether a first round shows that two keys train on the same rows: cosines of two updates from the
same rows, from other rows of the same kind (a pair of digits, a speaker), and from other kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _digits import image_set
from _report import SHARED, Report, options
from _sequences import Delta, Sequences, encoded, opened, speeches, trained
from torch import Tensor

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
    parser.add_argument("--kinds", action="store_true", help="the same rows, and others of the same kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("similarity")
    if arguments.kinds:
        _kinds(report, arguments.quick)
    else:
        _ranges(report, arguments.quick)
    report.finish(arguments)


def _ranges(report: Report, quick: bool) -> None:
    most = 0.0
    for name, (model, like, unlike) in _scenes().items():
        for steps in (3,) if quick else (3, 20, 50):
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


def _kinds(report: Report, quick: bool) -> None:
    """Report how many pairs of one kind a threshold links that links nine in ten pairs of the same rows."""
    rooms: list[tuple[str, Callable[[int, int, int], Tensor], int, tuple[int, int]]]
    rooms = [("digits", _digits_room, 10, (16, 64))]
    if SHARED.is_dir():
        rooms.append(("stories260K", _stories_room, 2, (32, 128)))
    for name, room, seeds, sizes in rooms:
        for rows, steps in itertools.product(sizes, (5, 20)):
            found: dict[str, list[float]] = {"same rows": [], "same kind": [], "other kind": []}
            for seed in range(1 if quick else seeds):
                updates = torch.nn.functional.normalize(room(rows, steps, seed).double(), dim=-1)
                for i, j in itertools.combinations(range(2 * len(updates)), 2):
                    what = (
                        "same rows" if i // 2 == j // 2 else "same kind" if i // 4 == j // 4 else "other kind"
                    )
                    found[what].append(float(updates[i // 2, i % 2] @ updates[j // 2, j % 2]))
            threshold = np.quantile(found["same rows"], 0.1)
            linked = float(np.mean(found["same kind"] >= threshold))
            setting = f"{name}, {rows} rows, {steps} steps"
            report.figure(f"{setting}: share of the same kind linked", linked)
            for what, cosines in found.items():
                report.figure(f"{setting}, {what}: least", min(cosines))
                report.figure(f"{setting}, {what}: largest", max(cosines))
            ranges = ", ".join(f"{what} {min(c):.2f} to {max(c):.2f}" for what, c in found.items())
            print(f"{setting}: {ranges}; linked {linked:.0%}", flush=True)


def _digits_room(size: int, steps: int, seed: int) -> Tensor:
    """``[8, 2, d]`` updates; every two contributors have different images of the same two digits."""
    images = image_set("digits")
    network, generator = images.network, torch.Generator().manual_seed(seed)
    pixels, labels, start = torch.tensor(images.images), torch.tensor(images.labels), network.first(seed)

    def update(rows: Tensor) -> Tensor:
        weights = start[None]
        for _ in range(steps):
            batch = rows[torch.randint(len(rows), (16,), generator=generator)]
            weights = weights - 0.05 * network.gradient(weights, pixels[batch][None], labels[batch][None])
        return (weights - start)[0]

    parts = list[Tensor]()
    for pair in torch.randperm(10, generator=generator)[:8].view(4, 2):
        rows = torch.isin(labels, pair).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        parts += [rows[:size], rows[size : 2 * size]]
    return torch.stack([torch.stack([update(part), update(part)]) for part in parts])


def _stories_room(size: int, steps: int, seed: int) -> Tensor:
    """``[6, 2, d]`` updates; every two contributors have different texts of the same speaker."""
    loaded, chosen = load_model(str(SHARED / "models" / "stories260K")), np.random.default_rng(seed)
    speakers, parts = speeches(SHARED, 12), list[Sequences]()
    for speaker in chosen.permutation(12)[:3]:
        rows = encoded(loaded.tokenizer, speakers[speaker], 64)
        rows = [rows[place] for place in chosen.permutation(len(rows))]
        half = min(size, len(rows) // 2)
        parts += [rows[:half], rows[half : 2 * half]]

    def update(part: int, key: int) -> Tensor:
        delta = trained(loaded.model, parts[part], steps, 2e-3, 8, 1000 * seed + 10 * part + key)
        return torch.cat([tensor.flatten() for tensor in delta.values()])

    return torch.stack([torch.stack([update(part, 0), update(part, 1)]) for part in range(len(parts))])


if __name__ == "__main__":
    main()
