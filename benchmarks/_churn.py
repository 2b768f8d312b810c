"""One-bit variants under a Zipf load, with a cache for a part of them, for the part ``churn`` of variants.py."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import Report

from gym_fed.config.serving import EngineConfig
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.base import load_base
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.bulk import IncomingVariant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey

AIM = 2.0
PROMPT, ANSWER = 16, 2
SIDES = ("all resident", "churn")
BUSY = 0.4
"""Share of the time for which the requests would keep the engine busy one by one."""
SHARE = 0.15
"""Of the variants for which the cache has room."""
BATCH = 20
"""Variants that are added at once, so that few files are there twice."""


@dataclass(frozen=True)
class Arrival:
    """A request: when, and for which variant."""

    seconds: float
    name: str


def churn(report: Report, folder: Path, model: str, count: int, requests: int, runs: int) -> None:
    """The same requests with every variant in memory that they name, and with a cache for ``SHARE`` of all variants.

    Before each run the files leave the page cache, so that a variant which is not in memory comes from the disk.
    """
    _say(f"loading {model}")
    loaded, tokenizer, base = load_base(model, [], "bfloat16", plain=True)
    names = [f"v{number}" for number in range(count)]
    first: dict[str, list[float]] = {side: [] for side in SIDES}
    gap = 0.0
    with MultiVariantModel(loaded, kernel="auto", base_format="auto") as served:
        size = _added(report, folder, base, served, names)
        caches = dict(zip(SIDES, (size * (count + 1), math.ceil(SHARE * count) * size), strict=True))
        for run in range(runs):
            order = list(caches.items())
            for side, cache_bytes in order if run % 2 == 0 else reversed(order):
                _drop_pages(folder / "churn")
                store = VariantStore.open(
                    folder / "churn", base=base, layout=served.layout, cache_bytes=cache_bytes
                )
                with store, Engine(served, tokenizer, store, EngineConfig()) as engine:
                    gap = gap or _alone(engine, names[0]) / BUSY
                    trace = _trace(names, requests, gap, run)
                    _warm(store, names, trace, side, run)
                    _say(f"run {run + 1} of {runs}, {side}: {requests} requests in {trace[-1].seconds:.0f} s")
                    before, cpu = store.stats(), time.process_time()
                    found = _answered(engine, trace)
                    after, cpu = store.stats(), time.process_time() - cpu
                misses = after.misses - before.misses
                assert (misses > 0) == (side == "churn"), (side, misses)
                first[side] += found
                key = f"churn_run_{run}_{side.replace(' ', '_')}"
                for percent in (50, 90, 99):
                    report.figure(f"{key}_p{percent}_ms", 1e3 * _percentile(found, percent))
                report.figure(f"{key}_cpu_s", cpu)
                if misses:
                    loads = max(1, after.loads - before.loads)
                    report.figure(f"{key}_misses_of_100", 100 * misses / requests)
                    report.figure(f"{key}_load_ms", 1e3 * (after.load_seconds - before.load_seconds) / loads)
    report.figure("churn_variants", count)
    report.figure("churn_requests_of_a_side", requests * runs)
    report.figure("churn_bytes_of_a_variant", size)
    report.figure("churn_seconds_between_requests", gap)
    for percent in (50, 90, 99):
        ours, peer = (1e3 * _percentile(first[side], percent) for side in reversed(SIDES))
        report.compare(f"churn: p{percent} of the first token", ours, peer, unit="ms")
    times = _percentile(first["churn"], 99) / _percentile(first["all resident"], 99)
    report.aim("churn: p99 of the first token, times all resident", figure=times, aim=AIM, better="lower")


def _say(text: str) -> None:
    print(f"churn, {time.strftime('%H:%M:%S')}: {text}", file=sys.stderr, flush=True)


def _added(report: Report, folder: Path, base: BaseSpec, served: MultiVariantModel, names: list[str]) -> int:
    """Add a variant of every name; returns the bytes that one takes in memory."""
    key, began = SigningKey.generate(), time.monotonic()
    with VariantStore.open(folder / "churn", base=base, layout=served.layout) as store:
        files = _files(folder, base, names)
        done = 0
        while batch := list(islice(files, BATCH)):
            store.add_all([IncomingVariant(file, file.stem, key.contributor) for file in batch], key)
            for file in batch:
                file.unlink()
            done += len(batch)
            if done % (5 * BATCH) == 0 or done == len(names):
                _say(f"{done} of {len(names)} variants added")
        report.figure("churn_seconds_to_add_them", time.monotonic() - began)
        variant = store.acquire(names[0])
        store.release(variant)
    return variant.resident_bytes


def _drop_pages(folder: Path) -> None:
    """Leave the files to the disk: what was written is synced already."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in folder.rglob("*.gymdelta"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


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
