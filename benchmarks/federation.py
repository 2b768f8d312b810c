"""Eight speakers of Shakespeare teach stories260K by one-bit updates; compared with fp32 FedAvg.

    python benchmarks/federation.py [--part network|learning|soups] [--cells FILE] [--shared FOLDER]
                                    [--quick] [--json] [--plot FILE]

``network``: `gym-server run` and eight `gym-client join` run as processes over gRPC with TLS; the same rounds in one
process must give the same losses. ``learning``: three sets of speakers and three seeds in one process, with settings
that were chosen on other speakers (see ``_federated_learning.py``). Updates are full deltas at one bit per weight with
error feedback, with a budget of 1/16 of the bf16 bytes for the entire file. The peer is FedAvg of fp32 deltas with the
same contributors, seeds and trainer, and with its own schedule, chosen on the same other speakers. ``soups``: the same
rounds with lattice soups, compared with bfloat16 soups.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from _report import Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _federated_learning import (
    Cells,
    Side,
    SpeakerSet,
    contributors,
    learning,
    one_thread,
    soups,
    speaker_sets,
)
from _federated_rounds import Course, Schedule

from demo.processes import run_federation
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.local_federation import BIN, ask, join_command

REPORTED, REPORT_SEEDS = ("first", "second", "less text"), (100, 200, 300)
QUICK_ROUNDS, QUICK_CONTRIBUTORS = 2, 2
RECIPE = TrainingRecipe(
    algorithm="pretrain",
    finetuning="full",
    max_steps=10,
    learning_rate=2e-3,
    per_device_train_batch_size=4,
    max_length=64,
)
ONE_BIT = {
    "codec": "bitdelta",
    "error_feedback": True,
    "group_size": "auto",
    "scale_dtype": "bfloat16",
    "small_tensors": "bitdelta",
    "max_bits_per_weight": 1.0,
}
SOUP = SoupRecipe(aggregator="mean", codec=CodecPolicy(codec="dense", error_feedback=False))
ROUNDS = 6
CHOSEN_GAIN, CHOSEN_DECAY, FEDAVG_DECAY = 1.33, 1.0, 1.0
"""Values chosen on the set of speakers for choosing, separately for each side."""


OURS = Side(Schedule(ROUNDS, CHOSEN_DECAY), CodecPolicy(**ONE_BIT, scale_gain=CHOSEN_GAIN), SOUP)
FEDAVG = Side(Schedule(ROUNDS, FEDAVG_DECAY), None, SOUP)
LATTICE = replace(OURS, soup=SOUP.model_copy(update={"codec": CodecPolicy(codec="lattice")}))
SAME_LOSS = 1e-6
"""Maximum difference between the hub's losses and those of the rounds in one process, in nats."""


def main() -> None:
    parser = options(__doc__, "cells", "shared")
    parser.add_argument("--part", choices=("network", "learning", "soups"), default="network")
    arguments = parser.parse_args()
    one_thread()
    model = arguments.shared / "models" / "stories260K"
    sets = speaker_sets(arguments.shared / "data" / "shakespeare_by_speaker" / "speakers.jsonl")
    peer = "soups in bfloat16" if arguments.part == "soups" else "fp32 FedAvg"
    result = Report(f"federation, {arguments.part}", peer=peer)
    with tempfile.TemporaryDirectory(prefix="gym-federation-") as name:
        folder = Path(name)
        if arguments.part == "network":
            network(result, folder, model, sets[REPORTED[0]], arguments)
            return
        cells = Cells(arguments.cells, model, folder, RECIPE)
        chosen, seeds = (REPORTED[:1], REPORT_SEEDS[:1]) if arguments.quick else (REPORTED, REPORT_SEEDS)
        part, kinds = (soups, (LATTICE, OURS)) if arguments.part == "soups" else (learning, (OURS, FEDAVG))
        ours, theirs = map(quick, kinds) if arguments.quick else kinds
        part(result, cells, [sets[s] for s in chosen], seeds, ours, theirs)
    result.finish(arguments)


def quick(side: Side) -> Side:
    return replace(side, schedule=Schedule(QUICK_ROUNDS, side.schedule.decay))


