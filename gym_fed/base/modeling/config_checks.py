"""Validate ``config.json`` before a model is built: a known architecture, and sizes that match the weight files.

Code that comes with a model is never run. transformers allocates what a config specifies, of any size, and compares
it with the weights only afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.tensor_files import tensor_shapes
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted, plain


def require_architecture(name: str, folder: Path) -> None:
    """Reject a model whose ``config.json`` names an architecture that is unknown, or that only transcribes speech.

    Raises:
        GymError: ``MODEL_INVALID`` with the architecture.
    """
    from transformers import CONFIG_MAPPING

    from gym_fed.base.modeling.mixture_of_depths import MODEL_TYPE as MIXTURE_OF_DEPTHS

    classes: list[Any] = []
    kind, has_code = None, False
    with suppress(OSError, ValueError, AttributeError):  # reading the model reports it
        config = read_object(folder / "config.json")
        kind, has_code = config.get("model_type"), "auto_map" in config
        classes = config.get("architectures") or []
    if isinstance(kind, str) and classes == [_transcriber(kind)]:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: is a {plain(kind, 60)} model, a speech encoder-decoder that has no language model",
            "use a language model that reads audio, such as Qwen2-Audio or Audio Flamingo 3",
        )
    known = isinstance(kind, str) and (kind in CONFIG_MAPPING or kind == MIXTURE_OF_DEPTHS)
    if known or (kind is None and not has_code):
        return
    raise GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: transformers has no architecture {plain(kind, 60)!r}, and code that comes with a model is never run",
        "use a model that transformers supports, or install a transformers version that supports this one",
    )


def _transcriber(kind: str) -> str | None:
    """Return the class of a model type that converts speech to text and is no language model (Whisper); else None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as LANGUAGE
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH

    return None if kind in LANGUAGE else SPEECH.get(kind)


def images_type(folder: Path) -> str | None:
    """Return the model type if it reads images or sound and has no text-only class in transformers; otherwise None."""
    with suppress(OSError, ValueError, AttributeError):  # loading reports it
        config = read_object(folder / "config.json")
        kind = config.get("model_type")
        if kind in _ORDINARY:
            return None  # without importing transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT_CLASSES
        from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as CLASSES

        has_part = "vision_config" in config or "audio_config" in config or kind in CLASSES
        if has_part and kind not in TEXT_CLASSES:
            return str(kind)
    return None


def require_text(name: str, folder: Path) -> None:
    """Reject a model that reads images or sound and has no text-only class in transformers.

    Raises:
        GymError: ``MODEL_INVALID`` with the model type.
    """
    if (kind := images_type(folder)) is not None:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: is a {kind} model, which reads images or audio; `gym train` and `gym api` support it, but "
            "other commands need text models",
            "load its folder with transformers (AutoModelForMultimodalLM), or use a text model",
        )


_ORDINARY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose tensor names are known to this module."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Names of the sizes that are compared with the weight files, as transformers' config attributes."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "d_model", "n_embd", "n_inner", "d_ff")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SIZE_LIMIT = 1 << 31
_SPARE_LAYERS = 1000
"""Number of layers that is always accepted for other model types, whose layers may share weights or be missing."""
MAX_ITEMS = 1 << 16
"""Maximum length of a list, and of ``num_labels``: transformers creates a name for each."""
_BEAMS = ("num_beams", "num_beam_groups", "num_return_sequences")
MAX_BEAMS = 64
"""Maximum number of sequences per prompt, each with its own cache."""
_WEIGHTS_PER_NUMBER = 32
"""Maximum number of weights per stored number: 1-bit weights in 32-bit words."""

_HINT = "correct it, or restore config.json and weights of the same model"

Shapes = Mapping[str, tuple[int, ...]]


def require_harmless(folder: Path) -> None:
    """Reject configs for which transformers would fill the memory.

    Raises:
        GymError: ``MODEL_INVALID`` with file, key and value.
    """
    for name in ("config.json", "generation_config.json"):
        pending: list[object] = []
        with suppress(OSError, GymError):  # loading the model reports it
            pending.append(read_object(folder / name))
        while pending:
            node = pending.pop()
            if isinstance(node, list):
                pending.extend(node)
            for key, value in node.items() if isinstance(node, dict) else ():
                pending.append(value)
                if (fault := _harm(key, value)) is not None:
                    raise GymError(
                        ErrorCode.MODEL_INVALID, f"{folder / name}: {plain(key, 60)} {fault}", _HINT
                    )


