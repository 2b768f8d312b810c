"""One base, a variant of its own for every user: tokens a second, time to the first token, and memory.

    python benchmarks/serving.py [--quick] [--json] [--plot FILE] [--model FOLDER] [--no-http]

1, 8 and 32 users at once, each with a distinct one-bit variant of all matrices, embeddings and head too, through our
engine. Beside it, turn by turn in the same run: the base alone through the same engine; PEFT's mixed batches of LoRA
adapters (and our engine with the same adapters); merged models swapped in for one user after the other; and over
HTTP, `transformers serve` on the base beside `gym api` with variants. The model is synthetic, with the layers of a 7B
Llama in bfloat16, unless ``--model`` names a folder, such as the one that `smollm2.py` makes. Ratios count.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from _report import Report, machine, options
from _serving_http import ask_all, free_port, gym_api, server, transformers_serve
from _serving_models import QUICK_LAYERS, SEVEN_B_LAYERS, Base, adapters, one_bit, saved, synthetic
from _serving_sides import Load, Speeds, Swapper, run_engine, run_peft
from rich.console import Console
from rich.table import Table

from gym_fed.config.serving import EngineConfig
from gym_fed.delta import DeltaFile
from gym_fed.serving.engine import Engine
from gym_fed.serving.mixed import MixedModel
from gym_fed.serving.store import VariantStore

USERS = (1, 8, 32)
OURS, LOOKUP, BASE = "ours, one-bit variants", "ours, one-bit, look-up", "the base alone"
OUR_LORA, PEFT, SWAP = "ours, LoRA variants", "PEFT adapter_names", "swapping merged models"
HTTP_OURS, HTTP_BASE = "gym api, one-bit variants", "gym api, base"
HTTP_PEER, HTTP_PEER_CB = "transformers serve, base", "transformers serve --continuous-batching, base"
SWITCHES = 200

Measured = dict[str, dict[int, Speeds]]


def main() -> None:
    """Measure, print, judge."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model folder instead of the synthetic model")
    parser.add_argument("--no-http", action="store_true", help="leave the servers out")
    parser.add_argument("--turns", type=int, help="how often each side is measured")
    arguments = parser.parse_args()
    report = Report("serving", peer="the peer that the row names")
    with tempfile.TemporaryDirectory(prefix="gym-serving-") as name:
        measured = measure(arguments, Path(name), report)
    show(measured, report, arguments)


def measure(arguments: Namespace, folder: Path, report: Report) -> Measured:
    """All sides in turns; aims and memory go into ``report``."""
    base = (
        saved(arguments.model.name, arguments.model)
        if arguments.model
        else synthetic(QUICK_LAYERS if arguments.quick else SEVEN_B_LAYERS, folder / "base")
    )
    turns = arguments.turns or (1 if arguments.quick else 3)
    prompt, new = (16, 16) if arguments.quick else (64, 32)
    say(
        f"{base.name}: {base.spec.num_parameters / 1e6:.0f} M weights; {turns} turns, {prompt} + {new} tokens"
    )
    loads = [Load(users, prompt, new, base.model.config.vocab_size) for users in USERS]
    deltas = [one_bit(base, folder, number) for number in range(max(USERS))]
    measured: Measured = {}
    loras = adapters(base, folder, max(USERS))
    with opened(base, folder / "store", [*deltas, *(delta for _, delta in loras)]) as (store, mixed):
        memory(base, store, deltas, report)
        switching(base, store, mixed, report)
        in_process(base, store, mixed, loads, turns, deltas, measured)
    with_peft(base, loras, loads, turns, measured)
    if not arguments.no_http:
        del base.model
        gc.collect()
        over_http(base, folder, loads, turns, measured)
    return measured


@contextmanager
def opened(base: Base, folder: Path, deltas: list[Path]) -> Iterator[tuple[VariantStore, MixedModel]]:
    """A store with every delta under its file's name, and the base with its mixed layers."""
    mixed = MixedModel(base.model)
    with VariantStore.open(
        folder, base=base.spec, layout=mixed.layout, cache_bytes=12 * 10**9, require_signature=False
    ) as store:
        for delta in deltas:
            store.add(delta, None, name=delta.stem, owner="bench")
        yield store, mixed
    mixed.close()


def memory(base: Base, store: VariantStore, deltas: list[Path], report: Report) -> None:
    """What one variant takes: the process before and after eight of them, and what the store counts."""
    process, few = psutil.Process(), deltas[:8]
    store.release(store.acquire(deltas[-1].stem))  # what the first one brings besides
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
    report.aim(
        "memory a variant, share of the bf16 model",
        figure=grown / base.bf16_bytes,
        aim=1 / 15,
        better="lower",
    )


def switching(base: Base, store: VariantStore, mixed: MixedModel, report: Report) -> None:
    """To another variant: one in memory, and one on disk."""
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
    report.aim("switch to a variant in memory, ms", figure=1e3 * max(seen), aim=10.0, better="lower")
    del base, mixed


