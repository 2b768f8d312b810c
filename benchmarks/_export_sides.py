"""The child processes of ``export.py``: the loss of an exported model on a text, and the peers' exports.

    python _export_sides.py held_out JOB
    python _export_sides.py auto_round MODEL OUT FORMAT     # FORMAT as auto-round calls it, gguf:q4_k_m
    python _export_sides.py llama_cpp SOURCE.gguf OUT.gguf TYPE

The loss is computed by the library that reads the format. JOB is a JSON file: ``{"parts", "windows", "answer",
"reference"}``. ``parts`` are the arguments of ``gym_fed.export.readers.reading``, and ``windows`` are lists of token
ids. The answer has the loss in nats per token. Compared with the logits in ``reference``, it also has the mean
Kullback-Leibler divergence and the share of positions with the same most likely token. If ``reference`` is ``null``,
the process writes its logits next to the answer instead.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def held_out(job_file: str) -> None:
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


def auto_round(model: str, out: str, form: str) -> None:
    """Export with auto-round's round-to-nearest, without calibration or tuning, like our default."""
    from auto_round import AutoRound

    scheme = form.upper() if form.startswith("gguf") else "W4A16"
    made = AutoRound(model=model, iters=0, scheme=scheme, device_map="cpu", disable_opt_rtn=True)
    made.quantize_and_save(out, format=form)


def llama_cpp(source: str, out: str, kind: str) -> None:
    """Export with llama.cpp's own quantiser, from a float32 file."""
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    parameters.nthread = 1
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters))
    if status:
        sys.exit(f"llama.cpp ended with {status}")


if __name__ == "__main__":
    sides: dict[str, Callable[..., None]] = {
        "held_out": held_out,
        "auto_round": auto_round,
        "llama_cpp": llama_cpp,
    }
    sides[sys.argv[1]](*sys.argv[2:])
