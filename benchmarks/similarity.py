"""How alike honest updates are, and those of one contributor under two keys: what a threshold can separate.

    python benchmarks/similarity.py [--beyond] [--quick] [--json]

Real training of small models: gym-nano on text tasks, stories260K on Shakespeare's speakers where the team's folder is
there. The cosine is that of ``gym_fed.soup.screening`` on dense updates and on the same written as signs.

``--beyond`` measures pairs against their round instead, as pay does (``gym_fed.soup.screening``): in honest
rounds of three to six contributors, and in rounds of four to six of which one has two to four keys.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import Report, options
from quality import Sequences, summed_loss

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.data import encode_rows
from gym_fed.data.generated import generate
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_source
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.screening import Comparison, beyond, compare

SHARED = Path(__file__).resolve().parents[2] / "shared"
CONTRIBUTORS = 4
THRESHOLD = 0.9
CODECS = {
    "dense": CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False),
    "signs": CodecPolicy(codec="bitdelta", error_feedback=False),
}
TASKS = ("copy", "double", "reverse", "upper", "vowels", "last")
MANY = 6
TOGETHER = RewardsConfig().together_threshold or 0.0

Delta = dict[str, torch.Tensor]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--beyond", action="store_true", help="measure pairs against their round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("similarity")
    if arguments.beyond:
        for name, scene in _scenes(MANY).items():
            for steps in (3,) if arguments.quick else (20, 50):
                _rounds(report, f"{name}, {steps} steps", steps, *scene)
        report.finish(arguments)
        return
    most = 0.0
    for name, (model, like, unlike) in _scenes().items():
        for steps in (3,) if arguments.quick else (3, 20, 50):
            base = {n: t.detach().clone() for n, t in model_tensors(model).items()}
            honest = [_trained(model, text, steps, 0) for text in like]
            others = [_trained(model, text, steps, 0) for text in unlike]
            again = [_trained(model, like[0], steps, seed) for seed in range(CONTRIBUTORS)]
            for codec in CODECS:
                for what, deltas in (("like", honest), ("unlike", others), ("again", again)):
                    low, high = _range(base, deltas, codec)
                    key = f"{name}_{steps}_steps_{what}_data_{codec}"
                    report.figure(f"{key}_min", low)
                    report.figure(f"{key}_max", high)
                    print(f"{name}, {steps} steps, {what} data, {codec}: {low:.2f} to {high:.2f}", flush=True)
                    if what != "again":
                        most = max(most, high)
    report.aim("the most alike honest pair, below the threshold", figure=most, aim=THRESHOLD, better="lower")
    report.finish(arguments)


def _rounds(
    report: Report, what: str, steps: int, model: Any, like: list[Sequences], unlike: list[Sequences]
) -> None:
    base = {n: t.detach().clone() for n, t in model_tensors(model).items()}
    for kind, texts in (("like", like), ("unlike", unlike)):
        honest = [_trained(model, text, steps, seed) for seed, text in enumerate(texts)]
        keys = {"trained anew": [honest[0], *(_trained(model, texts[0], steps, 100 + i) for i in range(3))]}
        keys |= {f"{noise:g} noise": [_noisy(honest[0], noise, i) for i in range(4)] for noise in (0.6, 1.0)}
        everything = [*honest, *(delta for deltas in keys.values() for delta in deltas)]
        for codec in CODECS:
            cosines = _compared(base, everything, codec).cosine
            alone = [
                value
                for n in (3, 4, 5, 6)
                for who in itertools.combinations(range(MANY), n)
                for value in _pairs(beyond(cosines[np.ix_(who, who)]), 0)[1]
            ]
            text = f"{what}, {kind} data, {codec}: honest alone up to {max(alone):.2f}"
            report.figure(f"{what} {kind} {codec} honest", max(alone))
            for place, way in enumerate(keys):
                first = MANY + 4 * place
                linked, beside = list[float](), list[float]()
                for n, count in itertools.product((4, 5, 6), (2, 3, 4)):
                    for who in itertools.combinations(range(1, MANY), n - 1):
                        among = [*range(first, first + count), *who]
                        own, others = _pairs(beyond(cosines[np.ix_(among, among)]), count)
                        linked, beside = linked + own, beside + others
                missed = statistics.mean(value < TOGETHER for value in linked)
                wrong = statistics.mean(value >= TOGETHER for value in beside)
                text += (
                    f"; {way}: {min(linked):.2f} to {max(linked):.2f}, {missed:.0%} missed, others up to "
                    f"{max(beside):.2f}, {wrong:.0%} of their pairs linked"
                )
                report.figure(f"{what} {kind} {codec} {way} missed", missed)
                report.figure(f"{what} {kind} {codec} {way} wrong", wrong)
            print(text, flush=True)


def _pairs(matrix: Any, keys: int) -> tuple[list[float], list[float]]:
    """The pairs within the first ``keys``, and all others."""
    own, others = list[float](), list[float]()
    for i, j in itertools.combinations(range(len(matrix)), 2):
        (own if j < keys else others).append(float(matrix[i, j]))
    return own, others


def _noisy(delta: Delta, share: float, seed: int) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    size = math.sqrt(
        sum(float(t.square().sum()) for t in delta.values()) / sum(t.numel() for t in delta.values())
    )
    return {n: t + share * size * torch.randn(t.shape, generator=generator) for n, t in delta.items()}


def _scenes(count: int = CONTRIBUTORS) -> dict[str, tuple[Any, list[Sequences], list[Sequences]]]:
    """By name a model, ``count`` texts of one kind, and as many of different kinds."""
    nano = load_model("gym-nano")

    def task(name: str, seed: int) -> Sequences:
        return _encoded(nano.tokenizer, generate(name, 64, seed=seed), packing=False)

    found = {
        "gym-nano": (
            nano.model,
            [task("copy", seed) for seed in range(count)],
            [task(name, 0) for name in TASKS[:count]],
        )
    }
    if SHARED.is_dir():
        stories = load_model(str(SHARED / "models" / "stories260K"))
        lines = (SHARED / "data" / "shakespeare_by_speaker" / "speakers.jsonl").read_text(encoding="utf-8")
        speakers = [
            _encoded(stories.tokenizer, [{"text": t} for t in json.loads(line)["speeches"]], packing=True)
            for line in lines.splitlines()[:count]
        ]
        whole = [row for speaker in speakers for row in speaker]
        shards = [whole[i::count] for i in range(count)]
        found["stories260K"] = (stories.model, shards, speakers)
    return found


def _encoded(tokenizer: Any, rows: list[dict[str, Any]], packing: bool) -> Sequences:
    encoded = encode_rows(tokenizer, rows, max_length=96, packing=packing)
    return [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in encoded]


def _trained(model: Any, text: Sequences, steps: int, seed: int) -> Delta:
    tuned = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    tuned.train()
    for _ in range(steps):
        chosen = torch.randint(len(text), (8,), generator=generator).tolist()
        optimizer.zero_grad()
        total, count = summed_loss(tuned, [text[i] for i in chosen])
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    before = model_tensors(model)
    return {name: (tensor - before[name]).detach() for name, tensor in model_tensors(tuned).items()}


def _range(base: Delta, deltas: list[Delta], codec: str) -> tuple[float, float]:
    """The least and the largest similarity of a pair."""
    alike = _compared(base, deltas, codec).similarity
    pairs = [alike[i, j] for i, j in itertools.combinations(range(len(deltas)), 2)]
    return float(np.min(pairs)), float(np.max(pairs))


def _compared(base: Delta, deltas: list[Delta], codec: str) -> Comparison:
    spec = BaseSpec.of(base, "base")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        files = []
        for i, delta in enumerate(deltas):
            path = Path(folder) / f"{i}.gymdelta"
            encode_source(delta.__getitem__, CODECS[codec], path, spec)
            files.append(stack.enter_context(DeltaFile.open(path, spec)))
        return compare(files, spec)


if __name__ == "__main__":
    main()
