"""Models that read images, sound or video: their loss is transformers' own, and only answers are learnt."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BlipConfig, BlipForConditionalGeneration

from gym_fed.base.modeling.processors import load_vision_model, media_of
from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media.reading import read_sound
from gym_fed.evaluation.own_set import _own_row
from gym_fed.training.run.check import prompt_of
from gym_fed.training.run.checks import check_template
from gym_fed.training.trainer import Trainer
from gym_fed.training.vision.conversations import encode_media_rows
from gym_fed.training.vision.media import ImageLimits, MediaProcessor, source_of
from gym_fed.training.vision.trainer import MediaBatches
from tests.support.media_models import MAKERS, RATE, media_model, sound, video
from tests.support.siblings import make_sibling
from tests.support.vision_models import drawn
from tools.architectures.processors import save_processor
from tools.architectures.shrinking import tiny_config

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
NEEDS_TORCHVISION = ("pixtral", "llama4")
SIBLINGS = ("gemma3_vision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ANSWERS = ("red cat", "blue, loud and far")
needs_torchvision = pytest.mark.skipif(
    not HAS_TORCHVISION, reason="transformers decodes videos with torchvision"
)


def made(kind: str, folder: Path) -> Path:
    return make_sibling(kind, folder) if kind in SIBLINGS else media_model(kind, folder)


def config(model: Path, **changes: Any) -> TrainingConfig:
    values = {
        **{"model": str(model), "output_dir": model.parent / "run", "max_steps": 2, "max_length": 400},
        **{"per_device_train_batch_size": 2, "learning_rate": 1e-2, "device": "cpu", "num_threads": 1},
        **{"save_final": False, "finetuning": "lora"},
    }
    return TrainingConfig(**{**values, **changes})


def rows(folder: Path, kinds: frozenset[str]) -> list[dict[str, Any]]:
    """Two rows with a picture and a sound each, as far as the model reads them."""
    made = []
    for number, answer in enumerate(ANSWERS):
        drawn(number, 40, 24 + 8 * number).save(folder / f"{number}.png")
        (folder / f"{number}.wav").write_bytes(sound(0.4 + 0.2 * number, 440.0 * (number + 1)))
        places = "<image>" * ("images" in kinds) + "so <audio>" * ("audios" in kinds)
        turns = [{"role": "user", "content": f"{places}what?"}, {"role": "assistant", "content": answer}]
        row: dict[str, Any] = {"messages": turns}
        if "images" in kinds:
            row["images"] = [str(folder / f"{number}.png")]
        if "audios" in kinds:
            row["audios"] = [str(folder / f"{number}.wav")]
        made.append(row)
    return made


def transformers_batch(processor: Any, given: list[dict[str, Any]]) -> Any:
    """The processor's own batch, with labels where the answers' words are."""
    conversations = []
    for row in given:
        parts: list[dict[str, Any]] = []
        if "images" in row:
            from PIL import Image

            parts.append({"type": "image", "image": Image.open(row["images"][0])})
        if "audios" in row:
            samples = read_sound(row["audios"][0], RATE)
            parts += [{"type": "text", "text": "so "}, {"type": "audio", "audio": samples}]
        parts.append({"type": "text", "text": "what?"})
        answer = [{"type": "text", "text": row["messages"][1]["content"]}]
        conversations.append([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}])
    batch = processor.apply_chat_template(
        conversations,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"text_kwargs": {"padding": True, "padding_side": "right"}},
    )
    ends = {processor.tokenizer.convert_tokens_to_ids(end) for end in ("<|im_end|>", "<end_of_turn>")}
    labels = torch.full_like(batch["input_ids"], -100)
    for ids, row_labels, row in zip(batch["input_ids"].tolist(), labels, given, strict=True):
        words = processor.tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"]
        (at,) = (n for n in range(len(ids)) if ids[n : n + len(words)] == words)
        assert ids[at + len(words)] in ends
        row_labels[at : at + len(words) + 1] = torch.tensor([*words, ids[at + len(words)]])
    batch["labels"] = labels
    return batch


@pytest.mark.few(6, "one path for every class")
@pytest.mark.parametrize("kind", [*MAKERS, *SIBLINGS])
def test_the_first_loss_is_that_of_transformers_and_two_steps_of_lora_lower_it(
    kind: str, tmp_path: Path
) -> None:
    if kind in NEEDS_TORCHVISION and not HAS_TORCHVISION:
        pytest.skip(f"transformers' processor of {kind} needs torchvision")
    folder = made(kind, tmp_path / "model")
    model, processor = load_vision_model(str(folder), dtype="float32", arguments={})
    given = rows(tmp_path, media_of(processor) - {"videos"})
    batch = transformers_batch(processor, given)
    with torch.inference_mode():
        inputs = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
        routers = {"output_router_logits": True} if kind == "qwen3_omni_thinker" else {}
        wanted = float(model(**inputs, **routers).loss)  # with the routers' loss, as in training
    encoded = encode_media_rows(config(folder), processor, given, assistant_only=True, packing=False)
    own = MediaBatches(processor)(list(encoded))
    assert torch.equal(own["labels"], batch["labels"])
    assert [each["length"] for each in encoded] == own["attention_mask"].sum(dim=1).tolist()
    result = Trainer(config(folder, dtype="float32")).train(given)
    assert result.losses[0] == pytest.approx(wanted, rel=1e-5)
    assert result.losses[1] < result.losses[0]


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_model("qwen2_audio", tmp_path_factory.mktemp("models") / "qwen2_audio")


def test_a_sound_is_a_file_bytes_an_array_or_a_part_of_openai(listener: Path, tmp_path: Path) -> None:
    import base64

    _, processor = load_vision_model(str(listener), dtype="float32", arguments={})
    (tmp_path / "a.wav").write_bytes(sound())
    samples = read_sound(sound(), RATE)
    encoded_bytes = base64.b64encode(sound()).decode()
    part = {"type": "input_audio", "input_audio": {"data": encoded_bytes, "format": "wav"}}
    answer = {"role": "assistant", "content": "yes"}
    ask = [{"role": "user", "content": "<audio>what?"}, answer]
    data = [
        {"messages": ask, "audios": ["a.wav"]},
        {"messages": ask, "audio": "a.wav"},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}, answer]},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(data))
    from gym_fed.data.reading import load_rows

    given = [
        *load_rows(tmp_path / "rows.json"),
        {"messages": ask, "audios": [{"bytes": sound(), "path": None}]},
        {"messages": ask, "audios": [{"array": samples, "sampling_rate": RATE}]},
    ]
    settings = config(listener)
    encoded = encode_media_rows(settings, processor, given, assistant_only=True, packing=False)
    batch = MediaBatches(processor)(list(encoded))
    assert len(batch["input_features"]) == 5
    for each in batch["input_features"][1:]:
        assert torch.allclose(each, batch["input_features"][0], atol=1e-5)
    assert len({tuple(ids) for ids in batch["input_ids"].tolist()}) == 1


def test_a_sound_longer_than_the_model_reads_is_counted(
    listener: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.wav").write_bytes(sound(3.0))
    given = [
        {
            "messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}],
            "audios": [str(tmp_path / "long.wav")],
        }
    ]
    Trainer(config(listener, output_dir=tmp_path / "run", max_steps=1)).train(given)
    assert "audios: 1 audio clip is truncated to the model's maximum length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "source", "problem"),
    [
        ("audios", "missing.wav", "row 2: audios: missing.wav is not a file"),
        ("audios", "https://example.org/a.mp3", "row 2: audios: https://example.org/a.mp3 is a URL"),
        (
            "audios",
            "data:audio/wav;base64,UklGRg==",
            "row 2: audios: data:audio/wav;base64,UklGRg==... is not a",
        ),
        ("images", "a.png", "row 2 has images, but the model reads only text and audios"),
        ("videos", "a.mp4", "row 2 has videos, but the model reads only text and audios"),
    ],
)
def test_a_medium_that_cannot_be_read_is_named_with_row_and_column(
    listener: Path, tmp_path: Path, column: str, source: str, problem: str
) -> None:
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "a.wav").write_bytes(sound())
    given = [{"messages": turns, "audios": [str(tmp_path / "a.wav")]}, {"messages": turns, column: [source]}]
    with pytest.raises(GymError, match=problem) as caught:
        Trainer(config(listener, output_dir=tmp_path / "run")).train(given)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert caught.value.hint
    assert not (tmp_path / "run").exists()


def test_rows_with_media_are_all_counted_when_a_model_of_text_refuses_them(tmp_path: Path) -> None:
    nano = load_model("gym-nano")
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}]
    given = [{"messages": turns}, {"messages": turns, "videos": ["1.mp4"]}]
    given += [{"messages": turns, "videos": ["1.mp4"], "audios": ["1.mp3"]}]
    settings = TrainingConfig(output_dir=tmp_path / "run", device="cpu")
    with pytest.raises(
        GymError, match=r"row 2 has videos.*of 3 rows: 1 with audios, 2 with videos"
    ) as caught:
        Trainer(settings, model=nano.model, tokenizer=nano.tokenizer).train(given)
    assert "a model that reads videos" in str(caught.value.hint)


def test_a_processor_that_takes_no_mixed_batch_is_refused_before_training(tmp_path: Path) -> None:
    folder = media_model("audioflamingo3", tmp_path / "model")
    (tmp_path / "a.wav").write_bytes(sound())
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}]
    given = [{"messages": turns}, {"messages": turns, "audios": [str(tmp_path / "a.wav")]}]
    with pytest.raises(
        GymError, match=r"row 1 and row 2: the model's processor rejects its media: .*match 1:1"
    ):
        Trainer(config(folder)).train(given)


@needs_torchvision
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_frames_of_a_video_are_sampled_by_the_processors_rule(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sibling(kind, tmp_path / "model")
    model, processor = load_vision_model(str(folder), dtype="float32", arguments={})
    (tmp_path / "a.mp4").write_bytes(video(frames=40, fps=10))
    for number in range(4):
        drawn(number, 56, 56).save(tmp_path / f"{number}.png")
    turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "grey"}]
    frames = [str(tmp_path / f"{number}.png") for number in range(4)]
    given = [
        {"messages": turns, "videos": [str(tmp_path / "a.mp4")]},
        {"messages": turns, "videos": [frames]},
    ]
    settings = config(folder, max_length=4000, dtype="float32")
    encoded = encode_media_rows(settings, processor, given, assistant_only=True, packing=False)
    assert "videos: 8 of 40 frames are read" in capsys.readouterr().err
    batch = MediaBatches(processor)(list(encoded))
    assert batch["video_grid_thw"][:, 0].tolist() == [4, 2]
    assert [each["length"] for each in encoded] == batch["attention_mask"].sum(dim=1).tolist()
    words = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert words == ["grey<|im_end|>"] * 2
    with torch.inference_mode():
        wanted = float(model(**batch).loss)
    result = Trainer(settings).train(given)
    assert result.losses[0] == pytest.approx(wanted, rel=1e-5)


def test_a_video_is_refused_without_torchvision_and_with_its_name(tmp_path: Path) -> None:
    if HAS_TORCHVISION:
        pytest.skip("torchvision is installed")
    folder = make_sibling("qwen2_vl", tmp_path / "model")
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}]
    given = [{"messages": turns, "videos": ["a.mp4"]}]
    with pytest.raises(GymError, match="row 1: reading its video needs the package torchvision") as caught:
        Trainer(config(folder)).train(given)
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_the_places_of_media_keep_their_order() -> None:
    from gym_fed.training.vision.conversations import place_media

    content = "a<audio>b<image>c<audio>"
    placed = place_media([{"role": "user", "content": content}], {"images": 1, "audios": 2}, "row 1")
    kinds = [part.get("text", part["type"]) for part in placed[0]["content"]]
    assert kinds == ["a", "audio", "b", "image", "c", "audio"]


def pairs(folder: Path, kinds: frozenset[str]) -> list[dict[str, Any]]:
    given = []
    for row in rows(folder, kinds):
        question, answer = row.pop("messages")
        given.append(
            {"prompt": [question], "chosen": [answer], "rejected": [{**answer, "content": "nothing"}], **row}
        )
    return given


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_audio"])
@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_dpo_learns_pairs_with_media_and_starts_at_ln_2(kind: str, finetuning: str, tmp_path: Path) -> None:
    folder = made(kind, tmp_path / "model")
    _, processor = load_vision_model(str(folder), dtype="float32", arguments={})
    given = pairs(tmp_path, media_of(processor) - {"videos"})
    settings = config(
        folder,
        algorithm="dpo",
        dpo={"loss_type": ["sigmoid"]},
        dtype="float32",
        finetuning=finetuning,
        max_steps=4,
    )
    result = Trainer(settings).train(given)
    assert result.losses[0] == pytest.approx(0.693147, abs=1e-4)
    assert result.losses[-1] < result.losses[0] - 1e-3


def test_the_answers_of_a_pair_alone_are_compared(listener: Path, tmp_path: Path) -> None:
    from gym_fed.training.vision.pairs import PairBatches, encode_media_pairs

    _, processor = load_vision_model(str(listener), dtype="float32", arguments={})
    given = pairs(tmp_path, frozenset({"audios"}))
    encoded = encode_media_pairs(config(listener, algorithm="dpo"), processor, given)
    batch = PairBatches(MediaBatches(processor))(list(encoded))
    answers = [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True)]
    ends = [f"{answer}<|im_end|>" for answer in (*ANSWERS, "nothing", "nothing")]
    assert [processor.tokenizer.decode(ids) for ids in answers] == ends
    assert len(batch["input_features"]) == 4
    with pytest.raises(GymError, match=r"row 1: audios: missing.wav is not a file"):
        encode_media_pairs(
            config(listener, algorithm="dpo"), processor, [{**given[0], "audios": ["missing.wav"]}]
        )


def test_other_algorithms_refuse_rows_with_media_by_name(tmp_path: Path) -> None:
    nano = load_model("gym-nano")
    (row,) = pairs(tmp_path, frozenset({"audios"}))[:1]
    settings = TrainingConfig(output_dir=tmp_path / "run", device="cpu", algorithm="orpo")
    with pytest.raises(GymError, match="row 1 has audios, but orpo reads only text") as caught:
        Trainer(settings, model=nano.model, tokenizer=nano.tokenizer).train([row])
    assert "use dpo or sft" in str(caught.value.hint)


def test_a_check_before_a_run_reads_pairs_as_the_run_does(listener: Path, tmp_path: Path) -> None:
    settings = config(listener, algorithm="dpo", default_system="Be kind.")
    given = pairs(tmp_path, frozenset({"audios"}))
    text = {"prompt": "q", "chosen": "y", "rejected": "n"}
    placed = [(f"row {number}", row) for number, row in enumerate([*given, text], 1)]
    assert check_template(settings, placed) == 3
    changed = {**given[0], "prompt": [{"role": "user", "content": "<audio><audio>what?"}]}
    with pytest.raises(GymError, match="row 1 has 1 audio and 2 placeholders for them"):
        check_template(settings, [("row 1", changed)])


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_a_place_without_a_medium_is_refused_before_training(kind: str, listener: Path) -> None:
    _, processor = load_vision_model(str(listener), dtype="float32", arguments={})
    content = [{"type": kind}, {"type": "text", "text": "what?"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(GymError, match=f"row 1 has 0 {kind}s and 1 placeholder for them"):
        encode_media_rows(config(listener), processor, [row], assistant_only=True, packing=False)


def test_an_array_of_two_channels_is_mixed_to_mono() -> None:
    left, right = np.full(1600, 0.5, np.float32), np.zeros(1600, np.float32)
    for array in (np.stack([left, right]), np.stack([left, right], axis=1).tolist()):
        url = source_of({"array": array, "sampling_rate": RATE}, "audios", "row 1")
        assert read_sound(url, RATE) == pytest.approx(np.full(1600, 0.25), abs=1e-6)


@pytest.mark.parametrize(
    "medium",
    [
        {"array": [0.0, "x"], "sampling_rate": RATE},
        {"array": [0.0], "sampling_rate": None},
        {"array": [0.0], "sampling_rate": 0},
        {"array": [[[0.0]]], "sampling_rate": RATE},
        {"bytes": "text"},
    ],
)
def test_an_array_that_is_not_sound_is_refused_by_its_row(medium: dict[str, Any]) -> None:
    with pytest.raises(GymError, match="row 1: audios: ") as caught:
        source_of(medium, "audios", "row 1")
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_frames_in_a_list_have_one_size_and_are_limited(listener: Path, tmp_path: Path) -> None:
    _, processor = load_vision_model(str(listener), dtype="float32", arguments={})
    for number, width in enumerate((40, 40, 24)):
        drawn(number, width, 40).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    media = MediaProcessor(processor, ImageLimits())
    processor.video_processor = None
    frames, _ = media._frame_list(files[:2], "row 1")
    assert frames.shape == (2, 40, 40, 3)
    for bad, problem in (
        (files, "frames of 40 x 40 and 24 x 40 pixels"),
        ([], "0 frames"),
        (files * 300, "900 frames"),
    ):
        with pytest.raises(GymError, match=f"row 1: videos: .*{problem}"):
            media._frame_list(bad, "row 1")


def test_a_processor_that_needs_media_refuses_rows_of_text_by_its_name(
    listener: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, processor = load_vision_model(str(listener), dtype="float32", arguments={})
    media = MediaProcessor(processor, ImageLimits())

    def needs_pictures(**_given: Any) -> None:
        raise TypeError("'NoneType' object is not iterable")

    monkeypatch.setattr(media, "processor", needs_pictures)
    row = {"text": "x", "images": [], "audios": [], "videos": []}
    with pytest.raises(GymError, match="rows have no media, but function needs media in each row"):
        media.inputs([row])


def test_a_row_without_an_image_is_refused_for_a_model_that_requires_one(tmp_path: Path) -> None:
    folder = tmp_path / "blip"
    BlipForConditionalGeneration(tiny_config(BlipConfig)).save_pretrained(folder)
    tokenizer = load_tokenizer("gym-nano")
    assert save_processor("blip", tokenizer, folder) == ""
    tokenizer.save_pretrained(folder)
    text = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(GymError, match="row 1 has no media, but the model needs pixel_values") as caught:
        Trainer(config(folder)).train([text])
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_a_processor_with_a_chat_format_of_its_own_is_refused_by_its_name(tmp_path: Path) -> None:
    class ChatOnly:
        feature_extractor = None

        def __call__(self, text: list[str], **options: Any) -> None:
            raise ValueError("use apply_chat_template")

    (tmp_path / "a.wav").write_bytes(sound())
    row = {"text": "hear", "images": [], "audios": [str(tmp_path / "a.wav")], "videos": []}
    with pytest.raises(GymError, match="row 1: ChatOnly takes media only in a chat format of its own"):
        MediaProcessor(ChatOnly()).inputs([row])


def test_rows_with_sound_are_not_evaluated_or_prompted_as_text() -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    assert prompt_of(row) is not None
    assert prompt_of({**row, "audios": ["a.wav"]}) is None
    with pytest.raises(GymError, match="row 1 has audios"):
        _own_row("row 1", {**row, "audios": ["a.wav"]}, {}, [])
