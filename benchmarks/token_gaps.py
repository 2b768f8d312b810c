"""Token gaps of users who are answered while a long prompt is read, by steps that are filled by time and by tokens.

    python benchmarks/token_gaps.py [--model FOLDER] [--quick] [--json]

Three users decode; then a prompt of 1,500 tokens arrives. Reported are the gaps between tokens before it, and between
its arrival and its first token, on one thread, with the base packed in bfloat16. The other side is the same engine with
``step_stretch: null``, whose steps take as many prompt tokens as ``max_batch_tokens`` allows.
"""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _report import Report, options

from gym_fed.base.models import load_model
from gym_fed.config.serving import EngineConfig
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.multi_variant import MultiVariantModel

USERS, WARM = 3, 25
TEXT = "The history of the town begins with a river, a mill and three families. "


def main() -> None:
    """Both sides, one after the other."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="model folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(str(arguments.model), dtype="bfloat16")
    long = 300 if arguments.quick else 1500
    report = Report("token_gaps", peer="step_stretch: null")
    with MultiVariantModel(loaded.model, base_format="auto") as served:
        if served.base_format != "bfloat16":
            raise SystemExit(f"the base is in {served.base_format}")
        mine = gaps(served, loaded.tokenizer, EngineConfig(), long)
        theirs = gaps(served, loaded.tokenizer, EngineConfig(step_stretch=None), long)
    for name in mine:
        report.compare(name, mine[name], theirs[name], unit="ms")
    stretched = mine["gap beside the prompt, median"] / mine["gap alone, median"]
    report.aim("median gap beside a long prompt, times alone", figure=stretched, aim=2.0, better="lower")
    report.finish(arguments)


def gaps(served: MultiVariantModel, tokenizer: Any, config: EngineConfig, long: int) -> dict[str, float]:
    """Milliseconds by what they are."""
    ids = tokenizer(TEXT * 200)["input_ids"]
    times: list[list[float]] = [[] for _ in range(USERS)]
    with Engine(served, tokenizer, config=config) as engine:
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        running = [
            engine.submit(GenerationRequest(ids[user : 40 + user], sampling, user=f"u{user}"))
            for user in range(USERS)
        ]

        def read(user: int) -> None:
            for _ in running[user]:
                times[user].append(time.monotonic())

        readers = [threading.Thread(target=read, args=(user,)) for user in range(USERS)]
        for reader in readers:
            reader.start()
        while min(map(len, times)) < WARM:
            time.sleep(0.01)
        arrived = time.monotonic()
        prompt = GenerationRequest(ids[100 : 100 + long], SamplingParams(max_tokens=2), user="long")
        reading = engine.submit(prompt)
        next(iter(reading))
        first = time.monotonic()
        for one in running:
            one.cancel()
        for reader in readers:
            reader.join()
    pairs = [pair for seen in times for pair in pairwise(seen)]
    alone = sorted(1e3 * (b - a) for a, b in pairs if b < arrived)
    beside = sorted(1e3 * (b - a) for a, b in pairs if b > arrived and a < first)
    return {
        "gap alone, median": statistics.median(alone),
        "gap beside the prompt, median": statistics.median(beside),
        "gap beside the prompt, 90 of 100": beside[int(0.9 * (len(beside) - 1))],
        "gap beside the prompt, longest": beside[-1],
        "first token of the prompt": 1e3 * (first - arrived),
    }


if __name__ == "__main__":
    main()
