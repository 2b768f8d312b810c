"""The real vLLM behind the gateway, on a CPU: answers, losses, LoRA next to signs, and a kill -9."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.engine.request import GenerationRequest, Grammar, SamplingParams
from gym_fed.serving.setup import Serving, open_serving
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from gym_fed.serving.vllm.engine import VllmEngine
from gym_fed.serving.vllm.process import VllmProcess
from gym_fed.trust.identity.keys import SigningKey
from tests.support.variants import Coding, merged, write_random_delta

PYTHON = Path(os.environ.get("GYM_VLLM_PYTHON", Path(sys.prefix).parent / ".vllm" / "bin" / "python"))
"""The interpreter of vLLM's environment."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no vLLM at {PYTHON}: make vllm"),
]

WAIT = 600.0
TOKENS = 16
PROMPTS = [f"{task}: {word}" for task in ("shout", "copy", "size") for word in ("abc", "Gym 1", "tree?")]


def all_weights(_name: str, shape: tuple[int, ...]) -> Coding:
    """Signs for every matrix, embeddings too, and every norm."""
    return ("bitdelta", {}) if len(shape) == 2 else ("dense", {})


def low_rank(name: str, shape: tuple[int, ...]) -> Coding:
    """LoRA for the linear layers of the attention."""
    return ("lora", {"rank": 4}) if "self_attn" in name and len(shape) == 2 else None


CODINGS = {"ada": all_weights, "bob": all_weights, "eve": low_rank}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of variants of gym-nano, and their files."""
    made = tmp_path_factory.mktemp("vllm")
    model = load_model("gym-nano").model
    with VariantStore.open(made / "store", base=BaseSpec.of(model, "gym-nano")) as store:
        for seed, (name, rule) in enumerate(CODINGS.items()):
            key = SigningKey.generate()
            delta = write_random_delta(model, made / f"{name}.gymdelta", rule, seed=seed, size=0.02)
            store.add(delta, sign_variant(delta, key, name=name), name=name, owner=key.contributor)
    return made


def opened(folder: Path, kind: str) -> Serving:
    settings: dict[str, Any] = {"kind": kind, "max_concurrent": 8, "kv_cache_size": "256MiB"}
    vllm = {"python": PYTHON, "variant_slots": 2, "variants_in_memory": 4} if kind == "vllm" else {}
    return open_serving(
        ServingConfig(base="gym-nano", variants=folder / "store", engine=settings, vllm=vllm, num_threads=1)
    )


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Any:
    with opened(folder, "vllm") as serving:
        yield serving


def answers(serving: Serving, **sampling: Any) -> dict[tuple[str, str], Any]:
    """The answers to every prompt by the base and every variant, all requested at once."""
    params = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0.0, "logprobs": 0, **sampling})
    requests = {
        (name, prompt): serving.engine.submit(
            GenerationRequest(list(prompt.encode()), params, name or None, user=name)
        )
        for prompt in PROMPTS
        for name in ("", *CODINGS)
    }
    return {key: request.result(WAIT) for key, request in requests.items()}


def test_greedy_answers_and_losses_are_those_of_the_own_engine_and_the_merged_model(
    vllm: Serving, folder: Path
) -> None:
    found = answers(vllm)
    with opened(folder, "own") as own:
        expected = answers(own)
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in expected.items()
    }
    base = load_model("gym-nano").model.float().eval()
    different = 0
    for name in ("", *CODINGS):
        model = merged(base, folder / f"{name}.gymdelta") if name else base
        losses, wanted = [], []
        for prompt in PROMPTS:
            one = found[name, prompt]
            ids = torch.tensor([[*prompt.encode(), *one.token_ids]])
            with torch.no_grad():
                chances = model(ids).logits.float().log_softmax(-1)[0, :-1]
            chosen = chances.gather(1, ids[0, 1:, None])[-len(one.token_ids) :, 0]
            wanted.append(-chosen.mean())
            losses.append(-sum(each.logprob for each in one.logprobs) / len(one.logprobs))
            different += bool(name) and one.token_ids != found["", prompt].token_ids
        assert abs(sum(losses) - float(sum(wanted))) / len(losses) < 1e-3, name
    assert different, "no variant answers differently than its base"


def test_losses_of_prompts_include_the_head(vllm: Serving, folder: Path) -> None:
    """Of prompts, vLLM computes logits by another way than of sampled tokens."""
    assert isinstance(vllm.engine, VllmEngine)
    address = vllm.engine.server.address
    ids = list(b"shout: hello and good bye")
    assert vllm.store is not None
    body = {"model": vllm.store.get("ada").sha256, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    transport = httpx.HTTPTransport(uds=str(address.socket))
    with httpx.Client(transport=transport, base_url=address.url, timeout=WAIT) as client:
        headers = {"Authorization": f"Bearer {address.key}"}
        choice = client.post("/v1/completions", json=body, headers=headers).json()["choices"][0]
        assert client.post("/v1/completions", json=body).status_code == 401  # without the gateway's key
    found = [next(iter(each.values()))["logprob"] for each in choice["prompt_logprobs"] if each]
    model = merged(load_model("gym-nano").model.float().eval(), folder / "ada.gymdelta")
    with torch.no_grad():
        chances = model(torch.tensor([ids])).logits.float().log_softmax(-1)[0, :-1]
    wanted = chances.gather(1, torch.tensor(ids)[1:, None]).mean()
    assert abs(sum(found) / len(found) - float(wanted)) < 1e-3


def test_grammar_holds(vllm: Serving) -> None:
    for grammar in (Grammar("choice", '["yes", "no"]'), Grammar("json_schema", '{"enum": ["yes", "no"]}')):
        params = SamplingParams(max_tokens=20, grammar=grammar)
        result = vllm.engine.submit(GenerationRequest(list(b"copy: a"), params)).result(WAIT)
        assert result.text.strip('"') in ("yes", "no")


def test_killed_vllm_is_back_with_its_variants(vllm: Serving) -> None:
    assert isinstance(vllm.engine, VllmEngine)
    process = vllm.engine.server
    assert isinstance(process, VllmProcess)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    running = vllm.engine.submit(GenerationRequest(list(b"copy: abc"), params, "ada"))
    next(running)
    waiting = [
        vllm.engine.submit(GenerationRequest(list(b"copy: abc"), params, "bob", user=str(n)))
        for n in range(12)
    ]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(GymError) as error:
        running.result(WAIT)
    assert error.value.code is ErrorCode.UNAVAILABLE
    ends = [_end(one) for one in waiting]
    assert set(ends) <= {"length", ErrorCode.UNAVAILABLE}
    assert ends.count("length") >= 12 - 7  # those that were not inside vLLM
    assert process.starts == 2
    again = vllm.engine.submit(GenerationRequest(list(b"copy: abc"), params, "ada")).result(WAIT)
    assert again.finish_reason == "length"


def _end(generation: Any) -> Any:
    try:
        return generation.result(WAIT).finish_reason
    except GymError as error:
        return error.code
