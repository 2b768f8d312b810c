"""Coverage-guided fuzzing of one target: ``python -m tests.fuzz.run TARGET [--seconds 60] [--corpus FOLDER]``.

Needs atheris (``make fuzz`` installs it). A failing input is saved in ``build/fuzz/TARGET``, and the exit code is
not 0. ``--input FILE`` reproduces a saved input without atheris. Every second mutation is one of the target's own
``mutate``, if it has one.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RSS_MB = 4096
SECONDS_AN_INPUT = 10
MAX_WORDS = 1000


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tests.fuzz.target import remove_scratch
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS))
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="inputs of earlier runs; new ones are added")
    parser.add_argument("--input", type=Path, help="read this file once and stop")
    given = parser.parse_args()
    if given.list:
        print(*sorted(TARGETS), sep="\n")
        return
    if given.target is None:
        parser.error("name a target; --list prints them")
    target = TARGETS[given.target]
    atexit.register(remove_scratch)
    if given.input is not None:
        once(given.target, given.input.read_bytes())
        return
    try:
        import atheris
    except ImportError:
        sys.exit("fuzz: atheris is not installed; make fuzz, or pip install atheris==3.0.0")
    with atheris.instrument_imports(include=list(target.modules)):
        seeds = target.seeds()
        for seed in seeds:
            once(given.target, seed)  # imports the parser's modules, so that they are instrumented
    work = ROOT / "build" / "fuzz" / given.target
    corpus = given.corpus or work / "corpus"
    for folder in (work, corpus):
        folder.mkdir(parents=True, exist_ok=True)
    dictionary = work / "words"
    dictionary.write_text("".join(f'"{word}"\n' for word in words_of(seeds)))
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-artifact_prefix={work}/",
        f"-max_total_time={given.seconds}",
        f"-max_len={target.max_bytes}",
        f"-timeout={SECONDS_AN_INPUT}",
        f"-rss_limit_mb={RSS_MB}",
        f"-dict={dictionary}",
        "-print_final_stats=1",
        f"-seed={given.seed}",
    ]
    options: dict[str, Any] = {}
    if (mutate := target.mutate) is not None:

        def mutated(data: bytes, max_bytes: int, seed: int) -> bytes:
            if seed % 2:
                return bytes(atheris.Mutate(data, max_bytes))
            changed = mutate(data, random.Random(seed))
            return changed if len(changed) <= max_bytes else data

        options["custom_mutator"] = mutated
    atheris.Setup(arguments, lambda data: once(given.target, data), **options)
    atheris.Fuzz()


def words_of(seeds: Iterable[bytes]) -> list[str]:
    """Return the names in valid inputs, which the fuzzer puts into others."""
    found = {
        word.decode() for seed in seeds for word in re.findall(rb"[A-Za-z_][\w.-]{2,40}", seed, re.ASCII)
    }
    return sorted(found)[:MAX_WORDS]


def once(name: str, data: bytes) -> None:
    """Parse one input; ``GymError`` is expected, any other exception is a finding."""
    from gym_fed.core.errors import GymError
    from tests.fuzz.targets import TARGETS

    try:
        TARGETS[name].read(data)
    except GymError:
        return


if __name__ == "__main__":
    main()
