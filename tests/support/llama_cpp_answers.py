"""Token ids and log-probabilities of a GGUF file by llama.cpp: a process of its own, for a Python with ``xllamacpp``.

    python llama_cpp_answers.py FILE < JOB.json

The job is ``{"texts": [...], "ids": [...]}``; the answer is one JSON line: the ids of each text, and by token id the
log-probabilities of what follows ``ids``.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.request import Request, urlopen


def main(file: str) -> None:
    """Answer the job on standard input."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx, params.n_gpu_layers = 1, 512, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)
    job = json.load(sys.stdin)

    def post(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = Request(server.listening_address + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=300) as answer:
            return json.load(answer)

    special = {"add_special": False, "parse_special": True}
    ids = [post("/tokenize", {"content": text, **special})["tokens"] for text in job["texts"]]
    settings = {"n_predict": 1, "temperature": 0.0, "n_probs": job["probabilities"], "ignore_eos": True}
    answer = post("/completion", {"prompt": job["ids"], **settings})
    first = answer["completion_probabilities"][0]["top_logprobs"]
    print(json.dumps({"ids": ids, "logprobs": {entry["id"]: entry["logprob"] for entry in first}}))


if __name__ == "__main__":
    main(sys.argv[1])
