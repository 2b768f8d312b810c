"""One-bit variants under a Zipf load, with a cache for a part of them, for the part ``churn`` of variants.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import Report

from gym_fed.config.serving import EngineConfig
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.identity.keys import SigningKey
from gym_fed.serving.base import load_base
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.bulk import IncomingVariant
from gym_fed.serving.store.store import VariantStore

AIM = 2.0
PROMPT, ANSWER = 32, 4
BUSY = 0.4
"""Share of the time for which the requests would keep the engine busy one by one."""
SHARE = 0.15
"""Of the variants for which the cache has room."""


@dataclass(frozen=True)
class Arrival:
    """A request: when, and for which variant."""

    seconds: float
    name: str


def churn(report: Report, folder: Path, model: str, count: int, requests: int, runs: int) -> None:
    """The same requests with every variant in memory that they name, and with a cache for ``SHARE`` of all variants."""
    loaded, tokenizer, base = load_base(model, [], "bfloat16", plain=True)
    key = SigningKey.generate()
    with MultiVariantModel(loaded, kernel="auto", base_format="auto") as served:
        names = [f"v{number}" for number in range(count)]
        with VariantStore.open(folder / "churn", base=base, layout=served.layout) as store:
            for file in _files(folder, base, names):
                store.add_all([IncomingVariant(file, file.stem, key.contributor)], key)
                file.unlink()
            variant = store.acquire(names[0])
            size = variant.resident_bytes
            store.release(variant)
        caches = {"all resident": size * (count + 1), "churn": math.ceil(SHARE * count) * size}
        first: dict[str, list[float]] = {side: [] for side in caches}
        gap = 0.0
        for run in range(runs):
            for side, cache_bytes in caches.items():
                with (
                    VariantStore.open(
                        folder / "churn", base=base, layout=served.layout, cache_bytes=cache_bytes
                    ) as store,
                    Engine(served, tokenizer, store, EngineConfig()) as engine,
                ):
                    gap = gap or _alone(engine, names[0]) / BUSY
                    trace = _trace(names, requests, gap, run)
                    _warm(store, names, trace, side, run)
                    before = store.stats()
                    found = _answered(engine, trace)
                    after = store.stats()
                misses = after.misses - before.misses
                assert (misses > 0) == (side == "churn"), (side, misses)
                first[side].append(_percentile(found, 99))
                report.figure(
                    f"churn_run_{run}_{side.replace(' ', '_')}_p50_ms", 1e3 * _percentile(found, 50)
                )
                report.figure(f"churn_run_{run}_{side.replace(' ', '_')}_p99_ms", 1e3 * first[side][-1])
                if side == "churn":
                    loads = max(1, after.loads - before.loads)
                    report.figure(f"churn_run_{run}_misses_of_100", 100 * misses / requests)
                    report.figure(
                        f"churn_run_{run}_load_ms", 1e3 * (after.load_seconds - before.load_seconds) / loads
                    )
    report.figure("churn_variants", count)
    report.figure("churn_bytes_of_a_variant", size)
    report.figure("churn_seconds_between_requests", gap)
    p99 = {side: statistics.median(found) for side, found in first.items()}
    report.compare("churn: p99 of the first token", 1e3 * p99["churn"], 1e3 * p99["all resident"], unit="ms")
    times = p99["churn"] / p99["all resident"]
    report.aim("churn: p99 of the first token, times all resident", figure=times, aim=AIM, better="lower")


def _files(folder: Path, base: BaseSpec, names: list[str]) -> Iterator[Path]:
    """One-bit deltas of every matrix, which differ in their last signs; each is made when it is wanted."""
    generator = torch.Generator().manual_seed(0)
    entries = [
        DeltaEntry.of(name, 1e-3 * torch.randn(shape, generator=generator), "bitdelta")
        for name, shape in base.shapes.items()
        if len(shape) == 2
    ]
    first = folder / f"{names[0]}.gymdelta"
    write_delta(first, entries, base)
    content = first.read_bytes()
    yield first
    for number, name in enumerate(names[1:], 1):
        path = folder / f"{name}.gymdelta"
        path.write_bytes(content[:-8] + number.to_bytes(8, "little"))
        yield path


def _trace(names: list[str], requests: int, gap: float, seed: int) -> list[Arrival]:
    """Variants by Zipf's law (exponent 1) at random times."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(names) + 1)
    chosen = random.choice(len(names), requests, p=weights / weights.sum())
    times = np.cumsum(random.exponential(gap, requests))
    return [Arrival(float(at), names[number]) for at, number in zip(times, chosen, strict=True)]


def _warm(store: VariantStore, names: list[str], trace: list[Arrival], side: str, seed: int) -> None:
    """Bring in what the requests name; for the smaller cache what requests before them would have left there."""
    wanted = {one.name for one in trace}
    if side == "churn":
        before = _trace(names, 4 * len(names), 0.0, seed + 1000)
        kept = dict.fromkeys(one.name for one in reversed(before))
        wanted = set(list(kept)[: math.ceil(SHARE * len(names))])
    for name in wanted:
        store.release(store.acquire(name))


def _alone(engine: Engine, name: str) -> float:
    """Seconds of a request that has the engine for itself, its variant in memory."""
    return min(engine.submit(_request(name, number)).result(60).seconds for number in range(3))


def _request(name: str, number: int) -> GenerationRequest:
    ids = np.random.default_rng(number).integers(10, 200, PROMPT).tolist()
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    return GenerationRequest(ids, sampling, name, user=f"{name}-{number}")


def _answered(engine: Engine, trace: list[Arrival]) -> list[float]:
    """Seconds to the first token of every request, each submitted at its time."""
    began = time.monotonic()
    running: list[Any] = []
    for number, one in enumerate(trace):
        time.sleep(max(0.0, began + one.seconds - time.monotonic()))
        running.append(engine.submit(_request(one.name, number)))
    return [one.result(120).seconds_to_first_token for one in running]


def _percentile(found: list[float], percent: int) -> float:
    return float(np.percentile(found, percent, method="higher"))
