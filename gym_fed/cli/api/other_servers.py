"""Options of vLLM, llama.cpp's server and others that `gym api` lacks; the error names gym-fed's equivalent."""

from __future__ import annotations

from typing import Any

import click

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import Command

_CONTEXT = "--set engine.max_context=TOKENS"
_AT_ONCE = "--set engine.max_concurrent=NUMBER"
_STEP = "--set engine.max_batch_tokens=TOKENS"
_NAME = "--set served_name=NAME"
_KEYS = "gym api keys add NAME, and then --api-keys api_keys.json"
_KV_DTYPE = "--set engine.kv_dtype=int8 (or float32, bfloat16)"
_KV_SIZE = "--set engine.kv_cache_size=4GiB, and --set cache_size=10GB for variants"
_CACHE_SIZE = "--set cache_size=10GB"
_DRAFT = "--set engine.speculative=draft and --set engine.draft_model=MODEL (or engine.speculative=ngram)"
_SAMPLING = "--set sampling.{0}=VALUE, the default for requests"
_DEVICE = "--set device=cuda (layers are not split across devices)"
_ONE_DEVICE = "leave it out: a server runs on one device"
_ON = "leave it out: it is always on"
_VARIANT = "gym variant add FILE.gymdelta; gym delta encode creates one from a LoRA folder"
_OF_REQUESTS = "leave it out: each request sets {0}"

OPTIONS = {
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c", "--context-length"), _CONTEXT),
    **dict.fromkeys(("--max-num-seqs", "--parallel", "-np", "--max-running-requests"), _AT_ONCE),
    **dict.fromkeys(("--max-num-batched-tokens", "--batch-size", "-b", "--ubatch-size", "-ub"), _STEP),
    **dict.fromkeys(("--served-model-name", "--alias", "-a"), _NAME),
    **dict.fromkeys(("--api-key", "--api-key-file"), _KEYS),
    **dict.fromkeys(("-m", "-hf", "-hfr", "--hf-repo", "--model-path"), "--base MODEL"),
    "--chat-template-file": "--chat-template FILE",
    "--generation-config": "--set sampling.temperature=1 and the like; without it, the model's "
    "generation_config.json applies",
    "--override-generation-config": _SAMPLING.format("temperature"),
    **dict.fromkeys(("--temp", "--temperature"), _SAMPLING.format("temperature")),
    **{f"--{name.replace('_', '-')}": _SAMPLING.format(name) for name in ("top_k", "top_p", "min_p")},
    **dict.fromkeys(("--repeat-penalty", "--repetition-penalty"), _SAMPLING.format("repetition_penalty")),
    "--seed": _OF_REQUESTS.format("seed"),
    **dict.fromkeys(("--n-predict", "--predict", "-n"), _OF_REQUESTS.format("max_tokens")),
    "--chat-template-kwargs": _OF_REQUESTS.format("chat_template_kwargs"),
    **dict.fromkeys(("--enable-auto-tool-choice", "--jinja", "--metrics", "--cont-batching", "-cb"), _ON),
    **dict.fromkeys(("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-lora"), _ON),
    **dict.fromkeys(("--embedding", "--embeddings"), "leave it out: /v1/embeddings is always available"),
    "--no-enable-prefix-caching": "--set engine.prefix_cache=false",
    "--tool-call-parser": "--set tool_format=FORMAT; without it, the chat template decides",
    "--reasoning-parser": "--set reasoning_parser=NAME; without it, the chat template decides",
    "--dtype": "--set dtype=bfloat16 (or float16, float32)",
    **dict.fromkeys(("--quantization", "-q"), "--set base_format=int8 (or int4, bfloat16)"),
    **dict.fromkeys(("--kv-cache-dtype", "--cache-type-k", "--cache-type-v", "-ctk", "-ctv"), _KV_DTYPE),
    **dict.fromkeys(("--gpu-memory-utilization", "--kv-cache-memory-bytes"), _KV_SIZE),
    **dict.fromkeys(("--max-loras", "--max-cpu-loras", "--max-lora-rank"), _CACHE_SIZE),
    **dict.fromkeys(("--lora-modules", "--lora", "--lora-paths"), _VARIANT),
    **dict.fromkeys(("--speculative-config", "--model-draft", "-md"), _DRAFT),
    **dict.fromkeys(("--device", "-dev", "--n-gpu-layers", "--gpu-layers", "-ngl"), _DEVICE),
    **dict.fromkeys(
        ("--tensor-parallel-size", "-tp", "--tp", "--pipeline-parallel-size", "-pp"), _ONE_DEVICE
    ),
    **dict.fromkeys(("--threads", "-t"), "--set num_threads=NUMBER"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-key-file"), "--set tls.key=FILE"),
    **dict.fromkeys(("--ssl-certfile", "--ssl-cert-file"), "--set tls.certificate=FILE"),
    **dict.fromkeys(("--timeout", "-to"), "--set request_timeout_seconds=SECONDS"),
    "--mmproj": "--base FOLDER of a vision model, which includes its projector",
}
"""The suggested replacement for each option."""


class NamesOurOptions(Command):
    """A command that refuses all options of other servers in one error, which names gym-fed's equivalents."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        given = list(args)  # click removes words from the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            foreign = _known_elsewhere(given, own)
            if not foreign:
                raise
            raise GymError(
                ErrorCode.USAGE,
                f"gym api has no option {', '.join(foreign)}",
                "\n  ".join(f"{option}: {instead}" for option, instead in foreign.items()),
            ) from error


def _known_elsewhere(words: list[str], own: set[str]) -> dict[str, Any]:
    """Return what to write instead of options that only other servers have."""
    end = words.index("--") if "--" in words else len(words)
    names = [word.partition("=")[0] for word in words[:end] if word.startswith("-")]
    spelled = {name: name.replace("_", "-") for name in names if name not in own}
    return {name: OPTIONS[key] for name, key in spelled.items() if key in OPTIONS}
