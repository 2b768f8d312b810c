"""One base, a variant of its own for every user: tokens per second, time to the first token, and memory.

    python benchmarks/serving.py [--part model|peft ...] [--quick] [--json] [--plot FILE]

There are 1, 8 and 32 concurrent users, each with a distinct variant. The parts can be run separately:

    model    one-bit variants by both kernels, LoRA variants, the base alone, and merged models swapped in for one user
             after the other (1 and 8 users), on a synthetic model with the layers of a 7B Llama in bfloat16
    peft     LoRA variants in our engine, and the same adapters in PEFT's mixed batches, on that model

The sides alternate. The script counts how often each kernel multiplied, how many rows had a variant, and how often
weights were swapped, and fails if a side ran anything else than intended.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _report import Report, options
from _serving_models import QUICK_LAYERS, SEVEN_B_LAYERS, Base, adapters, one_bit, synthetic, twin
from _serving_sides import (
    BASE,
    EXACT,
    LOOKUP,
    LORA,
    PEFT,
    SWAP,
    USERS,
    EngineSide,
    PeftSide,
    Run,
    Side,
    SwapSide,
    ratios,
    require_variants,
    say,
    shares,
    show,
)

from gym_fed.config.serving import EngineConfig
from gym_fed.delta.file import DeltaFile
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.store import VariantStore

SWITCHES = 200
SWAPPED_USERS = 8
"""Maximum number of users for swapping, which serves them one after the other, so that more only add time."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="which, in this order")
    parser.add_argument("--users", type=int, nargs="+", help="numbers of users at once")
    parser.add_argument("--turns", type=int, help="how often each side is measured")
    arguments = parser.parse_args()
    report = Report("serving", peer="the peer that the row names")
    for part in arguments.part:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gym-serving-") as name:
            run = Run(
                part,
                arguments.quick,
                tuple(arguments.users or PARTS[part][1]),
                arguments.turns or (1 if arguments.quick else 3),
                Path(name),
                report,
            )
            PARTS[part][0](run)
        show(run)
        report.figure(f"{part}_part_seconds", time.monotonic() - began)
        say(f"part {part}: {time.monotonic() - began:.0f} s")
        gc.collect()
    report.finish(arguments)


def large(run: Run) -> Base:
    return synthetic(QUICK_LAYERS if run.quick else SEVEN_B_LAYERS, run.folder / "base")


def model_part(run: Run) -> None:
    """Measure one-bit variants with both kernels, LoRA variants, the base, swapping, memory and switching."""
    base = large(run)
    with opened(run, base) as sides:
        memory(base, sides.store, sides.one_bits, run.report)
        switching(sides.store, run.report)
        with sides.swapping() as swap:
            for users in run.users:
                load = run.load(users, base)
                by_name = {name: sides.of(name) for name in (BASE, EXACT, LOOKUP, LORA)}
                run.take(by_name | ({SWAP: swap} if users <= SWAPPED_USERS else {}), load)
    shares(run, {EXACT: (BASE, SWAP, LOOKUP), LOOKUP: (BASE, SWAP), LORA: (BASE,)})
    if 8 in run.users:
        for name, aim in ((EXACT, 0.6), (LOOKUP, 0.6)):
            share = statistics.median(ratios(run.found, name, BASE, 8))
            run.report.aim(f"8 users, {name}: share of the base", share, aim, better="higher")
        times = statistics.median(ratios(run.found, EXACT, SWAP, 8))
        run.report.aim("8 users, exact: times swapping", times, 5.0, better="higher")


def peft_part(run: Run) -> None:
    """Measure our LoRA variants and PEFT's mixed batches with the same adapters."""
    base = large(run)
    with opened(run, base, one_bits=False) as sides:
        for users in run.users:
            names = (BASE, LORA, PEFT)
            run.take({name: sides.of(name) for name in names}, run.load(users, base))
    shares(run, {LORA: (PEFT, BASE)})


PARTS: dict[str, tuple[Callable[[Run], None], tuple[int, ...]]] = {
    "model": (model_part, USERS),
    "peft": (peft_part, USERS),
}
"""Function and numbers of users of each part, by name."""


