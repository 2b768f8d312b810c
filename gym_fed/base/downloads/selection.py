"""Select the files of a repository that a model needs: config, tokenizer, templates and safetensors; no pickles.

Files in subfolders (``original/``, ``onnx/``) are copies for other programs and are skipped, except for chat
templates. Like transformers, this prefers ``model.safetensors`` to an index with shards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"

_SMALL = frozenset(
    {
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
_ALSO = re.compile(r"(LICEN[CS]E|NOTICE)(\.(md|txt))?|additional_chat_templates/[\w.-]+\.jinja", re.ASCII)


def is_model_setting(path: str) -> bool:
    """Return True if a path is a config, tokenizer, template or licence of a model."""
    return path in _SMALL or _ALSO.fullmatch(path) is not None


def weights_index(listed: Collection[str]) -> str | None:
    """Return the index file to read; None if the weights are a single file."""
    return INDEX if INDEX in listed and WHOLE not in listed else None


def unlisted_shards(shards: Iterable[str], listed: Collection[str]) -> list[str]:
    """Return index entries that are not safetensors files at the top of the repository."""
    return sorted(s for s in shards if s not in listed or "/" in s or not s.endswith(".safetensors"))


def chosen_files(name: str, listed: Collection[str], shards: set[str] | None) -> list[str]:
    """Return the paths to download, small ones first, so that errors are found early.

    Raises:
        GymError: ``MODEL_INVALID`` if there are no safetensors weights.
    """
    weights: set[str] = {path for path in (WHOLE, ADAPTER) if path in listed}
    if shards is not None:
        weights |= {INDEX, *shards}
    if not weights:
        other = sorted(path for path in listed if path.endswith((".bin", ".pt", ".pth", ".gguf", ".onnx")))
        detail = (
            f" (only {', '.join(other[:3])}: a format that is not supported from the Hub)" if other else ""
        )
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: has no safetensors weights{detail}",
            "choose a repository with model.safetensors, or convert it with another tool and use the folder",
        )
    small = filter(is_model_setting, listed)
    return [*sorted(small), *sorted(weights)]


def is_whole(folder: Path) -> bool:
    """Return True if a snapshot has a config and all its weights, in a loadable format."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return (folder / ADAPTER).is_file() or (folder / "adapter_model.bin").is_file()
    if not (folder / "config.json").is_file():
        return False
    if any((folder / file).is_file() for file in (WHOLE, ADAPTER, "pytorch_model.bin")):
        return True
    for index in (INDEX, "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            try:
                shards = set(read_object(folder / index)["weight_map"].values())
            except (GymError, KeyError, AttributeError):
                return False
            return all((folder / str(shard)).is_file() for shard in shards)
    return False
