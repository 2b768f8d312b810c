"""KV caches in bfloat16 and int8 are close to float32, smaller, and independent of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gym_quant import kernels
from transformers import LlamaConfig, LlamaForCausalLM

from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.setup import open_serving

PROMPTS = [[at * 7 % 90 + 1 for at in range(40)], [5, 9, 2], [at * 3 % 90 + 2 for at in range(17)]]
OFF = {"float32": 0.0, "bfloat16": 0.02, "int8": 0.05}


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def last_logits(served: MultiVariantModel, cut: int, together: bool) -> list[torch.Tensor]:
    """Prompts in chunks of ``cut`` tokens, all in one step or each alone."""
    caches = [served.new_cache() for _ in PROMPTS]
    found = {}
    for start in range(0, 40, cut):
        chunks = {
            place: Chunk(ids[start : start + cut], caches[place])
            for place, ids in enumerate(PROMPTS)
            if start < len(ids)
        }
        if together:
            found.update(zip(chunks, served.step(list(chunks.values())), strict=True))
        else:
            found.update({place: served.step([chunk])[0] for place, chunk in chunks.items()})
    return [found[place] for place in range(len(PROMPTS))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("path", kernels.available())
def test_answers_are_near_to_those_of_a_float32_cache(dtype: str, path: str) -> None:
    model = llama()
    with kernels.using(path):
        with MultiVariantModel(model) as served:
            wanted = last_logits(served, 9, True)
            bytes_wide = served.bytes_per_token
        with MultiVariantModel(model, kv_dtype=dtype) as served:
            found = last_logits(served, 9, True)
            assert served.pool.dtype == dtype
            assert served.bytes_per_token <= bytes_wide * {"float32": 1, "bfloat16": 0.5, "int8": 0.51}[dtype]
    for one, other in zip(found, wanted, strict=True):
        off = float((one - other).abs().max() / other.abs().max())
        assert (off > 0) == (dtype != "float32")
        assert off <= OFF[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_answer_hardly_depends_on_the_batch_or_on_the_chunks(dtype: str) -> None:
    with MultiVariantModel(llama(), kv_dtype=dtype) as served:
        wanted = last_logits(served, 40, False)
        for cut, together in ((40, True), (3, True), (3, False)):
            for one, other in zip(last_logits(served, cut, together), wanted, strict=True):
                assert float((one - other).abs().max()) <= (1e-5 if dtype == "float32" else 0.05) * float(
                    other.abs().max()
                )


def test_auto_is_the_dtype_of_the_weights() -> None:
    assert EngineConfig().kv_dtype == "auto"
    with MultiVariantModel(llama().to(torch.bfloat16), kv_dtype="auto") as served:
        assert served.pool.dtype == served.new_pool(1 << 20).dtype == "bfloat16"


def test_another_dtype_is_refused() -> None:
    model = llama()
    with pytest.raises(GymError, match="not float16") as error:
        MultiVariantModel(model, kv_dtype="float16")
    assert error.value.code is ErrorCode.USAGE
    MultiVariantModel(model, kv_dtype="int8").close()  # the model was left as it was


def test_the_configured_dtype_is_served() -> None:
    config = ServingConfig(engine=EngineConfig(kv_dtype="int8"), device="cpu", num_threads=1)
    with open_serving(config) as serving:
        assert serving.served.pool.dtype == "int8"
