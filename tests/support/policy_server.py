"""What stands for a vLLM of a training run: a real model with pushed adapters, behind vLLM's URLs, in a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import uvicorn
from peft import PeftModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from gym_fed.serving.vllm_plugin.uploads import AdapterUploads
from tests.support.ports import free_port
from tests.support.seeded_sampling import generator, sample
from tests.support.wait import until


class PolicyServer:
    """A server of a model folder on loopback.

    Attributes:
        asked: The bodies of all requests for answers.
        loads: The names of all adapters that were loaded.
        kill_at: Number of the answer at which it ends without answering, as by kill -9; it starts again by ``start``.
        processed: True if log-probabilities are those of the sampling (``processed_logprobs``).
        lowered: What is subtracted from each log-probability, as if another policy had sampled.
    """

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.asked: list[dict[str, Any]] = []
        self.loads: list[str] = []
        self.kill_at: int | None = None
        self.processed = True
        self.lowered = 0.0
        self._port = free_port()
        self._adapters: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, without any adapter."""
        self._adapters = {}
        routes = [
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        app = Starlette(routes=routes, middleware=[Middleware(AdapterUploads)])
        self._server = uvicorn.Server(uvicorn.Config(app, port=self._port, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started, "the server listens")

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: with more, sums depend on what else runs
        self._server.run()

    def stop(self) -> None:
        """End at once: open connections are closed."""
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "base", "max_model_len": 128, "parent": None}]})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in self._adapters:
            return JSONResponse({"error": {"message": f"{name} has already been loaded"}}, 400)
        key = name.replace("-", "_")
        # Low memory: no random initial values, which would be drawn from the trainer's generator in this process.
        if not isinstance(self.model, PeftModel):
            self.model = PeftModel.from_pretrained(self.model, path, adapter_name=key, low_cpu_mem_usage=True)
        else:
            self.model.load_adapter(path, adapter_name=key, low_cpu_mem_usage=True)
        self.model.eval()
        self._adapters[name] = key
        self.loads.append(name)
        return Response()

    async def _unload(self, request: Request) -> Response:
        key = self._adapters.pop((await request.json())["lora_name"], None)
        if key is None:
            return JSONResponse({"error": {"message": "The adapter does not exist."}}, 404)
        return Response()

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.kill_at is not None and len(self.asked) >= self.kill_at:
            self.kill_at = None
            threading.Thread(target=self._restart, daemon=True).start()
            raise ConnectionAbortedError
        key = self._adapters.get(body["model"])
        if key is None:
            return JSONResponse({"error": {"message": f"The model {body['model']} does not exist."}}, 404)
        return JSONResponse(self._answer(key, body))

    def _restart(self) -> None:
        self.stop()
        self.start()

    @torch.no_grad()
    def _answer(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        self.model.set_adapter(key)
        ids, draw = list(body["prompt"]), generator(body["seed"])
        tokens: list[int] = []
        logprobs: list[float] = []
        reason = "length"
        while len(tokens) < body["max_tokens"] and reason != "stop":
            logits = self.model(torch.tensor([ids + tokens])).logits[:, -1].float()
            if self.processed and body["top_k"]:
                least = logits.topk(body["top_k"]).values[:, -1:]
                logits = torch.where(logits >= least, logits, -torch.inf)
            token = int(sample(logits, [draw], body["temperature"]))
            tokens.append(token)
            lowered = 0.0 if body["top_k"] == 1 else self.lowered
            logprobs.append(float((logits / body["temperature"]).log_softmax(-1)[0, token]) - lowered)
            reason = "stop" if token in body["stop_token_ids"] else "length"
        found = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": [{f"token_id:{t}": p} for t, p in zip(tokens, logprobs, strict=True)],
        }
        return {"choices": [{"index": 0, "token_ids": tokens, "logprobs": found, "finish_reason": reason}]}
