"""Exports a model: written, read back in a fresh process, compared, and recorded in ``export.json``."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.read_back import answers
from gym_fed.export.source import Source
from gym_fed.files import file_sha256, whole_file_or_none, whole_or_not_at_all, write_atomically
from gym_fed.kinds import EXPORT_FORMATS

PROMPTS = (
    "The capital of France is",
    "double: abc",
    "Write one sentence about the sea.",
    "def add(a, b):\n    return",
)
GREEDY_TOKENS = 32
RECORD = "export.json"
MERGED_TOLERANCE = 1e-3
"""How far a merged adapter's logits may be from those beside the base, as a share of the largest logit."""
_NOT_YET = ("awq", "executorch", "gguf", "gptq", "onnx", "openvino", "torch_export", "torchscript")


def format_named(name: str) -> ExportFormat:
    """The format, before anything is loaded.

    Raises:
        GymError: ``USAGE`` for one that is not there.
    """
    if name not in EXPORT_FORMATS:
        there = ", ".join(EXPORT_FORMATS.names())
        what = "is not there yet" if name in _NOT_YET else "is unknown"
        raise GymError(
            ErrorCode.USAGE,
            f"format {name} {what}",
            f"there are {there}; other programs convert a huggingface folder",
        )
    chosen: ExportFormat = EXPORT_FORMATS.new(name)
    return chosen


def export(
    source: Source, format: str, path: Path, options: Options, *, check: bool = True
) -> dict[str, Any]:
    """Write ``source`` to the new file or folder ``path``.

    Args:
        source: See ``open_source``.
        format: A member of ``EXPORT_FORMATS``.
        path: Nothing is overwritten.
        options: How it is written.
        check: Read it back in a fresh process and compare.

    Returns:
        What ``export.json`` holds.

    Raises:
        GymError: ``FILE_EXISTS``, also when another export took the name meanwhile; ``USAGE`` for a format that cannot
            hold the model; ``EXPORT_DIFFERS`` where what was written computes something else, and then nothing is left.
    """
    chosen = format_named(format)
    if os.path.lexists(path):
        raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists", "choose another name")
    chosen.check(source)
    record: dict[str, Any] = {"format": format, "source": source.name, "base": source.base}
    if chosen.is_file:
        return _file(chosen, source, path, options, record, check=check)
    with whole_or_not_at_all(path) as part:
        chosen.write(source, part, options)
        record["files"] = _digests(part)
        record["check"] = _checked(chosen, source, part, options) if check else None
        write_atomically(part / RECORD, _text(record))
    return record


def _file(
    chosen: ExportFormat, source: Source, path: Path, options: Options, record: dict[str, Any], *, check: bool
) -> dict[str, Any]:
    with whole_file_or_none(path) as part:
        chosen.write(source, part, options)
        record["files"] = {path.name: file_sha256(part)}
        record["check"] = _checked(chosen, source, part, options) if check else None
    write_atomically(path.with_name(f"{path.name}.{RECORD}"), _text(record))
    return record


def _text(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record, indent=2)}\n".encode()


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of every file, by its path in the folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file_sha256(file) for file in files}


def _checked(chosen: ExportFormat, source: Source, part: Path, options: Options) -> dict[str, Any]:
    """What was written against what should have been.

    Raises:
        GymError: ``EXPORT_DIFFERS``.
    """
    found: dict[str, Any] = {"prompts": list(PROMPTS), "read_by": _readers(chosen)}
    if chosen.expected(source, part, options) is not source.model:
        found["against_the_source"] = _rounding(chosen, source, part, options)
    wanted = _answers(chosen.expected(source, part, options), source.tokenizer)
    source.forget_merged()
    gc.collect()
    there = _in_a_fresh_process(chosen.parts(source, part))
    found["read_back"] = compared(wanted, there)
    found["read_back"]["tolerance"] = chosen.tolerance
    _require_equal(found["read_back"], chosen.tolerance, f"{chosen.reader} reads back")
    return found


def _rounding(chosen: ExportFormat, source: Source, part: Path, options: Options) -> dict[str, Any]:
    """What merging, rounding or encoding has changed, in this process; merging alone must change next to nothing."""
    own = _answers(source.model, source.tokenizer)
    if source.adapted and chosen.merges:
        merged = compared(own, _answers(source.whole(), source.tokenizer))
        _require_equal(merged, MERGED_TOLERANCE, "merging the adapter gives", tokens=False)
    figures = compared(own, _answers(chosen.expected(source, part, options), source.tokenizer))
    return figures


def _answers(model: Any, tokenizer: Any) -> dict[str, Any]:
    """In float32, as the other process computes them."""
    import torch

    if next(model.parameters()).dtype is not torch.float32:
        import copy

        model = copy.deepcopy(model)
        for value in model.state_dict(keep_vars=True).values():
            value.data = value.data.float() if value.is_floating_point() else value.data
    return answers(model.eval(), tokenizer, list(PROMPTS), GREEDY_TOKENS)


def _readers(chosen: ExportFormat) -> str:
    packages = dict.fromkeys(("transformers", chosen.reader))
    return ", ".join(f"{name.replace('_', '-')} {version(name.replace('_', '-'))}" for name in packages)


def compared(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """How two sets of ``answers`` differ.

    Returns:
        ``max`` and ``mean`` of the logits' distance, ``largest`` logit, ``top1`` (share of positions with the same
        likeliest token), ``kl`` (mean over positions, in nats), and whether token ids and greedy tokens are the same.
    """
    import torch

    names = [name for name in wanted if name.startswith("logits.")]
    same_ids = all(torch.equal(wanted[name], found[name]) for name in wanted if name.startswith("ids."))
    if not same_ids:
        return {"same_token_ids": False}
    one, other = (torch.cat([some[name] for name in names]).float() for some in (wanted, found))
    distance = (one - other).abs()
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    return {
        "max": float(distance.max()),
        "mean": float(distance.mean()),
        "largest": float(one.abs().max()),
        "top1": float((one.argmax(-1) == other.argmax(-1)).float().mean()),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "same_token_ids": True,
        "same_greedy_tokens": bool(torch.equal(wanted["greedy"], found["greedy"])),
    }


def _require_equal(figures: Mapping[str, Any], tolerance: float, what: str, *, tokens: bool = True) -> None:
    if not figures["same_token_ids"]:
        why = "other token ids for the same prompts"
    elif not figures["max"] <= tolerance * figures["largest"]:
        why = f"logits that are up to {figures['max']:.3g} off, of at most {figures['largest']:.3g}"
    elif tokens and not figures["same_greedy_tokens"]:
        why = "another answer to the same prompt"
    else:
        return
    raise GymError(
        ErrorCode.EXPORT_DIFFERS,
        f"{what} {why}; nothing was kept",
        "report this with the model's name; --skip-check writes it all the same",
    )


def _in_a_fresh_process(parts: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(prefix="gym-export-"))
    try:
        answer = folder / "answer.safetensors"
        job = {
            "parts": parts,
            "prompts": PROMPTS,
            "threads": torch.get_num_threads(),
            "answer": str(answer),
            "tokens": GREEDY_TOKENS,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "gym_fed.export.read_back", str(folder / "job.json")]
        # -P: Python files of the working directory, which may be a model's folder, are not imported
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise GymError(
                ErrorCode.EXPORT_DIFFERS,
                f"what was written cannot be read back: {last[:500]}; nothing was kept",
                "report this with the model's name; --skip-check writes it all the same",
            )
        found: dict[str, Any] = load_file(answer)
        return found
    finally:
        shutil.rmtree(folder)
