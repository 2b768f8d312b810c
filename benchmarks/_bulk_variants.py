"""Many small variants of gym-nano for the part ``bulk`` of variants.py, and the time that adding them takes."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch
from _report import Report

from gym_fed.base.models import load_model
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.store.bulk import IncomingVariant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey

LAYER = "model.layers.0."
AIM_SECONDS, AIM_VARIANTS = 30.0, 10_000


def bulk(report: Report, folder: Path, count: int, identical: int, singles: int) -> None:
    """Add ``count`` distinct files and ``identical`` ones in one command's way, and ``singles`` one by one."""
    loaded = load_model("gym-nano")
    base = BaseSpec.of(loaded.model, "gym-nano")
    source = folder / "deltas"
    source.mkdir()
    files = _files(source, base, count + singles)
    key = SigningKey.generate()
    with VariantStore.open(folder / "many") as store:
        new = [IncomingVariant(file, file.stem, key.contributor) for file in files[:count]]
        wall, processor = _timed(lambda: store.add_all(new, key))
        assert store.count() == count
    with VariantStore.open(folder / "same") as store:
        new = [IncomingVariant(files[0], f"same-{number}", key.contributor) for number in range(identical)]
        same, _ = _timed(lambda: store.add_all(new, key))
        objects = sum(1 for _ in (folder / "same" / "objects").glob("*/*"))
    with VariantStore.open(folder / "singles") as store:
        alone = [
            _timed(lambda one=one: store.add_all([IncomingVariant(one, one.stem, key.contributor)], key))[0]
            for one in files[count:]
        ]
    size = files[0].stat().st_size
    report.compare("bulk: each of many at once", 1e3 * wall / count, 1e3 * statistics.mean(alone), unit="ms")
    report.compare("bulk: each of many identical files", 1e3 * same / identical, unit="ms")
    report.figure("bulk_variants", count)
    report.figure("bulk_bytes_of_a_file", size)
    report.figure("bulk_seconds", wall)
    report.figure("bulk_cpu_seconds", processor)
    report.figure("bulk_objects_of_identical_files", objects)
    if count == AIM_VARIANTS:
        report.aim(f"{count:,} small variants, seconds", figure=wall, aim=AIM_SECONDS, better="lower")


def _files(folder: Path, base: BaseSpec, count: int) -> list[Path]:
    """One-bit deltas of the matrices of one layer, whose last signs differ."""
    generator = torch.Generator().manual_seed(0)
    entries = [
        DeltaEntry.of(name, torch.randn(shape, generator=generator), "bitdelta")
        for name, shape in base.shapes.items()
        if name.startswith(LAYER) and len(shape) == 2
    ]
    first = folder / "v0.gymdelta"
    write_delta(first, entries, base)
    content = first.read_bytes()
    found = [first]
    for number in range(1, count):
        path = folder / f"v{number}.gymdelta"
        path.write_bytes(content[:-8] + number.to_bytes(8, "little"))
        found.append(path)
    os.sync()  # the measurement does not pay for these
    return found


def _timed(call: object) -> tuple[float, float]:
    """Seconds of the clock, and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    call()  # type: ignore[operator]
    return time.perf_counter() - began, time.process_time() - used
