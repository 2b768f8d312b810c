"""Our side of `serving_peers.py`, in its own process with the interface of `_llama_cpp_side.py`.

    python _engine_side.py SETTINGS.json

Every turn asserts that all prompt tokens were computed, which format and kernels the base and the variants used, and
that the layers of small steps ran in one native call.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _peer import answer_turns
from _serving_models import saved
from gym_quant.kernels import dispatch
from gym_quant.kernels.linear import last_linear_kernel

from gym_fed.config.serving import EngineConfig
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.layer_calls import MAX_RECORDED_ROWS, RecordedLayers
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.store import VariantStore

GIB = 1 << 30


class EngineTurns:
    """The engine with its variants, which runs one turn per call."""

    def __init__(self, settings: dict[str, Any], stack: ExitStack) -> None:
        torch.set_num_threads(settings["threads"])
        self._settings = settings
        base = saved(Path(settings["model"]).name, Path(settings["model"]))
        model = base.model.requires_grad_(False)
        self._served = stack.enter_context(
            MultiVariantModel(model, kernel=settings["kernel"], base_format=settings["format"])
        )
        if self._served.base_format != settings["format"]:
            raise SystemExit(f"the base is in {self._served.base_format}, not in {settings['format']}")
        store = None
        if settings["variants"]:
            folder = Path(settings["folder"]) / f"store-{settings['kind']}"
            new = not folder.exists()
            store = stack.enter_context(
                VariantStore.open(
                    folder,
                    base=base.spec,
                    layout=self._served.layout,
                    cache_bytes=4 * GIB,
                    require_signature=False,
                )
            )
            for number, path in enumerate(settings["variants"]) if new else ():
                store.add(path, name=f"v{number}", owner="benchmark")
        # Every turn has the same prompts, so prompts must not be cached; the peer does not cache them either.
        config = EngineConfig(kernel=settings["kernel"], prefix_cache=False)
        self._engine = stack.enter_context(Engine(self._served, base.tokenizer, store, config))

    def turn(self, new: int) -> dict[str, Any]:
        """Answer all users at once, user ``i`` with variant ``i`` if there are variants."""
        settings = self._settings
        users, prompts = settings["users"], settings["prompts"]
        products = Counter(self._served.sign_products)
        factors = Counter({way: self._served.products["factors", way] for way in ("native", "torch")})
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        before, recorded = self._engine.stats(), RECORDED["steps"]
        began, cpu = time.perf_counter(), time.process_time()
        answers = [
            self._engine.submit(
                GenerationRequest(
                    prompt, sampling, f"v{user}" if settings["variants"] else None, user=f"u{user}"
                )
            )
            for user, prompt in enumerate(prompts)
        ]
        done = [answer.result() for answer in answers]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        ran = {k: n - products[k] for k, n in self._served.sign_products.items() if n > products[k]}
        if set(ran) != ({settings["kernel"]} if settings["kind"] == "signs" else set()):
            raise SystemExit(f"kernels that ran: {ran}, not {settings['kernel']}")
        low_rank = {way for way, n in factors.items() if self._served.products["factors", way] > n}
        if low_rank != ({"native"} if settings["kind"] == "lora" else set()):
            raise SystemExit(f"factors were multiplied by {low_rank or 'nothing'}")
        now = self._engine.stats()
        if (read := now.prompt_tokens - before.prompt_tokens) != (tokens := sum(map(len, prompts))):
            raise SystemExit(f"of {tokens} tokens of prompts {read} were computed")
        if now.generated_tokens - before.generated_tokens != users * new:
            raise SystemExit(f"{now.generated_tokens - before.generated_tokens} tokens, not {users * new}")
        base_kernel = last_linear_kernel()
        if not base_kernel.startswith(dispatch.path()):
            raise SystemExit(f"the base was multiplied by {base_kernel}, not by {dispatch.path()}")
        recorded = RECORDED["steps"] - recorded
        # Users start one after the other, so in short turns few steps have the same set of variants.
        short = bool(settings["variants"]) and new < 4 * users
        if recorded < (new // 4 if users <= MAX_RECORDED_ROWS and not short else 0):
            raise SystemExit(f"the layers of {recorded} steps were one call, of {now.steps - before.steps}")
        rows = now.rows - before.rows, now.rows_with_variants - before.rows_with_variants
        if rows[1] != (rows[0] if settings["variants"] else 0):
            raise SystemExit(f"of {rows[0]} rows {rows[1]} had a variant")
        return {
            "tokens": users * new,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "first": [answer.seconds_to_first_token for answer in done],
            "ran": {**ran, "base": base_kernel, "recorded steps": recorded},
        }


RECORDED = Counter({"steps": 0})


def count_recorded() -> None:
    """Count, in ``RECORDED``, the steps of this process whose layers run in one native call."""
    layers: Any = RecordedLayers
    run = RecordedLayers.run

    def counted(self: RecordedLayers, *arguments: Any) -> None:
        RECORDED["steps"] += 1
        run(self, *arguments)

    layers.run = counted


if __name__ == "__main__":
    count_recorded()
    with ExitStack() as stack:
        answer_turns(lambda settings: EngineTurns(settings, stack).turn)
