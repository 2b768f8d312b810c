"""Check the model classes one by one, and write the table of docs/support.md.

    python -m tools.architectures                      check the classes that lack a result
    python -m tools.architectures --only LlamaForCausalLM --columns load api
    python -m tools.architectures --write              write the table from the results

Every class is checked in a child process with limits on time and memory. The results are appended to a JSON lines file,
so that a stopped check can resume; the last result for a class and column counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from gym_fed.core.errors import GymError
from tools.architectures.classes import Architecture, architectures
from tools.architectures.steps import COLUMNS, Checks
from tools.architectures.table import drop_torn_line, results_of, write_page

RESULTS = Path("build/architectures.jsonl")
_NEEDS = {
    "delta": ("full", "lora"),
    "variant": ("full", "lora", "delta"),
    "api of full": ("full", "lora", "delta", "variant"),
    "api of lora": ("full", "lora", "delta", "variant"),
    "export": ("lora",),
}
"""The columns on whose results other columns depend."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], help="check only these classes or model types, again"
    )
    parser.add_argument("--faults", action="store_true", help="check the classes with a fault again")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, help="skip the other columns where possible")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="JSON lines file (default: %(default)s)"
    )
    parser.add_argument(
        "--part", default="0/1", help="K/N: check only every Nth class, starting with the Kth"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no class after this many minutes")
    parser.add_argument("--timeout", type=float, default=120, help="time limit per class in seconds")
    parser.add_argument("--memory", type=float, default=6, help="memory limit per class in GiB")
    parser.add_argument("--write", action="store_true", help="only write docs/support.md")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(options.results)
    if options.write:
        write_page(options.results, architectures())
        return 0
    known = results_of(options.results)
    chosen = [each for each in architectures() if is_chosen(each, options, known)]
    k, n = map(int, options.part.split("/"))
    chosen = chosen[k::n]
    _warm_up()
    deadline = time.monotonic() + 60 * options.minutes
    for number, architecture in enumerate(chosen, 1):
        if time.monotonic() > deadline:
            print(f"{len(chosen) - number + 1} classes left", flush=True)
            break
        record = _in_child(architecture, options)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        bad = {column: text for column, text in record["cells"].items() if not text.startswith("works")}
        heading = f"{number}/{len(chosen)} {architecture.name}, {sum(record['seconds'].values()):.0f} s"
        print(heading, *(f"\n    {column}: {text}" for column, text in bad.items()))
        sys.stdout.flush()
    return 0


def is_chosen(
    architecture: Architecture, options: argparse.Namespace, known: dict[str, dict[str, str]]
) -> bool:
    if options.only:
        names = {architecture.name, architecture.reads, *architecture.model_types}
        return not names.isdisjoint(options.only)
    cells = known.get(architecture.name)
    if options.faults:
        return cells is not None and any(text.startswith("FAULT") for text in cells.values())
    return cells is None or not cells.keys() >= {*(options.columns or COLUMNS)}


def _warm_up() -> None:
    """Check one class in this process, so that forked children inherit all imports."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    llama = next(each for each in architectures() if each.name == "LlamaForCausalLM")
    with tempfile.TemporaryDirectory(prefix="gym-architecture-") as folder:
        checks = Checks(llama, Path(folder))
        for column in COLUMNS:
            if column != "gguf" and not (text := checks.run(column)).startswith("works"):
                sys.exit(f"{llama.name}, {column}: {text}")


def _in_child(architecture: Architecture, options: argparse.Namespace) -> dict[str, Any]:
    """Check one class in a forked process; a column that it does not reach counts as a fault."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    columns = [column for column in COLUMNS if not options.columns or column in options.columns]
    with tempfile.TemporaryDirectory(prefix="gym-architecture-") as folder:
        child = context.Process(
            target=_check, args=(architecture, Path(folder), columns, options.memory, writer)
        )
        child.start()
        writer.close()
        cells: dict[str, str] = {}
        seconds: dict[str, float] = {}
        deadline = time.monotonic() + options.timeout
        end = f"it took more than {options.timeout:.0f} seconds"
        while reader.poll(max(0.0, deadline - time.monotonic())):
            try:
                column, text, seconds[column] = reader.recv()
            except EOFError:
                child.join()
                end = f"the process ended with {child.exitcode}"
                break
            cells[column] = text
        child.kill()
        child.join()
    missing = [column for column in columns if column not in cells]
    cells |= {
        column: f"FAULT ({end})" if column == missing[0] else f"not tried (after {missing[0]})"
        for column in missing
    }
    return {"class": architecture.name, "reads": architecture.reads, "cells": cells, "seconds": seconds}


def _check(architecture: Architecture, folder: Path, columns: list[str], memory: float, writer: Any) -> None:
    limit = int(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        checks = Checks(architecture, folder)
    except Exception as error:  # noqa: BLE001 (a result of the table)
        refused = isinstance(error, GymError)
        text = f"refused ({error.code.value}: {error.message})" if refused else f"not tried ({error})"
        for column in columns:
            writer.send((column, text, 0.0))
        return
    needed = {*columns, *(other for column in columns for other in _NEEDS.get(column, ()))}
    for column in COLUMNS:
        if column in needed:
            begun = time.monotonic()
            text = checks.run(column)
            if column in columns:
                writer.send((column, text, round(time.monotonic() - begun, 1)))


if __name__ == "__main__":
    sys.exit(main())