@dataclass
class Sides:
    """The engines of both kernels over one store, and PEFT's model, all sharing the base's weights."""

    base: Base
    store: VariantStore
    one_bits: list[Path]
    engines: dict[str, tuple[Engine, MultiVariantModel]]
    peft_folders: list[str]
    peft_model: object
    count: int
    _peft: PeftSide | None = None
    _differ: set[str] = field(default_factory=set)

    def of(self, name: str) -> Side:
        """Return a side by name, after checking that its variants differ from the base and from each other."""
        if name == PEFT:
            self._peft = self._peft or PeftSide(self.peft_model, self.peft_folders)
            return self._peft
        prefix, kernel = {
            BASE: (None, None),
            EXACT: ("v", "exact"),
            LOOKUP: ("v", "lookup"),
            LORA: ("lora", None),
        }[name]
        engine, served = self.engines[kernel or "exact"]
        if prefix is not None and name not in self._differ:
            require_variants(served, self.store, [f"{prefix}{number}" for number in range(self.count)])
            self._differ.add(name)
        return EngineSide(engine, served, prefix, kernel)

    @contextmanager
    def swapping(self) -> Iterator[SwapSide]:
        """Yield the side that alternates between two merged models in memory."""
        side = self.of(BASE)
        assert isinstance(side, EngineSide)
        with ExitStack() as stack:
            deltas = [stack.enter_context(DeltaFile.open(file, self.base.spec)) for file in self.one_bits[:2]]
            yield SwapSide(side, self.base.model, deltas)


@contextmanager
def opened(run: Run, base: Base, one_bits: bool = True, loras: bool = True) -> Iterator[Sides]:
    """Yield the sides, with a store that has a variant for every user."""
    say(f"{base.name}: {base.spec.num_parameters / 1e6:.0f} M weights")
    count = max(run.users)
    bits = [one_bit(base, run.folder, number) for number in range(count)] if one_bits else []
    lora = adapters(base, run.folder, count) if loras else []
    peft_model = twin(base.model)  # created before our hooks
    models = {"exact": base.model, "lookup": twin(base.model)}
    with ExitStack() as stack:
        served = {k: stack.enter_context(MultiVariantModel(m, kernel=k)) for k, m in models.items()}  # type: ignore[arg-type]
        store = stack.enter_context(
            VariantStore.open(
                run.folder / "store",
                base=base.spec,
                layout=served["lookup"].layout,
                cache_bytes=12 * 10**9,
                require_signature=False,
            )
        )
        for delta in (*bits, *(file for _, file in lora)):
            store.add(delta, None, name=delta.stem, owner="bench")
        config = EngineConfig(max_concurrent=count, max_batch_tokens=1024, prefix_cache=False)
        engines = {
            k: (stack.enter_context(Engine(m, base.tokenizer, store, config)), m) for k, m in served.items()
        }
        folders = [str(folder) for folder, _ in lora]
        yield Sides(base, store, bits, engines, folders, peft_model, count)


def memory(base: Base, store: VariantStore, deltas: list[Path], report: Report) -> None:
    """Report the memory of one variant, from the process's growth with eight of them and from the store's own count."""
    process, few = psutil.Process(), deltas[:8]
    store.release(store.acquire(deltas[-1].stem))  # excludes one-time allocations of the first variant
    gc.collect()
    before = process.memory_info().rss
    held = [store.acquire(delta.stem) for delta in few]
    gc.collect()
    grown = (process.memory_info().rss - before) / len(few)
    counted = statistics.mean(variant.resident_bytes for variant in held)
    for variant in held:
        store.release(variant)
    for what, size in (("growth of the process", grown), ("counted by the store", counted)):
        report.compare(f"memory a variant, {what}", size / 2**20, base.bf16_bytes / 2**20, unit="MiB")
    report.aim("memory a variant, share of the bf16 model", grown / base.bf16_bytes, 1 / 15)


def switching(store: VariantStore, report: Report) -> None:
    """Report the time of switching to another variant that is in memory."""
    names = [record.name for record in store.list() if record.name.startswith("v")][:8]
    for name in names:
        store.release(store.acquire(name))
    seen = []
    for number in range(SWITCHES):
        began = time.perf_counter()
        variant = store.acquire(names[number % len(names)])
        seen.append(time.perf_counter() - began)
        store.release(variant)
    report.compare("switch to a variant in memory", 1e3 * statistics.median(seen), unit="ms")
    report.aim("switch to a variant in memory, ms", 1e3 * max(seen), 10.0)


if __name__ == "__main__":
    main()
