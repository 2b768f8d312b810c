"""One side of ``soup.py`` in its own process: every rule on the same updates, with its time and memory.

    python benchmarks/_soup_sides.py SIDE N D ANSWERS RULES [BYZFL]

SIDE is ``ours``, ``flower-ten``, ``flower-one`` (arrays of an update), ``byzfl-torch``, ``byzfl-numpy``,
``byzfl-columns`` (numpy, contiguous by coordinate), or ``packed``; RULES are names with commas, or ``all``. Every rule
first runs on a hundredth of the coordinates, and its result is stored in the folder ANSWERS (``-`` stores none). The
last line of the output is a JSON object from rule to ``[seconds, MB]`` of one run, where MB is the peak increase of
resident memory, without the updates.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from gym_quant import kernels
from torch import Tensor

import gym_fed.core.library_env  # noqa: F401  (sets Flower's environment before its first import)
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.merging import inner_products
from gym_fed.soup.pipeline import Pipeline
from gym_fed.soup.stacks import BLOCK_ELEMENTS, mixed, stacks_of

PARTS, COLS = 10, 1000  # number of tensors in a model, and of their columns
Case = tuple[str, Callable[[], object]]


def main() -> None:
    """Measure one side once, with a small run of each rule before it as warm-up, whose answer is stored."""
    side, n, d, answers, rules = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    if side.startswith("byzfl"):
        sys.path[:0] = [sys.argv[6]]
    wanted = None if rules == "all" else set(rules.split(","))
    for name, run in cases_of(side, n, max(PARTS * COLS, d // 100)):
        if wanted is None or name in wanted:
            answer = run()
            if answers != "-":
                np.save(Path(answers) / f"{side} {name}.npy", flat(answer))
    found = {}
    for name, run in cases_of(side, n, d):
        if wanted is None or name in wanted:
            found[name] = measured(run)
    print(json.dumps(found))


def cases_of(side: str, n: int, d: int) -> Iterator[Case]:
    """Yield the cases of a side; each form of a peer is a separate side."""
    peer, _, form = side.partition("-")
    if peer == "flower":
        return flower_cases(n, d, 1 if form == "one" else PARTS)
    if peer == "byzfl":
        return byzfl_cases(n, d, form)
    return {"ours": our_cases, "packed": packed_cases}[peer](n, d)


def flat(answer: Any) -> np.ndarray[Any, Any]:
    """Flatten an aggregate to one vector; empty if it is written to a file."""
    if isinstance(answer, Tensor):
        answer = answer.numpy()
    if isinstance(answer, np.ndarray):
        return answer.reshape(-1)
    if isinstance(answer, list):  # Flower's arrays, whose names are numbers
        return np.concatenate([part.numpy().reshape(-1) for part in answer])
    return np.zeros(0)


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds, and the peak increase of resident memory in megabytes (0 except on Linux)."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # memory that glibc caches would hide growth
        if trim is not None:
            trim(0)
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # resets the high-water mark to the current resident memory
    before = _memory("VmRSS")
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return seconds, max(0.0, _memory("VmHWM") - before)


def _memory(field: str) -> float:
    status = Path("/proc/self/status")
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1000 if found else 0.0


def updates_of(n: int, d: int) -> Tensor:
    """Return ``[n, d]`` float32 updates, each a common direction plus an individual part."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(d, generator=generator)
    updates = torch.empty(n, d)
    for row in updates:
        torch.randn(d, generator=generator, out=row)
        row.add_(shared).mul_(0.01)
    return updates


