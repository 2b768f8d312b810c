"""The base model of a server: its identity, loading, and the digest of its float32 weights.

Variants refer to the digest. A hub describes its base with ``spec_of_files``, without loading torch or the model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.tensor_files import file_tensors, float32_digest, tensor_head, tensor_shapes
from gym_fed.base.models import (
    chain_on,
    folder_here,
    load_adapted,
    load_model,
    load_tokenizer,
    model_name,
    resolve,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.kept import MIN_KEPT, kept_text, mapped_base, share_kept
from gym_fed.serving.forward.plain_config import plain_config, plain_shapes
from gym_fed.serving.plain_tokenizer import plain_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gym_fed.base.modeling.checkpoint import Checkpoint
    from gym_fed.serving.forward.plain_model import PlainModel


_log = logging.getLogger(__name__)
_DERIVED = re.compile(r"(^lm_head\.weight|\.rotary_emb\.inv_freq)$")
"""Stored tensors that are derived from others: a tied head, and rotary frequencies from old versions of
transformers."""


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of generation_config.json, config.json and the tokenizer.

    Raises:
        GymError: ``MODEL_INVALID`` for a value that is not a token id of the model.
    """
    folder = Path(getattr(model, "name_or_path", None) or "")
    ids = _ids(
        model, model.config, folder / "config.json"
    )  # first: transformers copies it into generation_config
    ids |= _ids(model, getattr(model, "generation_config", None), folder / "generation_config.json")
    return ids if tokenizer.eos_token_id is None else ids | {tokenizer.eos_token_id}


def _ids(model: Any, config: Any, file: Path) -> frozenset[int]:
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list | tuple) else [value]
    most = _vocabulary(model)
    if not all(
        type(token_id) is int and token_id >= 0 and (most is None or token_id < most) for token_id in ids
    ):
        problem = "a token id" if most is None else f"a token id below {most:,}"
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{file}: eos_token_id is {str(value)[:80]}, which is neither {problem} nor a list of token ids",
            "correct it, or remove it",
        )
    return frozenset(ids)


def _vocabulary(model: Any) -> int | None:
    """Return the vocabulary size; None if the config does not state it."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    size = getattr(config, "vocab_size", None)
    return size if type(size) is int else None


def spec_of_files(folder: Path, name: str) -> BaseSpec | None:
    """Compute the ``BaseSpec`` of a folder's model from its files; None if the model must be loaded."""
    config = plain_config(folder)
    tensors = None if config is None else file_tensors(folder)
    if config is None or tensors is None or config.num_hidden_layers > len(tensors):
        return None
    shapes = {key: tensor.shape for key, tensor in sorted(tensors.items())}
    if shapes != plain_shapes(config):
        return None
    return BaseSpec(name, float32_digest(tensors, shapes), shapes)


def require_same_tensors(name: str) -> None:
    """Refuse a base with missing or extra tensors, by reading only the headers of its files.

    A base that is not on this machine, or whose architecture only transformers supports, is checked when it is loaded.

    Raises:
        GymError: ``MODEL_INVALID`` naming the tensor.
    """
    folder = folder_here(name)
    config = None if folder is None else plain_config(folder)
    tensors = None if folder is None else tensor_shapes(folder)
    if config is None or tensors is None or config.num_hidden_layers > len(tensors):
        return
    shapes = plain_shapes(config)
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: {counted(len(missing), 'tensor')} missing from its weights, such as {missing[0]}",
            "restore its files; a missing tensor would be filled with random numbers",
        )
    extra = sorted(key for key in tensors.keys() - shapes.keys() if not _DERIVED.search(key))
    if not extra:
        return
    from gym_fed.base.modeling.loading import EXTRA_TENSORS

    if os.environ.get(EXTRA_TENSORS) != "ignore":
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: {counted(len(extra), 'tensor')} that its architecture does not have, such as {extra[0]}",
            f"the model was saved with a different architecture; to ignore them, set {EXTRA_TENSORS}=ignore",
        )


