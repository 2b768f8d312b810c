"""Sound, video and more classes of pictures in chat: the answers of transformers' own generate."""

from __future__ import annotations

import base64
import importlib.util
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.processing_utils import VideosKwargs
from transformers.video_utils import default_sample_indices_fn

from gym_fed.base.modeling.media_inputs import frames_to_read, video_metadata
from gym_fed.base.modeling.processors import load_vision_model
from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media.reading import VideoFacts, read_sound, read_video
from gym_fed.serving.engine.request import Generation
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import UserMessage
from gym_fed.serving.openai.service import CHAT
from gym_fed.serving.pictures import clips
from gym_fed.serving.pictures.clips import is_wanted
from gym_fed.serving.pictures.reader import PictureReader
from gym_fed.serving.setup import Serving, open_serving
from tests.support.media_models import RATE, media_model, sound, video
from tests.support.siblings import SIBLINGS, make_sibling
from tests.support.vision_models import data_url, drawn, image_part

TOKENS = 10
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
NEEDS_TORCHVISION = ("pixtral", "llama4")
CASES = [
    *[(kind, "image") for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "pixtral", "qwen2_5_omni_thinker")],
    *[(kind, "image") for kind in ("llama4", "minicpmv4_6", "qwen3_omni_thinker")],
    *[(kind, "audio") for kind in ("qwen2_audio", "audioflamingo3", "qwen2_5_omni_thinker")],
    *[(kind, "audio") for kind in ("qwen3_omni_thinker", "qwen3_asr", "moss_transcribe_diarize")],
]


