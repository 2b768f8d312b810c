"""A side of `serving_peers.py` with llama.cpp built on this machine, for a Python with only ``llama-cpp-python``.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python
    python _llama_cpp_native_side.py SETTINGS.json

The library runs without a server: all prompts in one batch, then batches with one token of every user. Users with
adapters are computed one after the other, since a batch has only one adapter. Files and output lines have the format of
`_llama_cpp_side.py`.
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import Any

import llama_cpp as llama
import numpy as np
from _peer import answer_turns


class Context:
    """A model with its context, in which user ``i`` is sequence ``i``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llama.llama_backend_init()
        self._log = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._log, None)
        model = llama.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(settings["model"].encode(), model)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {settings['model']}")
        users, made = settings["users"], llama.llama_context_default_params()
        made.n_ctx, made.n_seq_max = users * settings["context"], users
        made.n_batch = made.n_ubatch = max(512, users * len(settings["prompts"][0]))
        made.n_threads = made.n_threads_batch = settings["threads"]
        self._context = llama.llama_init_from_model(self._model, made)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(made.n_batch, 0, 1)
        self.adapters = []
        for path in settings["adapters"]:
            adapter = llama.llama_adapter_lora_init(self._model, path.encode())
            if not adapter:
                raise SystemExit(f"llama.cpp could not load {path}")
            self.adapters.append(adapter)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def use(self, user: int) -> None:
        """Use the adapter of one user for the following calls."""
        adapters = (llama.llama_adapter_lora_p_ctypes * 1)(self.adapters[user])
        scales = (ctypes.c_float * 1)(1.0)
        if llama.llama_set_adapters_lora(self._context, adapters, 1, scales):
            raise SystemExit("llama.cpp refused an adapter")

    def decode(self, parts: list[tuple[int, int, list[int]]]) -> list[int]:
        """Return the most likely token after each part, which has a user, a start position and tokens."""
        batch, at, last = self._batch, 0, []
        for user, position, tokens in parts:
            for number, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, position + number
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, user
                batch.logits[at] = number == len(tokens) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        if llama.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode a batch")
        found = []
        for place in last:
            logits = llama.llama_get_logits_ith(self._context, place)
            found.append(int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax()))
        return found


def turn(context: Context, settings: dict[str, Any], new: int) -> dict[str, Any]:
    """Answer all users at once, or one after the other with adapters, since a batch has only one adapter."""
    context.clear()
    users = list(range(settings["users"]))
    groups = [[user] for user in users] if context.adapters else [users]
    first, answers = [0.0] * len(users), [list(prompt) for prompt in settings["prompts"]]
    began, cpu = time.perf_counter(), time.process_time()
    for group in groups:
        if context.adapters:
            context.use(group[0])
        for step in range(new):
            prompt = step == 0
            parts = [
                (u, 0 if prompt else len(answers[u]) - 1, answers[u] if prompt else answers[u][-1:])
                for u in group
            ]
            for user, token in zip(group, context.decode(parts), strict=True):
                answers[user].append(token)
                first[user] = first[user] or time.perf_counter() - began
    return {
        "tokens": len(users) * new,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "first": first,
        "build": llama.llama_print_system_info().decode(),
    }


if __name__ == "__main__":
    answer_turns(lambda settings: partial(turn, Context(settings), settings))
