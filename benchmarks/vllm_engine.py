"""`engine: vllm` against vLLM's own base: eight users with a variant each, and hundreds of variants through few slots.

    python benchmarks/vllm_engine.py [--model FOLDER] [--python PYTHON] [--variants 500] [--slots 16] [--turns 3]
        [--dtype bfloat16] [--threads 1] [--quick]

The model is SmolLM2-135M-Instruct unless a folder is given. Requests go through the gateway's engine, with a signed
store of one-bit variants of all matrices. In alternating turns, eight users use a variant each or the base, with 32 +
32 tokens, greedy decoding and no prompt cache. The aims are the medians of the turns' ratios, in wall time and in CPU
seconds of vLLM's processes. Then every variant is used once, eight at a time, in random order, so that each is
verified, read and loaded into a slot; the aim is the longest time to a first token. The engine's counters assert that
every token was computed.

vLLM runs in its own environment (`make vllm`). On a shared machine only the ratios are meaningful, not the seconds.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from _report import Report, options
from _serving_models import random_signs
from _smollm2 import read_gguf

from gym_fed.config.serving import ServingConfig
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.base import spec_of_files
from gym_fed.serving.engine.request import CompletionOutput, GenerationRequest, SamplingParams
from gym_fed.serving.setup import Serving, open_serving
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from gym_fed.serving.vllm.engine import VllmEngine
from gym_fed.serving.vllm.process import VllmProcess
from gym_fed.trust.identity.keys import SigningKey

USERS = 8
PROMPT, ANSWER = 32, 32
SHARE, FIRST_TOKEN_SECONDS = 0.85, 2.0


def store_of(folder: Path, spec: BaseSpec, number: int) -> list[str]:
    """Fill a store with signed variants of random signs and a small scale per row; return their names."""
    key = SigningKey.generate()
    names = [f"v{n}" for n in range(number)]
    with VariantStore.open(folder, base=spec) as store:
        for n, name in enumerate(names):
            delta = random_signs(
                spec, folder / f"{name}.gymdelta", n, lambda _, rows: torch.full((rows, 1), 1e-3)
            )
            store.add(delta, sign_variant(delta, key, name=name), name=name, owner=key.contributor)
            delta.unlink()
            print(f"\rvariants: {n + 1} of {number}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return names


def ask(
    serving: Serving, users: list[tuple[str, str | None]], tokens: int, seed: int
) -> list[CompletionOutput]:
    """Send one request of each user, all at once; return the answers."""
    draw = random.Random(seed)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    started = [
        serving.engine.submit(
            GenerationRequest([draw.randrange(100, 40_000) for _ in range(PROMPT)], params, variant, user)
        )
        for user, variant in users
    ]
    return [one.result(600) for one in started]


def cpu_seconds(serving: Serving) -> float:
    """Return the CPU seconds of vLLM's processes so far."""
    assert isinstance(serving.engine, VllmEngine)
    server = serving.engine.server
    assert isinstance(server, VllmProcess)
    first = psutil.Process(server.pid)
    times = [process.cpu_times() for process in (first, *first.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def rates(serving: Serving, users: list[tuple[str, str | None]], seed: int) -> tuple[float, float]:
    """Return the answer tokens per second and per CPU second."""
    began, used = time.perf_counter(), cpu_seconds(serving)
    answers = ask(serving, users, ANSWER, seed)
    seconds, used = time.perf_counter() - began, cpu_seconds(serving) - used
    assert all(len(each.token_ids) == ANSWER and not each.cached_tokens for each in answers)
    return len(users) * ANSWER / seconds, len(users) * ANSWER / used


def first_tokens(serving: Serving, names: list[str]) -> list[float]:
    """Return the seconds to the first token of every variant, at most eight at once."""
    order = random.Random(0).sample(names, len(names))
    seconds: list[float] = []
    for start in range(0, len(order), USERS):
        some: list[tuple[str, str | None]] = [(name, name) for name in order[start : start + USERS]]
        seconds += [each.seconds_to_first_token for each in ask(serving, some, 2, start)]
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--python", type=Path, help="the interpreter of vLLM's environment")
    parser.add_argument("--variants", type=int, default=500)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="threads of vLLM; by default one per core")
    given = parser.parse_args()
    variants = 40 if given.quick else given.variants
    slots = min(given.slots, 8) if given.quick else given.slots
    with tempfile.TemporaryDirectory() as home:
        folder = given.model or Path(home) / "smollm2"
        if given.model is None:
            read_gguf(folder)
        spec = spec_of_files(folder, folder.name)
        assert spec is not None, f"{folder} is no model that engine: vllm serves"
        names = store_of(Path(home) / "store", spec, variants)
        vllm: dict[str, Any] = {"variant_slots": slots, "variants_in_memory": 2 * slots}
        if given.python is not None:
            vllm["python"] = given.python
        config = ServingConfig(
            base=str(folder),
            served_name="model",
            variants=Path(home) / "store",
            dtype=given.dtype,
            num_threads=given.threads,
            engine={"kind": "vllm", "max_context": 256, "prefix_cache": False, "kv_cache_size": "512MiB"},
            vllm=vllm,
        )
        with open_serving(config) as serving:
            report = measured(serving, names, given.turns)
    report.finish(given)


def measured(serving: Serving, names: list[str], turns: int) -> Report:
    """Run all measurements on a running server."""
    base: list[tuple[str, str | None]] = [(str(n), None) for n in range(USERS)]
    own: list[tuple[str, str | None]] = [(name, name) for name in names[:USERS]]
    report = Report("vllm_engine", peer="vLLM's base")
    ask(serving, base, 2, 0)
    ask(serving, own, 2, 0)  # loads the variants
    turn_rates = [(rates(serving, own, turn), rates(serving, base, turn)) for turn in range(1, turns + 1)]
    for kind, unit in enumerate(("tokens/s", "tokens/CPU s")):
        ours = statistics.median(mine[kind] for mine, _ in turn_rates)
        theirs = statistics.median(plain[kind] for _, plain in turn_rates)
        report.compare("8 users, 8 variants", ours, theirs, unit=unit, better="higher")
        ratios = [mine[kind] / plain[kind] for mine, plain in turn_rates]
        report.figure(f"share_least_{unit}", min(ratios))
        report.figure(f"share_most_{unit}", max(ratios))
        name = f"8 users on 8 variants, share of vLLM's base in {unit}"
        report.aim(name, statistics.median(ratios), SHARE, better="higher")
    before = serving.engine.stats()
    seconds = first_tokens(serving, names)
    after = serving.engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == PROMPT * len(names)
    assert after.finished["error"] == 0
    report.figure("first_token_median", statistics.median(seconds))
    report.figure("first_token_longest", max(seconds))
    slots = serving.config.vllm.variant_slots
    report.aim(
        f"{len(names)} variants through {slots} slots, longest first token in seconds",
        max(seconds),
        FIRST_TOKEN_SECONDS,
        better="lower",
    )
    return report


if __name__ == "__main__":
    main()
