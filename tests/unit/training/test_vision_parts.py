"""Tower, projector and language model of real architectures (small, random): what is frozen does not move in a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TUNING
from gym_fed.training.vision.parts import freeze_parts, frozen_parts, reads_images

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**EYES))
    )


def qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    eyes = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config={**TEXT, "rope_scaling": ROPE}, vision_config=eyes)
    )


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    eyes = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config={**TEXT, "rope_scaling": ROPE}, vision_config=eyes)
    )


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    eyes = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config={**TEXT, "rope_scaling": ROPE}, vision_config=eyes)
    )


def idefics3() -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config={"model_type": "llama", **TEXT}, vision_config=EYES, scale_factor=2, pad_token_id=0
        )
    )


def smolvlm() -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config={"model_type": "llama", **TEXT}, vision_config=EYES, scale_factor=2, pad_token_id=0
        )
    )


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=TEXT, vision_config=EYES, mm_tokens_per_image=4)
    )


def internvl() -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    eyes = {**EYES, "image_size": [16, 16], "patch_size": [8, 8]}
    return InternVLForConditionalGeneration(
        InternVLConfig(text_config={"model_type": "qwen2", **TEXT}, vision_config=eyes)
    )


def mllama() -> Any:
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    text = {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    text["rope_scaling"] = {"rope_type": "default", "rope_theta": 10000.0}
    eyes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "image_size": 16,
        "patch_size": 8,
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    return MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=eyes))


def mistral3() -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={"model_type": "mistral", **TEXT},
            vision_config={"model_type": "pixtral", **EYES, "head_dim": 16},
        )
    )


WHERE: dict[Callable[[], Any], tuple[str, str]] = {
    llava: ("model.vision_tower.", "model.multi_modal_projector."),
    qwen2_vl: ("model.visual.", "model.visual.merger."),
    qwen2_5_vl: ("model.visual.", "model.visual.merger."),
    qwen3_vl: ("model.visual.", "model.visual.merger."),
    idefics3: ("model.vision_model.", "model.connector."),
    smolvlm: ("model.vision_model.", "model.connector."),
    gemma3: ("model.vision_tower.", "model.multi_modal_projector."),
    internvl: ("model.vision_tower.", "model.multi_modal_projector."),
    mllama: ("model.vision_model.", "model.multi_modal_projector."),
    mistral3: ("model.vision_tower.", "model.multi_modal_projector."),
}
"""Where tower and projector stand, as transformers' own code names them."""
MODELS = [pytest.param(make, id=make.__name__) for make in WHERE]


def parts(make: Callable[[], Any], names: list[str]) -> dict[str, set[str]]:
    tower, projector = WHERE[make]
    carrying = {name for name in names if name.startswith(projector)}
    seeing = {name for name in names if name.startswith(tower)} - carrying
    return {"tower": seeing, "projector": carrying, "language": set(names) - seeing - carrying}


