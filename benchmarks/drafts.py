"""Speculative decoding with a draft: tokens per second with and without, for 1, 2, 4 and 8 users.

    python benchmarks/drafts.py [--model FOLDER] [--noise SHARE] [--format bfloat16] [--users 1 2] [--runs 3]

The model is SmolLM2-135M-Instruct unless a folder is given. Its published weights lie on a 4-bit grid, so a draft that
is the model itself in 4 bits is nearly always right; ``--noise 0.01`` adds 1% of each matrix's standard deviation, as
in a model whose weights are not on such a grid. Users ask different questions and get 128 tokens, greedily. Every run
of a side is a process with one thread; sides alternate. The figure is tokens per CPU second, including prompts. The
script asserts that the answers are the same, and that proposals were made for one user.
"""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch
from _peer import Peer, in_turns, script, spread
from _report import Report, key, options, show
from _smollm2 import read_gguf
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="model folder")
    parser.add_argument(
        "--noise", type=float, default=0.0, metavar="SHARE", help="of each matrix's deviation"
    )
    parser.add_argument(
        "--format", default="bfloat16", help="the base's linear layers: bfloat16, int8 or int4"
    )
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    read_gguf(arguments.model)
    model = noisy(arguments.model, arguments.noise) if arguments.noise else arguments.model
    sides = {
        kind: Peer(kind, [*script("_drafts_side.py"), *map(json.dumps, (str(model), arguments.format, kind))])
        for kind in ("off", "draft")
    }
    in_turns(sides.values(), 1 if arguments.quick else arguments.runs, arguments.users)
    report, rows = Report("drafts", peer="without a draft"), []
    for users in map(str, arguments.users):
        runs = {kind: [result[users] for result in side.results] for kind, side in sides.items()}
        rates = {kind: [run["rate"] for run in found] for kind, found in runs.items()}
        rows.append([users, *(spread(rates[kind]) for kind in sides), accepted(users, runs)])
        report.compare(
            f"{users} users, {arguments.format}",
            rates["draft"],
            rates["off"],
            unit="tokens/CPU s",
            better="higher",
        )
        for kind, values in rates.items():
            report.figure(key(f"{users} users {kind} tokens cpu s"), statistics.median(values))
    show("tokens per CPU second, median (least-most)", ("users", "off", "draft", "accepted"), rows)
    report.finish(arguments)


def accepted(users: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the accepted share of proposals, after a check that answers are the same and proposals were made."""
    if any(run["answers"] != runs["off"][0]["answers"] for found in runs.values() for run in found):
        raise SystemExit(f"{users} users: the answers with a draft are others")
    last = runs["draft"][-1]
    if users == "1" and not last["proposed"]:
        raise SystemExit("one user: nothing was proposed")
    return f"{last['accepted'] / last['proposed']:.0%} of {last['proposed']}" if last["proposed"] else "-"


def noisy(model: Path, share: float) -> Path:
    """Write a copy of the model with noise on its matrices, unless it exists."""
    folder = model.with_name(f"{model.name}-noise-{share:g}")
    if folder.exists():
        return folder
    shutil.copytree(model, folder)
    tensors, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            wide = tensor.float()
            noise = share * wide.std() * torch.randn(wide.shape, generator=generator)
            tensors[name] = (wide + noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    main()
