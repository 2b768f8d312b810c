"""Keys of serving configs in other engines, alone or in a section ``serving:``."""

from __future__ import annotations

from gym_fed.interop.draft import Draft, KeyAlias, Unsupported

_FORMAT = Unsupported(
    "this format is not supported; the base is a model folder or a GGUF file",
    ("base: path/to/model-folder", "base: path/to/model.gguf"),
)
_BITS = Unsupported(
    "the base is served in 16, 8 or 4 bits, packed from 16-bit weights",
    ("base_format: int8", "base_format: int4"),
)


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOOL_FORMATS = {"llama3_json": "llama", "openai": "harmony"}
"""gym-fed's tool formats by the names of vLLM's parsers, if they differ."""


def _level(draft: Draft) -> None:
    for key in list(draft.get("serving")):
        draft.put(key, draft.take(f"serving.{key}"), f"serving.{key}")
    draft.note("serving", "no section: its keys are at the top level of serving.yaml")


def _format(draft: Draft) -> None:
    value = draft.get("model_format")
    if value not in ("huggingface", "hf", "safetensors", "gguf"):
        raise draft.refuse("model_format", _FORMAT, f"model_format: {value}")
    draft.take("model_format")
    draft.note("model_format", "not needed (base is a model folder or a GGUF file)")


def _quantization(draft: Draft) -> None:
    value = draft.get("quantization")
    if value in ("int8", "int4"):
        draft.put("base_format", draft.take("quantization"), "quantization")
        draft.note("quantization", f"`base_format: {value}`")
        return
    if value not in ("none", "no", False):
        raise draft.refuse("quantization", _BITS, f"quantization: {value}")
    draft.take("quantization")
    draft.note("quantization", "not needed (the base is served in `dtype`)")


def _requests(draft: Draft) -> None:
    """Translate ``batch_size`` (running) and ``max_concurrent`` (accepted) to running and queued requests."""
    at_once, in_all = draft.get("batch_size"), draft.get("max_concurrent")
    whole = all(isinstance(number, int) and number > 0 for number in (at_once, in_all) if number is not None)
    if not whole:
        raise draft.problem(
            "batch_size" if at_once is not None else "max_concurrent", "is not a number of requests"
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
            "max_concurrent", f"{in_all} is below batch_size {at_once}", "raise it, or omit it"
        )
    draft.take("max_concurrent")
    draft.put("engine.max_queued", in_all - at_once, "max_concurrent")
    draft.put("engine.max_queued_per_user", max(1, in_all - at_once), "max_concurrent")
    draft.note(
        "max_concurrent", f"`engine.max_queued: {in_all - at_once}` in addition to {at_once} running ones"
    )


def _served_name(draft: Draft) -> None:
    """Translate vLLM's ``served_model_name``, a name or a list of one."""
    names = draft.get("served_model_name")
    if isinstance(names, list) and len(names) != 1:
        raise draft.problem(
            "served_model_name", f"{len(names)} names; a model has only one here", "keep one name"
        )
    draft.take("served_model_name")
    draft.put("served_name", names[0] if isinstance(names, list) else names, "served_model_name")
    draft.note("served_model_name", "`served_name`")


def _tool_format(draft: Draft) -> None:
    named = draft.take("tool_call_parser")
    ours = _TOOL_FORMATS.get(named, named) if isinstance(named, str) else named
    draft.put("tool_format", ours, "tool_call_parser")
    draft.note("tool_call_parser", f"`tool_format: {ours}`")


WORDS = [
    KeyAlias(
        "serving",
        "its keys at the top level of serving.yaml",
        _level,
        lambda value: isinstance(value, dict),
        "serving: {max_concurrent, cache_size}",
    ),
    KeyAlias("model_format", "", _format, shown="serving.model_format: onnx", refusal=_FORMAT),
    KeyAlias("quantization", "`base_format`, if int8 or int4", _quantization, shown="serving.quantization"),
    KeyAlias("batch_size", "`engine.max_concurrent`", _requests, shown="serving.batch_size"),
    KeyAlias(
        "max_concurrent",
        "`engine.max_concurrent`; with batch_size `engine.max_queued`",
        _requests,
        shown="serving.max_concurrent",
    ),
    KeyAlias("model", "base", shown="serving.model"),
    KeyAlias("model_name_or_path", "base", shown="serving.model_name_or_path"),
    KeyAlias("template", "chat_template", shown="serving.template"),
    KeyAlias("max_model_len", "engine.max_context", shown="serving.max_model_len"),
    KeyAlias("ctx_size", "engine.max_context"),
    KeyAlias("max_num_seqs", "engine.max_concurrent"),
    KeyAlias("served_model_name", "`served_name`", _served_name),
    *(KeyAlias(name, f"sampling.{name}") for name in _SAMPLING),
    KeyAlias("kv_cache_dtype", "engine.kv_dtype"),
    KeyAlias("enable_prefix_caching", "engine.prefix_cache"),
    KeyAlias("tool_call_parser", "`tool_format`", _tool_format),
    KeyAlias("ssl_certfile", "tls.certificate"),
    KeyAlias("ssl_keyfile", "tls.key"),
]

NEAR = {"model_path": "base", "api_key": "api_keys"}
"""gym-fed's keys by those of other servers."""