def made(kind: str, folder: Path) -> Path:
    """A model folder; a sibling's weights are made larger, so that greedy answers are not all of one token."""
    if kind not in SIBLINGS:
        return media_model(kind, folder, seed=2 if kind == "llama4" else 0)
    make_sibling(kind, folder)
    model, _ = load_vision_model(str(folder), dtype="float32", arguments={})
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def audio_part(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


def video_part(data: bytes) -> dict[str, Any]:
    return {
        "type": "video_url",
        "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()},
    }


def opened(folder: Path, **changes: Any) -> Serving:
    return open_serving(ServingConfig(base=str(folder), device="cpu", num_threads=1, **changes))


def answer(serving: Serving, content: Any, tokens: int = TOKENS) -> tuple[list[int], int]:
    """The answer's token ids, and the number of the prompt's."""
    messages = [{"role": "user", "content": content}]
    body = {"model": serving.served_name, "messages": messages, "temperature": 0, "max_tokens": tokens}
    pending = serving.service.begin(CHAT, body, LOCAL)
    usage = pending.run()["usage"]
    (generation,) = pending._generations
    assert isinstance(generation, Generation)
    return list(generation.result().token_ids), usage["prompt_tokens"]


def expected(folder: Path, content: list[dict[str, Any]], **processor_kwargs: Any) -> tuple[list[int], int]:
    """What transformers makes of a question, with the model's own chat template."""
    model, processor = load_vision_model(str(folder), dtype="float32", arguments={})
    batch = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        processor_kwargs=processor_kwargs,
    )
    batch = {
        key: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    with torch.inference_mode():
        ids = model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    length = batch["input_ids"].shape[1]
    return ids[length:], length


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.few(3, "one path for every class")
@pytest.mark.parametrize(("kind", "medium"), CASES)
@pytest.mark.parametrize("batch", [pytest.param(None, marks=pytest.mark.slow), 16])
def test_the_answer_is_that_of_transformers_however_the_prompt_is_cut(
    kind: str, medium: str, batch: int | None, tmp_path: Path
) -> None:
    if kind in NEEDS_TORCHVISION and not HAS_TORCHVISION:
        pytest.skip(f"transformers' processor of {kind} needs torchvision")
    folder = made(kind, tmp_path / kind)
    if medium == "image":
        pictures = [drawn(1, 40, 24), drawn(2, 60, 90)][: 1 if kind == "minicpmv4_6" else 2]
        asked = [part for each in pictures for part in (image_part(data_url(each)), words("What"))]
        own = [{"type": "image", "image": picture} for picture in pictures]
        content = [part for each in own for part in (each, words("What"))]
    else:
        data = [sound(0.4), sound(0.7, 300.0)][: 1 if kind in ("audioflamingo3", "qwen3_asr") else 2]
        asked = [part for each in data for part in (audio_part(each), words("What"))]
        samples = [read_sound(each, RATE) for each in data]
        content = [part for each in samples for part in ({"type": "audio", "audio": each}, words("What"))]
    wanted = expected(folder, content)
    engine = EngineConfig() if batch is None else EngineConfig(max_batch_tokens=batch)
    with opened(folder, engine=engine) as serving:
        reader = serving.service._prompts.pictures
        assert isinstance(reader, PictureReader)
        assert medium in reader.kinds
        assert answer(serving, asked) == wanted
        assert answer(serving, asked) == wanted, "of the prefix cache, too"
        (model,) = serving.service.catalogue.list(LOCAL)
        assert medium in model.to_dict()["input_modalities"]
    assert len(set(wanted[0])) > 2


@pytest.mark.skipif(not HAS_TORCHVISION, reason="transformers prepares videos with torchvision")
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_video_is_sampled_and_read_as_transformers_does(kind: str, tmp_path: Path) -> None:
    folder = made(kind, tmp_path / kind)
    data = video(frames=30, fps=10)
    _, processor = load_vision_model(str(folder), dtype="float32", arguments={})
    frames, facts, indices = read_video(data, partial(frames_to_read, processor))
    settings = {"do_sample_frames": False, "video_metadata": [video_metadata(facts, indices)]}
    content = [{"type": "video", "video": frames}, words("What?")]
    wanted = expected(folder, content, videos_kwargs=settings)
    with opened(folder) as serving:
        assert answer(serving, [video_part(data), words("What?")]) == wanted


def test_a_model_that_numbers_its_pictures_reads_one_of_a_request(tmp_path: Path) -> None:
    with opened(media_model("minicpmv4_6", tmp_path / "minicpm")) as serving:
        with pytest.raises(RequestError, match="numbers its images") as caught:
            answer(serving, [image_part(data_url(drawn(1)))] * 2)
        assert "one image" in str(caught.value.hint)


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with opened(media_model("qwen2_audio", tmp_path_factory.mktemp("models") / "listener")) as serving:
        yield serving


@pytest.mark.parametrize(
    ("part", "problem", "field"),
    [
        (audio_part(b"RIFF1234WAVEjunk"), "cannot be decoded", "input_audio"),
        (audio_part(sound(), "exe"), "audio format 'exe' is not supported", "input_audio"),
        (
            {"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}},
            "broken base64",
            "input_audio",
        ),
        (image_part(data_url(drawn(1))), "does not support images", ""),
        (video_part(b"x"), "does not support videos", ""),
    ],
)
def test_a_part_that_cannot_be_read_is_refused_by_its_place(
    listener: Serving, part: dict[str, Any], problem: str, field: str
) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        answer(listener, [words("x"), part])
    assert caught.value.code.http_status == 400
    assert str(caught.value.param) == "messages[0].content[1]" + (f".{field}" if field else "")


def test_limits_of_sounds_are_kept(listener: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "MAX_SOUND_SECONDS", 0.3)
    with pytest.raises(RequestError, match=r"the audio is longer than 0.3 s"):
        answer(listener, [audio_part(sound(0.5))])
    monkeypatch.setattr(clips, "MAX_CLIP_BYTES", 100)
    with pytest.raises(RequestError, match="the audio has more than 100 bytes"):
        answer(listener, [audio_part(sound(0.2))])


def test_a_video_on_the_network_is_not_fetched(tmp_path: Path) -> None:
    for url, why in (
        ("https://example.org/a.mp4", "does not download media"),
        ("data:video/mp4,x", "not a base64 data URL"),
    ):
        with pytest.raises(GymError, match=why):
            clips.read_clip_of_video(url)


def test_a_place_of_sound_from_a_user_is_text(listener: Serving) -> None:
    reader = listener.service._prompts.pictures
    assert isinstance(reader, PictureReader)
    said = "is <|AUDIO|> one?"
    found, _ = answer(listener, [words(said), audio_part(sound())])
    assert len(found) == TOKENS
    ids = listener.service._prompts.of_question(said)
    assert reader.places(ids, "audio") == 0


def test_the_frames_of_all_videos_of_a_request_are_limited_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clip = clips.read_clip_of_video(video_part(video(frames=20))["video_url"]["url"])
    monkeypatch.setattr(clips, "frames_to_read", lambda _processor, facts: range(facts.frames))
    pixels = 20 * 64 * 48
    (frames,) = clip.inputs(None, pixels)["videos"]
    assert frames.size == 3 * pixels
    with pytest.raises(
        GymError, match=r"the video has 61,440 pixels in 20 frames; at most 61,439 are"
    ) as caught:
        clip.inputs(None, pixels - 1)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_video_that_nobody_waits_for_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "frames_to_read", lambda _processor, _facts: [0])
    clip = clips.read_clip_of_video(video_part(video())["video_url"]["url"])
    token = is_wanted.set(lambda: False)
    try:
        with pytest.raises(GymError) as caught:
            clip.inputs(None, 10**9)
    finally:
        is_wanted.reset(token)
    assert caught.value.code is ErrorCode.INTERRUPTED


def test_no_medium_is_decoded_after_the_prompt_exceeds_the_context(listener: Serving) -> None:
    prompts = listener.service._prompts
    messages = [
        UserMessage.model_validate(
            {"role": "user", "content": [audio_part(sound(0.3 + 0.1 * number)) for number in range(4)]}
        )
    ]
    ids = prompts.of_messages(list(messages))
    whole = prompts.pictures_of(list(messages))
    runs = whole.expand(ids, messages).runs
    context = runs[1].start + 1
    seen = prompts.pictures_of(list(messages))
    with pytest.raises(RequestError, match="or more including its media") as caught:
        seen.expand(ids, messages, context)
    assert caught.value.name == "context_length_exceeded"
    assert len(seen._processed) < len(runs) == len(whole._processed) == 4


def test_a_medium_that_the_processor_refuses_is_an_error_of_the_request(
    listener: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"audio": [np.zeros(800, np.float32)], "audio_kwargs": {"sampling_rate": RATE + 1}}
    monkeypatch.setattr(clips.Clip, "inputs", lambda *_: other)
    with pytest.raises(RequestError, match="the model's processor rejects the audio clip") as caught:
        answer(listener, [audio_part(sound(0.9))])
    assert (caught.value.name, caught.value.code) == ("invalid_audio", ErrorCode.USAGE)


def test_without_the_package_of_media_sound_is_refused_at_start_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = media_model("qwen2_audio", tmp_path / "listener")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "av" else found(name, *rest)
    )
    with opened(folder) as serving:
        (model,) = serving.service.catalogue.list(LOCAL)
        assert "input_modalities" not in model.to_dict()
        with pytest.raises(RequestError, match=r"pip install 'gym-fed\[media\]'"):
            answer(serving, [audio_part(sound())])


