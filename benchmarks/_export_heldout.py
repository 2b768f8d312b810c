"""Loss of an exported model on a text, by the library that reads its format; a process of its own.

    python _export_heldout.py JOB

JOB is a JSON file: ``{"parts", "windows", "answer", "reference"}``. ``parts`` is what
``gym_fed.export.readers.reading`` reads by, ``windows`` are lists of token ids. The answer has the loss in nats per
token, and against the logits of ``reference`` (a file that such a process wrote before, or ``null``: then this one
writes its own next to the answer) the mean Kullback-Leibler divergence and the share of positions with the same
likeliest token.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(job_file: str) -> None:
    """Do the job."""
    import torch
    from safetensors.torch import load_file, save_file

    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(1)
    reading = importlib.import_module(job["parts"]["reading"]).load(job["parts"])
    logits = [reading.logits(window).float() for window in job["windows"]]
    answer: dict[str, Any] = {"loss": _loss(logits, job["windows"])}
    if job["reference"] is None:
        save_file({str(at): found for at, found in enumerate(logits)}, f"{job['answer']}.safetensors")
    else:
        wanted = load_file(job["reference"])
        one = torch.cat([wanted[str(at)] for at in range(len(logits))]).log_softmax(-1)
        other = torch.cat(logits).log_softmax(-1)
        answer["kl"] = float((one.exp() * (one - other)).sum(-1).mean())
        answer["top1"] = float((one.argmax(-1) == other.argmax(-1)).float().mean())
    Path(job["answer"]).write_text(json.dumps(answer))


def _loss(logits: list[Any], windows: list[list[int]]) -> float:
    import torch

    lost = [
        torch.nn.functional.cross_entropy(found[:-1], torch.tensor(window[1:]), reduction="sum")
        for found, window in zip(logits, windows, strict=True)
    ]
    return float(sum(lost)) / sum(len(window) - 1 for window in windows)


if __name__ == "__main__":
    main(sys.argv[1])
