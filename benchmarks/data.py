"""Data larger than memory: `gym train` against ``datasets`` and TRL, by seconds, CPU seconds and memory.

    python benchmarks/data.py [--megabytes 100] [--turns 1] [--quick] [--json] [--plot FILE]

Each side pre-trains a tiny model for three steps on the same file of texts, in separate processes and with empty
caches. The first start reads, tokenises and packs; the second uses the cache; then two processes train together. The
memory added by the data is the peak proportional set size (PSS) minus that of a start with forty rows. CPU seconds are
compared, because other programs on the machine hardly affect them; wall time is printed next to them. Only our side has
``streaming: true``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _peer import ENVIRONMENT, script, spread
from _report import Report, options

MEGABYTES, QUICK_MEGABYTES = 100, 10
FEW_ROWS = 40
NAMES = ("Lily", "Tom", "Anna", "Ben", "Mia", "Sam", "Zoe", "Max")
SIDES = ("ours", "theirs")
AIM_CPU, AIM_SECOND, AIM_MEMORY, AIM_RANK = 1.1, 10.0, 500.0, 200.0

Starts = list[dict[str, Any]]


def main() -> None:
    parser = options(__doc__, "shared")
    parser.add_argument("--megabytes", type=int, help="size of the file of texts")
    parser.add_argument("--turns", type=int, default=1)
    arguments = parser.parse_args()
    megabytes = arguments.megabytes or (QUICK_MEGABYTES if arguments.quick else MEGABYTES)
    import datasets
    import trl

    report = Report("data", peer=f"datasets {datasets.__version__}, TRL {trl.__version__}")
    with tempfile.TemporaryDirectory(prefix="gym-benchmark-") as name:
        folder = Path(name)
        texts = folder / "texts.jsonl"
        write_texts(texts, megabytes * 1_000_000, arguments.shared)
        few = folder / "few.jsonl"
        few.write_text("".join(texts.open().readline() for _ in range(FEW_ROWS)))
        model = str(arguments.shared / "models" / "stories260K")
        found: dict[str, Starts] = {}
        for turn in range(arguments.turns):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                place = folder / f"{side}-{turn}"
                for kind, starts in starts_of(side, place, model, texts, few).items():
                    found.setdefault(f"{side}, {kind}", []).extend(starts)
    compare(report, found, megabytes)
    report.finish(arguments)


def starts_of(side: str, place: Path, model: str, texts: Path, few: Path) -> dict[str, Starts]:
    """Run all starts of one side, with separate caches."""
    caches = {"GYM_HOME": str(place / "home"), "HF_HOME": str(place / "hf")}

    def run(data: Path, number: int = 1, **more: Any) -> Starts:
        work = {"side": side, "data": str(data), "model": model, **more}
        return started(work, place, caches, number)

    kinds = {
        "few rows": run(few),
        "first start": run(texts),
        "second start": run(texts),
        "two processes, few rows": run(few, 2)[1:],
        "two processes": run(texts, 2)[1:],
    }
    if side == "ours":
        kinds["streaming"] = run(texts, streaming=True)
    return kinds


def started(work: dict[str, Any], place: Path, caches: dict[str, str], number: int) -> Starts:
    """Start ``number`` processes of one run; return the report of each."""
    place.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(dir=place)
    command = [*script("_data_side.py"), json.dumps({**work, "folder": f"{folder}/run"})]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(number):
        environment = {**os.environ, **ENVIRONMENT, "TOKENIZERS_PARALLELISM": "true", **caches}
        if number > 1:
            group = {"WORLD_SIZE": number, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": number}
            environment |= {key: str(value) for key, value in group.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        output, errors = (open(f"{folder}/{name}-{rank}", "w+") for name in ("out", "err"))  # noqa: SIM115
        processes.append(
            (subprocess.Popen(command, env=environment, stdout=output, stderr=errors), output, errors)
        )
    reports = []
    for process, output, errors in processes:
        code = process.wait()
        output.seek(0)
        errors.seek(0)
        if code:
            raise RuntimeError(f"{work['side']}: {errors.read()[-2000:]}")
        reports.append(json.loads(output.read().splitlines()[-1]))
    return reports


def write_texts(file: Path, size: int, shared: Path) -> None:
    """Write rows of two to eight paragraphs of WikiText-2 and TinyStories, each with a unique number."""
    draw = random.Random(0)
    sources = (shared / "data/wikitext2/valid.txt", shared / "data/tinystories/tinystories.txt")
    lines = [line.strip() for source in sources for line in source.read_text().splitlines()]
    paragraphs = [line for line in lines if len(line) > 40]
    with file.open("w") as sink:
        while sink.tell() < size:
            text = "\n".join(draw.choice(paragraphs) for _ in range(draw.randint(2, 8)))
            row = {"text": f"{draw.choice(NAMES)} {draw.randrange(10**6)}. {text}"}
            sink.write(json.dumps(row) + "\n")


def compare(report: Report, found: dict[str, Starts], megabytes: int) -> None:
    """Report the starts and the aims."""

    def values(side: str, kind: str, key: str) -> list[float]:
        return [start[key] for start in found[f"{side}, {kind}"]]

    def middle(side: str, kind: str, key: str) -> float:
        return statistics.median(values(side, kind, key))

    def added(side: str, kind: str) -> float:
        few = "two processes, few rows" if kind == "two processes" else "few rows"
        return max(0.0, middle(side, kind, "pss_mb") - middle(side, few, "pss_mb"))

    what = f"{megabytes} MB, "
    for kind in ("first start", "second start"):
        for key, unit in (("seconds", "s"), ("cpu_seconds", "CPU s")):
            report.compare(f"{what}{kind}, {key}", *(middle(side, kind, key) for side in SIDES), unit=unit)
            print(
                f"{kind}, {key}: {', '.join(f'{side} {spread(values(side, kind, key))}' for side in SIDES)}"
            )
    for kind in ("first start", "second start", "two processes"):
        report.compare(f"{what}{kind}, memory added", *(added(side, kind) for side in SIDES), unit="MB")
    report.compare(f"{what}streaming, memory added", added("ours", "streaming"), unit="MB")
    report.compare(f"{what}streaming, seconds", middle("ours", "streaming", "seconds"), unit="s")
    _require_same(found)
    ratio = ratios(
        values("ours", "first start", "cpu_seconds"), values("theirs", "first start", "cpu_seconds")
    )
    report.aim("first start: CPU seconds of datasets and TRL", ratio, AIM_CPU)
    few = middle("ours", "few rows", "seconds")
    late = max(0.0, middle("ours", "second start", "seconds") - few)
    report.aim("second start: seconds later than with few rows", late, AIM_SECOND)
    report.aim("memory added by the data, MB", added("ours", "first start"), AIM_MEMORY)
    report.aim("memory added to the second process, MB", added("ours", "two processes"), AIM_RANK)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios by turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _require_same(found: dict[str, Starts]) -> None:
    """Check that both sides read all rows, and that our second start has the same losses as the first."""
    rows = {start["rows"] for side in SIDES for start in found[f"{side}, first start"]}
    losses = [start["losses"] for kind in ("first", "second") for start in found[f"ours, {kind} start"]]
    if len(rows) != 1 or any(each != losses[0] for each in losses):
        raise RuntimeError(f"the starts are not the same work: rows {rows}, losses {losses}")


if __name__ == "__main__":
    main()