def network(
    result: Report, folder: Path, model: Path, speakers: SpeakerSet, arguments: argparse.Namespace
) -> None:
    """Run the network, the same rounds in this process, and FedAvg."""
    ours, theirs = OURS, FEDAVG
    if arguments.quick:
        ours, theirs = quick(OURS), quick(FEDAVG)
        few = dict(list(speakers.contributors.items())[:QUICK_CONTRIBUTORS])
        speakers = replace(speakers, contributors=few)
    recipe = RECIPE.model_copy(update={"seed": REPORT_SEEDS[0]})
    group = contributors(speakers, folder, model, RECIPE.max_length)
    found = federation(folder, model, ours, recipe, len(speakers.contributors))
    here, peer = (side.run(group, recipe) for side in (ours, theirs))
    apart = max(abs(a - b) for a, b in zip(found["losses"], here.losses, strict=True))
    assert apart <= SAME_LOSS, f"network {found['losses']}, in one process {here.losses}"
    assert found["up_bytes"] == here.up_bytes, "the network's updates have other sizes than those made here"
    report_network(result, found, peer, apart, group.num_weights)
    result.finish(arguments)


def federation(
    folder: Path, model: Path, side: Side, recipe: TrainingRecipe, contributing: int
) -> dict[str, Any]:
    assert side.codec is not None
    subprocess.run([BIN / "gym-server", "init", "--dir", folder / "hub"], check=True, capture_output=True)
    config = {
        "listen": "127.0.0.1:0",
        "base_model": str(model),
        "enrolment": {"policy": "open"},
        "rounds": {
            "num_rounds": side.schedule.rounds,
            "min_contributors": contributing,
            "deadline_seconds": 1200,
            "learning_rate_decay": side.schedule.decay,
        },
        "recipe": recipe.model_dump(mode="json", exclude_unset=True),
        "codec": side.codec.model_dump(mode="json", exclude_unset=True),
        "soup": side.soup.model_dump(mode="json", exclude_unset=True),
        "gate": {
            "heldout": "../heldout.jsonl",
            "format": "text",
            "max_examples": 10_000,
            "max_length": recipe.max_length,
            "max_loss_increase": 100.0,
            "screen_updates": False,
        },
    }
    (folder / "hub" / "gym-server.yaml").write_text(yaml.safe_dump(config))

    def joiner(name: str) -> Any:
        return lambda address, key: join_command(
            folder, name, address, key, "--base", model, "--device", "cpu"
        )

    names = [f"speaker{index}" for index in range(contributing)]
    seconds = run_federation(
        folder, {n: joiner(n) for n in names}, lambda event: print(event["text"], file=sys.stderr, flush=True)
    )
    found = ask(folder, "rounds")
    assert {u["verdict"] for r in found for u in r["updates"]} == {"merged"}
    return {
        "losses": [found[0]["heldout_before"], *(r["heldout_after"] for r in found)],
        "up_bytes": [sum(u["bytes"] for u in r["updates"]) / len(r["updates"]) for r in found],
        "down_bytes": sum(r["soup_bytes"] for r in found) / len(found),
        "seconds": seconds,
    }


def report_network(result: Report, ours: dict[str, Any], peer: Course, apart: float, weights: int) -> None:
    losses, sent = ours["losses"], sum(ours["up_bytes"]) / len(ours["up_bytes"])
    result.compare("held-out loss before", losses[0], peer.losses[0], unit="nats")
    for server_round, (own, other) in enumerate(zip(losses[1:], peer.losses[1:], strict=True), 1):
        result.compare(f"held-out loss, round {server_round}", own, other, unit="nats")
    result.compare("bytes up per contributor and round", sent, 4 * weights, unit="B")
    result.compare("bytes down per contributor and round", ours["down_bytes"], 4 * weights, unit="B")
    result.figure("apart_from_one_process", apart)
    result.figure("up_bytes_of_bf16", sent / (2 * weights))
    result.figure("seconds", ours["seconds"])
    share = (losses[0] - losses[-1]) / peer.gain()
    result.aim("share of the fp32 gain, last round", share, 0.98, better="higher")
    best = (losses[0] - min(losses)) / peer.best_gain()
    result.aim("share of the fp32 gain, best round", best, 0.98, better="higher")
    result.aim("bytes up against bf16", sent / (2 * weights), 1 / 16)


if __name__ == "__main__":
    main()