def load_base(
    name: str, adapters: Sequence[str], dtype: str, *, plain: bool = False
) -> tuple[Any, Any, BaseSpec]:
    """Load the model in its serving dtype, with its tokenizer and its ``BaseSpec``.

    With ``plain``, the model is a ``PlainModel`` and the tokenizer a ``PlainTokenizer`` if they support this base;
    transformers is not imported then.

    Weights of the folder's own safetensors files are read in the serving dtype, and the digest is computed from the
    files, block by block. With adapters, or if the files' tensors do not map one to one to the model's, the model is
    loaded in float32 and then converted, since its float32 weights are not in the files. This needs three times the
    memory.

    Raises:
        GymError: See ``load_model`` and ``end_ids``.
    """
    import torch

    from gym_fed.base.modeling.checkpoint import Checkpoint, config_of
    from gym_fed.base.modeling.config_checks import require_sizes

    target = getattr(torch, dtype)
    folder = Path(resolve(name))
    require_sizes(folder)
    if plain and not adapters and (model := _plain(folder, target)) is not None:
        tokenizer = plain_tokenizer(folder, model.config.architecture) or load_tokenizer(name)
        end_ids(model, tokenizer)
        return model, tokenizer, _spec(model, model.digest, name)
    checkpoint = None if adapters or dtype == "float32" else Checkpoint.find(folder)
    if checkpoint is not None:
        arguments: dict[str, Any] | None = None
        if not checkpoint.is_in(target) and (config := config_of(folder)) is not None:
            arguments = {"config": config, "state_dict": checkpoint.tensors(target)}
        loaded = load_model(name, dtype=dtype, arguments=arguments, images=True)
        if arguments is not None:
            _named(loaded.model, folder)
        del arguments
        end_ids(loaded.model, loaded.tokenizer)
        if (digest := checkpoint_digest(loaded.model, checkpoint)) is not None:
            return loaded.model, loaded.tokenizer, _spec(loaded.model, digest, name)
        del loaded
    if dtype != "float32":
        why = "adapters are merged into it" if adapters else "its files do not match its weights one to one"
        _log.warning("%s is first loaded in float32, which takes three times its memory: %s", name, why)
    from gym_fed.base.modeling.adapters import merged

    loaded = load_adapted(name, adapters, images=True)
    end_ids(loaded.model, loaded.tokenizer)
    model = merged(loaded.model, name)
    base = BaseSpec.of(model, model_name(name))
    if dtype != "float32":
        _warn_of_rounding(model, name, adapters, dtype)
    return _converted(model, target), loaded.tokenizer, base


def _converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert weights in place, except complex buffers, which ``Module.to`` would make real (Llama 4's tower)."""
    untyped: Any = model
    untyped._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return model


def _warn_of_rounding(model: nn.Module, name: str, adapters: Sequence[str], dtype: str) -> None:
    """Log the share of the adapters' change that is left after rounding to the dtype."""
    home, chain = chain_on(name, adapters)
    tuned = model_tensors(model)
    base = mapped_base(Path(resolve(home)), tuned) if chain else None
    share = None if base is None else share_kept(base, tuned, dtype)
    if share is not None and share < MIN_KEPT:
        _log.warning("%s with its adapters %s", name, kept_text(share, dtype))


def _plain(folder: Path, dtype: torch.dtype) -> PlainModel | None:
    """Load a folder's model without transformers' classes; return None if they are required."""
    import torch

    from gym_fed.base.modeling.checkpoint import Checkpoint
    from gym_fed.serving.forward.plain_model import PlainModel

    config = plain_config(folder)
    checkpoint = None if config is None else Checkpoint.find(folder)
    if config is None or checkpoint is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    weights = checkpoint.mapped() if checkpoint.is_in(dtype) else checkpoint.tensors(dtype)
    model = PlainModel.of(config, weights)
    if model is None:
        return None
    model.digest = float32_digest(checkpoint.entries, sorted(weights))
    model.name_or_path = str(folder)
    file = folder / "generation_config.json"
    with suppress(OSError, GymError):  # transformers also ignores a file that it cannot read
        model.generation_config.eos_token_id = (
            read_object(file).get("eos_token_id") if file.is_file() else None
        )
    return model


def _named(model: Any, folder: Path) -> None:
    """Set the name and generation config of a model built from tensors, as loading it from its folder would."""
    from transformers import GenerationConfig

    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _spec(model: nn.Module, digest: str, name: str) -> BaseSpec:
    shapes = {key: tuple(tensor.shape) for key, tensor in model_tensors(model).items()}
    return BaseSpec(model_name(name), digest, shapes)


def checkpoint_digest(model: nn.Module, checkpoint: Checkpoint) -> str | None:
    """Compute the ``tensors_digest`` that a model has in float32, from the files that it was loaded from.

    Returns None if the files' tensors do not map one to one to the model's: a parameter has a different name or shape,
    or is not the file's tensor rounded to its own dtype. Such a model must be loaded in float32.
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
