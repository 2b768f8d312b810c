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


def _section(draft: Draft) -> None:
    for key in list(draft.get("serving")):
        draft.put(key, draft.take(f"serving.{key}"), f"serving.{key}")
    draft.note("serving", "not a section; its keys are at the top level of serving.yaml")


def _format(draft: Draft) -> None:
    value = draft.get("model_format")
    if value not in ("huggingface", "hf", "safetensors", "gguf"):
        raise draft.refuse("model_format", _FORMAT, f"model_format: {value}")
    draft.drop("model_format", "base is a model folder or a GGUF file")


def _quantization(draft: Draft) -> None:
    value = draft.get("quantization")
    if value in ("int8", "int4"):
        draft.put("base_format", draft.take("quantization"), "quantization")
        draft.note("quantization", f"`base_format: {value}`")
        return
    if value not in ("none", "no", False):
        raise draft.refuse("quantization", _BITS, f"quantization: {value}")
    draft.drop("quantization", "the base is served in `dtype`")


def _requests(draft: Draft) -> None:
    """Translate ``batch_size`` (running) and ``max_concurrent`` (accepted) to running and queued requests."""
    running, accepted = draft.get("batch_size"), draft.get("max_concurrent")
    key = "max_concurrent" if running is None else "batch_size"
    if not all(
        isinstance(number, int) and number > 0 for number in (running, accepted) if number is not None
    ):
        raise draft.problem(key, "is not a number of requests")
    draft.move(key, "engine.max_concurrent")
    if running is None or accepted is None:
        return
    if accepted < running:
        problem = f"{accepted} is below batch_size {running}"
        raise draft.problem("max_concurrent", problem, "raise it, or omit it")
    queued = accepted - running
    draft.take("max_concurrent")
    draft.put("engine.max_queued", queued, "max_concurrent")
    draft.put("engine.max_queued_per_user", max(1, queued), "max_concurrent")
    draft.note("max_concurrent", f"`engine.max_queued: {queued}` in addition to {running} running ones")


def _served_name(draft: Draft) -> None:
    """Translate vLLM's ``served_model_name``, a name or a list of one."""
    names = draft.get("served_model_name")
    if isinstance(names, list) and len(names) != 1:
        problem = f"{len(names)} names, but gym-fed's models have one"
        raise draft.problem("served_model_name", problem, "keep one name")
    draft.take("served_model_name")
    draft.put("served_name", names[0] if isinstance(names, list) else names, "served_model_name")
    draft.note("served_model_name", "`served_name`")


def _tool_format(draft: Draft) -> None:
    parser = draft.take("tool_call_parser")
    ours = _TOOL_FORMATS.get(parser, parser) if isinstance(parser, str) else parser
    draft.put("tool_format", ours, "tool_call_parser")
    draft.note("tool_call_parser", f"`tool_format: {ours}`")


WORDS = [
    KeyAlias(
        "serving",
        "its keys at the top level of serving.yaml",
        _section,
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
