"""Keys of serving configs: a ``serving:`` level around them, and other engines' words for how many requests run."""

from __future__ import annotations

from gym_fed.compat.keys.draft import Draft, KeyWord
from gym_fed.compat.row import RefusedWord

_FORMAT = RefusedWord(
    "no base is read from this format; a model folder and a GGUF file are",
    ("base: path/to/model-folder", "base: path/to/model.gguf"),
)
_FEW_BITS = RefusedWord(
    "the base is served in 16 or 32 bits; variants are what is held in few bits",
    ("dtype: bfloat16", "cache_size: 10GB"),
)


def _level(draft: Draft) -> None:
    for key in list(draft.get("serving")):
        draft.put(key, draft.take(f"serving.{key}"), f"serving.{key}")
    draft.note("serving", "no section: its keys stand at the top level of serving.yaml")


def _format(draft: Draft) -> None:
    value = draft.get("model_format")
    if value not in ("huggingface", "hf", "safetensors", "gguf"):
        raise draft.refuse("model_format", _FORMAT, f"model_format: {value}")
    draft.take("model_format")
    draft.note("model_format", "not needed (base is a model folder or a GGUF file)")


def _quantization(draft: Draft) -> None:
    value = draft.get("quantization")
    if value not in ("none", "no", False):
        raise draft.refuse("quantization", _FEW_BITS, f"quantization: {value}")
    draft.take("quantization")
    draft.note("quantization", "not needed (the base is served in `dtype`)")


def _requests(draft: Draft) -> None:
    """``batch_size`` requests run at once, and ``max_concurrent`` are taken on: the rest of them waits."""
    at_once, in_all = draft.get("batch_size"), draft.get("max_concurrent")
    whole = all(isinstance(number, int) and number > 0 for number in (at_once, in_all) if number is not None)
    if not whole:
        raise draft.problem(
            "batch_size" if at_once is not None else "max_concurrent", "is no number of requests"
        )
    if at_once is None:
        draft.put("engine.max_concurrent", draft.take("max_concurrent"), "max_concurrent")
        draft.note("max_concurrent", "`engine.max_concurrent`")
        return
    draft.put("engine.max_concurrent", draft.take("batch_size"), "batch_size")
    draft.note("batch_size", "`engine.max_concurrent`")
    if in_all is None:
        return
    if in_all < at_once:
        raise draft.problem(
            "max_concurrent", f"{in_all} is below batch_size {at_once}", "raise it, or leave it out"
        )
    draft.take("max_concurrent")
    draft.put("engine.max_queued", in_all - at_once, "max_concurrent")
    draft.put("engine.max_queued_per_user", max(1, in_all - at_once), "max_concurrent")
    draft.note("max_concurrent", f"`engine.max_queued: {in_all - at_once}` beside the {at_once} that run")


WORDS = [
    KeyWord(
        "serving",
        "its keys at the top level of serving.yaml",
        _level,
        lambda value: isinstance(value, dict),
        "serving: {max_concurrent, cache_size}",
    ),
    KeyWord("model_format", "", _format, shown="serving.model_format: onnx", refusal=_FORMAT),
    KeyWord("quantization", "", _quantization, shown="serving.quantization: int4", refusal=_FEW_BITS),
    KeyWord("batch_size", "`engine.max_concurrent`", _requests, shown="serving.batch_size"),
    KeyWord(
        "max_concurrent",
        "`engine.max_concurrent`; beside batch_size `engine.max_queued`",
        _requests,
        shown="serving.max_concurrent",
    ),
    KeyWord("model", "base", shown="serving.model"),
    KeyWord("model_name_or_path", "base", shown="serving.model_name_or_path"),
    KeyWord("template", "chat_template", shown="serving.template"),
    KeyWord("max_model_len", "engine.max_context", shown="serving.max_model_len"),
]

NEAR = {"max_num_seqs": "engine", "model_path": "base", "api_key": "api_keys"}
"""Our keys by those of other servers."""
