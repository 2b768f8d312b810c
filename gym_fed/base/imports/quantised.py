"""Import AWQ and GPTQ folders as plain model folders, if the library with their kernels is not installed."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gym_fed.base.imports import awq, gptq
from gym_fed.base.imports.importer import Importer, Report
from gym_fed.base.imports.packed import PACKED, TensorInvalid
from gym_fed.base.imports.stored import StoredTensors, TensorWriter, weight_files
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.core.json_files import read_object

Dequantised = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[tuple[str, Any]]]
METHODS: Mapping[str, Dequantised] = {"awq": awq.dequantised, "gptq": gptq.dequantised}
"""The reader of each ``quant_method``."""
LIBRARY = "gptqmodel"
"""The package that transformers uses to run packed weights of both methods."""
_COPIED = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*",
)  # fmt: skip
"""Patterns of the files that are copied as they are."""
_NOT_COPIED = (
    "config.json", "import.json", "quantize_config.json", "quant_config.json", "quantization_config.json",
)  # fmt: skip
_MAX_EXPANSION = 16
"""Maximum number of weights per packed word: 2-bit weights in 32-bit words."""


class QuantisedImporter(Importer):
    """Importer for AWQ (gemm layout, 4 bits) and GPTQ (2, 3, 4 and 8 bits). Weights get the dtype of their scales."""

    name = "quantised"
    version = 1

    def takes(self, source: Path) -> bool:
        if importlib.util.find_spec(LIBRARY) is not None:
            return False
        with suppress(OSError, GymError):  # loading reports it
            return method_of(read_object(source / "config.json")) in METHODS
        return False

    def files(self, source: Path) -> list[Path]:
        return [source / "config.json", *_copied_files(source), *weight_files(source)]

    def require_header(self, source: Path) -> None:
        with StoredTensors(source):
            pass

    def bytes_needed(self, source: Path) -> int:
        with StoredTensors(source) as tensors:
            return sum(_plain_bytes(tensors, name) for name in tensors)

    def describe(self, source: Path) -> str:
        config = read_object(source / "config.json")
        section = config["quantization_config"]
        bits = section.get("bits", section.get("w_bit"))
        return f"{method_of(config)} of {str(bits)[:20]} bits, dequantised without {LIBRARY}"

    def write(self, source: Path, folder: Path, report: Report) -> None:
        config = read_object(source / "config.json")
        section = config.pop("quantization_config")
        config.pop("torch_dtype", None)
        _require_linear(source, config)
        needed = self.bytes_needed(source)
        with StoredTensors(source) as tensors:
            written = TensorWriter(folder)
            for name, value in plain_tensors(tensors, section):
                if name.endswith(".weight") and f"{name.removesuffix('weight')}{PACKED}" in tensors:
                    config["dtype"] = str(value.dtype).removeprefix("torch.")
                written.add(name, value)
                report(written.written, needed)
            written.finish()
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in _copied_files(source):
            shutil.copyfile(file, folder / file.name)
        _require_whole(source, folder)


def method_of(config: Mapping[str, Any]) -> str:
    """Return the ``quant_method`` of a ``config.json``; empty if there is none."""
    section = config.get("quantization_config")
    return str(section.get("quant_method", "")) if isinstance(section, dict) else ""


def plain_tensors(tensors: StoredTensors, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all tensors of a folder, with packed ones dequantised.

    Args:
        tensors: The folder's tensors.
        section: The ``quantization_config`` section.

    Raises:
        GymError: ``MODEL_INVALID`` with the file and the tensor.
    """
    try:
        yield from METHODS[str(section["quant_method"])](tensors, section)
    except TensorInvalid as error:
        raise GymError(error.code, f"{tensors.file_of(error.tensor)}: {error.message}", error.hint) from error


def _plain_bytes(tensors: StoredTensors, name: str) -> int:
    """Return a dequantised tensor's size in bytes; 2 per weight, since scales are 16-bit or rounded by training."""
    size = math.prod(tensors.shape(name))
    stem, _, part = name.rpartition(".")
    if part != PACKED:
        return size * 4
    outputs, words = (
        (tensors.shape(f"{stem}.{suffix}") if f"{stem}.{suffix}" in tensors else [])
        for suffix in ("scales", "qzeros")
    )
    fits = len(outputs) == 2 and len(words) == 2 and min(words) > 0
    return size * 2 * min(_MAX_EXPANSION, -(-outputs[1] // words[1]) if fits else _MAX_EXPANSION)


def _copied_files(source: Path) -> list[Path]:
    """Return the tokenizer, template, generation config and licence files."""
    files = {file for pattern in _COPIED for file in source.glob(pattern)}
    return sorted(
        file
        for file in files
        if file.name not in _NOT_COPIED and not file.name.endswith(".index.json") and lies_in(file, source)
    )


def _require_linear(source: Path, config: Mapping[str, Any]) -> None:
    """Reject models such as GPT-2, whose weights are transposed."""
    if str(config.get("model_type")) in ("gpt2", "openai-gpt", "imagegpt", "decision_transformer"):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{source}: packed weights of {config.get('model_type')} (Conv1D) are not supported",
            "use an unquantised base",
        )


def _require_whole(source: Path, folder: Path) -> None:
    """Load the folder once, to reject missing or extra tensors before it is used.

    Raises:
        GymError: ``MODEL_INVALID`` with tensors that are missing or unknown to the architecture.
    """
    import torch

    from gym_fed.base.modeling.loading import load_weights
    from gym_fed.base.modeling.model_class import class_for
    from gym_fed.core.library_env import quiet_loading

    try:
        with quiet_loading():
            load_weights(class_for(folder), str(folder), {"dtype": torch.float16}, name=str(source))
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{source}: cannot be loaded: {str(error)[:300]}",
            "fetch the model again",
        ) from error