def moved(model: Any, config: TrainingConfig) -> tuple[set[str], set[str]]:
    """Names of all weights, and of those that one step of gradient descent moves."""
    torch.manual_seed(0)
    frozen = frozen_parts(model, config)
    prepared = TUNING.new(config.finetuning).prepare(model, config)
    freeze_parts(prepared, config, frozen)
    with torch.no_grad():
        for weight in prepared.parameters():
            weight.add_(0.1)  # so that each has a gradient below
    before = {name: weight.detach().clone() for name, weight in prepared.named_parameters()}
    sum(weight.square().sum() for weight in prepared.parameters()).backward()
    torch.optim.SGD([p for p in prepared.parameters() if p.requires_grad], lr=0.1).step()
    after = dict(prepared.named_parameters())
    return set(before), {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.parametrize("make", MODELS)
def test_the_language_model_alone_is_trained_by_default(make: Callable[[], Any]) -> None:
    names, changed = moved(make(), TrainingConfig(model="x"))
    of = parts(make, sorted(names))
    assert all(of.values()), "a part without weights would prove nothing"
    assert changed == of["language"]


@pytest.mark.parametrize("make", MODELS)
def test_each_key_freezes_its_own_part(make: Callable[[], Any]) -> None:
    keys = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
    for key, part in zip(keys, ("tower", "projector", "language"), strict=True):
        values = {other: other == key for other in keys}
        names, changed = moved(make(), TrainingConfig(model="x", **values))
        assert changed == names - parts(make, sorted(names))[part]


@pytest.mark.parametrize("finetuning", ["lora", "ia3", "vera"])
@pytest.mark.parametrize("make", [pytest.param(m, id=m.__name__) for m in (llava, qwen2_vl, gemma3)])
def test_adapters_are_not_put_on_frozen_parts(make: Callable[[], Any], finetuning: str) -> None:
    names, changed = moved(make(), TrainingConfig(model="x", finetuning=finetuning))
    trained = {name.removeprefix("base_model.model.") for name in changed}
    assert trained
    of = parts(make, sorted(name.removeprefix("base_model.model.") for name in names))
    assert trained <= of["language"]
    assert not [name for name in of["tower"] | of["projector"] if "lora" in name or "ia3" in name]


def test_an_adapter_on_the_tower_is_there_when_it_is_not_frozen() -> None:
    _, changed = moved(qwen2_vl(), TrainingConfig(model="x", finetuning="lora", freeze_vision_tower=False))
    assert any(".visual.blocks." in name and "lora" in name for name in changed)
    assert not any(".visual.merger." in name for name in changed)


def test_freezing_layers_counts_those_of_the_language_model() -> None:
    config = TrainingConfig(model="x", finetuning="freeze", freeze={"num_trainable_layers": 1})
    names, changed = moved(gemma3(), config)
    assert changed == {name for name in names if ".language_model.layers.1." in name}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"freeze_language_model": True},
            "freeze_language_model, .* all of LlavaForConditionalGeneration would stay",
        ),
        (
            {"finetuning": "lora", "lora": {"modules_to_save": ["multi_modal_projector"]}},
            "lora.modules_to_save: 'multi_modal_projector' matches model.multi_modal_projector, which freeze_multi",
        ),
        (
            {"finetuning": "freeze", "freeze": {"extra_modules": ["vision_tower"]}},
            "freeze.extra_modules: 'vision_tower' matches model.vision_tower, which freeze_vision_tower freezes",
        ),
        (
            {"finetuning": "lora", "lora": {"target_modules": ["fc1", "fc2"]}},
            "lora.target_modules matches 4 layers, all in frozen parts",
        ),
    ],
)
def test_a_setting_that_needs_a_frozen_part_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        moved(llava(), TrainingConfig(model="x", **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_model_whose_parts_are_not_found_is_refused_with_what_was_looked_for() -> None:
    model = llava()
    model.model.eyes = model.model.vision_tower
    del model.model.vision_tower
    with pytest.raises(
        GymError, match=r"no vision tower was found in Llava.*: looked for modules called visual,"
    ):
        frozen_parts(model, TrainingConfig(model="x"))
    assert "freeze_vision_tower" not in frozen_parts(
        model, TrainingConfig(model="x", freeze_vision_tower=False)
    )


def test_of_a_model_of_text_alone_nothing_is_frozen() -> None:
    model = load_model("gym-nano").model
    assert not frozen_parts(model, TrainingConfig(model="gym-nano"))
    with pytest.raises(GymError, match="freeze_language_model: Qwen3ForCausalLM reads only text"):
        frozen_parts(model, TrainingConfig(model="gym-nano", freeze_language_model=True))


def test_an_encoder_of_bytes_is_no_part_for_sound() -> None:
    from transformers import BltConfig, GraniteSpeechConfig

    assert not reads_images(SimpleNamespace(config=BltConfig()))
    assert reads_images(SimpleNamespace(config=GraniteSpeechConfig()))
