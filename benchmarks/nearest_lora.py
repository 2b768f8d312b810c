"""Share of a one-bit variant's gain that a LoRA keeps: SmolLM2-135M-Instruct tuned on GSM8K, at ranks 8, 32, 128.

    python benchmarks/nearest_lora.py --smollm2 FOLDER [--shared FOLDER] [--work FOLDER] [--only PART] [--quick]
        [--json]

The parts are ``tune`` (all weights), ``one-bit`` and ``float32`` (the delta encoded so, and its nearest LoRAs), and
``lora`` (the same steps with LoRA of rank 16). Each writes into --work what it made, so that they may run one after the
other; without --only all run. The loss is that of rows which nothing was trained on, in nats per token of the answers.
Kept is (base - LoRA) / (base - delta). Nothing was chosen on these rows: steps and rates were set before.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _report import SHARED, Report, kept, options
from _sequences import encoded, train
from _smollm2 import questions

from gym_fed.base.models import load_model, model_name
from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta, lora_delta
from gym_fed.delta.factors import lora_factors
from gym_fed.delta.file import DeltaFile
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.export.formats.base import Options
from gym_fed.export.nearest import factors_of
from gym_fed.export.process import no_report
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source

RANKS = (8, 32, 128)
LORA_RANK = 16
STEPS, BATCH, LENGTH = 8, 4, 128
RATES = {"tune": 5e-5, "lora": 5e-4}
ROWS, HELDOUT = 400, 24
CODECS = {
    "one-bit": CodecPolicy(error_feedback=False),
    "float32": CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False),
}
PARTS = ("tune", *CODECS, "lora")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--smollm2", type=Path, required=True, help="a model folder")
    parser.add_argument("--shared", type=Path, default=SHARED, help="models and data")
    parser.add_argument("--work", type=Path, help="where parts lie between two runs")
    parser.add_argument("--only", metavar="PART", choices=PARTS, help=f"one of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gym-nearest-") as scratch:
        work = arguments.work or Path(scratch)
        work.mkdir(exist_ok=True)
        bench = Bench(arguments, work)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "tune": bench.tune,
            **{codec: partial(bench.nearest, codec) for codec in CODECS},
            "lora": bench.lora,
        }
        figures = {}
        for name, part in parts.items():
            if arguments.only in (None, name):
                figures[name] = kept(work / "parts.jsonl", name, part)
                print(name, json.dumps(figures[name]), file=sys.stderr, flush=True)
        if arguments.only is None:
            report(arguments, figures)


class Bench:
    """The base, the rows, and what is made of them."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.name, self.work = str(arguments.smollm2), work
        self.steps = 2 if arguments.quick else STEPS
        self.ranks = RANKS[:1] if arguments.quick else RANKS
        rows = questions(arguments.shared / "data")[:ROWS]
        self.heldout = rows[: 4 if arguments.quick else HELDOUT]
        self.rows = rows[HELDOUT:]

    def loss(self, model: Any, tokenizer: Any) -> float:
        return heldout_loss(model, tokenizer, self.heldout, batch_size=8, max_length=LENGTH)

    def source(self, codec: str) -> Source:
        return open_source(str(self.work / f"{codec}.gymdelta"), base=self.name)

    def tune(self) -> dict[str, Any]:
        """Use all weights, and store the deltas in ``work``."""
        loaded = load_model(self.name)
        base, tuned = loaded.model, copy.deepcopy(loaded.model)
        found: dict[str, Any] = {
            "seconds": timed_train(tuned, loaded.tokenizer, self.rows, self.steps, RATES["tune"])
        }
        spec = BaseSpec.of(base, model_name(self.name))
        for codec, policy in CODECS.items():
            made = encode_delta(tuned, base, policy, self.work / f"{codec}.gymdelta", spec)
            found[f"{codec} bits"] = made.bits_per_weight
        return found

    def nearest(self, codec: str) -> dict[str, Any]:
        """The nearest LoRA of each rank of a delta, as it is exported and loaded; with losses of base and delta."""
        loaded = load_model(self.name)
        base = self.loss(loaded.model, loaded.tokenizer)
        del loaded
        source = self.source(codec)
        assert source.delta is not None
        started = time.perf_counter()
        largest = factors_of(source, max(self.ranks), no_report)
        seconds = time.perf_counter() - started
        with DeltaFile.open(source.delta) as delta:
            total = delta.norm() ** 2
        figures: dict[str, Any] = {
            "seconds": seconds,
            "left out": sum(largest.left_out.values()),
            "base": base,
        }
        figures["delta"] = self.loss(source.model, source.tokenizer)
        for rank in self.ranks:
            # Singular components are sorted, so that those of a smaller rank are the first of these.
            lost = sum(
                float((b[:, rank:].square().sum(0) * a[rank:].square().sum(1)).sum())
                for a, b in largest.factors.values()
            )
            source.found[f"lora.{rank}"] = replace(
                largest,
                factors={name: (a[:rank], b[:, :rank]) for name, (a, b) in largest.factors.items()},
                rank=rank,
                norm_kept=largest.norm_kept - lost / total,
            )
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                out = Path(folder) / "adapter"
                record = export(source, "adapter", out, Options(rank=rank), check=False)
                figures[f"norm {rank}"] = record["lora"]["squared_norm_kept"]
                figures[f"megabytes {rank}"] = (out / "adapter_model.safetensors").stat().st_size / 1e6
                figures[f"loss {rank}"] = self.loss(load_model(str(out)).model, source.tokenizer)
        return figures

    def lora(self) -> dict[str, Any]:
        """LoRA's own factors, through a delta and the adapter that it becomes."""
        from peft import LoraConfig, get_peft_model

        loaded = load_model(self.name)
        spec = BaseSpec.of(loaded.model, model_name(self.name))
        torch.manual_seed(0)
        settings = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned = get_peft_model(loaded.model, settings)
        timed_train(tuned, loaded.tokenizer, self.rows, self.steps, RATES["lora"])
        file, out = self.work / "lora.gymdelta", self.work / "lora-adapter"
        lora_delta(lora_factors(tuned), file, spec, policy=CodecPolicy(factors="float32"))
        record = export(self.source("lora"), "adapter", out, Options(), check=False)
        with tuned.disable_adapter():
            base = self.loss(tuned, loaded.tokenizer)
        return {
            "base": base,
            "trained": self.loss(tuned, loaded.tokenizer),
            "adapter": self.loss(load_model(str(out)).model, loaded.tokenizer),
            "exact": record["lora"]["exact"],
        }


