"""A packed base answers like the float32 model within the format's loss, with variants, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.linear import linear_formats

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.padded import BatchCache
from tests.support.variants import load, merged, write_random_delta
from tests.unit.serving.test_decoder import build, in_chunks, stock, texts
from tests.unit.serving.test_multi_variant_step import RULES

LOSS = {"bfloat16": 1e-4, "int8": 4e-4, "int4": 7e-2}
"""Most KL divergence from the float32 model, of random models whose weights are as hard to round as any."""


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    theirs, ours = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


def wide(name: str) -> Any:
    """As wide as groups of columns."""
    return build(name, hidden_size=96, intermediate_size=160)


@pytest.mark.parametrize("name", ["llama biases", "qwen3", "mistral"])
@pytest.mark.parametrize("format", linear_formats())
def test_a_packed_base_answers_as_the_float32_model_within_the_format_s_loss(format: str, name: str) -> None:
    model, wholes = wide(name), texts(30, 12, 1, 40)
    wanted = torch.cat([stock(model, text) for text in wholes])
    with MultiVariantModel(model, base_format=format) as served:
        assert (served.forward, served.base_format, served.packed) == ("decoder", format, True)
        found = torch.cat(in_chunks(served, wholes, [[20, 9, 1], [1, 1, 10], [1], [38, 1, 1]]))
        assert served.forwards == {"decoder": 3, "transformers": 0, "general": 0}
    assert divergence(found, wanted) < LOSS[format]


def test_formats_of_fewer_bits_lose_more() -> None:
    (text,) = texts(60)
    losses = []
    for format in ("bfloat16", "int8", "int4"):
        model = wide("llama")
        wanted = stock(model, text)
        with MultiVariantModel(model, base_format=format) as served:
            losses.append(divergence(in_chunks(served, [text], [[60]])[0], wanted))
    assert losses == sorted(losses)
    assert losses[0] * 10 < losses[2]


@pytest.mark.parametrize(
    ("format", "head"), [("bfloat16", "bfloat16"), ("int8", "bfloat16"), ("int4", "int8")]
)
def test_the_head_is_packed_in_the_format_s_own_choice(format: str, head: str) -> None:
    with MultiVariantModel(wide("llama"), base_format=format) as served:
        assert served._decoder is not None
        formats = {name: layer[0] for name, layer in served._decoder.layers_in(format).items()}
    assert formats.pop("head.0") == head
    assert format in formats.values()


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
def test_variants_of_every_form_are_served_beside_a_packed_base(tmp_path: Path, format: str) -> None:
    model, wholes = wide("qwen2"), texts(*range(5, 5 + len(RULES)))
    paths = [
        write_random_delta(model, tmp_path / f"{known}.gymdelta", rule, seed=at)
        for at, (known, rule) in enumerate(RULES.items())
    ]
    wanted = torch.cat([stock(merged(model, p), text) for p, text in zip(paths, wholes, strict=True)])
    base = torch.cat([stock(model, text) for text in wholes])
    with MultiVariantModel(model, base_format=format) as served:
        chunks = [
            Chunk(text, served.new_cache(), load(path, served.layout), num_logits=len(text))
            for text, path in zip(wholes, paths, strict=True)
        ]
        found = served.step(chunks)
    assert divergence(found, wanted) < 10 * LOSS[format]
    assert divergence(found, wanted) * 20 < divergence(base, wanted)


def test_the_model_s_own_weights_are_given_up_and_what_needs_them_is_refused() -> None:
    model = wide("llama")
    before = sum(p.numel() for p in model.parameters())
    with MultiVariantModel(model, base_format="int8") as served:
        kept = sum(p.numel() for p in model.parameters())
        assert kept < before / 2
        assert model.get_input_embeddings().weight.shape == (97, 96)  # which the head is tied to
        batch = BatchCache([3], 8, served.dtype, served.device).prefill(0, 1)
        with pytest.raises(GymError, match="packed in int8") as refused:
            served.step_together([1, 2, 3], [0, 1, 2], [(None, 3, 1)], [2], batch)
        assert refused.value.code is ErrorCode.USAGE
        served.step([Chunk([1, 2, 3], served.new_cache())], merge=True)
        assert served.forwards == {"decoder": 1, "transformers": 0, "general": 0}


def test_auto_packs_a_bfloat16_base_and_leaves_a_float32_one() -> None:
    for dtype, packed, kernel in ((torch.bfloat16, True, "lookup"), (torch.float32, False, "exact")):
        with MultiVariantModel(wide("llama").to(dtype), base_format="auto", kernel="auto") as served:
            assert (served.packed, served.layout.kernel) == (packed, kernel)
            assert served.base_format == str(dtype).removeprefix("torch.")
    with MultiVariantModel(wide("llama"), base_format="int8", kernel="auto") as served:
        assert served.layout.kernel == "lookup"


def test_a_format_that_is_named_where_transformers_computes_is_refused_and_the_model_is_as_before() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=64, vocab_size=97)).eval()
    with pytest.raises(GymError, match=r"base_format int8.*GPT2LMHeadModel is not one of") as refused:
        MultiVariantModel(model, base_format="int8")
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    with MultiVariantModel(model, base_format="auto") as served:
        assert (served.forward, served.packed) == ("transformers", False)
    with pytest.raises(GymError, match="base_format is 'int3'"):
        MultiVariantModel(wide("llama"), base_format="int3")


def test_a_model_whose_weights_were_packed_is_refused_with_the_remedy() -> None:
    model = wide("llama")
    MultiVariantModel(model, base_format="int8").close()
    with pytest.raises(GymError, match="no longer has its weights") as refused:
        MultiVariantModel(model)
    assert (refused.value.code, refused.value.hint) == (ErrorCode.USAGE, "load the model again")