def in_process(
    base: Base,
    store: VariantStore,
    mixed: MixedModel,
    loads: list[Load],
    turns: int,
    deltas: list[Path],
    measured: Measured,
) -> None:
    """Our engine with and without variants, and swapping, in turns."""
    with DeltaFile.open(deltas[0], base.spec) as one, DeltaFile.open(deltas[1], base.spec) as two:
        config = EngineConfig(max_concurrent=max(USERS), max_batch_tokens=1024)
        with Engine(mixed, base.tokenizer, store, config) as engine:
            swapper = Swapper(engine, base.model, [one, two])
            for load in loads:
                bits = [f"v{number}" for number in range(load.users)]
                loras = [f"lora{number}" for number in range(load.users)]
                in_turns(
                    {
                        BASE: lambda s, x=load: run_engine(engine, x, [None] * x.users, s),
                        OURS: lambda s, x=load, n=bits: run_engine(engine, x, n, s),
                        OUR_LORA: lambda s, x=load, n=loras: run_engine(engine, x, n, s),
                        SWAP: lambda s, x=load: swapper.run(x, s),
                    },
                    load.users,
                    turns,
                    measured,
                )
    mixed.kernel = "lookup"
    with Engine(mixed, base.tokenizer, store, config) as engine:
        for load in loads:
            bits = [f"v{number}" for number in range(load.users)]
            in_turns(
                {LOOKUP: lambda s, x=load, n=bits: run_engine(engine, x, n, s)}, load.users, turns, measured
            )
    mixed.kernel = "exact"


def with_peft(
    base: Base, loras: list[tuple[Path, Path]], loads: list[Load], turns: int, measured: Measured
) -> None:
    """PEFT's own way, on the model that our hooks have left."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(base.model, str(loras[0][0]), adapter_name="lora0").eval()
    for number, (folder, _) in enumerate(loras[1:], start=1):
        model.load_adapter(str(folder), adapter_name=f"lora{number}")
    for load in loads:
        names = [f"lora{number}" for number in range(load.users)]
        in_turns({PEFT: lambda s, x=load, n=names: run_peft(model, x, n, s)}, load.users, turns, measured)


def over_http(base: Base, folder: Path, loads: list[Load], turns: int, measured: Measured) -> None:
    """Servers as processes, one after the other, since two would share the cores."""
    log, port = folder / "server.log", free_port()
    with server(gym_api(base.folder, folder / "store", port), port, log) as address:
        for load in loads:
            names = [f"base:v{number}" for number in range(load.users)]
            in_turns(
                {
                    HTTP_BASE: lambda s, x=load: ask_all(address, x, ["base"] * x.users, s),
                    HTTP_OURS: lambda s, x=load, n=names: ask_all(address, x, n, s),
                },
                load.users,
                turns,
                measured,
            )
    for side, continuous in ((HTTP_PEER, False), (HTTP_PEER_CB, True)):
        port = free_port()
        with server(transformers_serve(base.folder, port, continuous), port, log) as address:
            for load in loads:
                models = [str(base.folder)] * load.users
                in_turns(
                    {side: lambda s, x=load, m=models: ask_all(address, x, m, s)},
                    load.users,
                    turns,
                    measured,
                )


def in_turns(sides: dict[str, Callable[[Speeds], None]], users: int, turns: int, measured: Measured) -> None:
    """Every side once a turn, so that a slow moment meets all alike; the first turn warms up and does not count."""
    for turn in range(turns + 1):
        for name, side in sides.items():
            speeds = measured.setdefault(name, {}).setdefault(users, Speeds())
            side(speeds if turn else Speeds())
    for name in sides:
        say(f"{users:>2} users, {name}: {measured[name][users].rate:.1f} tokens/s")


def show(measured: Measured, report: Report, arguments: Namespace) -> None:
    """The tables, the aims and the picture."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for title, figure in (
        ("tokens a second, all users together", lambda s: s.rate),
        ("seconds to the first token, median", lambda s: s.first),
        ("seconds to the first token, 95 of 100", lambda s: s.first_p95),
    ):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for users in USERS:
            table.add_column(f"{users} users", justify="right")
        for name, by_users in measured.items():
            table.add_row(name, *(f"{figure(by_users[users]):.3g}" for users in USERS))
        console.print(table)
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    console.print(f"{torch.get_num_threads()} threads; {machine()['vectors']}; {load}")
    for users in USERS:
        for peer in (BASE, SWAP):
            rates = measured[OURS][users].rate, measured[peer][users].rate
            report.compare(f"{users} users, one-bit against {peer}", *rates, unit="tokens/s", better="higher")
        rates = measured[OUR_LORA][users].rate, measured[PEFT][users].rate
        report.compare(f"{users} users, LoRA against PEFT", *rates, unit="tokens/s", better="higher")
        for peer in (HTTP_PEER, HTTP_PEER_CB):
            if peer in measured:
                rates = measured[HTTP_OURS][users].rate, measured[peer][users].rate
                report.compare(
                    f"{users} users over HTTP, variants against {peer}",
                    *rates,
                    unit="tokens/s",
                    better="higher",
                )
    at = {name: by_users[8].rate for name, by_users in measured.items()}
    report.aim(
        "8 variants: share of the base's throughput", figure=at[OURS] / at[BASE], aim=0.6, better="higher"
    )
    report.aim("8 variants, look-up: the same share", figure=at[LOOKUP] / at[BASE], aim=0.6, better="higher")
    report.aim("8 variants: times swapping", figure=at[OURS] / at[SWAP], aim=5.0, better="higher")
    picture, arguments.plot = arguments.plot, None
    if picture:
        draw(measured, picture)
    report.finish(arguments)


def draw(measured: Measured, file: Path) -> None:
    """Tokens a second against users, a line a side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 5))
    for name, by_users in measured.items():
        ours = name in (OURS, LOOKUP, OUR_LORA, HTTP_OURS)
        rates = [by_users[users].rate for users in USERS]
        panel.plot(
            USERS,
            rates,
            marker="o",
            linewidth=2.2 if ours else 1.2,
            linestyle="-" if ours else "--",
            label=name,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(USERS, [str(users) for users in USERS])
    panel.set_xlabel("users at once, each with a variant of its own")
    panel.set_ylabel("tokens a second, all together")
    panel.grid(visible=True, which="both", alpha=0.25)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def say(text: str) -> None:
    """How far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
