"""Load the weights of a model folder strictly: its files must contain exactly the model's tensors.

transformers initialises missing tensors randomly and drops unknown ones, with only a warning. The results of such a
model are meaningless, so both cases are rejected with the tensors' names.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_panic
from gym_fed.core.text import counted

EXTRA_TENSORS = "GYM_EXTRA_TENSORS"
"""Environment variable; ``ignore`` loads a model without the tensors that its architecture does not have."""
_NAMES_SHOWN = 3
_OTHER_CLASS = re.compile(r"Unrecognized configuration class <class '.*configuration_(\w+)\.")
_log = logging.getLogger(__name__)


def load_weights(
    kind: Any, source: str | None, arguments: Mapping[str, Any], *, name: str, headless: bool = False
) -> Any:
    """Load a model with torch's SDPA attention, or with eager attention if its class does not support it.

    An implementation that ``config.json`` names is ignored, since it may be a GPU kernel.

    Args:
        kind: A transformers class with ``from_pretrained``.
        source: Folder of the model; None if ``arguments`` contains a ``state_dict``.
        arguments: Arguments of ``from_pretrained``; an ``attn_implementation`` among them is kept.
        name: Name of the model in errors.
        headless: True if the head is not used, so that tensors outside the body may differ.

    Raises:
        GymError: ``MODEL_INVALID`` with tensors that are missing, have a different shape, or are unknown to the
            architecture; errors from ``require_sizes``.
    """
    from gym_fed.base.modeling.config_checks import (  # it imports numpy
        largest_size,
        load_config,
        names_implementation,
        require_sizes,
    )

    if source is not None:
        require_sizes(Path(source))
    given = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True, **arguments}
    if source is not None and "config" not in given and names_implementation(Path(source)):
        given["config"] = load_config(Path(source))
    if "attn_implementation" in given:
        model, info = kind.from_pretrained(source, **given)
    else:
        try:
            model, info = kind.from_pretrained(source, **given, attn_implementation="sdpa")
        except ValueError as error:  # Gemma 2, gpt-oss, Bloom, Mamba and others, before weights are read
            if "does not support an attention implementation" not in str(error):
                raise
            model, info = kind.from_pretrained(source, **given, attn_implementation="eager")
            if largest_size(model.config.get_text_config(), "num_attention_heads"):
                _warn_of_eager(name, type(model).__name__)
    require_exact_tensors(name, model, info, headless=headless)
    return model


@cache
def _warn_of_eager(name: str, kind: str) -> None:
    """Warn once per model, which a run may load several times."""
    _log.warning(
        "%s: %s has no SDPA attention; using eager, which is slower and needs memory quadratic in the row length: "
        "use shorter rows if it runs out of memory",
        name,
        kind,
    )


def require_exact_tensors(name: str, model: Any, info: Mapping[str, Any], *, headless: bool = False) -> None:
    """Reject a model whose files lack a tensor or have an extra one; tied tensors are stored once.

    Args:
        name: Name of the model in errors.
        model: A loaded transformers model.
        info: Loading info that ``from_pretrained`` returns with ``output_loading_info``.
        headless: True if the head is not used, so that tensors outside the body may differ.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    is_body = not hasattr(model, prefix)  # its own names lack the prefix, but those in the files may have it

    def counts(key: str) -> bool:
        return not headless or key.startswith(f"{prefix}.")

    missing = sorted(key for key in info["missing_keys"] if is_body or counts(key))
    if missing:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: its weights lack {counted(len(missing), 'tensor')} of {type(model).__name__}: {_listed(missing)}",
            _untied_head(model, missing)
            or "restore its files; a missing tensor would be filled with random numbers",
        )
    mismatched = sorted(key for key, *_ in info["mismatched_keys"] if is_body or counts(key))
    if mismatched:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: weights have different shapes than config.json describes: {_listed(mismatched)}",
            "restore config.json and weights of the same model",
        )
    extra = sorted(filter(counts, info["unexpected_keys"]))
    if not extra:
        return
    count = counted(len(extra), "tensor")
    text = f"{name}: {count} that {type(model).__name__} does not have: {_listed(extra)}"
    if os.environ.get(EXTRA_TENSORS) != "ignore":
        raise GymError(
            ErrorCode.MODEL_INVALID,
            text,
            f"the model was saved with a different architecture; to ignore them, set {EXTRA_TENSORS}=ignore",
        )
    _log.warning("%s; ignored (%s=ignore)", text, EXTRA_TENSORS)


def _untied_head(model: Any, missing: list[str]) -> str:
    """Return the remedy for a missing head, which is usually tied to the embeddings; otherwise empty."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    named = [key for key, parameter in model.named_parameters() if parameter is weight]
    if missing != named:
        return ""
    return "config.json has tie_word_embeddings: false; set it to true if the head shares the weights of the embeddings"


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_NAMES_SHOWN])[:300]
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Convert libraries' exceptions for broken model files to a ``GymError`` with the model's name.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    wrong = (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError)
    try:
        yield
    except RecursionError as error:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: cannot be read as a model: one of its files is nested too deeply",
            "restore its JSON files, or use another folder",
        ) from error
    except BaseException as error:
        of_other_sizes = isinstance(error, RuntimeError) and "ignore_mismatched_sizes" in str(error)
        of_tokenizers = type(error) is Exception  # the tokenizers library raises plain Exception
        if not (isinstance(error, wrong) or of_other_sizes or of_tokenizers or is_panic(error)):
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if (other := _OTHER_CLASS.match(first_line)) is not None:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{name}: transformers has no text language model of type {other[1]}",
                "use a text model or a vision-language model",
            ) from error
        if of_other_sizes:
            first_line = "its weights differ in size from config.json"
        elif isinstance(error, StrictDataclassError):  # the next line contains the field's problem
            first_line = f"config.json: {' '.join(str(error).split())}"
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: cannot be read as a model: {first_line}",
            "restore its files, or use another folder",
        ) from error
