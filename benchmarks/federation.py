"""Eight speakers of Shakespeare teach stories260K over the real network; compared with fp32 FedAvg.

    python benchmarks/federation.py [--quick] [--json] [--plot FILE] [--shared FOLDER]

`gym-server run` and eight `gym-client join` are processes over gRPC with TLS; updates are full deltas at one bit a
weight with error feedback, under a budget of 1/16 of the bf16 bytes for the whole file. The peer is plain FedAvg of
fp32 deltas in one process: same contributors, schedule, seeds and trainer. Speakers that nobody trains on measure
the loss, and each side is judged at its best round, since the model overfits soon.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from _report import Report, options

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from demo.processes import BIN, ask, join_command, run_federation  # noqa: E402

NUM_CONTRIBUTORS = 8
HELDOUT_SPEAKERS = 8
ROUNDS, QUICK_ROUNDS = 8, 2
MAX_LENGTH = 128
RECIPE: dict[str, Any] = {
    "algorithm": "pretrain",
    "finetuning": "full",
    "max_steps": 40,
    "learning_rate": 2e-3,
    "per_device_train_batch_size": 16,
    "max_length": MAX_LENGTH,
    "seed": 0,
}
LEARNING_RATE_DECAY = 0.7
"""A round's learning rate is the last one's times this, on both sides: averaging needs a falling rate to converge."""
CODEC = {
    "codec": "bitdelta",
    "error_feedback": True,
    "group_size": "auto",
    "scale_dtype": "bfloat16",
    "small_tensors": "bitdelta",
    "max_bits_per_weight": 1.0,
}


def main() -> None:
    """Run both sides and compare."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared", help="models and data")
    arguments = parser.parse_args()
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="gym-federation-") as name:
        folder = Path(name)
        model = arguments.shared / "models" / "stories260K"
        write_data(folder, arguments.shared / "data" / "shakespeare_by_speaker" / "speakers.jsonl")
        ours = federation(folder, model, rounds)
        theirs = fedavg(folder, model, rounds)
    report(arguments, ours, theirs, rounds)


def write_data(folder: Path, speakers: Path) -> None:
    """The eight most prolific speakers, and the next eight held out."""
    lines = [json.loads(line) for line in speakers.read_text().splitlines()]
    texts = ["".join(json.dumps({"text": t}) + "\n" for t in line["speeches"]) for line in lines]
    for index in range(NUM_CONTRIBUTORS):
        (folder / f"speaker{index}.jsonl").write_text(texts[index])
    heldout = texts[NUM_CONTRIBUTORS : NUM_CONTRIBUTORS + HELDOUT_SPEAKERS]
    (folder / "heldout.jsonl").write_text("".join(heldout))


def federation(folder: Path, model: Path, rounds: int) -> dict[str, Any]:
    """The real thing."""
    subprocess.run([BIN / "gym-server", "init", "--dir", folder / "hub"], check=True, capture_output=True)
    config = {
        "listen": "127.0.0.1:0",
        "base_model": str(model),
        "enrolment": {"policy": "open"},
        "rounds": {
            "num_rounds": rounds,
            "min_contributors": NUM_CONTRIBUTORS,
            "deadline_seconds": 1200,
            "learning_rate_decay": LEARNING_RATE_DECAY,
        },
        "recipe": RECIPE,
        "codec": CODEC,
        "soup": {"aggregator": "mean", "codec": {"codec": "dense"}},
        "gate": {
            "heldout": "../heldout.jsonl",
            "format": "text",
            "max_examples": 10_000,
            "max_length": MAX_LENGTH,
            "max_loss_increase": 100.0,
            "screen_updates": False,
        },
    }
    (folder / "hub" / "gym-server.yaml").write_text(yaml.safe_dump(config))

    def joiner(name: str) -> Any:
        return lambda address, key: join_command(
            folder, name, address, key, "--model", model, "--device", "cpu"
        )

    names = [f"speaker{index}" for index in range(NUM_CONTRIBUTORS)]
    seconds = run_federation(
        folder, {n: joiner(n) for n in names}, lambda event: print(event["text"], file=sys.stderr, flush=True)
    )
    found = ask(folder, "rounds")
    updates = [u for r in found for u in r["updates"]]
    soups = [r["soup_bytes"] for r in found]
    return {
        "losses": [found[0]["heldout_before"], *(r["heldout_after"] for r in found)],
        "up_bytes": sum(u["bytes"] for u in updates) / len(updates),
        "down_bytes": sum(soups) / len(soups),
        "verdicts": sorted({u["verdict"] for u in updates}),
        "seconds": seconds,
    }


