"""Memory, speed and quality of LoRA, QLoRA, BitDelta and DeltaQuant INT4: SmolLM2 measured, Qwen3-4B by formula.

    python benchmarks/methods.py --smollm2 FOLDER [--seeds SEED ...] [--cells FILE] [--quick] [--json] [--shared FOLDER]

The model is trained on WikiText-2 for a few steps of 2 x 256 tokens: with LoRA of rank 16 on a float32 base, with the
same LoRA on a 4-bit base, and fully. The full fine-tune is then encoded without calibration. Every training and every
encoding runs in its own process with one thread. Memory is its `VmHWM`, speed is in CPU seconds, and quality is the
decrease of the loss on 16 other sequences. `--cells` stores finished cells in a file, from which a later run resumes.

Qwen3-4B's figures are computed: memory by `gym train --plan` for one GPU, in bfloat16; the size of a file from the
shapes and the codec; the time of a step from its operations and SmolLM2's measured operations per second. Its quality
was not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from _peer import child, script
from _report import Report, options

from gym_fed.config.delta import CodecPolicy

LENGTH, BATCH, STEPS = 256, 2, 8
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"finetuning": "lora", "lora": {"r": 16}, "learning_rate": 2e-4},
    "QLoRA": {"finetuning": "lora", "lora": {"r": 16}, "learning_rate": 2e-4, "quantization": {}},
    "full": {"finetuning": "full", "learning_rate": 2e-5},
}
CODECS: dict[str, dict[str, Any]] = {
    "BitDelta": {"codec": "bitdelta"},
    "DeltaQuant INT4": {"codec": "int4", "group_size": "row"},
}
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def run_values(model: str, method: str, folder: str, seed: int) -> dict[str, Any]:
    return {
        "model": model,
        "algorithm": "pretrain",
        "output_dir": folder,
        "seed": seed,
        "num_threads": 1,
        "max_length": LENGTH,
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        **TRAINED[method],
    }


def texts(shared: Path, part: str) -> list[dict[str, Any]]:
    """Return paragraphs of WikiText-2's validation file: the last fifth is the test part."""
    lines = (shared / "data" / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines()
    rows = [{"text": line.strip()} for line in lines if len(line) > 200]
    cut = len(rows) * 4 // 5
    return rows[:cut] if part == "train" else rows[cut:]


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def train(model: str, method: str, folder: str, shared: str, seed: int) -> dict[str, float]:
    """Train in this process; return memory, speed and losses."""
    from gym_fed import Trainer, TrainingConfig

    moments: list[float] = []
    config = TrainingConfig(**run_values(model, method, folder, seed), device="cpu")
    Trainer(config, on_step=lambda *_: moments.append(time.thread_time())).train(
        texts(Path(shared), "train")[:400]
    )
    seconds = statistics.median(after - before for before, after in pairwise(moments))
    adapter = Path(folder, "adapter_model.safetensors")
    return {"peak": peak_bytes(), "seconds": seconds} | (
        {"file": adapter.stat().st_size} if adapter.exists() else {}
    )


def encode(model: str, run: str, method: str, out: str) -> dict[str, float]:
    """Encode a run in this process; return memory, speed and size."""
    from gym_fed.quantization import Quantizer
    from gym_fed.quantization.config import CalibratedPolicy

    before = time.process_time()
    policy = CalibratedPolicy(**CODECS[method], distill_steps=0, calibration_samples=0)
    report = Quantizer(policy).quantize(model, run, out=out, progress=False)
    return {"peak": peak_bytes(), "seconds": time.process_time() - before, "file": report.size_bytes}


def loss(model: str, tuned: str, shared: str) -> dict[str, float]:
    """Return the held-out loss of a model, a run or a delta on its base."""
    from _sequences import encoded, loss_of

    from gym_fed.base.models import load_model, load_tuned
    from gym_fed.quantization import Quantizer

    loaded = load_model(model) if tuned in ("", model) else None
    whole = loaded.model if loaded else None
    if whole is None:
        whole = (
            Quantizer.apply(model, tuned) if tuned.endswith(".gymdelta") else load_tuned(tuned, model).model
        )
    tokenizer = (loaded or load_model(model)).tokenizer
    sequences = encoded(tokenizer, texts(Path(shared), "test")[:200], LENGTH)[:16]
    return {"loss": sum(loss_of(whole, [one]) for one in sequences) / len(sequences)}


def cells_of(model: str, shared: str, seed: int, folder: Path) -> dict[str, dict[str, float]]:
    """Measure all methods with one seed."""

    def apart(*words: Any) -> dict[str, float]:
        found: dict[str, float] = child([*script("methods.py"), "--do", json.dumps(words)])
        return found

    found = {"base": apart("loss", model, "", shared)}
    for method in TRAINED:
        run = str(folder / method)
        found[method] = apart("train", model, method, run, shared, seed) | apart("loss", model, run, shared)
    for method in CODECS:
        out = str(folder / f"{method}.gymdelta")
        found[method] = apart("encode", model, str(folder / "full"), method, out) | apart(
            "loss", model, out, shared
        )
    return found


def qwen3(shared: Path, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """Compute Qwen3-4B's figures; ``rates`` has SmolLM2's operations, or encoded weights, per second."""
    import torch
    from gym_quant.codec import as_matrix

    from gym_fed import TrainingConfig
    from gym_fed.delta.policy import choose, parts_of
    from gym_fed.training.planning.plan import plan_run

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_4B))
        for method in TRAINED:
            values = run_values(folder, method, str(Path(folder, "run")), 0)
            precision = {"base_dtype": "bfloat16"} if method == "LoRA" else {}
            plan = plan_run(TrainingConfig(**values, **precision, device="cuda"), device="cuda", timed=False)
            seconds = plan.operations / rates[method]
            found[method] = {"peak": plan.memory.peak, "seconds": seconds, "operations": plan.operations}
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    weights = sum(p.numel() for p in model.parameters())
    parts = parts_of(shapes, model)
    for method, own in CODECS.items():
        policy = CodecPolicy(**own, error_feedback=False)
        size = sum(
            choose(
                name,
                torch.empty(as_matrix(shape) if len(shape) > 1 else shape, device="meta"),
                policy,
                parts[name],
            ).payload_bytes
            for name, shape in shapes.items()
        )
        found[method] = {"peak": 12.0 * weights, "seconds": weights / rates[method], "file": size}
    return found


