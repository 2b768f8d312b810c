"""Variants of parameters outside linear layers, embeddings and norms: experts, routers, sinks, heads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.store import VariantStore
from tests.support.small_classes import build
from tests.support.variants import Coding, load, merged, off, write_random_delta

IDS = [5, 9, 2, 44, 17, 3, 8, 7, 60, 61, 62]


def of_experts(name: str, shape: tuple[int, ...]) -> Coding:
    del shape
    return ("dense", {"dtype": "float32"}) if "experts" in name else None


def one_bit(name: str, shape: tuple[int, ...]) -> Coding:
    del shape
    return ("bitdelta", {}) if "experts" in name else None


def of_attention(name: str, shape: tuple[int, ...]) -> Coding:
    adapted = "self_attn" in name and len(shape) == 2
    return ("lora", {"rank": 3, "factors": "float32"}) if adapted else None


def of_all(name: str, shape: tuple[int, ...]) -> Coding:
    del name, shape
    return "dense", {"dtype": "float32"}


@pytest.mark.parametrize("kind", ["Bert", "CTRL", "OPT"])
def test_a_class_with_its_own_head_or_embedding_is_served_with_variants(tmp_path: Path, kind: str) -> None:
    model = build(kind)
    path = write_random_delta(model, tmp_path / "all.gymdelta", of_all, seed=0, size=0.05)
    with torch.inference_mode():
        ids = torch.tensor([IDS])
        wanted = [each(ids, use_cache=False).logits[0, 5:] for each in (model, merged(model, path))]
    with MultiVariantModel(model) as served:
        assert served.forward == "transformers"
        variants = [None, load(path, served.layout)]
        caches = [served.new_cache() for _ in variants]
        found = []
        for part in (IDS[:6], *([token] for token in IDS[6:])):
            chunks = [Chunk(part, c, v) for c, v in zip(caches, variants, strict=True)]
            found.append(served.step(chunks))
    for number, logits in enumerate(wanted):
        assert off(torch.stack([step[number] for step in found]), logits) < 1e-4, number


@pytest.mark.few(4, "one path for every class of experts")
@pytest.mark.parametrize(
    "kind", ["Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV2", "DeepseekV3", "Glm4Moe", "GptOss", "Lfm2Moe"]
)
def test_rows_of_variants_of_experts_equal_those_of_the_merged_models(tmp_path: Path, kind: str) -> None:
    model = build(kind)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    paths = [
        write_random_delta(model, tmp_path / f"{n}.gymdelta", rule, seed=n, size=0.05)
        for n, rule in enumerate((of_experts, of_attention, of_all))
    ]
    with torch.inference_mode():
        wanted = [
            tuned(torch.tensor([IDS]), use_cache=False).logits[0, 5:]
            for tuned in (*(merged(model, path) for path in paths), model)
        ]
    assert off(wanted[0], wanted[3]) > 1e-3  # the experts' delta changes the logits
    with MultiVariantModel(model) as served:
        variants = [*(load(path, served.layout) for path in paths), None]
        caches = [served.new_cache() for _ in variants]
        found = []
        for part in (IDS[:6], *([token] for token in IDS[6:])):
            chunks = [Chunk(part, c, v) for c, v in zip(caches, variants, strict=True)]
            found.append(served.step(chunks))
    for number, logits in enumerate(wanted):
        assert off(torch.stack([step[number] for step in found]), logits) < 1e-4, number
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_variant_counts_the_memory_of_the_parameters_that_it_replaces(tmp_path: Path) -> None:
    model = build("Mixtral")
    path = write_random_delta(model, tmp_path / "a.gymdelta", of_experts, seed=0)
    with MultiVariantModel(model) as served:
        variant = load(path, served.layout)
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    assert variant.resident_bytes == experts


def test_a_variant_whose_experts_exceed_the_memory_is_refused_before_any_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Mixtral").to(torch.bfloat16)
    path = write_random_delta(model, tmp_path / "a.gymdelta", one_bit, seed=0)
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    assert experts > 5 * path.stat().st_size
    decoded: list[str] = []
    decode = DeltaFile.decode
    monkeypatch.setattr(DeltaFile, "decode", lambda self, name: (decoded.append(name), decode(self, name))[1])
    base = BaseSpec.of(model, "base")
    with MultiVariantModel(model) as served:

        def use(limit: int) -> None:
            with VariantStore.open(
                tmp_path / str(limit),
                base=base,
                layout=served.layout,
                cache_bytes=limit,
                require_signature=False,
            ) as store:
                store.add(path, None, name="a", owner="ann")
                store.release(store.acquire("a"))

        with pytest.raises(GymError, match="bytes of memory") as error:
            use(experts - 1)
        assert error.value.code is ErrorCode.TOO_LARGE
        assert not decoded
        use(experts)
        assert decoded


def test_a_delta_that_the_served_model_cannot_add_is_refused_when_it_is_added(tmp_path: Path) -> None:
    model = build("Whisper")
    path = write_random_delta(model, tmp_path / "a.gymdelta", of_all, seed=0)
    with MultiVariantModel(model) as served:
        layout = served.layout
    refused = next(iter(layout.parameters))
    parameters = {**layout.parameters, refused: replace(layout.parameters[refused], refusal="it is shared")}
    with (
        VariantStore.open(
            tmp_path / "store", layout=replace(layout, parameters=parameters), require_signature=False
        ) as store,
        pytest.raises(GymError, match=f"{re.escape(refused)}.*cannot be served") as error,
    ):
        store.add(path, None, name="a", owner="ann")
    assert error.value.code is ErrorCode.MODEL_INVALID
    with VariantStore.open(tmp_path / "store", require_signature=False) as store:
        assert store.count() == 0


def test_a_class_whose_language_model_has_the_head_is_served() -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = build("Llama4Text").config.to_dict()
    vision = {
        **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 16, "patch_size": 4, "vision_output_dim": 32},
        **{"projector_input_dim": 32, "projector_output_dim": 32},
    }
    torch.manual_seed(0)
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision)).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([IDS]), use_cache=False).logits[0, 5:]
    with MultiVariantModel(model) as served:
        cache = served.new_cache()
        found = [served.step([Chunk(part, cache)])[0] for part in (IDS[:6], *([token] for token in IDS[6:]))]
    assert off(torch.stack(found), wanted) < 1e-4