def fedavg(folder: Path, model: Path, rounds: int) -> dict[str, Any]:
    """Plain FedAvg in fp32, with the contributors' own trainer and seeds."""
    import torch

    from gym_fed.config import TrainingConfig
    from gym_fed.data import load_rows
    from gym_fed.delta import model_tensors
    from gym_fed.evaluation import heldout_loss
    from gym_fed.models import load_model
    from gym_fed.training import Trainer

    loaded = load_model(str(model))
    tensors = model_tensors(loaded.model)
    heldout = load_rows(folder / "heldout.jsonl", "text")
    data = [load_rows(folder / f"speaker{index}.jsonl") for index in range(NUM_CONTRIBUTORS)]

    def loss() -> float:
        return float(heldout_loss(loaded.model, loaded.tokenizer, heldout, max_length=MAX_LENGTH))

    losses = [loss()]
    for server_round in range(1, rounds + 1):
        start = {name: tensor.clone() for name, tensor in tensors.items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for index, rows in enumerate(data):
            rate = RECIPE["learning_rate"] * LEARNING_RATE_DECAY ** (server_round - 1)
            recipe = {**RECIPE, "seed": server_round, "learning_rate": rate}
            output = folder / "fedavg" / f"{server_round}-{index}"
            config = TrainingConfig(
                **recipe, output_dir=output, save_final=False, device="cpu", lr_scheduler_type="constant"
            )
            Trainer(config, model=loaded.model, tokenizer=loaded.tokenizer).train(dataset=rows)
            for name, tensor in tensors.items():
                total[name] += tensor - start[name]
                tensor.copy_(start[name])
        for name, tensor in tensors.items():
            tensor.copy_(start[name] + total[name] / NUM_CONTRIBUTORS)
        losses.append(loss())
        print(
            f"fp32 FedAvg round {server_round}: held-out loss {losses[-1]:.4f}", file=sys.stderr, flush=True
        )
    weights = sum(tensor.numel() for tensor in tensors.values())
    return {"losses": losses, "weights": weights}


def report(arguments: argparse.Namespace, ours: dict[str, Any], theirs: dict[str, Any], rounds: int) -> None:
    """The table, the aims and the curve."""
    result = Report("federation", peer="fp32 FedAvg")
    bf16, fp32 = 2 * theirs["weights"], 4 * theirs["weights"]
    before, best, peer_best = ours["losses"][0], min(ours["losses"]), min(theirs["losses"])
    result.compare("held-out loss before", before, theirs["losses"][0], unit="nats")
    for server_round in range(1, rounds + 1):
        result.compare(
            f"held-out loss, round {server_round}",
            ours["losses"][server_round],
            theirs["losses"][server_round],
            unit="nats",
        )
    result.compare("held-out loss, best round", best, peer_best, unit="nats")
    result.compare("bytes up, a contributor and round", ours["up_bytes"], fp32, unit="B")
    result.compare("bytes down, a contributor and round", ours["down_bytes"], fp32, unit="B")
    result.figure("share_of_gain", (before - best) / (theirs["losses"][0] - peer_best))
    result.figure("up_bytes_of_bf16", ours["up_bytes"] / bf16)
    result.figure("seconds", ours["seconds"])
    result.aim("share of the fp32 gain", figure=result.figures["share_of_gain"], aim=0.98, better="higher")
    result.aim("bytes up against bf16", figure=result.figures["up_bytes_of_bf16"], aim=1 / 16, better="lower")
    plot, arguments.plot = arguments.plot, None
    result.finish(arguments)
    if plot:
        draw(plot, ours["losses"], theirs["losses"])


def draw(file: Path, ours: list[float], theirs: list[float]) -> None:
    """Both loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(theirs, "o-", label="FedAvg, fp32")
    axes.plot(ours, "s--", label="gym-fed, one bit a weight")
    axes.set_xlabel("round")
    axes.set_ylabel("held-out loss (nats a token)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