def main() -> None:
    parser = options(__doc__, "cells", "shared", seeds=[1, 2, 3])
    parser.add_argument("--smollm2", default=os.environ.get("GYM_SMOLLM2"))
    parser.add_argument("--do", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do:
        name, *words = json.loads(arguments.do)
        measured_by: dict[str, Callable[..., dict[str, float]]] = {
            "train": train,
            "encode": encode,
            "loss": loss,
        }
        print(json.dumps(measured_by[name](*words)))
        return
    shared = arguments.shared
    model = arguments.smollm2 if arguments.smollm2 and not arguments.quick else None
    model = model or str(shared / "models" / "stories260K")
    measured: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.cells and arguments.cells.exists():
        measured = json.loads(arguments.cells.read_text(encoding="utf-8"))
    for seed in arguments.seeds[: 1 if arguments.quick else None]:
        if str(seed) not in measured:
            with tempfile.TemporaryDirectory(prefix="gym-methods-") as folder:
                measured[str(seed)] = cells_of(model, str(shared), seed, Path(folder))
            if arguments.cells:
                arguments.cells.write_text(json.dumps(measured), encoding="utf-8")
    show(model, measured, shared, Report("methods", peer="the base"), arguments)


def show(
    model: str,
    measured: dict[str, dict[str, dict[str, float]]],
    shared: Path,
    report: Report,
    arguments: argparse.Namespace,
) -> None:
    from gym_fed import TrainingConfig
    from gym_fed.training.planning.plan import plan_run

    runs = list(measured.values())

    def middle(method: str, key: str) -> float:
        return statistics.median(run[method][key] for run in runs)

    def spread(values: list[float], form: str) -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"

    rates: dict[str, float] = {}
    for method in TRAINED:
        plan = plan_run(TrainingConfig(**run_values(model, method, "unused", 0), device="cpu"), timed=False)
        rates[method] = plan.operations / middle(method, "seconds")
        weights = plan.sizes.total
    rates |= {method: weights / middle(method, "seconds") for method in CODECS}
    computed = qwen3(shared, rates)
    own_columns, far_columns = "peak, GiB | seconds | file, MB | loss", "peak, GiB | seconds | file, MB"
    print(f"| method | {Path(model).name}: {own_columns} | Qwen3-4B: {far_columns} |")
    print("|---|---|---|---|---|---|---|---|")
    base = [run["base"]["loss"] for run in runs]
    print(f"| base | | | | {spread(base, '.4f')} | | | |")
    for method in (*TRAINED, *CODECS):
        own = {key: [run[method][key] for run in runs] for key in ("peak", "seconds", "loss")}
        far = computed[method]
        size = f"{far['file'] / 1e6:,.0f}" if "file" in far else ""
        near = "" if method == "full" else f"{middle(method, 'file') / 1e6:,.1f}"
        print(
            f"| {method} | {spread([v / (1 << 30) for v in own['peak']], '.2f')} | {spread(own['seconds'], '.2f')} | "
            f"{near} | {spread(own['loss'], '.4f')} | "
            f"{far['peak'] / (1 << 30):.1f} | {far['seconds']:,.0f} | {size} |"
        )
        report.figure(f"{method}: loss", round(middle(method, "loss"), 4))
        report.figure(f"{method}: peak, GiB", round(middle(method, "peak") / (1 << 30), 3))
        report.figure(f"{method}: peak of Qwen3-4B, GiB", round(far["peak"] / (1 << 30), 2))
    report.finish(arguments)


if __name__ == "__main__":
    main()
