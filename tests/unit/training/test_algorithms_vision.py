"""Fine-tuning a model that reads images: a tiny LLaVA of random weights, on rows that differ in the picture alone."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.processors import load_vision_model
from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.trainer import Trainer
from gym_fed.training.vision.conversations import encode_media_rows, place_media
from gym_fed.training.vision.trainer import MediaBatches

COLOURS = {
    "red": (220, 20, 20),
    "green": (20, 200, 20),
    "blue": (20, 20, 220),
    "white": (250, 250, 250),
    "black": (5, 5, 5),
    "yellow": (240, 230, 20),
}
TEMPLATE = (
    "{% macro words(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endmacro %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ words(message['content']) + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ words(message['content']) + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tiny_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA of 60,000 random weights: 16 x 16 pixels are four patches of the CLIP tower, and so four tokens."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        Qwen3Config,
    )

    tokenizer = load_tokenizer("gym-nano")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token="<image>",
    )
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=True,
        )
    )
    folder = tmp_path_factory.mktemp("models") / "llava"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of 16 x 16 pixels for each colour."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in COLOURS.items():
        Image.new("RGB", (16, 16), colour).save(folder / f"{name}.png")
    return {name: folder / f"{name}.png" for name in COLOURS}


def row(picture: Path | str, answer: str, question: str = "<image>colour?") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [str(picture)]}


def config(folder: Path, model: Path | str, **changes: Any) -> TrainingConfig:
    values = {
        "model": str(model),
        "output_dir": folder,
        "max_steps": 60,
        "per_device_train_batch_size": 6,
        "learning_rate": 1e-2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


@torch.inference_mode()
def loss(model: Any, processor: Any, rows: list[dict[str, Any]], settings: TrainingConfig) -> float:
    encoded = encode_media_rows(settings, processor, rows, assistant_only=True, packing=False)
    return float(model(**MediaBatches(processor)(encoded)).loss)


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_an_answer_that_the_picture_alone_determines_is_learnt(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path, finetuning: str
) -> None:
    rows = [row(pictures[name], name) for name in COLOURS]
    names = list(COLOURS)
    swapped = [row(pictures[a], b) for a, b in zip(names, names[1:] + names[:1], strict=True)]
    changes: dict[str, Any] = {"finetuning": finetuning, "save_final": True}
    if finetuning == "lora":
        changes["lora"] = {"r": 16, "lora_alpha": 32}
    settings = config(tmp_path / "run", tiny_llava, **changes)
    result = Trainer(settings).train(rows)
    right = loss(result.model, result.tokenizer, rows, settings)
    wrong = loss(result.model, result.tokenizer, swapped, settings)
    assert result.losses[0] > 5.4
    assert result.num_tokens > 0
    if finetuning == "full":
        assert right < 0.5 < 1.0 < wrong, "the answer follows the picture"
        model, processor = load_vision_model(str(tmp_path / "run"), dtype="float32", arguments={})
        assert loss(model, processor, rows, settings) == pytest.approx(right, rel=1e-4)
    else:  # factors beside frozen random weights learn less
        assert right < 5.3
        assert right < wrong - 0.1
        assert (tmp_path / "run/adapter_model.safetensors").is_file()


def test_the_assistants_words_alone_are_learnt_unless_all_are_wanted(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    _, processor = load_vision_model(str(tiny_llava), dtype="float32", arguments={})
    settings = config(tmp_path / "run", tiny_llava)
    rows = [row(pictures["red"], "red"), row(pictures["blue"], "deep blue")]
    encoded = encode_media_rows(settings, processor, rows, assistant_only=True, packing=False)
    assert json.dumps(encoded), "rows are plain data, so that their digest is the same in a resumed run"
    batch = MediaBatches(processor)(encoded)
    words = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert words == ["red<|im_end|>", "deep blue<|im_end|>"]
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert lengths == [each["length"] for each in encoded]
    whole = encode_media_rows(settings, processor, rows, assistant_only=False, packing=False)
    everything = MediaBatches(processor)(whole)
    assert ((everything["labels"] != -100).sum(dim=1) == batch["attention_mask"].sum(dim=1)).all()


def test_rows_without_pictures_are_learnt_among_those_with_some(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    plain = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
    rows = [row(pictures["red"], "red"), plain] * 3
    settings = config(tmp_path / "run", tiny_llava, max_steps=4, per_device_train_batch_size=2)
    result = Trainer(settings).train(rows, [plain, row(pictures["blue"], "blue")])
    assert result.losses[-1] < result.losses[0]
    assert any("eval_loss" in entry for entry in result.history)


def test_a_row_of_text_alone_is_cut_and_counted_beside_rows_with_pictures(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    def talk(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    rows = [row(pictures["red"], "red"), talk("hello", "one two three " * 20), talk("what is it? " * 20, "x")]
    _, processor = load_vision_model(str(tiny_llava), dtype="float32", arguments={})
    settings = config(tmp_path / "run", tiny_llava, max_steps=1, per_device_train_batch_size=3)
    encoded = encode_media_rows(settings, processor, rows, assistant_only=True, packing=False)
    assert [each["length"] for each in encoded][1:] == [64], "of the third nothing is left to learn"
    batch = MediaBatches(processor, max_length=64)(encoded)
    assert {batch[key].shape for key in ("input_ids", "attention_mask", "labels")} == {(2, 64)}
    whole = MediaBatches(processor)(encoded)
    assert torch.equal(batch["labels"], whole["labels"][:, :64])
    assert torch.equal(batch["pixel_values"], whole["pixel_values"])

    seen: dict[str, Any] = {}
    result = Trainer(settings, on_rows=lambda name, counts: seen.update({name: counts.as_dict()})).train(rows)
    counts = seen["data"]
    assert (counts["rows"], counts["learned"], counts["cut"], counts["dropped"]) == (3, 2, 2, 1)
    assert counts["tokens"] == int((batch["labels"][:, 1:] != -100).sum())
    third = len(processor.tokenizer("x<|im_end|>")["input_ids"])
    assert counts["tokens_cut"] == int((whole["labels"] != -100).sum()) - counts["tokens"] + third
    assert result.num_examples == 2


def test_a_row_is_cut_behind_its_pictures_and_refused_where_they_would_be_cut(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    early = row(pictures["red"], "deep red " * 20)
    late = row(pictures["blue"], "blue", question="what colour is it? " * 10 + "<image>")
    _, processor = load_vision_model(str(tiny_llava), dtype="float32", arguments={})
    settings = config(tmp_path / "run", tiny_llava)
    (cut,) = encoded = encode_media_rows(settings, processor, [early], assistant_only=True, packing=False)
    assert (cut["length"], encoded.counts.cut, encoded.counts.learned) == (64, 1, 1)
    batch = MediaBatches(processor, max_length=64)(encoded)
    assert int((batch["input_ids"] == processor.image_token_id).sum()) == 4
    assert encoded.counts.tokens == int((batch["labels"] != -100).sum())

    with pytest.raises(
        GymError, match=r"row 2 has \d+ tokens up to the end of its images.*2 rows have this problem"
    ) as caught:
        Trainer(settings).train([early, late, early, late])
    needed = int(re.findall(r"raise max_length \(to (\d+)", str(caught.value.hint))[0])
    whole = MediaBatches(processor)(
        encode_media_rows(
            config(tmp_path, tiny_llava, max_length=500),
            processor,
            [late],
            assistant_only=True,
            packing=False,
        )
    )
    places = (whole["input_ids"][0] == processor.image_token_id).nonzero()
    assert needed == int(places.max()) + 1
    assert not (tmp_path / "run").exists()


def test_a_stopped_run_goes_on_to_the_same_losses(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    rows = [row(pictures[name], name) for name in COLOURS]
    changes: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2}
    whole = Trainer(config(tmp_path / "whole", tiny_llava, **changes)).train(rows)
    seen: list[int] = []
    with pytest.raises(GymError, match="stopped at step 2 of 4"):
        Trainer(
            config(tmp_path / "part", tiny_llava, **changes),
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 2,
        ).train(rows)
    assert Trainer(config(tmp_path / "part", tiny_llava, **changes)).train(rows).losses == whole.losses


def test_a_file_of_llama_factorys_layout_and_of_openais_is_read(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    picture = pictures["red"].read_bytes()
    (tmp_path / "a.png").write_bytes(picture)
    turns = [{"role": "user", "content": "<image>colour?"}, {"role": "assistant", "content": "red"}]
    (tmp_path / "mllm.json").write_text(json.dumps([{"messages": turns, "images": ["a.png"]}]))
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "colour?"}]
    line = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]}
    (tmp_path / "openai.jsonl").write_text(json.dumps(line) + "\n")
    data = [{"path": tmp_path / "mllm.json"}, {"path": tmp_path / "openai.jsonl"}]
    settings = config(tmp_path / "run", tiny_llava, data=data, max_steps=1, per_device_train_batch_size=2)
    result = Trainer(settings).train()
    assert result.num_examples == 2
    _, processor = load_vision_model(str(tiny_llava), dtype="float32", arguments={})
    from gym_fed.training.rows.run_rows import rows_of

    encoded = encode_media_rows(settings, processor, rows_of(settings), assistant_only=True, packing=False)
    assert json.loads(encoded[0]["row"])["text"] == json.loads(encoded[1]["row"])["text"]
    batch = MediaBatches(processor)(encoded)
    assert torch.equal(batch["pixel_values"][0], batch["pixel_values"][1])


def test_pictures_stand_where_the_text_puts_them() -> None:
    def shown(content: Any, count: int) -> str:
        placed = place_media([{"role": "user", "content": content}], {"images": count}, "row 1")[0]["content"]
        return "".join("#" if part["type"] == "image" else part["text"] for part in placed)

    assert shown("a <image> b<image>", 2) == "a # b#"
    assert shown("what?", 2) == "##what?"
    assert shown([{"type": "text", "text": "x<image>"}, {"type": "image"}], 2) == "x##"
    assert place_media([{"role": "user", "content": "a"}], {}, "row 1") == [{"role": "user", "content": "a"}]
    with pytest.raises(GymError, match="row 7 has 1 image and 2 placeholders for them"):
        place_media([{"role": "user", "content": "<image><image>"}], {"images": 1}, "row 7")


@pytest.mark.parametrize(
    ("picture", "problem"),
    [
        ("missing.png", "row 2: images: missing.png cannot be read"),
        ("https://example.org/a.png", "row 2: images: https://example.org/a.png is a URL"),
        ("data:image/png;base64,AAAA", "row 2: images: data:image/png;base64,AAAA... cannot be read"),
    ],
)
def test_a_picture_that_is_not_there_is_named_with_its_row(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path, picture: str, problem: str
) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        Trainer(config(tmp_path / "run", tiny_llava)).train([row(pictures["red"], "red"), row(picture, "?")])
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_learnt_is_refused(
    tiny_llava: Path, tiny_base: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    good = row(pictures["red"], "red")
    plain = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
    cases: list[tuple[TrainingConfig, list[dict[str, Any]], str]] = [
        (
            config(tmp_path / "run", tiny_base),
            [plain, good],
            "row 2 has images, but the model reads only text",
        ),
        (config(tmp_path / "run", tiny_llava, packing=True), [good], "packing: rows with media"),
        (config(tmp_path / "run", tiny_llava), [good, {"text": "words"}], "row 2 is not a conversation"),
        (config(tmp_path / "run", tiny_llava, max_length=4), [good], r"row 1 has \d+ tokens up to"),
        (
            config(tmp_path / "run", tiny_llava),
            [{**good, "tools": [{"type": "function"}]}],
            "row 1 has tools, but the model's chat template leaves them out",
        ),
        (
            config(tmp_path / "run", tiny_llava),
            [{**good, "train_on_eos": "all"}],
            "row 1 has train_on_eos, .*remove it from the data source",
        ),
    ]
    for settings, rows, problem in cases:
        with pytest.raises(GymError, match=problem):
            Trainer(settings).train(rows)
    assert not (tmp_path / "run").exists()


def test_the_answers_are_located_without_marks_in_the_template(
    tiny_llava: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    _, processor = load_vision_model(str(tiny_llava), dtype="float32", arguments={})
    first, second = row(pictures["red"], "red"), row(pictures["blue"], "deep blue", "<image>and?")
    talk = {
        "messages": [*first["messages"], *second["messages"]],
        "images": [*first["images"], *second["images"]],
    }
    weighed = {
        **talk,
        "messages": [talk["messages"][0], {**talk["messages"][1], "weight": 0}, *second["messages"]],
    }

    def learned(*rows: dict[str, Any], **changes: Any) -> list[str]:
        changed = config(tmp_path / "run", tiny_llava, **changes)
        encoded = encode_media_rows(changed, processor, rows, assistant_only=True, packing=False)
        batch = MediaBatches(processor)(encoded)
        assert [each["length"] for each in encoded] == batch["attention_mask"].sum(dim=1).tolist()
        return [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]

    marked = learned(talk, weighed)
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    processor.chat_template = plain + prompt
    assert marked == learned(talk, weighed) == ["red<|im_end|>deep blue<|im_end|>", "deep blue<|im_end|>"]
    assert learned(talk, mask_history=True) == ["deep blue<|im_end|>"]


def test_a_model_without_a_processor_is_refused(tiny_llava: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "bare"
    shutil.copytree(tiny_llava, folder)
    (folder / "processor_config.json").unlink()
    with pytest.raises(GymError, match="bare") as caught:
        load_vision_model(str(folder), dtype="float32", arguments={})
    assert caught.value.code in (ErrorCode.MODEL_INVALID, ErrorCode.MISSING_DEPENDENCY)


def test_a_processor_that_cannot_be_made_here_names_the_package(
    tiny_llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2-VL's takes films as well; without torchvision transformers fails with one of several errors."""
    monkeypatch.setattr(
        "gym_fed.core.requirements.importlib.util.find_spec",
        lambda name: None if name == "torchvision" else object(),
    )
    for error in (ImportError("Qwen2VLVideoProcessor requires"), AttributeError("VIDEO_PROCESSOR_MAPPING")):

        def fails(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", fails)
        with pytest.raises(GymError, match="needs the package torchvision") as caught:
            load_vision_model(str(tiny_llava), dtype="float32", arguments={})
        assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
