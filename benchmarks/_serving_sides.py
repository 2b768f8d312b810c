"""The sides of `serving.py` in one process: our engine, PEFT's mixed adapters, and swapped models."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _peer import Peer, in_turns, spread
from _report import Better, Report, load, machine
from _report import key as figure_key
from _report import show as show_table
from _serving_models import Base
from torch import Tensor

from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import apply_delta
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.store import VariantStore

PROBE = list(range(10, 18))
"""Prompt for checking that variants differ."""


@dataclass(frozen=True)
class Load:
    """The load of a turn: ``users`` at once, each with its own prompt and an answer of ``new`` tokens."""

    users: int
    prompt: int
    new: int
    vocabulary: int

    def prompts(self) -> list[list[int]]:
        """Return prompts of random tokens, the same for every side, without special tokens."""
        generator = torch.Generator().manual_seed(self.users)
        high = min(self.vocabulary, 256)
        found: list[list[int]] = torch.randint(
            10, high - 10, (self.users, self.prompt), generator=generator
        ).tolist()
        return found

    @property
    def warm_up(self) -> Load:
        """Return a warm-up load with the same users and two tokens each, after which everything is loaded."""
        return Load(self.users, self.prompt, min(2, self.new), self.vocabulary)


@dataclass
class Speeds:
    """The measurements of one side with one number of users, one entry per turn."""

    tokens_a_second: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)
    """Counters of the engine, summed over the turns."""

    def add(self, tokens: int, seconds: float, first: Sequence[float]) -> None:
        self.tokens_a_second.append(tokens / seconds)
        self.first_token_seconds.extend(first)

    @property
    def rate(self) -> float:
        """Return the median tokens per second of all users together, including the time for prompts."""
        return statistics.median(self.tokens_a_second)

    def first(self, share: float) -> float:
        """Return the quantile ``share`` of the users' seconds to the first token."""
        ordered = sorted(self.first_token_seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


Side = Callable[[Load, Speeds], None]


@dataclass
class EngineSide:
    """Our engine, where user ``i`` has the variant named ``prefix`` plus ``i``, or all users have the base.

    Attributes:
        kernel: The only kernel that may multiply its sign deltas; None if no kernel may.
    """

    engine: Engine
    served: MultiVariantModel
    prefix: str | None
    kernel: str | None

    def __call__(self, load: Load, speeds: Speeds) -> None:
        products, stats = Counter(self.served.sign_products), self.engine.stats()
        names = [None if self.prefix is None else f"{self.prefix}{user}" for user in range(load.users)]
        run_engine(self.engine, load, names, speeds)
        now = self.engine.stats()
        ran = Counter({kind: self.served.sign_products[kind] - products[kind] for kind in products})
        rows = {
            "rows": now.rows - stats.rows,
            "rows with variants": now.rows_with_variants - stats.rows_with_variants,
        }
        require_ran(self.kernel, ran)
        if rows["rows with variants"] != (rows["rows"] if self.prefix is not None else 0):
            raise RuntimeError(f"of {rows['rows']} rows {rows['rows with variants']} had a variant")
        speeds.ran.update(ran)
        speeds.ran.update(rows)


def require_ran(kernel: str | None, ran: Counter[str]) -> None:
    """Check the counters against the kernel of a side."""
    others = {kind: count for kind, count in ran.items() if count and kind != kernel}
    if others or (kernel is not None and not ran[kernel]):
        raise RuntimeError(f"the side of kernel {kernel} ran {dict(ran)}")


def require_distinct(logits: Tensor, names: Sequence[str]) -> None:
    """Check that all variants have different logits for one prompt; the last two rows are the base's, as control."""
    found = logits.float()
    noise = float((found[-1] - found[-2]).abs().max())
    for one in range(len(names) - 1):
        for other in range(one):
            if not float((found[one] - found[other]).abs().max()) > 2 * noise:
                raise RuntimeError(f"{names[one]} and {names[other]} give the same logits")


def require_variants(served: MultiVariantModel, store: VariantStore, names: Sequence[str]) -> None:
    """Check our variants with ``require_distinct``."""
    held = [store.acquire(name) for name in names]
    chunks = [Chunk(PROBE, served.new_cache(), variant) for variant in (*held, None, None)]
    require_distinct(served.step(chunks), [*names, "base", "base"])
    for variant in held:
        store.release(variant)


def run_engine(engine: Engine, load: Load, variants: Sequence[str | None], speeds: Speeds) -> None:
    """Answer all users at once, user ``i`` with ``variants[i]``."""
    sampling = SamplingParams(max_tokens=load.new, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    running = [
        engine.submit(GenerationRequest(prompt, sampling, variant, user=f"u{number}"))
        for number, (prompt, variant) in enumerate(zip(load.prompts(), variants, strict=True))
    ]
    done = [one.result() for one in running]
    seconds = time.perf_counter() - started
    speeds.add(sum(d.completion_tokens for d in done), seconds, [d.seconds_to_first_token for d in done])


class PeftSide:
    """PEFT's mixed batch in its fastest form: adapters in the base's bfloat16, and one ``generate`` for all users."""

    def __init__(self, model: Any, folders: Sequence[str]) -> None:
        from peft import PeftModel

        plain: Any = {"autocast_adapter_dtype": False}  # PEFT's default would compute the adapters in float32
        wrapped = PeftModel.from_pretrained(model, folders[0], adapter_name="lora0", **plain)
        self._model: Any = wrapped.eval()
        for number, folder in enumerate(folders[1:], start=1):
            self._model.load_adapter(folder, adapter_name=f"lora{number}", **plain)
        dtypes = {p.dtype for name, p in self._model.named_parameters() if "lora_" in name}
        if dtypes != {torch.bfloat16}:
            raise RuntimeError(f"PEFT's adapters are {dtypes}")
        self._require_active(len(folders))

    def __call__(self, load: Load, speeds: Speeds) -> None:
        """Run one turn, in which row ``i`` has the adapter ``lora`` plus ``i``."""
        from transformers import LogitsProcessorList

        started = time.perf_counter()
        seen: list[float] = []

        def first(ids: Tensor, scores: Tensor) -> Tensor:
            if not seen:
                seen.append(time.perf_counter() - started)
            return scores

        ids = torch.tensor(load.prompts())
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                adapter_names=[f"lora{user}" for user in range(load.users)],
                max_new_tokens=load.new,
                min_new_tokens=load.new,
                do_sample=False,
                logits_processor=LogitsProcessorList([first]),
            )
        tokens = (made.shape[1] - ids.shape[1]) * len(ids)
        speeds.add(tokens, time.perf_counter() - started, seen * load.users)
        speeds.ran.update({"rows": load.users, "rows with variants": load.users})

    @torch.inference_mode()
    def _require_active(self, count: int) -> None:
        names = [*(f"lora{number}" for number in range(count)), "__base__", "__base__"]
        ids = torch.tensor(PROBE).expand(len(names), -1)
        require_distinct(self._model(input_ids=ids, adapter_names=names).logits[:, -1], names)


class SwapSide:
    """One model that serves users one after the other, by copying each merged model's weights over the previous one's.

    Two merged models are kept in memory and used alternately, so that a swap is a copy at memory speed; reading from
    disk would be slower.
    """

    def __init__(self, side: EngineSide, model: Any, deltas: Sequence[Any]) -> None:
        self._side = side
        self._live = model_tensors(model)
        self._base = {name: tensor.clone() for name, tensor in self._live.items()}
        self._merged = []
        for delta in deltas:
            copy = {name: tensor.clone() for name, tensor in self._base.items()}
            apply_delta(copy, delta)
            if not any(not torch.equal(copy[name], self._base[name]) for name in copy):
                raise RuntimeError("a merged model is the base")
            self._merged.append(copy)

    def __call__(self, load: Load, speeds: Speeds) -> None:
        """Run one turn with a swap and an answer per user, and restore the base's weights outside the measured time."""
        products = Counter(self._side.served.sign_products)
        sampling = SamplingParams(max_tokens=load.new, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        first, tokens = [], 0
        for number, prompt in enumerate(load.prompts()):
            self._put(self._merged[number % len(self._merged)])
            waited = time.perf_counter() - started
            done = self._side.engine.submit(GenerationRequest(prompt, sampling)).result()
            first.append(waited + done.seconds_to_first_token)
            tokens += done.completion_tokens
        speeds.add(tokens, time.perf_counter() - started, first)
        last = self._merged[(load.users - 1) % len(self._merged)]
        if not all(torch.equal(tensor, last[name]) for name, tensor in self._live.items()):
            raise RuntimeError("the weights that answered are not the last merged model's")
        self._put(self._base)
        require_ran(None, Counter(self._side.served.sign_products) - products)
        speeds.ran.update({"swaps": load.users, "rows with variants": 0})

    def _put(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(weights[name])


def measured(sides: dict[str, Side], load: Load, turns: int, say: Callable[[str], None]) -> dict[str, Speeds]:
    """Measure every side once per turn, in alternating order, so that slow periods of the machine affect all sides."""
    found = {name: Speeds() for name in sides}
    for side in sides.values():
        side(load.warm_up, Speeds())
    in_turns([Peer(name, partial(side, load, found[name])) for name, side in sides.items()], turns)
    for name, speeds in found.items():
        low, high = min(speeds.tokens_a_second), max(speeds.tokens_a_second)
        say(
            f"{load.users:>2} users, {name}: {speeds.rate:.1f} tokens/s ({low:.1f}-{high:.1f}), ran {dict(speeds.ran)}"
        )
    return found


USERS = (1, 8, 32)
BASE, EXACT, LOOKUP = "the base alone", "one-bit variants, exact", "one-bit variants, look-up"
LORA, PEFT, SWAP = "LoRA variants", "PEFT adapter_names", "swapping merged models"

Found = dict[str, dict[int, Speeds]]


@dataclass
class Run:
    """One part of the benchmark, with its settings, report and measurements."""

    part: str
    quick: bool
    users: tuple[int, ...]
    turns: int
    folder: Path
    report: Report
    found: Found = field(default_factory=dict)

    def load(self, users: int, base: Base, prompt: int = 64, new: int = 32) -> Load:
        """Return a load of 64 + 32 tokens, or fewer with ``--quick``."""
        vocabulary = base.model.config.vocab_size
        return Load(users, 16, 8, vocabulary) if self.quick else Load(users, prompt, new, vocabulary)

    def take(self, sides: dict[str, Side], load: Load, turns: int | None = None) -> None:
        for name, speeds in measured(sides, load, turns or self.turns, say).items():
            self.found.setdefault(name, {})[load.users] = speeds


def ratios(found: Found, ours: str, theirs: str, users: int) -> list[float]:
    """Return the ratios of our tokens per second to theirs, by turn."""
    sides = found[ours][users].tokens_a_second, found[theirs][users].tokens_a_second
    return [a / b for a, b in zip(*sides, strict=True)]


def shares(run: Run, pairs: dict[str, tuple[str, ...]]) -> None:
    """Report our rates next to those of the other sides, and the spread of the ratios."""
    better: Better = "higher"
    for ours, others in pairs.items():
        for theirs in others:
            for users in run.found[ours]:
                if users not in run.found[theirs]:
                    continue
                rates = run.found[ours][users].rate, run.found[theirs][users].rate
                what = f"{run.part}: {users} users, {ours} against {theirs}"
                run.report.compare(what, *rates, unit="tokens/s", better=better)
                seen = ratios(run.found, ours, theirs, users)
                for name, value in (
                    ("least", min(seen)),
                    ("median", statistics.median(seen)),
                    ("most", max(seen)),
                ):
                    run.report.figure(figure_key(f"{what} {name} ratio"), value)


def show(run: Run) -> None:
    """Print the tables of a part, and add every number as a figure."""
    tables: tuple[tuple[str, Callable[[Speeds], str]], ...] = (
        (
            f"{run.part}: tokens per second of all users, median (least-most)",
            lambda speeds: spread(speeds.tokens_a_second),
        ),
        (f"{run.part}: seconds to the first token, 50 / 99 of 100", first_text),
        (f"{run.part}: what ran, counted", ran_text),
    )
    for title, cell in tables:
        rows = [
            [name, *(cell(by_users[u]) if u in by_users else "-" for u in run.users)]
            for name, by_users in run.found.items()
        ]
        show_table(title, ("", *(f"{users} users" for users in run.users)), rows)
    say(f"{torch.get_num_threads()} threads; {machine()['vectors']}; {load()}")
    for name, by_users in run.found.items():
        for users, speeds in by_users.items():
            key = figure_key(f"{run.part} {users} users {name}")
            run.report.figure(f"{key}_tokens_s", speeds.rate)
            run.report.figure(f"{key}_least_tokens_s", min(speeds.tokens_a_second))
            run.report.figure(f"{key}_most_tokens_s", max(speeds.tokens_a_second))
            run.report.figure(f"{key}_first_token_p50_s", speeds.first(0.5))
            run.report.figure(f"{key}_first_token_p99_s", speeds.first(0.99))
            for kind, count in speeds.ran.items():
                run.report.figure(f"{key}_ran_{kind.replace(' ', '_')}", count)


def first_text(speeds: Speeds) -> str:
    return f"{speeds.first(0.5):.3g} / {speeds.first(0.99):.3g} of {len(speeds.first_token_seconds)}"


def ran_text(speeds: Speeds) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in speeds.ran.items() if count) or "-"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
