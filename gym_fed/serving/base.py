"""Loads the base that is served, and describes it as its variants know it: by the digest of its float32 weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.delta.base import BaseSpec, model_tensors, tensor_head
from gym_fed.models import load_adapted, load_model, model_name, resolve

if TYPE_CHECKING:
    from torch import nn

    from gym_fed.modeling.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


def load_base(name: str, adapters: Sequence[str], dtype: str) -> tuple[Any, Any, BaseSpec]:
    """The model in its serving type, its tokenizer, and its description.

    Weights of the folder's own safetensors files are read in the serving type, and the digest is computed from the
    files, block by block. With adapters, and where a model is not made of its files' tensors one to one, it is loaded
    in float32 and converted afterwards, for its float32 weights are nowhere else; that takes three times the memory.

    Raises:
        GymError: As ``load_model``.
    """
    import torch

    from gym_fed.modeling.adapters import merged
    from gym_fed.modeling.checkpoint import Checkpoint, config_of

    target = getattr(torch, dtype)
    folder = Path(resolve(name))
    checkpoint = None if adapters or dtype == "float32" else Checkpoint.find(folder)
    if checkpoint is not None:
        arguments: dict[str, Any] | None = None
        if not checkpoint.is_in(target) and (config := config_of(folder)) is not None:
            arguments = {"config": config, "state_dict": checkpoint.tensors(target)}
        loaded = load_model(name, dtype=dtype, arguments=arguments)
        if arguments is not None:
            _named(loaded.model, folder)
        del arguments
        if (base := _described(loaded.model, checkpoint, model_name(name))) is not None:
            return loaded.model, loaded.tokenizer, base
        del loaded
    if dtype != "float32":
        why = "adapters are merged into it" if adapters else "its files are not its weights one to one"
        _log.warning("%s is loaded in float32 first, in three times its memory: %s", name, why)
    loaded = load_adapted(name, adapters)
    model: Any = merged(loaded.model, name)
    base = BaseSpec.of(model, model_name(name))
    return model.to(dtype=target), loaded.tokenizer, base


def _named(model: Any, folder: Path) -> None:
    """Give a model of given tensors what it has when it is loaded from its folder: the name, and how it generates."""
    from transformers import GenerationConfig

    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _described(model: Any, checkpoint: Checkpoint, name: str) -> BaseSpec | None:
    digest = checkpoint_digest(model, checkpoint)
    if digest is None:
        return None
    return BaseSpec(name, digest, {key: tuple(one.shape) for key, one in model_tensors(model).items()})


def checkpoint_digest(model: nn.Module, checkpoint: Checkpoint) -> str | None:
    """``tensors_digest`` of a model as it would be in float32, from the files that it was loaded from.

    None where the model is not made of the files' tensors one to one: a parameter has another name or shape, or is not
    the file's rounded to its own type. Such a model has to be loaded in float32.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in model_tensors(model).items():
        if checkpoint.shape(name) != tuple(tensor.shape) or not tensor.is_contiguous():
            return None
        digest.update(tensor_head(name, torch.float32, tensor.shape))
        flat = tensor.view(-1)
        for at, block in checkpoint.blocks(name):
            if not torch.equal(block.to(tensor.dtype), flat[at : at + len(block)].to("cpu")):
                return None
            digest.update(block.to(torch.float32).numpy().data)
    return f"sha256:{digest.hexdigest()}"
