"""llama.cpp's side of `serving_peers.py`, in its own process, for a Python with ``xllamacpp`` and without gym-fed.

    python _llama_cpp_side.py SETTINGS.json

It reads a JSON file, answers all of its prompts at once, and prints one JSON line: tokens, wall and CPU seconds, and
seconds to each first token. It reads one line from standard input before each turn, so that sides can alternate.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import xllamacpp  # type: ignore[import-not-found]
from _peer import answer_turns


def serve(settings: dict[str, Any]) -> Any:
    """Start a server in this process, with one slot per user."""
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_parallel = settings["users"]
    params.n_ctx = settings["users"] * settings["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_gpu_layers = 0
    params.cont_batching = True
    params.warmup = True
    params.cache_prompt = params.cache_idle_slots = False  # do not keep finished prompts in memory either
    params.cache_ram_mib = 0
    params.verbosity = -1
    if settings["adapters"]:
        params.lora_init_without_apply = True
        adapters = []
        for path in settings["adapters"]:
            adapter = xllamacpp.CommonAdapterLoraInfo()
            adapter.path, adapter.scale = path, 0.0
            adapters.append(adapter)
        params.lora_adapters = adapters
    return xllamacpp.Server(params)


def request(settings: dict[str, Any], user: int, prompt: list[int], new: int) -> dict[str, Any]:
    """Return a request like our side's: greedy, of full length and without prompt cache."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": new,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    if settings["adapters"]:
        body["lora"] = [
            {"id": number, "scale": float(number == user)} for number in range(len(settings["adapters"]))
        ]
    return body


def turn(server: Any, settings: dict[str, Any], new: int) -> dict[str, Any]:
    first = [0.0] * settings["users"]
    tokens = [0] * settings["users"]
    errors: list[str] = []
    began, cpu = time.perf_counter(), time.process_time()

    def ask(user: int) -> None:
        def heard(chunk: Any) -> bool:
            for one in chunk if isinstance(chunk, list) else [chunk]:
                if isinstance(one, dict) and "error" in one:
                    errors.append(str(one["error"]))
                if isinstance(one, dict) and "usage" in one:
                    tokens[user] = int(one["usage"]["completion_tokens"])
                first[user] = first[user] or time.perf_counter() - began
            return False

        server.handle_completions(request(settings, user, settings["prompts"][user], new), heard)

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(settings["users"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors or tokens != [new] * settings["users"]:
        raise SystemExit(f"llama.cpp answered {tokens} tokens of {new} each; {errors[:1]}")
    return {
        "tokens": sum(tokens),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "first": first,
        "build": xllamacpp.get_system_info(),
    }


if __name__ == "__main__":
    answer_turns(lambda settings: partial(turn, serve(settings), settings))