def malicious(rule: str, n: int) -> int:
    """Return the number of malicious clients that all sides must withstand: a fifth, or Bulyan's limit n >= 4f + 3."""
    return min(n // 5, (n - 3) // 4) if rule == "bulyan" else n // 5


def recipe_of(rule: str, n: int) -> SoupRecipe:
    """Return our recipe for a rule, which is written as pre-aggregators and an aggregator joined by plus signs."""
    *before, aggregator = rule.split("+")
    robust = rule != "mean"
    return SoupRecipe(
        aggregator=aggregator,
        pre_aggregators=before,
        num_malicious_nodes=malicious(rule, n) if robust else 0,
        codec=CodecPolicy(error_feedback=False),
    )


OURS = (
    "mean",
    "median",
    "trimmed_mean",
    "mean_around_median",
    "krum",
    "multi_krum",
    "bulyan",
    "nnm+trimmed_mean",
)


def our_cases(n: int, d: int) -> Iterator[Case]:
    """Yield our rules on float32 in memory, with the steps and blocks of a merge of decoded updates."""
    updates = updates_of(n, d)
    for rule in OURS:
        pipeline = Pipeline.of(recipe_of(rule, n))
        yield rule, partial(merged, updates, pipeline)


def merged(updates: Tensor, pipeline: Pipeline) -> Tensor:
    """Merge float updates ``[n, d]`` without reading or writing files."""
    n, d = updates.shape
    weights = torch.ones(n, dtype=torch.float64)
    pipeline.check(weights)
    needed = pipeline.needs > Needs.NOTHING
    products = kernels.products(updates) if needed else torch.zeros(n, n, dtype=torch.float64)
    plan = pipeline.plan(GramMatrix(products, weights))
    if not needed or len(plan.matrix) == 1:
        return _combined(updates, plan, pipeline)
    out = torch.empty(d)
    step = max(1, BLOCK_ELEMENTS // n)
    whole = torch.empty(n, step)
    for start in range(0, d, step):
        part = updates[:, start : start + step]
        block = whole.copy_(part) if part.shape[1] == step else part.contiguous()
        out[start : start + step] = _combined(block, plan, pipeline)
    return out


def _combined(block: Tensor, plan: CombinationWeights, pipeline: Pipeline) -> Tensor:
    return pipeline.aggregator.combine(mixed(block, plan.matrix), plan.weights)


def flower_cases(n: int, d: int, parts: int) -> Iterator[Case]:
    """Yield Flower's strategies on new replies of ``parts`` arrays each, since some strategies empty their replies."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import strategy
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # read by messages
    updates = updates_of(n, d).numpy()

    def replies() -> list[Any]:
        made = []
        for node, update in enumerate(updates, start=1):
            arrays = {f"layer{i}": Array(part) for i, part in enumerate(update.reshape(parts, -1))}
            content = RecordDict(
                {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1, "loss": 1.0})}
            )
            made.append(Message(content, dst_node_id=node, message_type="train"))
        return made

    strategies: dict[str, Callable[[], Any]] = {
        "mean": strategy.FedAvg,
        "median": strategy.FedMedian,
        "trimmed_mean": lambda: strategy.FedTrimmedAvg(beta=malicious("trimmed_mean", n) / n + 1e-9),
        "krum": lambda: strategy.Krum(num_malicious_nodes=malicious("krum", n)),
        "multi_krum": lambda: strategy.MultiKrum(
            num_malicious_nodes=malicious("multi_krum", n), num_nodes_to_select=n - malicious("multi_krum", n)
        ),
        "bulyan": lambda: strategy.Bulyan(num_malicious_nodes=malicious("bulyan", n)),
    }
    for rule, build in strategies.items():
        messages = replies()

        def run(build: Callable[[], Any] = build, messages: list[Any] = messages) -> list[Any]:
            arrays = build().aggregate_train(1, messages)[0]
            if arrays is None:
                raise RuntimeError("Flower aggregated nothing")
            return list(arrays.values())

        yield rule, run


def byzfl_cases(n: int, d: int, form: str) -> Iterator[Case]:
    """Yield ByzFL's rules on a torch matrix, or on a numpy matrix in row-major or column-major order.

    ByzFL's top-level package imports CUDA code, so it is bypassed.
    """
    import importlib
    import types

    package = types.ModuleType("byzfl")
    package.__path__ = [str(Path(sys.path[0]) / "byzfl")]
    sys.modules["byzfl"] = package
    rules = importlib.import_module("byzfl.aggregators.aggregators")
    before = importlib.import_module("byzfl.aggregators.preaggregators")
    updates: Any = updates_of(n, d)
    if form != "torch":
        updates = np.asfortranarray(updates.numpy()) if form == "columns" else updates.numpy()
    f = malicious("krum", n)
    yield "mean", lambda: rules.Average()(updates)
    yield "median", lambda: rules.Median()(updates)
    yield "trimmed_mean", lambda: rules.TrMean(f)(updates)
    yield "mean_around_median", lambda: rules.Meamed(f)(updates)
    yield "krum", lambda: rules.Krum(f)(updates)
    yield "multi_krum", lambda: rules.MultiKrum(f)(updates)
    if (
        4 * d * n * (n - f) < psutil.virtual_memory().available / 2
    ):  # it gathers the n - f neighbours of all n updates at once
        yield "nnm+trimmed_mean", lambda: rules.TrMean(f)(before.NNM(f)(updates))
    else:
        print(f"ByzFL's NNM would take {4e-9 * d * n * (n - f):.1f} GB: left out", file=sys.stderr)


PACKED = ("mean", "byzantine_robust", "norm_cap+nnm+trimmed_mean")
MANY = 100  # number of contributors from which NNM, which averages each with nearly all others, is left out


def packed_cases(n: int, d: int) -> Iterator[Case]:
    """Yield our rules on opened files of sign bits, merged into float32 tensors in memory, as peers return them."""
    with opened_signs(n, d) as (updates, spec, _):
        for rule in PACKED if n <= MANY else PACKED[:2]:
            yield rule, partial(merged_signs, updates, recipe_of(rule, n), spec)


def merged_signs(updates: list[DeltaFile], recipe: SoupRecipe, spec: BaseSpec) -> dict[str, Tensor]:
    """Run ``merge`` on opened files, without writing the result."""
    pipeline, weights = Pipeline.of(recipe), torch.ones(len(updates), dtype=torch.float64)
    norms = [update.norm() for update in updates]
    stacks = stacks_of(updates, spec)
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    if pipeline.needs > Needs.NOTHING:
        products = inner_products(stacks, norms)
    plan = pipeline.plan(GramMatrix(products, weights))
    merged = {}
    for stack in stacks:
        merged[stack.name] = torch.empty(stack.shape)
        stack.merge(plan, pipeline.aggregator, merged[stack.name])
    return merged


@contextmanager
def opened_signs(n: int, d: int) -> Iterator[tuple[list[DeltaFile], BaseSpec, Path]]:
    """Yield n opened updates of sign bits, their base, and their folder."""
    spec = BaseSpec(
        "benchmark", "sha256:" + "0" * 64, {f"layer{i}": (d // PARTS // COLS, COLS) for i in range(PARTS)}
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        files = [write_signs(folder / f"{row}.gymdelta", row, spec) for row in range(n)]
        yield [opened.enter_context(DeltaFile.open(file, spec)) for file in files], spec, folder


def write_signs(file: Path, row: int, spec: BaseSpec) -> Path:
    """Write a delta with common signs, of which a random quarter is replaced; return its path."""
    own, shared = np.random.default_rng([1, row]), np.random.default_rng(0)
    entries = []
    for name, shape in spec.shapes.items():
        delta = DeltaEntry.of(name, torch.zeros(shape))
        payload = dict(delta.payload())
        size = payload["bits"].numel()
        flips = np.frombuffer(own.bytes(size), np.uint8) & np.frombuffer(own.bytes(size), np.uint8)
        bits = np.frombuffer(shared.bytes(size), np.uint8) ^ flips
        payload["bits"] = torch.from_numpy(bits).reshape(payload["bits"].shape)
        payload["scales"] = payload["scales"] + 0.01 * (1.0 + own.random())
        entries.append(DeltaEntry(name, shape, delta.codec, delta.params, partial(dict, payload)))
    write_delta(file, entries, spec)
    return file


if __name__ == "__main__":
    main()