def _harm(key: str, value: object) -> str | None:
    """Return why an entry of a config is refused; None if it is not."""
    most = MAX_ITEMS if key == "num_labels" else MAX_BEAMS
    if key in ("num_labels", *_BEAMS) and isinstance(value, int) and value > most:
        return f"is {value:.6g}, but at most {most:,} are allowed"
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        return f"has {counted(len(value), 'value')}, but at most {MAX_ITEMS:,} are allowed"
    if key == "quantization_config" and not isinstance(value, dict | None):
        return "is not a mapping"
    return None


def names_implementation(folder: Path) -> bool:
    """Return True if ``config.json`` names an implementation of attention or experts, such as FlashAttention."""
    try:
        return b'_implementation"' in (folder / "config.json").read_bytes()
    except OSError:  # loading the model reports it
        return False


def load_config(folder: Path) -> Any:
    """Load the transformers config of a folder, without the implementations that it names.

    transformers would prefer them to an ``attn_implementation`` argument. Many need a GPU, or code from the Hub.

    Raises:
        GymError: Errors from ``require_harmless``.
    """
    from transformers import AutoConfig

    require_harmless(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None  # sets those of its parts, too
    return config


def require_sizes(folder: Path) -> None:
    """Reject a model folder whose config has different sizes from its safetensors files.

    Raises:
        GymError: ``MODEL_INVALID`` with file, key and value; errors from ``require_harmless``.
    """
    file = folder / "config.json"
    require_harmless(folder)
    try:
        config = read_object(file)
    except (OSError, GymError):  # loading the model reports it
        return
    ordinary = config.get("model_type") in _ORDINARY
    faults = _invalid_sizes(config) if ordinary else iter(())
    if (fault := next(faults, None)) is None and (shapes := tensor_shapes(folder)):
        fault = next(_other_sizes(config, shapes) if ordinary else _too_large(config, shapes), None)
    if fault is not None:
        raise GymError(ErrorCode.MODEL_INVALID, f"{file}: {fault}", _HINT)


def _invalid_sizes(config: Mapping[str, Any]) -> Iterator[str]:
    for key in (*SIZES, "head_dim"):
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 < value < _SIZE_LIMIT):
            yield f"{key} is {str(value)[:40]!r}, not an integer from 1 to {_SIZE_LIMIT - 1:,}"


def _other_sizes(config: Mapping[str, Any], shapes: Shapes) -> Iterator[str]:
    layers = config.get("num_hidden_layers")
    stored = 1 + max((int(match[1]) for name in shapes if (match := _LAYER.search(name))), default=-1)
    if layers is not None and stored and layers > stored:  # extra layers in the files are ignored
        yield f"num_hidden_layers is {layers:,}, but the weights have {counted(stored, 'layer')}"
    if config.get("quantization_config") is not None:  # packed weights have different shapes
        return
    hidden, heads, dim = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if dim is None and hidden and heads and config["model_type"] != "qwen3":
        dim = hidden // heads
    for key, tensor, axis, each in (
        ("vocab_size", "embed_tokens.weight", 0, 1),
        ("hidden_size", "embed_tokens.weight", 1, 1),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 0, 1),
        ("num_attention_heads", "layers.0.self_attn.q_proj.weight", 0, dim),
        ("num_key_value_heads", "layers.0.self_attn.k_proj.weight", 0, dim),
    ):
        value, name = config.get(key), next((name for name in shapes if name.endswith(tensor)), None)
        if value is None or each is None or name is None or len(shapes[name]) != 2:
            continue
        if value * each != shapes[name][axis]:
            by = "" if each == 1 else f" heads of {each:,}"
            yield f"{key} is {value:,}{by}, but the weights' {name} is {list(shapes[name])}"


def _too_large(config: Mapping[str, Any], shapes: Shapes) -> Iterator[str]:
    """Yield sizes that are impossible with these files, for an unknown model type."""
    max_layers = max(_SPARE_LAYERS, len(shapes))
    max_width = _WEIGHTS_PER_NUMBER * sum(map(math.prod, shapes.values()))
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for keys, limit in ((_LAYERS, max_layers), (_WIDTHS, max_width)):
            for key in keys:
                if type(value := section.get(key)) is int and value > limit:
                    yield f"{key} is {value:,}, more than the weights' {counted(len(shapes), 'tensor')} can have"


def largest_size(text: Any, key: str) -> int | None:
    """Return a size of a text config, the largest one if layers differ; None if the config does not have it."""
    try:
        value = getattr(text, key, None)
    except RuntimeError:  # Gemma 4 and others: transformers requires a layer's own config
        value = [getattr(text.per_layer_config[layer], key, None) for layer in range(text.num_hidden_layers)]
    if isinstance(value, list | tuple):
        return max((size for size in value if isinstance(size, int)), default=None)
    return value if isinstance(value, int) else None
