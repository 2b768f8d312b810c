"""Translates ``deepspeed`` and ``fsdp``: which strategy, which ZeRO stage, and what is offloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.interop.llamafactory.translation import Translator

_NO_ZERO = "give a DeepSpeed file, with zero_optimization: {stage: 2} or 3"


def translate_distributed(translator: Translator, processes: int | None) -> None:
    """Write ``distributed``; in one process (``processes`` is 1) there is nothing to shard, which a note says."""
    deepspeed, fsdp = translator.take("deepspeed"), translator.take("fsdp")
    translator.take("fsdp_config")
    if deepspeed:
        offloading(translator, "deepspeed", str(deepspeed), processes)
    elif fsdp:
        shard(translator, "fsdp", {"strategy": "fsdp2", "cpu_offload": "offload" in str(fsdp)}, processes)


def offloading(translator: Translator, key: str, file: str, processes: int | None) -> None:
    """DeepSpeed, from the file that ``key`` names; in one process it still moves the optimiser to the CPU's memory."""
    stage, offload = _zero(file)
    if stage is None:
        translator.lose(key, f"{file} is not here, and its name does not contain the ZeRO stage")
    elif stage in (2, 3):
        shard(
            translator, key, {"strategy": "deepspeed", "zero_stage": stage, "cpu_offload": offload}, processes
        )
        if "distributed" in translator.result.values:
            translator.note(
                key, "stage and offloading are read; the rest of the file is transformers' choice"
            )
    else:
        translator.note(key, f"ZeRO stage {stage} shards no gradients: plain data-parallel processes do")


def shard(translator: Translator, key: str, settings: dict[str, Any], processes: int | None) -> None:
    """Write ``distributed``, unless one process would have everything anyway."""
    if processes == 1:
        what = settings["strategy"]
        translator.note(key, f"one process: {what} has nothing to share out; with --nproc N it does")
        return
    for name, value in settings.items():
        translator.put(f"distributed.{name}", value, key)


def _zero(file: str) -> tuple[int | None, bool]:
    """Stage and offloading of a DeepSpeed file; by its name (``ds_z3_offload_config.json``) when it is not here."""
    path = Path(file)
    if path.is_file():
        zero = read_object(path, ErrorCode.CONFIG_INVALID, _NO_ZERO).get("zero_optimization") or {}
        stage = zero.get("stage", 0) if isinstance(zero, dict) else None
        if stage not in (0, 1, 2, 3):
            raise GymError(ErrorCode.CONFIG_INVALID, f"{path}: names no stage from 0 to 3", _NO_ZERO)
        return int(stage), any(key.startswith("offload_") for key in zero)
    match = re.search(r"z(?:ero)?_?([0123])", path.name)
    return (int(match.group(1)) if match else None), "offload" in path.name