@pytest.mark.parametrize(
    ("frames", "fps", "settings"), [(5, 1.0, {"fps": 2.0}), (5, 10.0, {"num_frames": 10})]
)
def test_a_video_with_too_few_frames_for_the_processor_is_refused(
    frames: int, fps: float, settings: dict[str, Any]
) -> None:
    processor = SimpleNamespace(video_processor=Sampler(**settings))
    facts = VideoFacts(frames, fps, 64, 48, frames / fps)
    with pytest.raises(GymError, match=f"has {frames} frames at .*, which cannot be sampled") as caught:
        frames_to_read(processor, facts)
    assert caught.value.code is ErrorCode.USAGE


def test_a_processor_with_a_rate_and_a_number_of_frames_samples_the_number() -> None:
    processor = SimpleNamespace(video_processor=Sampler(fps=2.0, num_frames=4))
    assert len(frames_to_read(processor, VideoFacts(20, 10.0, 64, 48, 2.0))) == 4


class Sampler:
    """The sampling of transformers' video processors, which need torchvision for the rest."""

    valid_kwargs = VideosKwargs

    def __init__(self, **settings: Any) -> None:
        self.fps = settings.get("fps")
        self.num_frames = settings.get("num_frames")

    def sample_frames(self, metadata: Any, **settings: Any) -> Any:
        return default_sample_indices_fn(metadata, num_frames=settings["num_frames"], fps=settings["fps"])