def timed_train(model: Any, tokenizer: Any, rows: list[dict[str, Any]], steps: int, rate: float) -> float:
    started = time.perf_counter()
    train(model, encoded(tokenizer, rows, LENGTH), steps, rate, BATCH, cycle=True)
    return time.perf_counter() - started


def report(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    """The table: shares of each delta's own gain, and of its squared norm."""
    made = Report("nearest_lora", peer="the same of the tune before encoding")
    sides = [figures[codec] for codec in CODECS]
    for rank in RANKS[:1] if arguments.quick else RANKS:
        gains = [100 * (one["base"] - one[f"loss {rank}"]) / (one["base"] - one["delta"]) for one in sides]
        size = f"{sides[0][f'megabytes {rank}']:.0f} MB"
        made.compare(f"gain kept at rank {rank}, {size}", *gains, unit="%", better="higher")
        norms = [100 * one[f"norm {rank}"] for one in sides]
        made.compare(f"squared norm kept at rank {rank}", *norms, unit="%", better="higher")
    for codec, one in zip(CODECS, sides, strict=True):
        made.figure(f"loss_{codec.replace('-', '_')}", one["delta"])
    made.figure("loss_base", sides[0]["base"])
    lora = figures["lora"]
    own = 100 * (lora["base"] - lora["adapter"]) / (lora["base"] - lora["trained"])
    made.compare("a variant trained as LoRA: gain kept", own, unit="%", better="higher")
    made.finish(arguments)


if __name__ == "__main__":
    main()
