"""``image_max_pixels`` and ``image_min_pixels`` reach the processor: an image becomes more tokens or fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.training_file import load_training_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.checks import check_inputs
from gym_fed.training.trainer import Trainer
from gym_fed.training.vision.conversations import encode_media_rows
from gym_fed.training.vision.media import ImageLimits
from gym_fed.training.vision.trainer import MediaBatches

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] if message['content'] is string "
    "else message['content'][0]['text'] }}{% endgeneration %}"
    "{% else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def processor() -> Any:
    """LLaVA-NeXT's: an image is cut into as many tiles of 16 x 16 pixels as its own size needs."""
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    tokenizer = load_tokenizer("gym-nano")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 64], [64, 128]],
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token="<image>",
    )


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    from PIL import Image

    Image.new("RGB", (64, 32), (220, 20, 20)).save(tmp_path / "red.png")
    messages = [{"role": "user", "content": "<image>colour?"}, {"role": "assistant", "content": "red"}]
    return {"messages": messages, "images": [str(tmp_path / "red.png")]}


def tokens(processor: Any, row: dict[str, Any], **sizes: int) -> tuple[int, int]:
    """Image tokens of the batch that is learnt from, and the length that the row was counted as."""
    config = TrainingConfig(model="x", max_length=400, **sizes)
    encoded = encode_media_rows(config, processor, [row], assistant_only=True, packing=False)
    batch = MediaBatches(processor, limits=ImageLimits.of(config))(encoded)
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert int(torch.tensor(encoded[0]["length"])) == batch["input_ids"].shape[1], (
        "counted as it is learnt from"
    )
    return int((batch["input_ids"] == image).sum()), encoded[0]["length"]


def test_an_image_becomes_as_many_tokens_as_its_size_allows(processor: Any, row: dict[str, Any]) -> None:
    plain, _ = tokens(processor, row)
    small, _ = tokens(processor, row, image_max_pixels=32 * 16)
    large, _ = tokens(processor, row, image_min_pixels=128 * 64)
    same, _ = tokens(processor, row, image_max_pixels=64 * 32, image_min_pixels=64 * 32)
    assert plain == same
    assert 2 * small < plain < large / 2


@pytest.mark.parametrize(
    ("size", "wanted"),
    [((4000, 1000), (1536, 384)), ((10, 10), (32, 32)), ((10_000, 1), (10_000, 1)), ((768, 768), (768, 768))],
)
def test_the_shape_is_kept(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert ImageLimits(32 * 32, 768 * 768).size(*size) == wanted


def test_least_above_most_is_refused() -> None:
    with pytest.raises(ValueError, match="image_min_pixels: 9 is above image_max_pixels, 4"):
        TrainingConfig(image_min_pixels=9, image_max_pixels=4)


def test_a_model_of_text_alone_has_no_images_to_size(tmp_path: Path) -> None:
    nano = load_model("gym-nano")
    config = TrainingConfig(output_dir=tmp_path / "run", image_max_pixels=100, device="cpu")
    trainer = Trainer(config, model=nano.model, tokenizer=nano.tokenizer)
    with pytest.raises(GymError, match="image_max_pixels: this run of sft reads only text") as caught:
        trainer.train(
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
        )
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "run").exists()
    sized = TrainingConfig(
        model="gym-nano", data=[{"tasks": ["double"], "num_examples": 4}], image_max_pixels=9
    )
    with pytest.raises(GymError, match="image_max_pixels: this run of sft reads only text"):
        check_inputs(sized)
    check_inputs(sized.model_copy(update={"image_max_pixels": None}))


def test_llamafactorys_files_have_its_defaults_for_models_that_read_images(tmp_path: Path) -> None:
    eyes, words = tmp_path / "eyes", tmp_path / "words"
    for folder, config in ((eyes, '{"vision_config": {}}'), (words, "{}")):
        folder.mkdir()
        (folder / "config.json").write_text(config)
    head = "stage: sft\ndo_train: true\nfinetuning_type: lora\n"

    def read(text: str) -> TrainingConfig:
        file = tmp_path / "theirs.yaml"
        file.write_text(head + text)
        return load_training_config(file)[0]

    config = read(f"model_name_or_path: {eyes}\n")
    assert (config.image_max_pixels, config.image_min_pixels) == (589824, 1024)
    assert (config.freeze_vision_tower, config.freeze_multi_modal_projector) == (True, True)
    assert not config.freeze_language_model
    config = read(
        f"model_name_or_path: {eyes}\nimage_max_pixels: 262144\nfreeze_vision_tower: false\n"
        "freeze_multi_modal_projector: false\nfreeze_language_model: true\n"
    )
    assert config.image_max_pixels == 262144
    assert not config.freeze_vision_tower
    assert not config.freeze_multi_modal_projector
    assert config.freeze_language_model
    assert read(f"model_name_or_path: {words}\n").image_max_pixels is None
